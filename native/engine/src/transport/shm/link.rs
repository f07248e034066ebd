//! One connection to a process on this host: its handshake, its rings, what it has resolved.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    os::fd::OwnedFd,
    sync::{atomic::Ordering::SeqCst, Arc},
};

use super::{
    bell::PeerBell,
    control::{Control, Fds, Frame, Gone, Setup},
    imports::Imports,
    jobs::Job,
    layout::{counts, INBOX, MESSAGE_RING},
    messages::{Fate, Receiver, Sender},
    raw::Map,
    ring::{Consumer, Producer},
};
use crate::{
    api::{EngineId, RegionKey},
    domain::{
        Admit, Completion, Count, DomainError, LinkId, MessageRoom, PeerIdentity, Token,
        WorkRequest,
    },
    sync::atomic::fence,
    time::Time,
    transport::handshake::{Acceptor, Initiator, Pending},
};

/// Regions that a link asks for at a time; work on further ones waits in the group. Half of what the owner answers
/// without listening to us, so that two that ask each other always go on.
pub(super) const MOST_ASKED: usize = super::control::MOST_OWED / 2;

/// How far the two have got with each other.
pub(super) enum Stage {
    AwaitHello,
    AwaitProof(Acceptor),
    AwaitWelcome(Initiator),
    AwaitAccepted(Pending),
    AwaitSetup(PeerIdentity),
    Up(Box<Lines>),
}

/// What a link that is up writes to.
pub(super) struct Lines {
    /// The peer's inbox.
    pub outbox: Map,
    pub bell: PeerBell,
    produce: Producer,
    sender: Sender,
    /// The peer's process id if its memory can be written by the kernel, or why not.
    pub process: Result<i32, String>,
}

pub(super) struct Link {
    pub id: LinkId,
    pub control: Control,
    pub stage: Stage,
    /// Who it proved to be.
    pub peer: Option<EngineId>,
    inbox: Map,
    consume: Consumer,
    receiver: Receiver,
    pub imports: Imports,
    /// Work that waits for the owner's word on a region.
    pub resolving: HashMap<RegionKey, Vec<(Token, WorkRequest)>>,
    /// Work whose region is known but whose count found the ring full.
    pub deferred: VecDeque<(Token, WorkRequest)>,
    /// Copies that are done and whose count found the ring full.
    uncounted: VecDeque<(Token, Count)>,
    /// A count found the ring full and was refused: whoever posts tries again after the next poll.
    refused: bool,
    /// Work whose count the peer may not have taken before it left.
    unheard: Vec<Token>,
    sends: VecDeque<(Token, usize)>,
    pub jobs: Vec<Arc<Job>>,
    /// Our regions that the peer may reach.
    pub exported: HashSet<u32>,
    /// When the connection was made.
    pub begun: Time,
    /// The handshake, or a farewell, must be over by then.
    pub deadline: Time,
    /// On its way down; nothing new is posted.
    pub closing: Option<DomainError>,
    /// Nothing is taken from the peer any more.
    pub deaf: bool,
    /// The peer has been told that nothing of ours touches its memory any more (MR-1).
    pub finished: bool,
    /// `LinkDown` has been reported.
    pub told: bool,
    /// Nothing of the peer's touches our memory any more: its end of the connection has ended, which
    /// a living peer has done last (MR-1).
    pub gone: bool,
    /// Goes to the peer with the setup.
    pub inbox_fd: Option<OwnedFd>,
}

impl Link {
    pub fn new(
        id: LinkId,
        control: Control,
        stage: Stage,
        (begun, deadline): (Time, Time),
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
            refused: false,
            unheard: Vec::new(),
            sends: VecDeque::new(),
            jobs: Vec::new(),
            exported: HashSet::new(),
            begun,
            deadline,
            closing: None,
            deaf: false,
            finished: false,
            told: false,
            gone: false,
            inbox_fd: Some(fd),
        })
    }

    pub fn send(&mut self, frame: &Frame, fds: Fds) -> Result<(), Gone> {
        self.control.send(frame.encode(), fds)
    }

    /// As `send`, for what the peer has asked for.
    pub fn reply(&mut self, frame: &Frame, fds: Fds) -> Result<(), Gone> {
        self.control.reply(frame.encode(), fds)
    }

    /// Takes the peer's setup: maps its inbox and bell, tries whether its memory can be reached.
    pub fn bring_up(&mut self, setup: &Setup, fds: Fds) -> Result<(), DomainError> {
        let [inbox, bell, event]: [OwnedFd; 3] = fds
            .into_iter()
            .collect::<Vec<_>>()
            .try_into()
            .map_err(|_| DomainError::Handshake("the setup lacks its descriptors".into()))?;
        let outbox = Map::import(std::os::fd::AsFd::as_fd(&inbox), INBOX)?;
        let process = probe(self.control.peer_pid(), setup);
        self.stage = Stage::Up(Box::new(Lines {
            outbox,
            bell: PeerBell::import(bell, event)?,
            produce: Producer::new(),
            sender: Sender::new(MESSAGE_RING),
            process,
        }));
        self.deadline = Time::NEVER;
        Ok(())
    }

    pub fn lines(&mut self) -> Option<&mut Lines> {
        match &mut self.stage {
            Stage::Up(lines) if self.closing.is_none() => Some(lines),
            _ => None,
        }
    }

    pub fn is_up(&self) -> bool {
        matches!(self.stage, Stage::Up(_))
    }

    /// Reports what has arrived in the rings; counts of one kind in a row become one.
    pub fn take_arrivals(&mut self, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let Stage::Up(lines) = &mut self.stage else { return false };
        let (slots, tail) = counts(&self.inbox);
        let mut moved = false;
        let mut run: Option<Count> = None;
        // Bounded, so that a busy writer can't keep this thread from everything else.
        for _ in 0..1024 {
            let Some(count) = self.consume.pop(slots) else { break };
            match &mut run {
                Some(r) if r.imm == count.imm && r.n.checked_add(count.n).is_some() => {
                    r.n += count.n;
                }
                _ => out.extend(run.replace(count).map(Completion::Count)),
            }
            if self.consume.publish(slots, tail, false) {
                lines.bell.ring();
            }
        }
        if let Some(count) = run {
            out.push(Completion::Count(count));
            moved = true;
            if self.consume.is_empty(slots) && self.consume.publish(slots, tail, true) {
                lines.bell.ring();
            }
        }
        moved | self.take_messages(room, out) | self.settle_sends(out)
    }

    fn take_messages(&mut self, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let Stage::Up(lines) = &mut self.stage else { return false };
        let mut moved = false;
        while self.closing.is_none() {
            let len = match self.receiver.peek(&self.inbox) {
                Ok(None) => break,
                Ok(Some(len)) => len,
                Err(_) => {
                    let cause = "its message ring is corrupt";
                    self.closing = Some(DomainError::Handshake(cause.into()));
                    return true;
                }
            };
            match room.admit(len) {
                Admit::Wait => break,
                Admit::TooLong { .. } => self.receiver.refuse(&self.inbox, len),
                Admit::Take => {
                    let message = self.receiver.pop(&self.inbox, len);
                    // Reported one at a time: each takes its place in the pool before the next
                    // asks for one.
                    out.push(Completion::Message { link: self.id, message });
                    moved = true;
                    break;
                }
            }
            moved = true;
        }
        if moved && self.receiver.wakes_sender(&self.inbox) {
            lines.bell.ring();
        }
        moved
    }

    fn settle_sends(&mut self, out: &mut Vec<Completion>) -> bool {
        let Stage::Up(lines) = &mut self.stage else { return false };
        let mut moved = false;
        while let Some((token, len)) = self.sends.front().copied() {
            let Some(fate) = lines.sender.settle(&lines.outbox, len) else { break };
            self.sends.pop_front();
            moved = true;
            let result = match fate {
                Fate::Taken => Ok(()),
                Fate::TooLong => Err(DomainError::Refused(format!(
                    "{len} bytes are more than its receive pool takes"
                ))),
            };
            out.push(Completion::Done { link: self.id, token, result });
        }
        moved
    }

    /// Whether a poll would find something; asked once more after the bell was armed.
    pub fn has_work(&mut self, room: &dyn Fn(usize) -> bool) -> bool {
        if !self.is_up() {
            return false;
        }
        // Once its end was told, only the connection has something to say, or a device that stored until now.
        if self.told {
            return (self.gone || !self.finished) && !self.imports.is_entered();
        }
        let (slots, _) = counts(&self.inbox);
        // A link on its way down has its last word to say, or its end to tell; then its peer has.
        let stores = self.imports.is_entered();
        let ends = self.closing.is_some() && (!self.finished && !stores || self.deaf);
        if !self.consume.is_empty(slots) || ends {
            return true;
        }
        match self.receiver.peek(&self.inbox) {
            Ok(Some(len)) if room(len) => return true,
            Err(_) => return true,
            _ => {}
        }
        let Stage::Up(lines) = &mut self.stage else { return false };
        let settles = self
            .sends
            .front()
            .is_some_and(|(_, len)| lines.sender.ask_and_look(&lines.outbox, *len));
        let refused = self.refused && self.closing.is_none();
        let waits = refused || !self.uncounted.is_empty() || !self.deferred.is_empty();
        let (slots, tail) = counts(&lines.outbox);
        settles || (waits && lines.produce.has_room(slots, tail)) || self.imports.is_leaving()
    }

    /// Whether a count can be sent now; if not, the peer will ring when it can.
    #[inline]
    pub fn has_room(&mut self) -> bool {
        if !self.uncounted.is_empty() {
            return false;
        }
        let Some(lines) = self.lines() else { return false };
        let (slots, tail) = counts(&lines.outbox);
        lines.produce.has_room(slots, tail)
    }

    /// Whether a count can be posted now; if not, the link has work as soon as one can (IC-4).
    #[inline]
    pub fn takes_count(&mut self) -> bool {
        let takes = self.has_room();
        self.refused |= !takes;
        takes
    }

    /// Whether there is room again for what was refused, which is tried again then.
    pub fn take_refusal(&mut self) -> bool {
        let again = self.refused && self.has_room();
        self.refused &= !again;
        again
    }

    /// Sends a count; there must be room. False if its work is not over: the peer has left, perhaps
    /// before it took the count, so the work ends with the link. Without `now`, `ring` is to follow.
    #[inline]
    pub fn push_count(&mut self, token: Token, count: Count, now: bool) -> bool {
        let Stage::Up(lines) = &mut self.stage else { return false };
        let (slots, tail) = counts(&lines.outbox);
        lines.produce.push(slots, count);
        match now {
            // Its fence is the one that `is_closed` needs.
            true => lines.bell.ring(),
            false => fence(SeqCst),
        }
        if !Producer::is_closed(tail) {
            return true;
        }
        self.unheard.push(token);
        let cause = "its other end has left it".to_owned();
        self.closing.get_or_insert(DomainError::LinkDown(cause));
        false
    }

    /// Wakes the peer if it sleeps.
    pub fn ring(&self) {
        if let Stage::Up(lines) = &self.stage {
            lines.bell.ring();
        }
    }

    /// Begins no more copies; those under way end with the chunk that they are at.
    pub fn stop_copying(&self) {
        self.jobs.iter().for_each(|job| job.cancelled.store(true, SeqCst));
    }

    /// Takes no more counts after those that are here already.
    pub fn stop_counting(&self) {
        Consumer::close(counts(&self.inbox).1);
    }

    pub fn push_message(&mut self, token: Token, message: &[u8]) -> bool {
        let Some(lines) = self.lines() else { return false };
        if !lines.sender.push(&lines.outbox, message) {
            return false;
        }
        lines.bell.ring();
        self.sends.push_back((token, message.len()));
        true
    }

    /// Counts a finished copy, now or as soon as the ring has room.
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
        let mut moved = false;
        while let Some((token, count)) = self.uncounted.pop_front() {
            if !self.has_room_for_next() {
                self.uncounted.push_front((token, count));
                break;
            }
            if self.push_count(token, count, true) {
                out.push(Completion::Done { link: self.id, token, result: Ok(()) });
            }
            moved = true;
        }
        moved
    }

    fn has_room_for_next(&mut self) -> bool {
        let Some(lines) = self.lines() else { return false };
        let (slots, tail) = counts(&lines.outbox);
        lines.produce.has_room(slots, tail)
    }

    /// Every token that has not been completed, except those of copies still running.
    pub fn abandon(&mut self) -> Vec<Token> {
        let resolving = std::mem::take(&mut self.resolving).into_values().flatten().map(|(t, _)| t);
        let deferred = std::mem::take(&mut self.deferred).into_iter().map(|(t, _)| t);
        let uncounted = std::mem::take(&mut self.uncounted).into_iter().map(|(t, _)| t);
        let sends = std::mem::take(&mut self.sends).into_iter().map(|(t, _)| t);
        let unheard = std::mem::take(&mut self.unheard);
        resolving.chain(deferred).chain(uncounted).chain(sends).chain(unheard).collect()
    }
}

/// Whether the peer's memory can be reached by the kernel: reads a random value that only it knows.
fn probe(pid: Option<i32>, setup: &Setup) -> Result<i32, String> {
    let pid = pid.filter(|p| *p > 0).ok_or("it runs in another pid namespace")?;
    let mut seen = [0u8; 16];
    let mut local = [super::raw::piece(seen.as_mut_ptr() as usize, 16)];
    let mut remote = [super::raw::piece(setup.probe_addr as usize, 16)];
    // SAFETY: the local piece is `seen`.
    unsafe { super::raw::across(pid, super::raw::Direction::In, &mut local, &mut remote) }
        .map_err(|e| format!("process_vm_readv: {e}"))?;
    match seen == setup.probe {
        true => Ok(pid),
        false => Err("its process id means somebody else here".into()),
    }
}
