//! A decoder's state of its prefillers and requests.

use std::{collections::BTreeMap, sync::Arc};

use fabric_engine::{Counter, Handle, Peer, Region};

use super::Event;
use crate::{
    events::Events,
    pairing::Pairing,
    terms::Cause,
    wire::{reason, Message, Request},
};

pub(super) struct State {
    pub sessions: BTreeMap<u64, Session>,
    pub tickets: BTreeMap<u64, Ticket>,
    pub events: Arc<Events<Event>>,
    pub next_seq: u64,
    pub closed: bool,
}

/// One session with a prefiller.
pub(super) struct Session {
    pub facts: Arc<Facts>,
    pub ends: Vec<End>,
    /// Local memory, registered for this prefiller alone (MR-2).
    pub grants: Vec<Region>,
    pub phase: SessionPhase,
    /// Requests made before all of its processes had welcomed this decoder.
    pub early: Vec<u64>,
    /// All of its access has been revoked.
    pub revoked: bool,
}

/// What doesn't change about a prefiller.
pub(super) struct Facts {
    pub name: String,
    pub pairing: Pairing,
    pub max_message: u64,
    /// By local rank, then by the prefiller's rank.
    pub writers: Vec<Vec<Peer>>,
}

/// One process of a prefiller.
pub(super) struct End {
    pub peer: Peer,
    /// Its number of the session, since its welcome.
    pub incarnation: Option<u64>,
    /// Beats since its last message.
    pub silent: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SessionPhase {
    Greeting,
    Open,
    Lost(String),
}

/// A request, from the call that makes it until its pages can be used for another.
pub(super) struct Ticket {
    pub session: u64,
    /// The request message, until the prefiller's welcome.
    pub early: Option<Box<Request>>,
    pub counters: Vec<Counter>,
    pub expectations: Vec<Handle>,
    /// Expectations that aren't complete.
    pub missing: usize,
    pub phase: Phase,
    pub ends: Vec<AtEnd>,
    /// Beats since it ended here without the prefiller's confirmation.
    pub lingers: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Waiting,
    Ready,
    Failed(Cause),
}

/// State of a request at one process of its prefiller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AtEnd {
    /// The process does not know the request.
    Unasked,
    /// It may write. Number of answered beats that did not mention the request.
    Asked { unknown: u32 },
    /// It has been told to stop, and may still write.
    Stopping,
    /// Nothing that it wrote can land any more (MR-1).
    Over,
}

/// Actions to take after the lock is released.
pub(super) enum Act {
    Send { session: u64, end: usize, peer: Peer, bytes: Vec<u8>, request: Option<u64> },
    Cancel(Vec<Handle>),
    Revoke { session: u64, regions: Vec<Region> },
    Drop(Vec<Counter>, Vec<Handle>),
}

impl State {
    /// Ends the wait for a request's bytes; the prefiller may still write.
    pub fn fail(&mut self, seq: u64, cause: Cause, acts: &mut Vec<Act>) {
        let Some(ticket) = self.tickets.get_mut(&seq).filter(|t| t.phase == Phase::Waiting) else {
            return;
        };
        ticket.phase = Phase::Failed(cause.clone());
        ticket.early = None;
        let expectations = std::mem::take(&mut ticket.expectations);
        acts.push(Act::Cancel(expectations));
        acts.push(Act::Drop(std::mem::take(&mut ticket.counters), Vec::new()));
        self.events.push(seq, Event::Failed(cause));
        self.stop(seq, acts);
    }

    /// Cancels the request at every process of the prefiller.
    pub fn stop(&mut self, seq: u64, acts: &mut Vec<Act>) {
        let Some(ticket) = self.tickets.get_mut(&seq) else { return };
        let number = ticket.session;
        for end in 0..ticket.ends.len() {
            match ticket.ends[end] {
                AtEnd::Unasked => ticket.ends[end] = AtEnd::Over,
                AtEnd::Asked { .. } => {
                    ticket.ends[end] = AtEnd::Stopping;
                    if let Some(session) = self.sessions.get(&number) {
                        acts.extend(session.cancel(number, end, seq));
                    }
                }
                AtEnd::Stopping | AtEnd::Over => {}
            }
        }
        self.settle(seq, acts);
    }

    /// Removes a request whose memory was released.
    pub fn settle(&mut self, seq: u64, acts: &mut Vec<Act>) {
        let over =
            |t: &Ticket| t.phase != Phase::Waiting && t.ends.iter().all(|e| *e == AtEnd::Over);
        if !self.tickets.get(&seq).is_some_and(over) {
            return;
        }
        if let Some(ticket) = self.tickets.remove(&seq) {
            acts.push(Act::Drop(ticket.counters, ticket.expectations));
            self.events.push(seq, Event::Released);
            self.forget(ticket.session);
        }
    }

    /// Gives a prefiller up with all its requests: its access is revoked, and afterwards nothing
    /// that it wrote can land any more. Its processes are told to cancel, unless they are known
    /// dead.
    pub fn lose(&mut self, number: u64, why: &str, tell: bool, acts: &mut Vec<Act>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if matches!(session.phase, SessionPhase::Lost(_)) {
            return;
        }
        if tell {
            let goodbye = Message::Goodbye { session: number, why: reason(why) }.to_bytes();
            for end in 0..session.ends.len() {
                acts.extend(session.send(number, end, goodbye.clone(), None));
            }
        }
        session.phase = SessionPhase::Lost(why.to_owned());
        acts.push(Act::Revoke { session: number, regions: std::mem::take(&mut session.grants) });
        let cause = self.cause_of_loss(number);
        for seq in self.of(number) {
            self.fail(seq, cause.clone(), acts);
        }
    }

    /// The cause with which requests to a given up prefiller fail.
    pub fn cause_of_loss(&self, number: u64) -> Cause {
        match self.sessions.get(&number) {
            _ if self.closed => Cause::Closed,
            Some(Session { phase: SessionPhase::Lost(why), facts, .. }) => {
                Cause::Lost(format!("prefiller {}: {why}", facts.name))
            }
            _ => Cause::Lost("the prefiller has been given up".into()),
        }
    }

    /// All access of a prefiller has been revoked.
    pub fn revoked(&mut self, number: u64, acts: &mut Vec<Act>) {
        if let Some(session) = self.sessions.get_mut(&number) {
            session.revoked = true;
        }
        for seq in self.of(number) {
            if let Some(ticket) = self.tickets.get_mut(&seq) {
                ticket.ends.fill(AtEnd::Over);
            }
            self.settle(seq, acts);
        }
        self.forget(number);
    }

    /// Requests of one prefiller.
    pub fn of(&self, session: u64) -> Vec<u64> {
        self.tickets.iter().filter(|(_, t)| t.session == session).map(|(seq, _)| *seq).collect()
    }

    /// A lost prefiller that nothing is left of.
    fn forget(&mut self, number: u64) {
        let gone = |m: &Session| m.revoked;
        if self.sessions.get(&number).is_some_and(gone) && self.of(number).is_empty() {
            self.sessions.remove(&number);
        }
    }
}

impl Session {
    /// A message to one process of the prefiller, unless it has been given up.
    pub fn send(
        &self,
        session: u64,
        end: usize,
        bytes: Vec<u8>,
        request: Option<u64>,
    ) -> Option<Act> {
        if matches!(self.phase, SessionPhase::Lost(_)) {
            return None;
        }
        let peer = self.ends[end].peer.clone();
        Some(Act::Send { session, end, peer, bytes, request })
    }

    pub fn ask(&self, session: u64, end: usize, request: &Request) -> Option<Act> {
        let incarnation = self.ends[end].incarnation?;
        let (seq, request) = (request.seq, Box::new(request.clone()));
        let message = Message::Request { session, incarnation, request };
        self.send(session, end, message.to_bytes(), Some(seq))
    }

    pub fn cancel(&self, session: u64, end: usize, seq: u64) -> Option<Act> {
        self.send(session, end, Message::Cancel { session, seq }.to_bytes(), None)
    }
}
