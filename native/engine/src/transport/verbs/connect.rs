//! The active side of a connection.
//!
//! ```text
//! 1 hello   own address, acceptor's id           by datagram, later also by TCP
//! 2 welcome the acceptor's name and nonce
//! 3 proof   and, sealed, the queue pairs         created after the welcome
//! 4 acceptor's proof and, sealed, its queue pairs, connected already
//! - a first frame by the new queue pairs
//! ```
//! The initiator repeats each message until it is answered; the acceptor repeats its answer to a
//! repetition. An exchange has a random number and engine ids name incarnations, so two engines
//! that connect to each other at once make two links, and a restarted peer makes none (MR-2).

use std::{sync::Arc, time::Duration};

use super::{
    address::{address_attr, mtu_bytes, LinkRequest, NicAddress, QpSetup},
    cq_pool::CqSlot,
    datagrams::DatagramAddress,
    device::{unreachable_error, Device, Pair},
    helper_threads::JobOrigin,
    link::{Link, LinkIdentity},
    raw::Ah,
    side_channel, LinkEntry, LinkState, VerbsDomain,
};
use crate::{
    api::EngineAddress,
    domain::{Completion, DomainError, LinkId, PeerIdentity},
    time::Time,
    transport::{
        handshake::{Failure, Initiator, UnprovenWelcome},
        nic::{
            frame::{link_name, new_exchange, Exchange},
            handshake_fragments::{HandshakeMessage, Reassembly},
        },
    },
};

const FIRST_WAIT: Duration = Duration::from_millis(25);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// Results of the helper threads.
pub(super) enum HelperResult {
    AddressResolved(Role, Result<DatagramAddress, DomainError>),
    QpsBuilt(LinkId, CqSlot, Result<Box<Pair>, DomainError>),
    QpsConnected(LinkId, CqSlot, Result<Box<(Pair, QpSetup)>, DomainError>),
    SideConnected(LinkId, Result<std::net::TcpStream, String>),
    /// Whether a large registration has ended.
    RegionReleased(u32, bool),
}

#[derive(Clone, Copy)]
pub(super) enum Role {
    Initiator(LinkId),
    Acceptor(Exchange),
}

enum Stage {
    AwaitWelcome,
    BuildingQps(UnprovenWelcome),
    AwaitAcceptance(UnprovenWelcome, Box<Pair>),
    /// The acceptor is proven.
    ConnectingQps(PeerIdentity),
}

/// A link that this side is opening.
pub(super) struct ConnectAttempt {
    peer: EngineAddress,
    endpoint: usize,
    remote: NicAddress,
    exchange: Exchange,
    initiator: Initiator,
    stage: Stage,
    message: Option<HandshakeMessage>,
    retry_at: Time,
    wait: Duration,
    side_at: Time,
    deadline: Time,
    target: Option<DatagramAddress>,
    side_channel: Option<usize>,
    reassembly: Reassembly,
    pub cq_slot: Option<CqSlot>,
    /// Failures on the way, for the error.
    failures: Vec<String>,
}

impl ConnectAttempt {
    pub fn next_timer(&self) -> Time {
        let again = if self.message.is_some() { self.retry_at } else { Time::NEVER };
        again.min(self.side_at).min(self.deadline)
    }
}

/// A message in two parts.
pub(super) fn join_parts(first: &[u8], second: &[u8]) -> Vec<u8> {
    [&(first.len() as u32).to_le_bytes(), first, second].concat()
}

pub(super) fn split_parts(bytes: &[u8]) -> Result<(&[u8], &[u8]), DomainError> {
    let cut = bytes
        .split_first_chunk::<4>()
        .and_then(|(len, rest)| rest.split_at_checked(u32::from_le_bytes(*len) as usize));
    cut.ok_or_else(|| DomainError::Handshake("a message of the handshake is cut off".into()))
}

/// Resolves the peer's datagram address. Blocks during address resolution.
pub(super) fn resolve(
    device: &Device,
    local: &NicAddress,
    remote: &NicAddress,
) -> Result<DatagramAddress, DomainError> {
    let attr = address_attr(local, remote, &device.route, remote.qpn);
    let ah = Ah::new(&device.pd, attr).map_err(|e| unreachable_error(&e, local, remote))?;
    let mtu = mtu_bytes(local.mtu.min(remote.mtu));
    Ok(DatagramAddress { ah, qpn: remote.qpn, qkey: remote.qkey, mtu })
}

impl VerbsDomain {
    pub(super) fn start_connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        let remote = NicAddress::of(peer, endpoint)?;
        if let Some(why) = self.unreachable_reason(&remote) {
            return Err(DomainError::Unavailable(why));
        }
        let exchange = new_exchange()?;
        let link_request = LinkRequest { exchange, from_endpoint: self.own_endpoint };
        let (initiator, hello) =
            Initiator::start(&self.credentials, peer.id, link_request.encode())?;
        let message = HandshakeMessage {
            exchange,
            to_initiator: false,
            step: 1,
            bytes: join_parts(&self.address.encode(), &hello),
        };
        let attempt = ConnectAttempt {
            peer: peer.clone(),
            endpoint,
            remote: remote.clone(),
            exchange,
            initiator,
            stage: Stage::AwaitWelcome,
            message: Some(message),
            retry_at: Time::NEVER,
            wait: FIRST_WAIT,
            side_at: now.after(self.peer_timeout / 2),
            deadline: now.after(self.peer_timeout * 3 / 2),
            target: None,
            side_channel: None,
            reassembly: Reassembly::default(),
            cq_slot: None,
            failures: Vec::new(),
        };
        let id = self.add_slot(LinkState::Opening(Box::new(attempt)))?;
        self.attempts.insert(exchange, id);
        let (device, local) = (Arc::clone(&self.device), self.address.clone());
        self.helper.run(JobOrigin::Local, move || {
            HelperResult::AddressResolved(Role::Initiator(id), resolve(&device, &local, &remote))
        });
        Ok(id)
    }

    fn attempt(&mut self, id: LinkId) -> Option<&mut ConnectAttempt> {
        match self.slot(id)? {
            LinkEntry { state: LinkState::Opening(a), .. } => Some(a),
            _ => None,
        }
    }

    /// Sends the current message, and schedules its repetition.
    fn send_message(&mut self, id: LinkId) {
        let now = self.now;
        let Some(LinkState::Opening(a)) = self.slots.get_mut(Self::index(id)).map(|s| &mut s.state)
        else {
            return;
        };
        let Some(message) = &a.message else { return };
        if let Some(target) = &a.target {
            message.frames(target.mtu).for_each(|f| self.datagrams.send(target, &f));
        }
        if let Some(key) = a.side_channel {
            let frames = message.frames(usize::MAX);
            frames.for_each(|f| self.side_channel.send(key, &f, &self.epoll));
        }
        a.retry_at = now.after(a.wait);
        a.wait = (a.wait * 2).min(LONGEST_WAIT);
    }

    pub(super) fn on_address_resolved(
        &mut self,
        id: LinkId,
        target: Result<DatagramAddress, DomainError>,
    ) {
        let Some(a) = self.attempt(id) else { return };
        match target {
            Ok(target) => {
                a.target = Some(target);
                self.send_message(id);
            }
            // If datagrams have no route, queue pairs have none either.
            Err(e) => self.drop_attempt(id, e),
        }
    }

    pub(super) fn on_side_connected(
        &mut self,
        id: LinkId,
        stream: Result<std::net::TcpStream, String>,
    ) {
        let now = self.now;
        if self.attempt(id).is_none() {
            return;
        }
        let key = stream.and_then(|s| {
            self.side_channel
                .add(now, s, Some(id), &self.epoll)
                .ok_or_else(|| "epoll_ctl failed".into())
        });
        let Some(a) = self.attempt(id) else { return };
        match key {
            Ok(key) => {
                a.side_channel = Some(key);
                self.send_message(id);
            }
            Err(why) => a.failures.push(format!("by TCP: {why}")),
        }
    }

    /// Handles a fragment of the acceptor.
    pub(super) fn on_acceptor_fragment(
        &mut self,
        id: LinkId,
        fragment: &crate::transport::nic::frame::HandshakeFragment<'_>,
    ) {
        let Some(a) = self.attempt(id) else { return };
        let awaited = match a.stage {
            Stage::AwaitWelcome => 2,
            Stage::AwaitAcceptance(..) => 4,
            _ => return,
        };
        if fragment.step != awaited {
            return;
        }
        let result = match a.reassembly.take(fragment) {
            Ok(None) => return,
            // A stranger may have sent it; the answer may still arrive.
            Err(_) => return,
            Ok(Some(bytes)) if awaited == 2 => self.on_welcome(id, &bytes),
            Ok(Some(bytes)) => self.on_accepted(id, &bytes),
        };
        if let Err(Failure { reply, error }) = result {
            if let (Some(reply), Some(a)) = (reply, self.attempt(id)) {
                let (exchange, bytes) = (a.exchange, join_parts(&reply, &[]));
                a.message =
                    Some(HandshakeMessage { exchange, to_initiator: false, step: 3, bytes });
                self.send_message(id);
            }
            self.drop_attempt(id, error);
        }
    }

    fn on_welcome(&mut self, id: LinkId, bytes: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let Some(a) = self.attempt(id) else { return Ok(()) };
        let w = a.initiator.on_welcome(bytes)?;
        a.message = None;
        a.stage = Stage::BuildingQps(w);
        let (cq_slot, cq) = self.cqs.reserve(&self.device).map_err(silent)?;
        let device = Arc::clone(&self.device);
        self.helper.run(JobOrigin::Local, move || {
            HelperResult::QpsBuilt(id, cq_slot, Pair::build(&device, &cq, id).map(Box::new))
        });
        Ok(())
    }

    pub(super) fn on_qps_built(
        &mut self,
        id: LinkId,
        cq_slot: CqSlot,
        pair: Result<Box<Pair>, DomainError>,
    ) {
        let device = Arc::clone(&self.device);
        let pair = match (self.attempt(id).is_some(), pair) {
            (true, Ok(pair)) => pair,
            (_, result) => {
                // The dropped pair has no posted requests that could complete.
                self.cqs.release(cq_slot);
                return result.err().into_iter().for_each(|e| self.drop_attempt(id, e));
            }
        };
        let Some(a) = self.attempt(id) else { return };
        a.cq_slot = Some(cq_slot);
        let Stage::BuildingQps(welcomed) = std::mem::replace(&mut a.stage, Stage::AwaitWelcome)
        else {
            return;
        };
        let sealed = welcomed.session.seal(b"initiator", &pair.setup(&device).encode());
        let bytes = join_parts(&welcomed.proof, &sealed);
        a.message =
            Some(HandshakeMessage { exchange: a.exchange, to_initiator: false, step: 3, bytes });
        a.wait = FIRST_WAIT;
        a.stage = Stage::AwaitAcceptance(welcomed, pair);
        self.send_message(id);
    }

    fn on_accepted(&mut self, id: LinkId, bytes: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let Some(a) = self.attempt(id) else { return Ok(()) };
        let (accepted, sealed) = split_parts(bytes).map_err(silent)?;
        let Stage::AwaitAcceptance(welcomed, _) = &a.stage else { return Ok(()) };
        let peer = welcomed.pending.on_accepted(accepted)?;
        let remote_setup = welcomed.session.unseal(b"acceptor", sealed);
        let remote_setup = remote_setup.and_then(|setup| QpSetup::decode(&setup));
        let remote_setup = remote_setup.map_err(silent)?;
        let Some(cq_slot) = a.cq_slot.take() else { return Ok(()) };
        let Stage::AwaitAcceptance(_, pair) = std::mem::replace(&mut a.stage, Stage::AwaitWelcome)
        else {
            return Ok(());
        };
        a.message = None;
        a.stage = Stage::ConnectingQps(peer);
        let remote = a.remote.clone();
        let (device, local) = (Arc::clone(&self.device), self.address.clone());
        self.helper.run(JobOrigin::Local, move || {
            let joined = pair.join(&device, (&local, &remote), &remote_setup);
            HelperResult::QpsConnected(
                id,
                cq_slot,
                joined.map(|()| Box::new((*pair, remote_setup))),
            )
        });
        Ok(())
    }

    /// The queue pairs are connected to the acceptor's: the link is up.
    pub(super) fn on_qps_connected(
        &mut self,
        id: LinkId,
        cq_slot: CqSlot,
        made: Result<Box<(Pair, QpSetup)>, DomainError>,
    ) {
        let now = self.now;
        let (pair, remote_setup) = match (self.attempt(id).is_some(), made) {
            (true, Ok(made)) => *made,
            (_, made) => {
                let error = made.err();
                self.cqs.release(cq_slot);
                return error.into_iter().for_each(|e| self.drop_attempt(id, e));
            }
        };
        let Some(a) = self.attempt(id) else { return };
        let Stage::ConnectingQps(peer) = std::mem::replace(&mut a.stage, Stage::AwaitWelcome)
        else {
            return;
        };
        let (exchange, by_tcp) = (a.exchange, a.side_channel.is_some());
        let origin = LinkIdentity {
            id,
            peer: peer.clone(),
            endpoint: a.endpoint,
            name: link_name(&a.exchange),
            remote: a.remote.clone(),
            cq_slot,
        };
        let (endpoint, name) = (a.endpoint, origin.name);
        self.attempts.remove(&exchange);
        self.side_channel.drop_link(id);
        let mut link = Link::new(&self.device, origin, pair, &remote_setup, now);
        link.announced = true;
        // The first frame confirms the acceptor's answer.
        link.channel.heartbeat();
        let transport = if by_tcp { "TCP" } else { "datagram" };
        let description = format!("handshake with {} by {transport}", link.remote.label());
        self.install_link(id, link);
        self.completions.push(Completion::LinkUp { link: id, peer, endpoint, name, description });
    }

    /// Drops an attempt and reports its link as down.
    pub(super) fn drop_attempt(&mut self, id: LinkId, cause: DomainError) {
        let Some(a) = self.attempt(id) else { return };
        let (exchange, cq_slot) = (a.exchange, a.cq_slot.take());
        self.attempts.remove(&exchange);
        self.side_channel.drop_link(id);
        self.slots.remove(Self::index(id));
        if let Some(cq_slot) = cq_slot {
            self.cqs.release(cq_slot);
        }
        self.completions.push(Completion::LinkDown {
            link: id,
            cause,
            receipt: crate::domain::Receipt::Unknown,
            unfinished: Vec::new(),
        });
    }

    /// Repeats messages, opens the side channel, and drops attempts after their deadline.
    pub(super) fn tick_attempts(&mut self, now: Time) {
        let due: Vec<LinkId> = self.attempts.values().copied().collect();
        for id in due {
            let Some(a) = self.attempt(id) else { continue };
            if a.next_timer() > now {
                continue;
            }
            if a.deadline <= now {
                let mut failures = std::mem::take(&mut a.failures);
                failures.insert(0, "by datagram: no answer in time".into());
                let remote = a.remote.label();
                let why = format!(
                    "{} at {remote} did not answer: {}",
                    a.peer.label(),
                    failures.join("; ")
                );
                self.drop_attempt(id, DomainError::Gone(why));
                continue;
            }
            if a.side_at <= now {
                a.side_at = Time::NEVER;
                if matches!(a.stage, Stage::AwaitWelcome | Stage::AwaitAcceptance(..))
                    && a.side_channel.is_none()
                {
                    let remote = a.remote.clone();
                    let candidates = remote.side_candidates(self.own_gids.contains(&remote.gid));
                    self.helper.run(JobOrigin::Local, move || {
                        HelperResult::SideConnected(id, side_channel::connect(&candidates))
                    });
                }
            }
            if self.attempt(id).is_some_and(|a| a.message.is_some() && a.retry_at <= now) {
                self.send_message(id);
            }
        }
    }
}
