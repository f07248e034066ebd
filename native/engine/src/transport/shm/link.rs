//! One connection to a process on this host: handshake state, rings, and resolved regions.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    os::fd::OwnedFd,
    sync::{atomic::Ordering::SeqCst, Arc},
};

use super::{
    control_socket::{ControlSocket, Disconnected, Fds, Frame, LinkSetup},
    doorbell::PeerDoorbell,
    imports::Imports,
    jobs::CopyJob,
    layout::{counts, INBOX, MESSAGE_RING},
    messages::{Receiver, SendResult, Sender},
    raw::Map,
    ring::{Consumer, Producer},
};
use crate::{
    api::{EngineId, RegionKey},
    domain::{
        Admit, Completion, Count, DomainError, LinkId, MessageRoom, PeerIdentity, Token,
        WorkRequest,
    },
    time::Time,
    transport::handshake::{Acceptor, Initiator, UnprovenAcceptor},
};

/// Regions that a link resolves at a time; work on further ones waits in the group. Half of the
/// replies that an owner sends without reading, so that two links that resolve from each other
/// never block.
pub(super) const MAX_RESOLVING: usize = super::control_socket::MAX_PENDING_REPLIES / 2;

/// State of the handshake.
pub(super) enum Stage {
    AwaitHello,
    AwaitProof(Acceptor),
    AwaitWelcome(Initiator),
    AwaitAccepted(UnprovenAcceptor),
    AwaitSetup(PeerIdentity),
    Up(Box<Outbound>),
}

/// The sending side of a link that is up.
pub(super) struct Outbound {
    /// The peer's inbox.
    pub outbox: Map,
    pub doorbell: PeerDoorbell,
    produce: Producer,
    sender: Sender,
    /// The peer's process id if the kernel can write its memory, or why not.
    pub process: Result<i32, String>,
}

pub(super) struct Link {
    pub id: LinkId,
    pub control: ControlSocket,
    pub stage: Stage,
    /// The proven peer.
    pub peer: Option<EngineId>,
    inbox: Map,
    consume: Consumer,
    receiver: Receiver,
    pub imports: Imports,
    /// Work that waits for a region to be resolved.
    pub resolving: HashMap<RegionKey, Vec<(Token, WorkRequest)>>,
    /// Work on resolved regions whose count found the ring full.
    pub deferred: VecDeque<(Token, WorkRequest)>,
    /// Finished copies whose count found the ring full.
    uncounted: VecDeque<(Token, Count)>,
    /// Whether a count was refused because the ring was full; the caller retries after the next
    /// poll.
    count_refused: bool,
    /// Work whose count the peer may not have received before it left.
    unacknowledged: Vec<Token>,
    sends: VecDeque<(Token, usize)>,
    /// Whether the receive pool had no room for the next message at the last poll.
    message_waits: bool,
    /// Control messages of the peer that were not taken yet.
    pub control_messages: usize,
    /// Whether the peer's message ring is invalid: the link must end.
    pub corrupt: bool,
    pub jobs: Vec<Arc<CopyJob>>,
    /// Local regions that the peer may access.
    pub exported: HashSet<u32>,
    /// When the connection was made.
    pub connected_at: Time,
    /// When the handshake must be over.
    pub deadline: Time,
    /// The cause, once the link is closing; nothing new is posted then.
    pub closing: Option<DomainError>,
    /// Whether nothing is received from the peer any more.
    pub receiving_stopped: bool,
    /// Whether the sending side is closed: this side no longer accesses the peer's memory (MR-1).
    pub send_closed: bool,
    /// Whether `LinkDown` was reported.
    pub down_reported: bool,
    /// Whether the peer has closed its side of the connection, which a living peer does after its
    /// last access to local memory (MR-1).
    pub peer_closed: bool,
    /// Sent to the peer with the setup.
    pub inbox_fd: Option<OwnedFd>,
}

impl Link {
    pub fn new(
        id: LinkId,
        control: ControlSocket,
        stage: Stage,
        (connected_at, deadline): (Time, Time),
    ) -> Result<Self, DomainError> {
        let (inbox, fd) = Map::create(INBOX)?;
        Ok(Self {
            id,
            control,
            stage,
            peer: None,
            inbox,
            consume: Consumer::new(),
            receiver: Receiver::new(MESSAGE_RING),
            imports: Imports::default(),
            resolving: HashMap::new(),
            deferred: VecDeque::new(),
            uncounted: VecDeque::new(),
            count_refused: false,
            unacknowledged: Vec::new(),
            sends: VecDeque::new(),
            message_waits: false,
            control_messages: 0,
            corrupt: false,
            jobs: Vec::new(),
            exported: HashSet::new(),
            connected_at,
            deadline,
            closing: None,
            receiving_stopped: false,
            send_closed: false,
            down_reported: false,
            peer_closed: false,
            inbox_fd: Some(fd),
        })
    }

    pub fn send(&mut self, frame: &Frame, fds: Fds) -> Result<(), Disconnected> {
        self.control.send(frame.encode(), fds)
    }

    /// Sends a frame that answers a request of the peer.
    pub fn reply(&mut self, frame: &Frame, fds: Fds) -> Result<(), Disconnected> {
        self.control.reply(frame.encode(), fds)
    }

    /// Sends the answer to a revocation.
    pub fn confirm(&mut self, frame: &Frame) -> Result<(), Disconnected> {
        self.control.confirm(frame.encode())
    }

    /// Handles the peer's setup: maps its inbox and doorbell, and tests access to its memory.
    pub fn open(&mut self, setup: &LinkSetup, fds: Fds) -> Result<(), DomainError> {
        let [inbox, doorbell, event]: [OwnedFd; 3] = fds
            .into_iter()
            .collect::<Vec<_>>()
            .try_into()
            .map_err(|_| DomainError::Handshake("the setup lacks its descriptors".into()))?;
        let outbox = Map::import(std::os::fd::AsFd::as_fd(&inbox), INBOX)?;
        let process = probe(self.control.peer_pid(), setup);
        self.stage = Stage::Up(Box::new(Outbound {
            outbox,
            doorbell: PeerDoorbell::import(doorbell, event)?,
            produce: Producer::new(),
            sender: Sender::new(MESSAGE_RING),
            process,
        }));
        self.deadline = Time::NEVER;
        Ok(())
    }

    pub fn outbound(&mut self) -> Option<&mut Outbound> {
        match &mut self.stage {
            Stage::Up(outbound) if self.closing.is_none() => Some(outbound),
            _ => None,
        }
    }

    pub fn is_up(&self) -> bool {
        matches!(self.stage, Stage::Up(_))
    }

    /// Reports what has arrived in the rings. Consecutive counts with the same immediate are
    /// merged.
    pub fn take_arrivals(&mut self, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let Stage::Up(outbound) = &mut self.stage else { return false };
        let (slots, tail) = counts(&self.inbox);
        let mut progressed = false;
        let mut run: Option<Count> = None;
        // Bounded, so that a busy writer can't occupy this thread.
        for _ in 0..1024 {
            let Some(count) = self.consume.pop(slots) else { break };
            match &mut run {
                Some(r) if r.imm == count.imm && r.n.checked_add(count.n).is_some() => {
                    r.n += count.n;
                }
                _ => out.extend(run.replace(count).map(Completion::Count)),
            }
            if self.consume.publish(slots, tail, false) {
                outbound.doorbell.ring();
            }
        }
        if let Some(count) = run {
            out.push(Completion::Count(count));
            progressed = true;
            if self.consume.is_empty(slots) && self.consume.publish(slots, tail, true) {
                outbound.doorbell.ring();
            }
        }
        progressed | self.take_messages(room, out) | self.report_sends(out)
    }

    fn take_messages(&mut self, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let Stage::Up(outbound) = &mut self.stage else { return false };
        let mut progressed = false;
        self.message_waits = false;
        while self.closing.is_none() && !self.corrupt {
            let len = match self.receiver.peek(&self.inbox) {
                Ok(None) => break,
                Ok(Some(len)) => len,
                Err(_) => {
                    self.corrupt = true;
                    return true;
                }
            };
            match room.admit(len) {
                Admit::Wait => {
                    self.message_waits = true;
                    break;
                }
                Admit::TooLong { .. } => self.receiver.refuse(&self.inbox, len),
                Admit::Take => {
                    let message = self.receiver.pop(&self.inbox, len);
                    // One message per call, so that all links get some of the room.
                    out.push(Completion::Message { link: self.id, message });
                    progressed = true;
                    break;
                }
            }
            progressed = true;
        }
        if progressed && self.receiver.wakes_sender(&self.inbox) {
            outbound.doorbell.ring();
        }
        progressed
    }

    fn report_sends(&mut self, out: &mut Vec<Completion>) -> bool {
        let Stage::Up(outbound) = &mut self.stage else { return false };
        let mut progressed = false;
        while let Some((token, len)) = self.sends.front().copied() {
            let Some(result) = outbound.sender.take_result(&outbound.outbox, len) else { break };
            self.sends.pop_front();
            progressed = true;
            let result = match result {
                SendResult::Delivered => Ok(()),
                SendResult::TooLong => Err(DomainError::Refused(format!(
                    "the message of {len} bytes is longer than the peer's receive buffers"
                ))),
            };
            out.push(Completion::Done { link: self.id, token, result });
        }
        progressed
    }

    /// Whether a poll would find something; checked again after the doorbell was armed.
    pub fn has_work(&mut self) -> bool {
        if !self.is_up() {
            return false;
        }
        // After `LinkDown` only the connection, or a device that stored until now, needs attention.
        if self.down_reported {
            return (self.peer_closed || !self.send_closed) && !self.imports.has_stores();
        }
        let (slots, _) = counts(&self.inbox);
        // A closing link still has to close its side, or report its end; then the peer closes its
        // side.
        let stores = self.imports.has_stores();
        let ends =
            self.closing.is_some() && (!self.send_closed && !stores || self.receiving_stopped);
        if !self.consume.is_empty(slots) || ends {
            return true;
        }
        match self.receiver.peek(&self.inbox) {
            Ok(Some(_)) if !self.message_waits => return true,
            Err(_) => return true,
            _ => {}
        }
        let Stage::Up(outbound) = &mut self.stage else { return false };
        let settles = self
            .sends
            .front()
            .is_some_and(|(_, len)| outbound.sender.request_wake(&outbound.outbox, *len));
        let count_refused = self.count_refused && self.closing.is_none();
        let waits = count_refused || !self.uncounted.is_empty() || !self.deferred.is_empty();
        let (slots, tail) = counts(&outbound.outbox);
        settles
            || (waits && outbound.produce.has_room(slots, tail))
            || self.imports.has_releasable()
    }

    /// Whether a count can be sent now; if not, the peer rings once it can.
    #[inline]
    pub fn has_room(&mut self) -> bool {
        if !self.uncounted.is_empty() {
            return false;
        }
        let Some(outbound) = self.outbound() else { return false };
        let (slots, tail) = counts(&outbound.outbox);
        outbound.produce.has_room(slots, tail)
    }

    /// Whether a count can be posted now; if not, the link has work as soon as it can (IC-4).
    #[inline]
    pub fn can_count(&mut self) -> bool {
        let takes = self.has_room();
        self.count_refused |= !takes;
        takes
    }

    /// Whether there is room again after a refusal; clears the refusal.
    pub fn take_count_refusal(&mut self) -> bool {
        let again = self.count_refused && self.has_room();
        self.count_refused &= !again;
        again
    }

    /// Sends a count; there must be room. False if its work is not done: the peer has left, perhaps
    /// before it received the count, so the work ends with the link. Without `now` the caller calls
    /// `ring_doorbell`.
    #[inline]
    pub fn push_count(&mut self, token: Token, count: Count, now: bool) -> bool {
        let Stage::Up(outbound) = &mut self.stage else { return false };
        let (slots, tail) = counts(&outbound.outbox);
        outbound.produce.push(slots, count);
        if now {
            outbound.doorbell.ring_for_counts();
        }
        if !Producer::is_closed(tail) {
            return true;
        }
        self.unacknowledged.push(token);
        let cause = "the peer has closed the link".to_owned();
        self.closing.get_or_insert(DomainError::LinkDown(cause));
        false
    }

    /// Wakes the peer if it sleeps, after counts were pushed.
    pub fn ring_doorbell(&self) {
        if let Stage::Up(outbound) = &self.stage {
            outbound.doorbell.ring_for_counts();
        }
    }

    /// Cancels copies; those under way end after their current chunk.
    pub fn stop_copying(&self) {
        self.jobs.iter().for_each(|job| job.cancelled.store(true, SeqCst));
    }

    /// Receives no counts beyond those in the ring.
    pub fn stop_counting(&self) {
        Consumer::close(counts(&self.inbox).1);
    }

    pub fn push_message(&mut self, token: Token, message: &[u8]) -> bool {
        let Some(outbound) = self.outbound() else { return false };
        if !outbound.sender.push(&outbound.outbox, message) {
            return false;
        }
        outbound.doorbell.ring();
        self.sends.push_back((token, message.len()));
        true
    }

    /// Counts a finished copy, now or once the ring has room.
    pub fn count_copy(&mut self, token: Token, count: Count, out: &mut Vec<Completion>) {
        if self.has_room() {
            if self.push_count(token, count, true) {
                out.push(Completion::Done { link: self.id, token, result: Ok(()) });
            }
        } else {
            self.uncounted.push_back((token, count));
        }
    }

    pub fn flush_counts(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut progressed = false;
        while let Some((token, count)) = self.uncounted.pop_front() {
            if !self.has_room_for_next() {
                self.uncounted.push_front((token, count));
                break;
            }
            if self.push_count(token, count, true) {
                out.push(Completion::Done { link: self.id, token, result: Ok(()) });
            }
            progressed = true;
        }
        progressed
    }

    fn has_room_for_next(&mut self) -> bool {
        let Some(outbound) = self.outbound() else { return false };
        let (slots, tail) = counts(&outbound.outbox);
        outbound.produce.has_room(slots, tail)
    }

    /// Removes every token that is not completed, except those of running copies.
    pub fn abandon(&mut self) -> Vec<Token> {
        let resolving = std::mem::take(&mut self.resolving).into_values().flatten().map(|(t, _)| t);
        let deferred = std::mem::take(&mut self.deferred).into_iter().map(|(t, _)| t);
        let uncounted = std::mem::take(&mut self.uncounted).into_iter().map(|(t, _)| t);
        let sends = std::mem::take(&mut self.sends).into_iter().map(|(t, _)| t);
        let unacknowledged = std::mem::take(&mut self.unacknowledged);
        resolving.chain(deferred).chain(uncounted).chain(sends).chain(unacknowledged).collect()
    }
}

/// Tests whether the kernel can access the peer's memory: reads a random value that only it knows.
fn probe(pid: Option<i32>, setup: &LinkSetup) -> Result<i32, String> {
    let pid = pid.filter(|p| *p > 0).ok_or("the peer runs in another pid namespace")?;
    let mut seen = [0u8; 16];
    let mut local = [super::raw::io_range(seen.as_mut_ptr() as usize, 16)];
    let mut remote = [super::raw::io_range(setup.probe_addr as usize, 16)];
    // SAFETY: the local range is `seen`.
    unsafe { super::raw::process_vm_copy(pid, super::raw::Direction::In, &mut local, &mut remote) }
        .map_err(|e| format!("process_vm_readv: {e}"))?;
    match seen == setup.probe {
        true => Ok(pid),
        false => Err("its process id names another process here".into()),
    }
}
