//! The passive side of a connection. See [`super::connect`] for the messages.

use std::sync::Arc;

use super::{
    address::{LinkRequest, NicAddress, QpSetup},
    connect::{join_parts, resolve, split_parts, HelperResult, Role},
    cq_pool::CqSlot,
    datagrams::DatagramAddress,
    device::Pair,
    helper_threads::JobOrigin,
    link::{Link, LinkIdentity},
    LinkEntry, LinkState, VerbsDomain,
};
use crate::{
    domain::{DomainError, LinkId, PeerIdentity},
    time::Time,
    transport::{
        handshake::{Acceptor, Failure, Session},
        nic::{
            frame::{link_name, Exchange, HandshakeFragment},
            handshake_fragments::{HandshakeMessage, Reassembly},
        },
    },
};

/// Handshakes of unproven initiators at a time.
const MAX_UNPROVEN: usize = 128;

enum Stage {
    /// The initiator's datagram address is being resolved.
    ResolvingInitiator(Vec<u8>),
    AwaitProof(Box<Acceptor>, LinkRequest),
    /// The initiator is proven; the queue pairs are being created.
    ConnectingQps(Box<ProvenPeer>),
    /// The last answer is out; repetitions get it again.
    Done,
}

struct ProvenPeer {
    accepted: Vec<u8>,
    session: Session,
    peer: PeerIdentity,
    endpoint: usize,
    remote: NicAddress,
}

/// A handshake that a peer began.
pub(super) struct AcceptAttempt {
    remote: NicAddress,
    stage: Stage,
    reassembly: Reassembly,
    target: Option<DatagramAddress>,
    side_channel: Option<usize>,
    answer: Option<HandshakeMessage>,
    link: Option<LinkId>,
    pub deadline: Time,
}

impl AcceptAttempt {
    fn is_proven(&self) -> bool {
        self.link.is_some()
    }

    /// Whether the handshake is done and led to this link.
    pub fn is_done_for(&self, id: LinkId) -> bool {
        self.link == Some(id) && matches!(self.stage, Stage::Done)
    }
}

impl VerbsDomain {
    /// Handles a fragment of an initiator.
    pub(super) fn on_initiator_fragment(
        &mut self,
        side_channel: Option<usize>,
        fragment: &HandshakeFragment<'_>,
    ) {
        let exchange = fragment.exchange;
        if !self.accepts.contains_key(&exchange) {
            if fragment.step != 1 || !self.make_room() {
                return;
            }
            let accept = AcceptAttempt {
                remote: self.address.clone(),
                stage: Stage::ResolvingInitiator(Vec::new()),
                reassembly: Reassembly::default(),
                target: None,
                side_channel,
                answer: None,
                link: None,
                deadline: self.now.after(self.peer_timeout * 3 / 2),
            };
            self.accepts.insert(exchange, accept);
        }
        let Some(v) = self.accepts.get_mut(&exchange) else { return };
        if side_channel.is_some() {
            v.side_channel = side_channel;
        }
        let Ok(Some(bytes)) = v.reassembly.take(fragment) else { return };
        let result = match (&v.stage, fragment.step) {
            (Stage::ResolvingInitiator(hello), 1) if hello.is_empty() => {
                self.on_hello(exchange, &bytes)
            }
            (Stage::AwaitProof(..), 3) => self.on_proof(exchange, &bytes),
            // The answer is under way, or was lost.
            (Stage::Done, _) | (Stage::AwaitProof(..), 1) => {
                self.send_answer(exchange);
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(Failure { reply, error }) = result {
            self.refuse(exchange, fragment.step + 1, reply, &error);
        }
    }

    /// Makes room for an unproven initiator by dropping the oldest. Proven initiators do not count.
    fn make_room(&mut self) -> bool {
        let strangers = || self.accepts.iter().filter(|(_, v)| !v.is_proven());
        if strangers().count() < MAX_UNPROVEN {
            return true;
        }
        let oldest = strangers().min_by_key(|(_, v)| v.deadline).map(|(e, _)| *e);
        oldest.is_some_and(|e| self.accepts.remove(&e).is_some())
    }

    fn refuse(
        &mut self,
        exchange: Exchange,
        step: u8,
        reply: Option<Vec<u8>>,
        error: &DomainError,
    ) {
        let Some(v) = self.accepts.get_mut(&exchange) else { return };
        self.log.unproven(&v.remote.label(), error);
        v.stage = Stage::Done;
        v.answer = reply.map(|r| {
            let bytes = if step == 4 { join_parts(&r, &[]) } else { r };
            HandshakeMessage { exchange, to_initiator: true, step, bytes }
        });
        self.send_answer(exchange);
    }

    fn on_hello(&mut self, exchange: Exchange, bytes: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let (address, hello) = split_parts(bytes).map_err(silent)?;
        let remote = NicAddress::decode(address).map_err(silent)?;
        if let Some(why) = self.unreachable_reason(&remote) {
            return Err(silent(DomainError::Handshake(why)));
        }
        let Some(v) = self.accepts.get_mut(&exchange) else { return Ok(()) };
        v.remote = remote.clone();
        v.stage = Stage::ResolvingInitiator(hello.to_vec());
        if v.side_channel.is_some() {
            return self.send_welcome(exchange);
        }
        let (device, here) = (Arc::clone(&self.device), self.address.clone());
        self.helper.run(JobOrigin::Stranger, move || {
            HelperResult::AddressResolved(
                Role::Acceptor(exchange),
                resolve(&device, &here, &remote),
            )
        });
        Ok(())
    }

    pub(super) fn on_return_address(
        &mut self,
        exchange: Exchange,
        target: Result<DatagramAddress, DomainError>,
    ) {
        let Some(v) = self.accepts.get_mut(&exchange) else { return };
        match target {
            Ok(target) => {
                v.target = Some(target);
                if let Err(Failure { reply, error }) = self.send_welcome(exchange) {
                    self.refuse(exchange, 2, reply, &error);
                }
            }
            Err(e) => self.refuse(exchange, 2, None, &e),
        }
    }

    fn send_welcome(&mut self, exchange: Exchange) -> Result<(), Failure> {
        let Some(v) = self.accepts.get_mut(&exchange) else { return Ok(()) };
        let Stage::ResolvingInitiator(hello) = &v.stage else { return Ok(()) };
        let (acceptor, welcome) = Acceptor::on_hello(&self.credentials, hello)?;
        let link_request =
            LinkRequest::decode(&acceptor.extra).map_err(|error| Failure { reply: None, error })?;
        v.stage = Stage::AwaitProof(Box::new(acceptor), link_request);
        v.answer = Some(HandshakeMessage { exchange, to_initiator: true, step: 2, bytes: welcome });
        self.send_answer(exchange);
        Ok(())
    }

    fn on_proof(&mut self, exchange: Exchange, bytes: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let Some(v) = self.accepts.get_mut(&exchange) else { return Ok(()) };
        let Stage::AwaitProof(acceptor, link_request) = &v.stage else { return Ok(()) };
        let (proof, sealed) = split_parts(bytes).map_err(silent)?;
        let accepted = acceptor.on_proof(proof)?;
        let session = acceptor.session();
        let remote_setup = session.unseal(b"initiator", sealed);
        let remote_setup = remote_setup.and_then(|setup| QpSetup::decode(&setup));
        let remote_setup = remote_setup.map_err(silent)?;
        if link_request.exchange != exchange {
            return Err(silent(DomainError::Handshake("the hello names another exchange".into())));
        }
        let (peer, endpoint) = (acceptor.peer.clone(), usize::from(link_request.from_endpoint));
        // Queue pairs connect to the proven address, not to the one that asked for an answer.
        let remote = NicAddress::of(&peer.address, endpoint).map_err(Failure::with_reply)?;
        let (cq_slot, cq) = self.cqs.reserve(&self.device).map_err(Failure::with_reply)?;
        let id = match self.add_slot(LinkState::Accepting(exchange)) {
            Ok(id) => id,
            Err(e) => {
                self.cqs.release(cq_slot);
                return Err(Failure::with_reply(e));
            }
        };
        let Some(v) = self.accepts.get_mut(&exchange) else { return Ok(()) };
        v.link = Some(id);
        v.answer = None;
        let proven = ProvenPeer { accepted, session, peer, endpoint, remote: remote.clone() };
        v.stage = Stage::ConnectingQps(Box::new(proven));
        let (device, here) = (Arc::clone(&self.device), self.address.clone());
        self.helper.run(JobOrigin::Local, move || {
            let made = Pair::build(&device, &cq, id).and_then(|pair| {
                pair.join(&device, (&here, &remote), &remote_setup)?;
                Ok(Box::new((pair, remote_setup)))
            });
            HelperResult::QpsConnected(id, cq_slot, made)
        });
        Ok(())
    }

    /// The queue pairs are connected to the initiator's. The link is up once the initiator uses it.
    pub(super) fn on_accepted_qps_connected(
        &mut self,
        id: LinkId,
        exchange: Exchange,
        cq_slot: CqSlot,
        made: Result<Box<(Pair, QpSetup)>, DomainError>,
    ) {
        let now = self.now;
        let Some(v) = self.accepts.get_mut(&exchange) else {
            return self.release_slot(id, cq_slot);
        };
        let Stage::ConnectingQps(proven) = std::mem::replace(&mut v.stage, Stage::Done) else {
            return self.release_slot(id, cq_slot);
        };
        let (pair, remote_setup) = match made {
            Ok(made) => *made,
            Err(e) => {
                self.release_slot(id, cq_slot);
                let Failure { reply, error } = Failure::with_reply(e);
                return self.refuse(exchange, 4, reply, &error);
            }
        };
        let setup = proven.session.seal(b"acceptor", &pair.setup(&self.device).encode());
        let bytes = join_parts(&proven.accepted, &setup);
        v.answer = Some(HandshakeMessage { exchange, to_initiator: true, step: 4, bytes });
        // The initiator may repeat its message until then.
        v.deadline = now.after(self.peer_timeout * 3 / 2);
        let ProvenPeer { peer, endpoint, remote, .. } = *proven;
        let name = link_name(&exchange);
        let origin = LinkIdentity { id, peer, endpoint, name, remote, cq_slot };
        let link = Link::new(&self.device, origin, pair, &remote_setup, now);
        self.install_link(id, link);
        self.send_answer(exchange);
    }

    fn release_slot(&mut self, id: LinkId, cq_slot: CqSlot) {
        if self.slot(id).is_some_and(|s: &mut LinkEntry| matches!(s.state, LinkState::Accepting(_)))
        {
            self.slots.remove(Self::index(id));
        }
        self.cqs.release(cq_slot);
    }

    /// Sends the last answer again.
    fn send_answer(&mut self, exchange: Exchange) {
        let Some(v) = self.accepts.get(&exchange) else { return };
        let Some(message) = &v.answer else { return };
        match (v.side_channel, &v.target) {
            (Some(key), _) => {
                let frames = message.frames(usize::MAX);
                frames.for_each(|f| self.side_channel.send(key, &f, &self.epoll));
            }
            (None, Some(target)) => {
                message.frames(target.mtu).for_each(|f| self.datagrams.send(target, &f));
            }
            (None, None) => {}
        }
    }

    pub(super) fn tick_accepts(&mut self, now: Time) {
        // A handshake whose queue pairs are being created stays past its deadline.
        self.accepts.retain(|_, v| v.deadline > now || matches!(v.stage, Stage::ConnectingQps(_)));
    }
}
