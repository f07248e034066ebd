//! Handshakes by message. Each step is repeated until the next step answers it. Before the peer is
//! proven, a bounded number of handshakes is kept and no key is sent.
//!
//! ```text
//! 1 initiator -> own address, hello      2 acceptor -> welcome
//! 3 initiator -> sealed terms, proof         4 acceptor -> sealed terms, its proof
//! ```

mod fragments;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    address::EndpointAddress,
    link::{self, Link},
    LibfabricDomain, LinkEntry,
};
use crate::{
    api::{EngineAddress, Envelope},
    domain::{Completion, DomainError, LinkId, PeerIdentity},
    time::Time,
    transport::{
        handshake::{Acceptor, Failure, Initiator, Session, UnprovenAcceptor},
        nic::{
            frame::{self, Exchange},
            handshake_fragments::{HandshakeMessage, Reassembly},
            message_channel::{MessageChannel, ReceiveLimits},
        },
    },
};

/// Interval after which an unanswered message is repeated; doubled each time.
const REPEAT_INTERVAL: Duration = Duration::from_millis(100);

/// Factor of the peer timeout until an endpoint's first link is up: with the first connection some
/// providers allocate and register resources, during which nothing moves.
const FIRST_LINK_FACTOR: u32 = 3;

const ENVELOPE: Envelope = Envelope::new(*b"FRlt", "a link's terms", 256);

/// The parameters that each side sends after the other is authenticated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LinkTerms {
    /// The endpoint of its engine that sends this.
    pub endpoint: u8,
    /// The sender's number of the link, and the seal that frames to it must carry.
    pub link: LinkId,
    pub seal: u64,
    pub receive_limits: ReceiveLimits,
    /// Target of writes that only count: even those need a valid key.
    pub scratch: u64,
    pub scratch_key: u64,
}

impl LinkTerms {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        let terms: Self =
            ENVELOPE.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))?;
        terms.receive_limits.check()?;
        Ok(terms)
    }
}

pub(super) enum Role {
    Initiator(Initiator),
    Acceptor(Box<Acceptor>),
}

pub(super) struct HandshakeState {
    role: Role,
    /// The link that an active connect will become.
    link: LinkId,
    /// The peer's endpoint to connect to; the acceptor learns it from the terms.
    endpoint: usize,
    remote: EndpointAddress,
    address: usize,
    reassembly: Reassembly,
    /// The last message sent; it determines the next step.
    message: HandshakeMessage,
    /// The acceptor's unproven welcome, and the session key.
    welcomed: Option<(UnprovenAcceptor, Session)>,
    seal: u64,
    retry_at: Time,
    retry_after: Duration,
    pub deadline: Time,
    /// The provider's error of a message that it could not deliver.
    delivery_error: Option<String>,
}

impl HandshakeState {
    pub fn next_timer(&self) -> Time {
        self.retry_at.min(self.deadline)
    }
}

/// Joins two parts into one message.
pub(super) fn join_parts(first: &[u8], second: &[u8]) -> Vec<u8> {
    let mut out = (first.len() as u16).to_le_bytes().to_vec();
    out.extend_from_slice(first);
    out.extend_from_slice(second);
    out
}

pub(super) fn split_parts(bytes: &[u8]) -> Result<(&[u8], &[u8]), DomainError> {
    let cut = || DomainError::Handshake("a handshake message is cut off".into());
    let (n, rest) = bytes.split_first_chunk::<2>().ok_or_else(cut)?;
    rest.split_at_checked(u16::from_le_bytes(*n).into()).ok_or_else(cut)
}

impl LibfabricDomain {
    pub(super) fn start_connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        let remote = EndpointAddress::of(peer, endpoint)?;
        let nic = self.nic.as_ref().ok_or_else(super::closed)?;
        let address = self.addresses.acquire(nic, &remote.address)?;
        let started = frame::new_exchange().and_then(|exchange| {
            let (initiator, hello) = Initiator::start(&self.credentials, peer.id, Vec::new())?;
            Ok((exchange, initiator, hello, self.reserve()?))
        });
        let (exchange, initiator, hello, link) = started.inspect_err(|_| {
            self.addresses.release(address);
        })?;
        let bytes = join_parts(&self.own_address.encode(), &hello);
        let message = HandshakeMessage { exchange, to_initiator: false, step: 1, bytes };
        let role = Role::Initiator(initiator);
        let handshake = self.new_handshake(now, role, link, (endpoint, remote, address), message);
        self.handshakes.insert((exchange, true), handshake);
        self.send_current((exchange, true));
        Ok(link)
    }

    fn new_handshake(
        &self,
        now: Time,
        role: Role,
        link: LinkId,
        (endpoint, remote, address): (usize, EndpointAddress, usize),
        message: HandshakeMessage,
    ) -> HandshakeState {
        HandshakeState {
            role,
            link,
            endpoint,
            remote,
            address,
            reassembly: Reassembly::default(),
            message,
            welcomed: None,
            seal: super::random(),
            retry_at: now.after(REPEAT_INTERVAL),
            retry_after: REPEAT_INTERVAL,
            deadline: now.after(self.peer_timeout * if self.warm { 1 } else { FIRST_LINK_FACTOR }),
            delivery_error: None,
        }
    }

    /// Sends a handshake's current message, for the first time or again.
    fn send_current(&mut self, key: (Exchange, bool)) {
        let Some(handshake) = self.handshakes.get(&key) else { return };
        let (address, message) = (handshake.address, handshake.message.clone());
        self.send_handshake_message(address, &message);
    }

    fn on_step(&mut self, key: (Exchange, bool), step: u8, message: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let (first, second) = split_parts(message).map_err(silent)?;
        let Some(handshake) = self.handshakes.get(&key) else { return Ok(()) };
        let (exchange, own_seal, link) = (key.0, handshake.seal, handshake.link);
        match (&handshake.role, step) {
            (Role::Initiator(initiator), 2) => {
                let welcomed = initiator.on_welcome(second)?;
                let sealed =
                    welcomed.session.seal(b"initiator", &self.terms(link, own_seal).encode());
                let bytes = join_parts(&sealed, &welcomed.proof);
                let message = HandshakeMessage { exchange, to_initiator: false, step: 3, bytes };
                let (now, Some(handshake)) = (self.now, self.handshakes.get_mut(&key)) else {
                    return Ok(());
                };
                handshake.message = message;
                handshake.welcomed = Some((welcomed.pending, welcomed.session));
                (handshake.retry_after, handshake.retry_at) =
                    (REPEAT_INTERVAL, now.after(REPEAT_INTERVAL));
                self.send_current(key);
                Ok(())
            }
            (Role::Initiator(_), 4) => {
                let Some((pending, session)) = &handshake.welcomed else { return Ok(()) };
                let peer = pending.on_accepted(second)?;
                let terms = session.unseal(b"acceptor", first);
                let terms = terms.and_then(|t| LinkTerms::decode(&t)).map_err(silent)?;
                let Some(handshake) = self.handshakes.remove(&key) else { return Ok(()) };
                if usize::from(terms.endpoint) != handshake.endpoint {
                    self.drop_handshake(
                        handshake,
                        DomainError::Handshake("another NIC answered".into()),
                    );
                    return Ok(());
                }
                self.open_link(exchange, handshake, peer, terms, None);
                Ok(())
            }
            (Role::Acceptor(acceptor), 3) => {
                let accepted = acceptor.on_proof(second)?;
                let (peer, session) = (acceptor.peer.clone(), acceptor.session());
                let terms = session.unseal(b"initiator", first);
                let terms = terms.and_then(|t| LinkTerms::decode(&t)).map_err(silent)?;
                let there =
                    EndpointAddress::of(&peer.address, terms.endpoint.into()).map_err(silent)?;
                let Some(handshake) = self.handshakes.get(&key) else { return Ok(()) };
                if there != handshake.remote {
                    let why = "its messages come from another address than its endpoint names";
                    return Err(silent(DomainError::Handshake(why.into())));
                }
                let link = self.reserve().map_err(silent)?;
                let sealed = session.seal(b"acceptor", &self.terms(link, own_seal).encode());
                let bytes = join_parts(&sealed, &accepted);
                let message = HandshakeMessage { exchange, to_initiator: true, step: 4, bytes };
                let Some(handshake) = self.handshakes.remove(&key) else { return Ok(()) };
                let handshake =
                    HandshakeState { link, endpoint: terms.endpoint.into(), ..handshake };
                self.send_handshake_message(handshake.address, &message);
                self.open_link(exchange, handshake, peer, terms, Some(message));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn terms(&self, link: LinkId, seal: u64) -> LinkTerms {
        LinkTerms {
            endpoint: self.own_endpoint as u8,
            link,
            seal,
            receive_limits: link::receive_limits(),
            scratch: if self.virtual_addresses() { self.scratch.addr(0) as u64 } else { 0 },
            scratch_key: self.scratch.key(),
        }
    }

    /// Both sides are proven. The acceptor reports the link as up with the initiator's first frame,
    /// because the initiator may not know it yet.
    fn open_link(
        &mut self,
        exchange: Exchange,
        handshake: HandshakeState,
        peer: PeerIdentity,
        terms: LinkTerms,
        accepted: Option<HandshakeMessage>,
    ) {
        let slot = Self::slot(handshake.link);
        let addr = self.addresses.addr(handshake.address);
        let confirmed = accepted.is_none();
        let mut channel =
            MessageChannel::new(link::receive_limits(), terms.receive_limits, terms.link);
        if confirmed {
            channel.heartbeat();
        }
        let link = Link {
            id: handshake.link,
            peer,
            endpoint: handshake.endpoint,
            remote: handshake.remote,
            address: handshake.address,
            addr,
            exchange,
            accepted,
            confirmed,
            seal_in: handshake.seal,
            terms,
            channel,
            pending: Default::default(),
            last_error: None,
            unconfirmed: Default::default(),
            received: Default::default(),
            confirm_at: Time::NEVER,
            received_at: self.now,
            sent_at: self.now,
            delivered_at: Time(0),
            chunks: 0,
            bytes: 0,
            frames: 0,
            imms: 0,
            queries: Default::default(),
            fences: Default::default(),
        };
        self.links[slot] = LinkEntry::Up(Box::new(link));
        self.warm = true;
        self.fence_returning_peer(handshake.link);
        if confirmed {
            self.report_link_up(handshake.link);
            self.send_frames(handshake.link);
        }
    }

    pub(super) fn report_link_up(&mut self, id: LinkId) {
        let nic = format!("{} ({})", self.offer.domain, self.offer.provider);
        let Some(l) = self.link(id) else { return };
        let (peer, endpoint) = (l.peer.clone(), l.endpoint);
        let description = format!("handshake from {nic} with {}", l.remote.label());
        self.completions.push(Completion::LinkUp {
            link: id,
            peer,
            endpoint,
            name: 0,
            description,
        });
    }

    fn on_handshake_failed(&mut self, key: (Exchange, bool), failure: Failure) {
        let Some(handshake) = self.handshakes.remove(&key) else { return };
        if let Some(refusal) = failure.reply {
            let message = HandshakeMessage {
                exchange: key.0,
                to_initiator: !key.1,
                step: handshake.message.step + 2,
                bytes: join_parts(&[], &refusal),
            };
            self.send_handshake_message(handshake.address, &message);
        }
        self.drop_handshake(handshake, failure.error);
    }

    /// Drops a failed handshake.
    fn drop_handshake(&mut self, handshake: HandshakeState, cause: DomainError) {
        self.addresses.release(handshake.address);
        match handshake.role {
            Role::Acceptor(_) => self.log.unproven(&handshake.remote.label(), &cause),
            _ => {
                self.links.try_remove(Self::slot(handshake.link));
                self.completions.push(Completion::LinkDown {
                    link: handshake.link,
                    cause,
                    receipt: crate::domain::Receipt::Unknown,
                    unfinished: Vec::new(),
                });
            }
        }
    }

    /// Drops an active connect that has no link yet.
    pub(super) fn drop_connect(&mut self, id: LinkId, cause: DomainError) {
        let key =
            self.handshakes.iter().find(|((_, ours), s)| *ours && s.link == id).map(|(k, _)| *k);
        if let Some(handshake) = key.and_then(|key| self.handshakes.remove(&key)) {
            self.drop_handshake(handshake, cause);
        }
    }

    /// Whether a handshake with that address is under way.
    pub(super) fn has_handshake(&self, address: usize) -> bool {
        self.handshakes.values().any(|s| s.address == address)
    }

    /// Records the provider's error for a handshake message, in case the handshake fails.
    pub(super) fn on_undelivered(&mut self, address: usize, text: &str) {
        for handshake in self.handshakes.values_mut().filter(|s| s.address == address) {
            handshake.delivery_error = Some(text.to_owned());
        }
    }

    /// Repeats unanswered messages, and drops handshakes after their deadline.
    pub(super) fn tick_handshakes(&mut self, now: Time) -> bool {
        let due: Vec<_> = self
            .handshakes
            .iter()
            .filter(|(_, s)| s.next_timer() <= now)
            .map(|(key, s)| (*key, s.deadline <= now))
            .collect();
        for (key, over) in &due {
            if *over {
                let Some(handshake) = self.handshakes.remove(key) else { continue };
                let mut why = "no answer in time".to_owned();
                if let Some(delivery_error) = &handshake.delivery_error {
                    why = format!("{why}: {delivery_error}");
                }
                let address = handshake.address;
                self.drop_handshake(handshake, DomainError::Gone(why));
                // Undeliverable messages would occupy the slots of others.
                self.abort_transfers(address);
                continue;
            }
            if let Some(handshake) = self.handshakes.get_mut(key) {
                handshake.retry_after *= 2;
                handshake.retry_at = now.after(handshake.retry_after);
            }
            // An acceptor answers repetitions and does not repeat by itself.
            if key.1 {
                self.send_current(*key);
            }
        }
        !due.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn terms() -> LinkTerms {
        LinkTerms {
            endpoint: 3,
            link: 1 << 16,
            seal: u64::MAX,
            receive_limits: link::receive_limits(),
            scratch: 1 << 47,
            scratch_key: 9,
        }
    }

    #[test]
    fn terms_survive_and_impossible_ones_are_refused() {
        assert_eq!(LinkTerms::decode(&terms().encode()), Ok(terms()));
        let receive_limits = ReceiveLimits { slot_bytes: 8, ..link::receive_limits() };
        assert!(LinkTerms::decode(&LinkTerms { receive_limits, ..terms() }.encode()).is_err());
        let cut = terms().encode();
        assert!(LinkTerms::decode(&cut[..cut.len() - 1]).is_err());
    }

    #[test]
    fn the_parts_of_a_message_are_split_again() {
        let (first, second) = (b"where".as_slice(), b"hello".as_slice());
        assert_eq!(split_parts(&join_parts(first, second)), Ok((first, second)));
        assert_eq!(split_parts(&join_parts(&[], second)), Ok((&[][..], second)));
        for cut in [&[][..], &[1], &[1, 0], &[255, 255, 7]] {
            assert!(split_parts(cut).is_err());
        }
    }

    proptest! {
        #[test]
        fn unauthenticated_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = split_parts(&bytes);
            for magic in [b"FRlt", b"FRlf"] {
                let sealed = crate::fuzzing::sealed(magic, &bytes);
                let _ = LinkTerms::decode(&sealed);
                if let Ok(remote) = EndpointAddress::decode(&sealed) {
                    prop_assert!(remote.address.len() <= 512 && remote.label().len() < 400);
                }
            }
        }
    }
}
