//! The passive side of a connection. See [`super::shake`] for the messages.

use std::sync::Arc;

use super::{
    datagrams::Target,
    device::Pair,
    helper::Whose,
    link::{Link, Origin},
    place::{Intro, Place, Setup},
    shake::{pair_up, reach, take_apart, Outcome, Who},
    shelves::Seat,
    Slot, State, VerbsDomain,
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
const MOST: usize = 128;

enum Stage {
    /// The initiator's datagram address is being resolved.
    Reaching(Vec<u8>),
    AwaitProof(Box<Acceptor>, Intro),
    /// The initiator is proven; the queue pairs are being created.
    Joining(Box<Proven>),
    /// The last answer is out; repetitions get it again.
    Over,
}

struct Proven {
    accepted: Vec<u8>,
    session: Session,
    peer: PeerIdentity,
    endpoint: usize,
    there: Place,
}

/// A handshake that a peer began.
pub(super) struct Visit {
    there: Place,
    stage: Stage,
    pieces: Reassembly,
    target: Option<Target>,
    side: Option<usize>,
    answer: Option<HandshakeMessage>,
    link: Option<LinkId>,
    pub deadline: Time,
}

impl Visit {
    fn is_proven(&self) -> bool {
        self.link.is_some()
    }

    /// Whether the handshake is done and led to this link.
    pub fn led_to(&self, id: LinkId) -> bool {
        self.link == Some(id) && matches!(self.stage, Stage::Over)
    }
}

impl VerbsDomain {
    /// Handles a fragment of an initiator.
    pub(super) fn visited(&mut self, side: Option<usize>, piece: &HandshakeFragment<'_>) {
        let exchange = piece.exchange;
        if !self.visits.contains_key(&exchange) {
            if piece.step != 1 || !self.make_room() {
                return;
            }
            let visit = Visit {
                there: self.place.clone(),
                stage: Stage::Reaching(Vec::new()),
                pieces: Reassembly::default(),
                target: None,
                side,
                answer: None,
                link: None,
                deadline: self.now.after(self.peer_timeout * 3 / 2),
            };
            self.visits.insert(exchange, visit);
        }
        let Some(v) = self.visits.get_mut(&exchange) else { return };
        if side.is_some() {
            v.side = side;
        }
        let Ok(Some(bytes)) = v.pieces.take(piece) else { return };
        let result = match (&v.stage, piece.step) {
            (Stage::Reaching(hello), 1) if hello.is_empty() => self.hello(exchange, &bytes),
            (Stage::AwaitProof(..), 3) => self.proof(exchange, &bytes),
            // The answer is under way, or was lost.
            (Stage::Over, _) | (Stage::AwaitProof(..), 1) => {
                self.answer(exchange);
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(Failure { reply, error }) = result {
            self.refuse(exchange, piece.step + 1, reply, &error);
        }
    }

    /// Makes room for an unproven initiator by dropping the oldest. Proven initiators do not count.
    fn make_room(&mut self) -> bool {
        let strangers = || self.visits.iter().filter(|(_, v)| !v.is_proven());
        if strangers().count() < MOST {
            return true;
        }
        let oldest = strangers().min_by_key(|(_, v)| v.deadline).map(|(e, _)| *e);
        oldest.is_some_and(|e| self.visits.remove(&e).is_some())
    }

    fn refuse(
        &mut self,
        exchange: Exchange,
        step: u8,
        reply: Option<Vec<u8>>,
        error: &DomainError,
    ) {
        let Some(v) = self.visits.get_mut(&exchange) else { return };
        self.log.unproven(&v.there.words(), error);
        v.stage = Stage::Over;
        v.answer = reply.map(|r| {
            let bytes = if step == 4 { pair_up(&r, &[]) } else { r };
            HandshakeMessage { exchange, to_initiator: true, step, bytes }
        });
        self.answer(exchange);
    }

    fn hello(&mut self, exchange: Exchange, bytes: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let (place, hello) = take_apart(bytes).map_err(silent)?;
        let there = Place::decode(place).map_err(silent)?;
        if let Some(why) = self.unfit_place(&there) {
            return Err(silent(DomainError::Handshake(why)));
        }
        let Some(v) = self.visits.get_mut(&exchange) else { return Ok(()) };
        v.there = there.clone();
        v.stage = Stage::Reaching(hello.to_vec());
        if v.side.is_some() {
            return self.greet(exchange);
        }
        let (device, here) = (Arc::clone(&self.device), self.place.clone());
        self.helper.run(Whose::Stranger, move || {
            Outcome::Reached(Who::Acceptor(exchange), reach(&device, &here, &there))
        });
        Ok(())
    }

    pub(super) fn way_back(&mut self, exchange: Exchange, target: Result<Target, DomainError>) {
        let Some(v) = self.visits.get_mut(&exchange) else { return };
        match target {
            Ok(target) => {
                v.target = Some(target);
                if let Err(Failure { reply, error }) = self.greet(exchange) {
                    self.refuse(exchange, 2, reply, &error);
                }
            }
            Err(e) => self.refuse(exchange, 2, None, &e),
        }
    }

    fn greet(&mut self, exchange: Exchange) -> Result<(), Failure> {
        let Some(v) = self.visits.get_mut(&exchange) else { return Ok(()) };
        let Stage::Reaching(hello) = &v.stage else { return Ok(()) };
        let (acceptor, welcome) = Acceptor::on_hello(&self.credentials, hello)?;
        let intro =
            Intro::decode(&acceptor.extra).map_err(|error| Failure { reply: None, error })?;
        v.stage = Stage::AwaitProof(Box::new(acceptor), intro);
        v.answer = Some(HandshakeMessage { exchange, to_initiator: true, step: 2, bytes: welcome });
        self.answer(exchange);
        Ok(())
    }

    fn proof(&mut self, exchange: Exchange, bytes: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let Some(v) = self.visits.get_mut(&exchange) else { return Ok(()) };
        let Stage::AwaitProof(acceptor, intro) = &v.stage else { return Ok(()) };
        let (proof, sealed) = take_apart(bytes).map_err(silent)?;
        let accepted = acceptor.on_proof(proof)?;
        let session = acceptor.session();
        let theirs = session.unseal(b"initiator", sealed);
        let theirs = theirs.and_then(|setup| Setup::decode(&setup));
        let theirs = theirs.map_err(silent)?;
        if intro.exchange != exchange {
            return Err(silent(DomainError::Handshake("the hello names another exchange".into())));
        }
        let (peer, endpoint) = (acceptor.peer.clone(), usize::from(intro.from_endpoint));
        // Queue pairs connect to the proven address, not to the one that asked for an answer.
        let there = Place::of(&peer.address, endpoint).map_err(Failure::with_reply)?;
        let (seat, cq) = self.shelves.seat(&self.device).map_err(Failure::with_reply)?;
        let id = match self.add_slot(State::Accepting(exchange)) {
            Ok(id) => id,
            Err(e) => {
                self.shelves.leave(seat);
                return Err(Failure::with_reply(e));
            }
        };
        let Some(v) = self.visits.get_mut(&exchange) else { return Ok(()) };
        v.link = Some(id);
        v.answer = None;
        let proven = Proven { accepted, session, peer, endpoint, there: there.clone() };
        v.stage = Stage::Joining(Box::new(proven));
        let (device, here) = (Arc::clone(&self.device), self.place.clone());
        self.helper.run(Whose::Own, move || {
            let made = Pair::build(&device, &cq, id).and_then(|pair| {
                pair.join(&device, (&here, &there), &theirs)?;
                Ok(Box::new((pair, theirs)))
            });
            Outcome::Joined(id, seat, made)
        });
        Ok(())
    }

    /// The queue pairs are connected to the initiator's. The link is up once the initiator uses it.
    pub(super) fn joined_visit(
        &mut self,
        id: LinkId,
        exchange: Exchange,
        seat: Seat,
        made: Result<Box<(Pair, Setup)>, DomainError>,
    ) {
        let now = self.now;
        let Some(v) = self.visits.get_mut(&exchange) else { return self.forget_slot(id, seat) };
        let Stage::Joining(proven) = std::mem::replace(&mut v.stage, Stage::Over) else {
            return self.forget_slot(id, seat);
        };
        let (pair, theirs) = match made {
            Ok(made) => *made,
            Err(e) => {
                self.forget_slot(id, seat);
                let Failure { reply, error } = Failure::with_reply(e);
                return self.refuse(exchange, 4, reply, &error);
            }
        };
        let setup = proven.session.seal(b"acceptor", &pair.setup(&self.device).encode());
        let bytes = pair_up(&proven.accepted, &setup);
        v.answer = Some(HandshakeMessage { exchange, to_initiator: true, step: 4, bytes });
        // The initiator may repeat its message until then.
        v.deadline = now.after(self.peer_timeout * 3 / 2);
        let Proven { peer, endpoint, there, .. } = *proven;
        let name = link_name(&exchange);
        let origin = Origin { id, peer, endpoint, name, there, seat };
        let link = Link::new(&self.device, origin, pair, &theirs, now);
        self.set_up(id, link);
        self.answer(exchange);
    }

    fn forget_slot(&mut self, id: LinkId, seat: Seat) {
        if self.slot(id).is_some_and(|s: &mut Slot| matches!(s.state, State::Accepting(_))) {
            self.slots.remove(Self::index(id));
        }
        self.shelves.leave(seat);
    }

    /// Sends the last answer again.
    fn answer(&mut self, exchange: Exchange) {
        let Some(v) = self.visits.get(&exchange) else { return };
        let Some(letter) = &v.answer else { return };
        match (v.side, &v.target) {
            (Some(key), _) => {
                let frames = letter.frames(usize::MAX);
                frames.for_each(|f| self.side.say(key, &f, &self.epoll));
            }
            (None, Some(target)) => {
                letter.frames(target.mtu).for_each(|f| self.datagrams.send(target, &f));
            }
            (None, None) => {}
        }
    }

    pub(super) fn tick_visits(&mut self, now: Time) {
        // A handshake whose queue pairs are being created stays past its deadline.
        self.visits.retain(|_, v| v.deadline > now || matches!(v.stage, Stage::Joining(_)));
    }
}
