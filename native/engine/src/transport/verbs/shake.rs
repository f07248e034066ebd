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
    datagrams::Target,
    device::{unreachable_words, Device, Pair},
    helper::Whose,
    link::{Link, Origin},
    place::{mtu_bytes, path, Intro, Place, Setup},
    raw::Ah,
    shelves::Seat,
    side, Slot, State, VerbsDomain,
};
use crate::{
    api::EngineAddress,
    domain::{Completion, DomainError, LinkId, PeerIdentity},
    time::Time,
    transport::{
        handshake::{Failure, Initiator, Welcomed},
        nic::{
            frame::{link_name, new_exchange, Exchange},
            handshake_fragments::{HandshakeMessage, Reassembly},
        },
    },
};

const FIRST_WAIT: Duration = Duration::from_millis(25);
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// Results of the helper threads.
pub(super) enum Outcome {
    Reached(Who, Result<Target, DomainError>),
    Built(LinkId, Seat, Result<Box<Pair>, DomainError>),
    Joined(LinkId, Seat, Result<Box<(Pair, Setup)>, DomainError>),
    Side(LinkId, Result<std::net::TcpStream, String>),
    /// Whether a large registration has ended.
    Released(u32, bool),
}

#[derive(Clone, Copy)]
pub(super) enum Who {
    Initiator(LinkId),
    Acceptor(Exchange),
}

enum Stage {
    Hello,
    Building(Welcomed),
    Proof(Welcomed, Box<Pair>),
    /// The acceptor is proven.
    Joining(PeerIdentity),
}

/// A link that this side is opening.
pub(super) struct Attempt {
    peer: EngineAddress,
    endpoint: usize,
    there: Place,
    exchange: Exchange,
    initiator: Initiator,
    stage: Stage,
    letter: Option<HandshakeMessage>,
    again_at: Time,
    wait: Duration,
    side_at: Time,
    deadline: Time,
    target: Option<Target>,
    side: Option<usize>,
    pieces: Reassembly,
    pub seat: Option<Seat>,
    /// Failures on the way, for the error.
    notes: Vec<String>,
}

impl Attempt {
    pub fn next_timer(&self) -> Time {
        let again = if self.letter.is_some() { self.again_at } else { Time::NEVER };
        again.min(self.side_at).min(self.deadline)
    }
}

/// A message in two parts.
pub(super) fn pair_up(first: &[u8], second: &[u8]) -> Vec<u8> {
    [&(first.len() as u32).to_le_bytes(), first, second].concat()
}

pub(super) fn take_apart(bytes: &[u8]) -> Result<(&[u8], &[u8]), DomainError> {
    let cut = bytes
        .split_first_chunk::<4>()
        .and_then(|(len, rest)| rest.split_at_checked(u32::from_le_bytes(*len) as usize));
    cut.ok_or_else(|| DomainError::Handshake("a message of the handshake is cut off".into()))
}

/// Resolves the peer's datagram address. Blocks during address resolution.
pub(super) fn reach(device: &Device, here: &Place, there: &Place) -> Result<Target, DomainError> {
    let attr = path(here, there, &device.route, there.qpn);
    let ah = Ah::new(&device.pd, attr).map_err(|e| unreachable_words(&e, here, there))?;
    let mtu = mtu_bytes(here.mtu.min(there.mtu));
    Ok(Target { ah, qpn: there.qpn, qkey: there.qkey, mtu })
}

impl VerbsDomain {
    pub(super) fn begin(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        let there = Place::of(peer, endpoint)?;
        if let Some(why) = self.unfit_place(&there) {
            return Err(DomainError::Unavailable(why));
        }
        let exchange = new_exchange()?;
        let intro = Intro { exchange, from_endpoint: self.own_endpoint };
        let (initiator, hello) = Initiator::start(&self.credentials, peer.id, intro.encode())?;
        let letter = HandshakeMessage {
            exchange,
            to_initiator: false,
            step: 1,
            bytes: pair_up(&self.place.encode(), &hello),
        };
        let attempt = Attempt {
            peer: peer.clone(),
            endpoint,
            there: there.clone(),
            exchange,
            initiator,
            stage: Stage::Hello,
            letter: Some(letter),
            again_at: Time::NEVER,
            wait: FIRST_WAIT,
            side_at: now.after(self.peer_timeout / 2),
            deadline: now.after(self.peer_timeout * 3 / 2),
            target: None,
            side: None,
            pieces: Reassembly::default(),
            seat: None,
            notes: Vec::new(),
        };
        let id = self.add_slot(State::Opening(Box::new(attempt)))?;
        self.attempts.insert(exchange, id);
        let (device, here) = (Arc::clone(&self.device), self.place.clone());
        self.helper.run(Whose::Own, move || {
            Outcome::Reached(Who::Initiator(id), reach(&device, &here, &there))
        });
        Ok(id)
    }

    fn attempt(&mut self, id: LinkId) -> Option<&mut Attempt> {
        match self.slot(id)? {
            Slot { state: State::Opening(a), .. } => Some(a),
            _ => None,
        }
    }

    /// Sends the current message, and schedules its repetition.
    fn speak(&mut self, id: LinkId) {
        let now = self.now;
        let Some(State::Opening(a)) = self.slots.get_mut(Self::index(id)).map(|s| &mut s.state)
        else {
            return;
        };
        let Some(letter) = &a.letter else { return };
        if let Some(target) = &a.target {
            letter.frames(target.mtu).for_each(|f| self.datagrams.send(target, &f));
        }
        if let Some(key) = a.side {
            let frames = letter.frames(usize::MAX);
            frames.for_each(|f| self.side.say(key, &f, &self.epoll));
        }
        a.again_at = now.after(a.wait);
        a.wait = (a.wait * 2).min(LONGEST_WAIT);
    }

    pub(super) fn reached(&mut self, id: LinkId, target: Result<Target, DomainError>) {
        let Some(a) = self.attempt(id) else { return };
        match target {
            Ok(target) => {
                a.target = Some(target);
                self.speak(id);
            }
            // If datagrams have no route, queue pairs have none either.
            Err(e) => self.give_up(id, e),
        }
    }

    pub(super) fn side_connected(
        &mut self,
        id: LinkId,
        stream: Result<std::net::TcpStream, String>,
    ) {
        let now = self.now;
        if self.attempt(id).is_none() {
            return;
        }
        let key = stream.and_then(|s| {
            self.side.add(now, s, Some(id), &self.epoll).ok_or_else(|| "epoll_ctl failed".into())
        });
        let Some(a) = self.attempt(id) else { return };
        match key {
            Ok(key) => {
                a.side = Some(key);
                self.speak(id);
            }
            Err(why) => a.notes.push(format!("by TCP: {why}")),
        }
    }

    /// Handles a fragment of the acceptor.
    pub(super) fn answered(
        &mut self,
        id: LinkId,
        piece: &crate::transport::nic::frame::HandshakeFragment<'_>,
    ) {
        let Some(a) = self.attempt(id) else { return };
        let awaited = match a.stage {
            Stage::Hello => 2,
            Stage::Proof(..) => 4,
            _ => return,
        };
        if piece.step != awaited {
            return;
        }
        let result = match a.pieces.take(piece) {
            Ok(None) => return,
            // A stranger may have sent it; the answer may still arrive.
            Err(_) => return,
            Ok(Some(bytes)) if awaited == 2 => self.welcomed(id, &bytes),
            Ok(Some(bytes)) => self.accepted(id, &bytes),
        };
        if let Err(Failure { reply, error }) = result {
            if let (Some(reply), Some(a)) = (reply, self.attempt(id)) {
                let (exchange, bytes) = (a.exchange, pair_up(&reply, &[]));
                a.letter = Some(HandshakeMessage { exchange, to_initiator: false, step: 3, bytes });
                self.speak(id);
            }
            self.give_up(id, error);
        }
    }

    fn welcomed(&mut self, id: LinkId, bytes: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let Some(a) = self.attempt(id) else { return Ok(()) };
        let w = a.initiator.on_welcome(bytes)?;
        a.letter = None;
        a.stage = Stage::Building(w);
        let (seat, cq) = self.shelves.seat(&self.device).map_err(silent)?;
        let device = Arc::clone(&self.device);
        self.helper.run(Whose::Own, move || {
            Outcome::Built(id, seat, Pair::build(&device, &cq, id).map(Box::new))
        });
        Ok(())
    }

    pub(super) fn built(&mut self, id: LinkId, seat: Seat, pair: Result<Box<Pair>, DomainError>) {
        let device = Arc::clone(&self.device);
        let pair = match (self.attempt(id).is_some(), pair) {
            (true, Ok(pair)) => pair,
            (_, result) => {
                // The dropped pair has no posted requests that could complete.
                self.shelves.leave(seat);
                return result.err().into_iter().for_each(|e| self.give_up(id, e));
            }
        };
        let Some(a) = self.attempt(id) else { return };
        a.seat = Some(seat);
        let Stage::Building(welcomed) = std::mem::replace(&mut a.stage, Stage::Hello) else {
            return;
        };
        let sealed = welcomed.session.seal(b"initiator", &pair.setup(&device).encode());
        let bytes = pair_up(&welcomed.proof, &sealed);
        a.letter =
            Some(HandshakeMessage { exchange: a.exchange, to_initiator: false, step: 3, bytes });
        a.wait = FIRST_WAIT;
        a.stage = Stage::Proof(welcomed, pair);
        self.speak(id);
    }

    fn accepted(&mut self, id: LinkId, bytes: &[u8]) -> Result<(), Failure> {
        let silent = |error| Failure { reply: None, error };
        let Some(a) = self.attempt(id) else { return Ok(()) };
        let (accepted, sealed) = take_apart(bytes).map_err(silent)?;
        let Stage::Proof(welcomed, _) = &a.stage else { return Ok(()) };
        let peer = welcomed.pending.on_accepted(accepted)?;
        let theirs = welcomed.session.unseal(b"acceptor", sealed);
        let theirs = theirs.and_then(|setup| Setup::decode(&setup));
        let theirs = theirs.map_err(silent)?;
        let Some(seat) = a.seat.take() else { return Ok(()) };
        let Stage::Proof(_, pair) = std::mem::replace(&mut a.stage, Stage::Hello) else {
            return Ok(());
        };
        a.letter = None;
        a.stage = Stage::Joining(peer);
        let there = a.there.clone();
        let (device, here) = (Arc::clone(&self.device), self.place.clone());
        self.helper.run(Whose::Own, move || {
            let joined = pair.join(&device, (&here, &there), &theirs);
            Outcome::Joined(id, seat, joined.map(|()| Box::new((*pair, theirs))))
        });
        Ok(())
    }

    /// The queue pairs are connected to the acceptor's: the link is up.
    pub(super) fn joined(
        &mut self,
        id: LinkId,
        seat: Seat,
        made: Result<Box<(Pair, Setup)>, DomainError>,
    ) {
        let now = self.now;
        let (pair, theirs) = match (self.attempt(id).is_some(), made) {
            (true, Ok(made)) => *made,
            (_, made) => {
                let error = made.err();
                self.shelves.leave(seat);
                return error.into_iter().for_each(|e| self.give_up(id, e));
            }
        };
        let Some(a) = self.attempt(id) else { return };
        let Stage::Joining(peer) = std::mem::replace(&mut a.stage, Stage::Hello) else { return };
        let (exchange, by_tcp) = (a.exchange, a.side.is_some());
        let origin = Origin {
            id,
            peer: peer.clone(),
            endpoint: a.endpoint,
            name: link_name(&a.exchange),
            there: a.there.clone(),
            seat,
        };
        let (endpoint, name) = (a.endpoint, origin.name);
        self.attempts.remove(&exchange);
        self.side.drop_link(id);
        let mut link = Link::new(&self.device, origin, pair, &theirs, now);
        link.announced = true;
        // The first frame confirms the acceptor's answer.
        link.channel.heartbeat();
        let transport = if by_tcp { "TCP" } else { "datagram" };
        let note = format!("handshake with {} by {transport}", link.there.words());
        self.set_up(id, link);
        self.news.push(Completion::LinkUp { link: id, peer, endpoint, name, note });
    }

    /// Drops an attempt and reports its link as down.
    pub(super) fn give_up(&mut self, id: LinkId, cause: DomainError) {
        let Some(a) = self.attempt(id) else { return };
        let (exchange, seat) = (a.exchange, a.seat.take());
        self.attempts.remove(&exchange);
        self.side.drop_link(id);
        self.slots.remove(Self::index(id));
        if let Some(seat) = seat {
            self.shelves.leave(seat);
        }
        self.news.push(Completion::LinkDown {
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
                let mut notes = std::mem::take(&mut a.notes);
                notes.insert(0, "by datagram: no answer in time".into());
                let there = a.there.words();
                let why =
                    format!("{} at {there} did not answer: {}", a.peer.label(), notes.join("; "));
                self.give_up(id, DomainError::Gone(why));
                continue;
            }
            if a.side_at <= now {
                a.side_at = Time::NEVER;
                if matches!(a.stage, Stage::Hello | Stage::Proof(..)) && a.side.is_none() {
                    let there = a.there.clone();
                    let candidates = there.side_candidates(self.own_gids.contains(&there.gid));
                    self.helper
                        .run(Whose::Own, move || Outcome::Side(id, side::connect(&candidates)));
                }
            }
            if self.attempt(id).is_some_and(|a| a.letter.is_some() && a.again_at <= now) {
                self.speak(id);
            }
        }
    }
}
