//! Handshakes over messages: each step is a letter in pieces, repeated until the next step answers
//! it. Before the token is proven nothing is kept but a bounded number of these, and no key is told.
//!
//! ```text
//! 1 initiator -> where to answer, hello      2 acceptor -> welcome
//! 3 initiator -> sealed terms, proof         4 acceptor -> sealed terms, its proof
//! ```

mod letters;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    link::{self, Link},
    place::Place,
    LibfabricDomain, Slot,
};
use crate::{
    api::{EngineAddress, Envelope},
    domain::{Completion, DomainError, LinkId, PeerIdentity},
    time::Time,
    transport::{
        handshake::{Acceptor, Failure, Initiator, Pending, Session},
        nic::{
            frame::{self, Exchange},
            handshake_fragments::{HandshakeMessage, Reassembly},
            message_channel::{MessageChannel, ReceiveLimits},
        },
    },
};

/// A letter without an answer is repeated after so long, and then ever more rarely.
const REPEAT: Duration = Duration::from_millis(100);

/// How many times the usual patience an endpoint has until its first link is up: some providers
/// allocate and register what connections need when the first is made, and nothing moves meanwhile.
const COLD: u32 = 3;

const ENVELOPE: Envelope = Envelope::new(*b"FRlt", "a link's terms", 256);

/// What each side tells the other once it has been proven to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Terms {
    /// From which endpoint of its engine it speaks.
    pub endpoint: u8,
    /// What it calls the link, and the number that frames to it must bear.
    pub link: LinkId,
    pub seal: u64,
    pub receive_limits: ReceiveLimits,
    /// Where writes go that only count: a valid key is needed even for no bytes.
    pub scratch: u64,
    pub scratch_key: u64,
}

impl Terms {
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

pub(super) struct Setup {
    role: Role,
    /// The link that a connect of ours is to become.
    link: LinkId,
    /// Which endpoint of the peer's we want; the acceptor learns it with the terms.
    endpoint: usize,
    place: Place,
    address: usize,
    pieces: Reassembly,
    /// What was said last, by which it is known what is to come.
    letter: HandshakeMessage,
    /// The acceptor that has welcomed us, and the key of this handshake.
    welcomed: Option<(Pending, Session)>,
    seal: u64,
    repeat_at: Time,
    gap: Duration,
    pub deadline: Time,
    /// What the provider said of a letter that it could not deliver.
    tried: Option<String>,
}

impl Setup {
    pub fn next_timer(&self) -> Time {
        self.repeat_at.min(self.deadline)
    }
}

/// Two parts of a letter.
pub(super) fn pack(first: &[u8], second: &[u8]) -> Vec<u8> {
    let mut out = (first.len() as u16).to_le_bytes().to_vec();
    out.extend_from_slice(first);
    out.extend_from_slice(second);
    out
}

pub(super) fn unpack(bytes: &[u8]) -> Result<(&[u8], &[u8]), DomainError> {
    let cut = || DomainError::Handshake("a letter that is cut off".into());
    let (n, rest) = bytes.split_first_chunk::<2>().ok_or_else(cut)?;
    rest.split_at_checked(u16::from_le_bytes(*n).into()).ok_or_else(cut)
}

impl LibfabricDomain {
    pub(super) fn begin(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        let place = Place::of(peer, endpoint)?;
        let nic = self.nic.as_ref().ok_or_else(super::closed)?;
        let address = self.addresses.hold(nic, &place.address)?;
        let started = frame::new_exchange().and_then(|exchange| {
            let (initiator, hello) = Initiator::start(&self.credentials, peer.id, Vec::new())?;
            Ok((exchange, initiator, hello, self.reserve()?))
        });
        let (exchange, initiator, hello, link) = started.inspect_err(|_| {
            self.addresses.release(address);
        })?;
        let bytes = pack(&self.place.encode(), &hello);
        let letter = HandshakeMessage { exchange, to_initiator: false, step: 1, bytes };
        let role = Role::Initiator(initiator);
        let setup = self.setup(now, role, link, (endpoint, place, address), letter);
        self.setups.insert((exchange, true), setup);
        self.repeat((exchange, true));
        Ok(link)
    }

    fn setup(
        &self,
        now: Time,
        role: Role,
        link: LinkId,
        (endpoint, place, address): (usize, Place, usize),
        letter: HandshakeMessage,
    ) -> Setup {
        Setup {
            role,
            link,
            endpoint,
            place,
            address,
            pieces: Reassembly::default(),
            letter,
            welcomed: None,
            seal: super::random(),
            repeat_at: now.after(REPEAT),
            gap: REPEAT,
            deadline: now.after(self.peer_timeout * if self.warm { 1 } else { COLD }),
            tried: None,
        }
    }

    /// Sends a handshake's current letter, for the first time or again.
    fn repeat(&mut self, key: (Exchange, bool)) {
        let Some(setup) = self.setups.get(&key) else { return };
        let (address, letter) = (setup.address, setup.letter.clone());
        self.mail_letter(address, &letter);
    }

    fn answer(&mut self, key: (Exchange, bool), step: u8, letter: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let (first, second) = unpack(letter).map_err(silent)?;
        let Some(setup) = self.setups.get(&key) else { return Ok(()) };
        let (exchange, own_seal, link) = (key.0, setup.seal, setup.link);
        match (&setup.role, step) {
            (Role::Initiator(initiator), 2) => {
                let welcomed = initiator.on_welcome(second)?;
                let sealed =
                    welcomed.session.seal(b"initiator", &self.terms(link, own_seal).encode());
                let bytes = pack(&sealed, &welcomed.proof);
                let letter = HandshakeMessage { exchange, to_initiator: false, step: 3, bytes };
                let (now, Some(setup)) = (self.now, self.setups.get_mut(&key)) else {
                    return Ok(());
                };
                setup.letter = letter;
                setup.welcomed = Some((welcomed.pending, welcomed.session));
                (setup.gap, setup.repeat_at) = (REPEAT, now.after(REPEAT));
                self.repeat(key);
                Ok(())
            }
            (Role::Initiator(_), 4) => {
                let Some((pending, session)) = &setup.welcomed else { return Ok(()) };
                let peer = pending.on_accepted(second)?;
                let terms = session.unseal(b"acceptor", first);
                let terms = terms.and_then(|t| Terms::decode(&t)).map_err(silent)?;
                let Some(setup) = self.setups.remove(&key) else { return Ok(()) };
                if usize::from(terms.endpoint) != setup.endpoint {
                    self.abandon(setup, DomainError::Handshake("another NIC answered".into()));
                    return Ok(());
                }
                self.come_up(exchange, setup, peer, terms, None);
                Ok(())
            }
            (Role::Acceptor(acceptor), 3) => {
                let accepted = acceptor.on_proof(second)?;
                let (peer, session) = (acceptor.peer.clone(), acceptor.session());
                let terms = session.unseal(b"initiator", first);
                let terms = terms.and_then(|t| Terms::decode(&t)).map_err(silent)?;
                let there = Place::of(&peer.address, terms.endpoint.into()).map_err(silent)?;
                let Some(setup) = self.setups.get(&key) else { return Ok(()) };
                if there != setup.place {
                    let why = "it speaks from elsewhere than its address says";
                    return Err(silent(DomainError::Handshake(why.into())));
                }
                let link = self.reserve().map_err(silent)?;
                let sealed = session.seal(b"acceptor", &self.terms(link, own_seal).encode());
                let bytes = pack(&sealed, &accepted);
                let letter = HandshakeMessage { exchange, to_initiator: true, step: 4, bytes };
                let Some(setup) = self.setups.remove(&key) else { return Ok(()) };
                let setup = Setup { link, endpoint: terms.endpoint.into(), ..setup };
                self.mail_letter(setup.address, &letter);
                self.come_up(exchange, setup, peer, terms, Some(letter));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn terms(&self, link: LinkId, seal: u64) -> Terms {
        Terms {
            endpoint: self.own_endpoint as u8,
            link,
            seal,
            receive_limits: link::receive_limits(),
            scratch: if self.virtual_addresses() { self.scratch.addr(0) as u64 } else { 0 },
            scratch_key: self.scratch.key(),
        }
    }

    /// Both sides are proven. The acceptor's link is up with the initiator's first frame: until
    /// then the other side may not know it yet.
    fn come_up(
        &mut self,
        exchange: Exchange,
        setup: Setup,
        peer: PeerIdentity,
        terms: Terms,
        accepted: Option<HandshakeMessage>,
    ) {
        let slot = Self::slot(setup.link);
        let addr = self.addresses.addr(setup.address);
        let confirmed = accepted.is_none();
        let mut channel =
            MessageChannel::new(link::receive_limits(), terms.receive_limits, terms.link);
        if confirmed {
            channel.heartbeat();
        }
        let link = Link {
            id: setup.link,
            peer,
            endpoint: setup.endpoint,
            place: setup.place,
            address: setup.address,
            addr,
            exchange,
            accepted,
            confirmed,
            seal_in: setup.seal,
            terms,
            channel,
            pending: Default::default(),
            trouble: None,
            sent: Default::default(),
            seen: Default::default(),
            confirm_at: Time::NEVER,
            heard_at: self.now,
            spoke_at: self.now,
            pieces: 0,
            bytes: 0,
            frames: 0,
            imms: 0,
            asking: Default::default(),
            fences: Default::default(),
        };
        self.links[slot] = Slot::Up(Box::new(link));
        self.warm = true;
        self.fence_newcomer(setup.link);
        if confirmed {
            self.report_up(setup.link);
            self.pump(setup.link);
        }
    }

    pub(super) fn report_up(&mut self, id: LinkId) {
        let nic = format!("{} ({})", self.offer.domain, self.offer.provider);
        let Some(l) = self.link(id) else { return };
        let (peer, endpoint) = (l.peer.clone(), l.endpoint);
        let note = format!("the handshake from {nic} with {} worked", l.place.label());
        self.news.push(Completion::LinkUp { link: id, peer, endpoint, name: 0, note });
    }

    fn setup_failed(&mut self, key: (Exchange, bool), failure: Failure) {
        let Some(setup) = self.setups.remove(&key) else { return };
        if let Some(refusal) = failure.reply {
            let letter = HandshakeMessage {
                exchange: key.0,
                to_initiator: !key.1,
                step: setup.letter.step + 2,
                bytes: pack(&[], &refusal),
            };
            self.mail_letter(setup.address, &letter);
        }
        self.abandon(setup, failure.error);
    }

    /// A handshake has come to nothing.
    fn abandon(&mut self, setup: Setup, cause: DomainError) {
        self.addresses.release(setup.address);
        match setup.role {
            Role::Acceptor(_) => self.log.unproven(&setup.place.label(), &cause),
            _ => {
                self.links.try_remove(Self::slot(setup.link));
                self.news.push(Completion::LinkDown {
                    link: setup.link,
                    cause,
                    receipt: crate::domain::Receipt::Unknown,
                    unfinished: Vec::new(),
                });
            }
        }
    }

    /// Drops a connect of ours that has not come to a link yet.
    pub(super) fn give_up(&mut self, id: LinkId, cause: DomainError) {
        let key = self.setups.iter().find(|((_, ours), s)| *ours && s.link == id).map(|(k, _)| *k);
        if let Some(setup) = key.and_then(|key| self.setups.remove(&key)) {
            self.abandon(setup, cause);
        }
    }

    /// Whether a handshake with that address is under way.
    pub(super) fn has_setup(&self, address: usize) -> bool {
        self.setups.values().any(|s| s.address == address)
    }

    /// The provider could not deliver a letter to an address: said if nothing better comes.
    pub(super) fn undelivered(&mut self, address: usize, words: &str) {
        for setup in self.setups.values_mut().filter(|s| s.address == address) {
            setup.tried = Some(words.to_owned());
        }
    }

    /// Repeats what was not answered, and gives up on what won't be.
    pub(super) fn tick_setups(&mut self, now: Time) -> bool {
        let due: Vec<_> = self
            .setups
            .iter()
            .filter(|(_, s)| s.next_timer() <= now)
            .map(|(key, s)| (*key, s.deadline <= now))
            .collect();
        for (key, over) in &due {
            if *over {
                let Some(setup) = self.setups.remove(key) else { continue };
                let mut why = "no answer in time".to_owned();
                if let Some(tried) = &setup.tried {
                    why = format!("{why}: {tried}");
                }
                let address = setup.address;
                self.abandon(setup, DomainError::Gone(why));
                // Letters that nobody takes would keep the slots of others.
                self.cut_off(address);
                continue;
            }
            if let Some(setup) = self.setups.get_mut(key) {
                setup.gap *= 2;
                setup.repeat_at = now.after(setup.gap);
            }
            // An acceptor answers repetitions; it does not repeat by itself.
            if key.1 {
                self.repeat(*key);
            }
        }
        !due.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn terms() -> Terms {
        Terms {
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
        assert_eq!(Terms::decode(&terms().encode()), Ok(terms()));
        let receive_limits = ReceiveLimits { slot_bytes: 8, ..link::receive_limits() };
        assert!(Terms::decode(&Terms { receive_limits, ..terms() }.encode()).is_err());
        let cut = terms().encode();
        assert!(Terms::decode(&cut[..cut.len() - 1]).is_err());
    }

    #[test]
    fn the_parts_of_a_letter_come_apart() {
        let (first, second) = (b"where".as_slice(), b"hello".as_slice());
        assert_eq!(unpack(&pack(first, second)), Ok((first, second)));
        assert_eq!(unpack(&pack(&[], second)), Ok((&[][..], second)));
        for cut in [&[][..], &[1], &[1, 0], &[255, 255, 7]] {
            assert!(unpack(cut).is_err());
        }
    }

    proptest! {
        #[test]
        fn what_strangers_send_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = unpack(&bytes);
            for magic in [b"FRlt", b"FRlf"] {
                let sealed = crate::fuzzing::sealed(magic, &bytes);
                let _ = Terms::decode(&sealed);
                if let Ok(place) = Place::decode(&sealed) {
                    prop_assert!(place.address.len() <= 512 && place.label().len() < 400);
                }
            }
        }
    }
}
