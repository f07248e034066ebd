//! A decoder's sessions and pulls.

use std::{collections::BTreeMap, sync::Arc};

use fabric_engine::{Counter, Handle, Peer, Region};

use super::Event;
use crate::{
    events::Events,
    pairing::Pairing,
    terms::Cause,
    wire::{reason, Message, Request},
};

pub(super) struct DecoderState {
    pub sessions: BTreeMap<u64, Session>,
    pub pulls: BTreeMap<u64, PendingPull>,
    pub events: Arc<Events<Event>>,
    pub next_seq: u64,
    pub closed: bool,
}

/// One session with a prefiller.
pub(super) struct Session {
    pub info: Arc<PrefillerInfo>,
    pub processes: Vec<PrefillerProcess>,
    /// Local memory, registered for this prefiller alone (MR-2).
    pub grants: Vec<Region>,
    pub phase: SessionPhase,
    /// Requests made before all of its processes had welcomed this decoder.
    pub early: Vec<u64>,
    /// Leases to renew by the next beat.
    pub leases: Vec<u64>,
    /// All of its access has been revoked.
    pub revoked: bool,
}

/// The constant facts of a prefiller.
pub(super) struct PrefillerInfo {
    pub name: String,
    pub pairing: Pairing,
    pub max_message: u64,
    /// By local rank, then by the prefiller's rank.
    pub writers: Vec<Vec<Peer>>,
}

/// One process of a prefiller.
pub(super) struct PrefillerProcess {
    pub peer: Peer,
    /// The process's number of the session, since its welcome.
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

/// A pull, from its call until its pages can be reused.
pub(super) struct PendingPull {
    pub session: u64,
    /// The request message, until the prefiller's welcome.
    pub early: Option<Box<Request>>,
    pub counters: Vec<Counter>,
    pub expectations: Vec<Handle>,
    /// Expectations that aren't complete.
    pub missing: usize,
    pub phase: Phase,
    pub processes: Vec<ProcessState>,
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
pub(super) enum ProcessState {
    /// The process does not know the request.
    NotRequested,
    /// The process may write. `unknown`: answered beats that did not mention the request.
    Requested { unknown: u32 },
    /// The decoder has cancelled it; the process may still write.
    Cancelling,
    /// Nothing that it wrote can land any more (MR-1).
    Quiesced,
}

/// Actions to take after the lock is released.
pub(super) enum Action {
    Send { session: u64, process: usize, peer: Peer, bytes: Vec<u8>, request: Option<u64> },
    Cancel(Vec<Handle>),
    Revoke { session: u64, regions: Vec<Region> },
    Drop(Vec<Counter>, Vec<Handle>),
}

impl DecoderState {
    /// Ends the wait for a request's bytes; the prefiller may still write.
    pub fn fail(&mut self, seq: u64, cause: Cause, actions: &mut Vec<Action>) {
        let Some(pull) = self.pulls.get_mut(&seq).filter(|t| t.phase == Phase::Waiting) else {
            return;
        };
        pull.phase = Phase::Failed(cause.clone());
        pull.early = None;
        let expectations = std::mem::take(&mut pull.expectations);
        actions.push(Action::Cancel(expectations));
        actions.push(Action::Drop(std::mem::take(&mut pull.counters), Vec::new()));
        self.events.push(seq, Event::Failed(cause));
        self.stop(seq, actions);
    }

    /// Whether no process of the prefiller has been sent a request that is under way.
    pub fn is_unheard(&self, seq: u64) -> bool {
        let pull = self.pulls.get(&seq);
        pull.is_some_and(|t| t.processes.iter().all(|e| *e == ProcessState::NotRequested))
    }

    /// Cancels the request at every process of the prefiller.
    pub fn stop(&mut self, seq: u64, actions: &mut Vec<Action>) {
        let Some(pull) = self.pulls.get_mut(&seq) else { return };
        let number = pull.session;
        for process in 0..pull.processes.len() {
            match pull.processes[process] {
                ProcessState::NotRequested => pull.processes[process] = ProcessState::Quiesced,
                ProcessState::Requested { .. } => {
                    pull.processes[process] = ProcessState::Cancelling;
                    if let Some(session) = self.sessions.get(&number) {
                        actions.extend(session.cancel(number, process, seq));
                    }
                }
                ProcessState::Cancelling | ProcessState::Quiesced => {}
            }
        }
        self.settle(seq, actions);
    }

    /// Removes a request whose memory was released.
    pub fn settle(&mut self, seq: u64, actions: &mut Vec<Action>) {
        let over = |t: &PendingPull| {
            t.phase != Phase::Waiting && t.processes.iter().all(|e| *e == ProcessState::Quiesced)
        };
        if !self.pulls.get(&seq).is_some_and(over) {
            return;
        }
        if let Some(pull) = self.pulls.remove(&seq) {
            actions.push(Action::Drop(pull.counters, pull.expectations));
            self.events.push(seq, Event::Released);
            self.forget(pull.session);
        }
    }

    /// Gives a prefiller up with all its requests: its access is revoked, and afterwards nothing
    /// that it wrote can land any more. Its processes are told to cancel, unless they are known
    /// dead.
    pub fn lose(&mut self, number: u64, why: &str, notify: bool, actions: &mut Vec<Action>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if matches!(session.phase, SessionPhase::Lost(_)) {
            return;
        }
        if notify {
            let goodbye = Message::Goodbye { session: number, why: reason(why) }.to_bytes();
            for process in 0..session.processes.len() {
                actions.extend(session.send(number, process, goodbye.clone(), None));
            }
        }
        session.phase = SessionPhase::Lost(why.to_owned());
        actions
            .push(Action::Revoke { session: number, regions: std::mem::take(&mut session.grants) });
        let cause = self.cause_of_loss(number);
        for seq in self.of(number) {
            self.fail(seq, cause.clone(), actions);
        }
    }

    /// The cause with which requests to a given up prefiller fail.
    pub fn cause_of_loss(&self, number: u64) -> Cause {
        match self.sessions.get(&number) {
            _ if self.closed => Cause::Closed,
            Some(Session { phase: SessionPhase::Lost(why), info, .. }) => {
                Cause::Lost(format!("prefiller {}: {why}", info.name))
            }
            _ => Cause::Lost("the prefiller has been given up".into()),
        }
    }

    /// All access of a prefiller has been revoked.
    pub fn revoked(&mut self, number: u64, actions: &mut Vec<Action>) {
        if let Some(session) = self.sessions.get_mut(&number) {
            session.revoked = true;
        }
        for seq in self.of(number) {
            if let Some(pull) = self.pulls.get_mut(&seq) {
                pull.processes.fill(ProcessState::Quiesced);
            }
            self.settle(seq, actions);
        }
        self.forget(number);
    }

    /// Requests of one prefiller.
    pub fn of(&self, session: u64) -> Vec<u64> {
        self.pulls.iter().filter(|(_, t)| t.session == session).map(|(seq, _)| *seq).collect()
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
        process: usize,
        bytes: Vec<u8>,
        request: Option<u64>,
    ) -> Option<Action> {
        if matches!(self.phase, SessionPhase::Lost(_)) {
            return None;
        }
        let peer = self.processes[process].peer.clone();
        Some(Action::Send { session, process, peer, bytes, request })
    }

    pub fn send_request(&self, session: u64, process: usize, request: &Request) -> Option<Action> {
        let incarnation = self.processes[process].incarnation?;
        let (seq, request) = (request.seq, Box::new(request.clone()));
        let message = Message::Request { session, incarnation, request };
        self.send(session, process, message.to_bytes(), Some(seq))
    }

    pub fn cancel(&self, session: u64, process: usize, seq: u64) -> Option<Action> {
        self.send(session, process, Message::Cancel { session, seq }.to_bytes(), None)
    }
}
