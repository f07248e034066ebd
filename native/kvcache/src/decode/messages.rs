//! Messages between a decoder and its prefillers.

use std::sync::{atomic::AtomicUsize, atomic::Ordering::SeqCst, Arc};

use fabric_engine::{api::EngineId, EngineError, Op, Result, Submit};

use super::{
    is_loss,
    state::{Action, DecoderState, Phase, ProcessState, SessionPhase},
    Decoder, Inner,
};
use crate::{
    parts::cut,
    terms::Cause,
    timer::after,
    wire::{Message, RequestState},
};

/// Beats that a prefiller may answer without knowing a request before the request counts as lost:
/// the request message may be slower than a beat.
const UNKNOWN: u32 = 2;

impl Decoder {
    /// Renews leases of a prefiller by the next beat: pages that this decoder has not requested yet
    /// and will. The engines at both ends choose the numbers. Replaces those of an earlier call that
    /// no beat has carried; does nothing once the prefiller has been given up.
    pub fn renew(&self, prefiller: u64, leases: Vec<u64>) {
        if let Some(session) = self.inner.state.lock().sessions.get_mut(&prefiller) {
            session.leases = leases;
        }
    }
}

impl Inner {
    /// Executes actions that were decided under the lock.
    pub(super) fn run(self: &Arc<Self>, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Send { session, process, peer, bytes, request } => {
                    let parts = cut(&bytes, self.control());
                    let send = |message| Op::Send { peer: &peer, message };
                    let ops: Vec<Op<'_>> = parts.iter().map(|part| send(part)).collect();
                    let sent = self.control().submit(&ops, Submit::default());
                    let weak = Arc::downgrade(self);
                    let on_sent = move |result: Result<()>| {
                        if let (Err(error), Some(inner)) = (result, weak.upgrade()) {
                            inner.unsent(session, process, request, &error);
                        }
                    };
                    match sent {
                        Ok(handle) => handle.on_done(on_sent),
                        Err(error) => on_sent(Err(error)),
                    }
                }
                Action::Cancel(handles) => handles.iter().for_each(fabric_engine::Handle::cancel),
                Action::Drop(counters, handles) => drop((counters, handles)),
                Action::Revoke { session, regions } => self.revoke(session, &regions),
            }
        }
        self.events.report();
    }

    fn revoke(self: &Arc<Self>, session: u64, regions: &[fabric_engine::Region]) {
        let left = Arc::new(AtomicUsize::new(regions.len()));
        for region in regions {
            // Kept until the memory is released; the caller is told so even after it dropped the
            // decoder.
            let (inner, left) = (Arc::clone(self), Arc::clone(&left));
            // It fails only in a forked child, whose engine does nothing.
            let over = move |_| {
                if left.fetch_sub(1, SeqCst) == 1 {
                    let mut actions = Vec::new();
                    inner.state.lock().revoked(session, &mut actions);
                    inner.run(actions);
                }
            };
            match region.revoke() {
                Ok(handle) => handle.on_done(over),
                Err(error) => over(Err(error)),
            }
        }
    }

    /// A message was not delivered.
    fn unsent(
        self: &Arc<Self>,
        session: u64,
        process: usize,
        request: Option<u64>,
        error: &EngineError,
    ) {
        let mut actions = Vec::new();
        {
            let mut state = self.state.lock();
            if let Some(seq) = request {
                // The message may have arrived: the prefiller must stop.
                state.fail(seq, Cause::of(error), &mut actions);
            }
            if is_loss(error) || matches!(error, EngineError::Timeout { .. }) {
                state.lose(session, &error.to_string(), false, &mut actions);
            } else {
                tracing::warn!(session, process, %error, "a message to a prefiller was not sent");
            }
        }
        self.run(actions);
    }

    /// Handles a message.
    pub(super) fn on_message(self: &Arc<Self>, from: EngineId, bytes: &[u8]) {
        let whole = self.parts.join(from, bytes, self.control().now());
        let message = whole.and_then(|w| w.map(|w| Message::from_bytes(&w)).transpose());
        let message = match message {
            Ok(None) => return,
            Ok(Some(message)) => message,
            Err(error) => {
                tracing::warn!(%from, %error, "what a peer sent is no message of a prefiller");
                return;
            }
        };
        let mut actions = Vec::new();
        self.state.lock().on_message(from, message, &mut actions);
        self.run(actions);
    }

    /// Schedules the next beat of a session.
    pub(super) fn schedule_beat(self: &Arc<Self>, session: u64) {
        let weak = Arc::downgrade(self);
        let beat = move || {
            if let Some(inner) = weak.upgrade() {
                inner.beat(session);
            }
        };
        if let Err(error) = after(self.control(), self.terms.beat, beat) {
            // Without beats the loss of the prefiller would go unnoticed.
            let mut actions = Vec::new();
            self.state.lock().abandon_session(session, &error, &mut actions);
            self.run(actions);
        }
    }

    fn beat(self: &Arc<Self>, session: u64) {
        let mut actions = Vec::new();
        let goes_on = self.state.lock().beat(session, self.terms.silent_beats(), &mut actions);
        self.run(actions);
        self.parts.expire(self.control().now());
        if goes_on {
            self.schedule_beat(session);
        }
    }
}

impl DecoderState {
    fn on_message(&mut self, from: EngineId, message: Message, actions: &mut Vec<Action>) {
        let number = message.session();
        let Some(session) = self.sessions.get_mut(&number) else { return };
        // Only processes of this session speak for the prefiller.
        let Some(process) = session.processes.iter().position(|e| e.peer.id() == from) else {
            return;
        };
        session.processes[process].silent = 0;
        match message {
            Message::Welcome { incarnation, .. } => {
                let known = *session.processes[process].incarnation.get_or_insert(incarnation);
                if known != incarnation {
                    // Its earlier writes may still be under way, and it can't report them (MR-1).
                    return self.lose(number, "it has forgotten this decoder", true, actions);
                }
                let all = session.processes.iter().all(|e| e.incarnation.is_some());
                if all && session.phase == SessionPhase::Greeting {
                    session.phase = SessionPhase::Open;
                    let early = std::mem::take(&mut session.early);
                    self.send_early_requests(number, &early, actions);
                }
            }
            Message::Declined { why, .. } => {
                self.lose(number, &format!("it declined this decoder: {why}"), true, actions);
            }
            Message::Goodbye { why, .. } => self.lose(number, &why, true, actions),
            // A message of another incarnation says nothing about this one (MR-2).
            Message::Status { incarnation, .. }
                if session.processes[process].incarnation != Some(incarnation) => {}
            Message::Status { states, .. } => {
                for (seq, at) in states {
                    self.on_status(number, process, seq, at, actions);
                }
            }
            other => tracing::warn!(%from, ?other, "a prefiller sent what only decoders send"),
        }
    }

    /// Ends the session with a prefiller because the local engine failed.
    fn abandon_session(&mut self, number: u64, error: &EngineError, actions: &mut Vec<Action>) {
        if Cause::of(error) == Cause::Closed {
            for seq in self.of(number) {
                self.fail(seq, Cause::Closed, actions);
            }
        }
        self.lose(number, &format!("no more beats: {error}"), true, actions);
    }

    /// Sends what waited for the prefiller's welcome.
    fn send_early_requests(&mut self, number: u64, early: &[u64], actions: &mut Vec<Action>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        for seq in early {
            let Some(pull) = self.pulls.get_mut(seq) else { continue };
            let Some(request) = pull.early.take() else { continue };
            for process in 0..pull.processes.len() {
                pull.processes[process] = ProcessState::Requested { unknown: 0 };
                actions.extend(session.send_request(number, process, &request));
            }
        }
    }

    /// Handles a prefiller process's report on a request.
    fn on_status(
        &mut self,
        number: u64,
        process: usize,
        seq: u64,
        at: RequestState,
        actions: &mut Vec<Action>,
    ) {
        let Some(pull) = self.pulls.get_mut(&seq).filter(|t| t.session == number) else {
            return;
        };
        let Some(place) =
            pull.processes.get_mut(process).filter(|p| **p != ProcessState::NotRequested)
        else {
            return;
        };
        match (at, *place) {
            (_, ProcessState::Quiesced | ProcessState::NotRequested) => {}
            (RequestState::Open, ProcessState::Requested { .. }) => {
                *place = ProcessState::Requested { unknown: 0 }
            }
            (RequestState::Unknown, ProcessState::Requested { unknown }) if unknown < UNKNOWN => {
                *place = ProcessState::Requested { unknown: unknown + 1 };
            }
            (RequestState::Unknown, ProcessState::Requested { .. })
                if pull.phase == Phase::Waiting =>
            {
                // Told to stop, it will not take the request either, should that still come.
                let why = "it does not know of the request, whose message was lost".into();
                self.fail(seq, Cause::Lost(why), actions);
            }
            (RequestState::Unknown, _) | (RequestState::Open, ProcessState::Cancelling) => {
                // It may not have heard that it was told to stop.
                *place = ProcessState::Cancelling;
                if let Some(session) = self.sessions.get(&number) {
                    actions.extend(session.cancel(number, process, seq));
                }
            }
            (RequestState::Done, _) => {
                *place = ProcessState::Quiesced;
                self.settle(seq, actions);
            }
            (RequestState::Cancelled, _) => {
                *place = ProcessState::Quiesced;
                self.fail(seq, Cause::Failed("it cancelled the request".into()), actions);
                self.settle(seq, actions);
            }
            (RequestState::Failed(why), _) => {
                *place = ProcessState::Quiesced;
                self.fail(seq, Cause::Failed(why), actions);
                self.settle(seq, actions);
            }
            (RequestState::Refused { why, elsewhere, reason }, _) => {
                *place = ProcessState::Quiesced;
                let name = self.sessions.get(&number).map_or("", |m| &m.info.name);
                let why = format!("prefiller {name} refused the request: {why}");
                self.fail(seq, Cause::Refused { why, elsewhere, reason }, actions);
                self.settle(seq, actions);
            }
        }
    }

    /// Returns whether to send another beat.
    fn beat(&mut self, number: u64, silent_beats: u32, actions: &mut Vec<Action>) -> bool {
        let next_seq = self.next_seq;
        let mut ready = Vec::new();
        let mut stuck = None;
        for (seq, pull) in self.pulls.iter_mut().filter(|(_, t)| t.session == number) {
            if pull.phase == Phase::Waiting {
                continue;
            }
            pull.lingers += 1;
            if pull.phase == Phase::Ready && pull.lingers == silent_beats {
                ready.push(*seq);
            }
            if pull.lingers > 2 * silent_beats {
                stuck = Some(*seq);
            }
        }
        if let Some(seq) = stuck {
            // The prefiller answers but does not end its writes: its access is revoked after a
            // bound.
            let why = format!("it doesn't let go of request {seq}, which is over");
            self.lose(number, &why, true, actions);
            return false;
        }
        // All data has arrived; only the prefiller's confirmation is missing.
        ready.into_iter().for_each(|seq| self.stop(seq, actions));
        let mut open = Vec::new();
        for (seq, pull) in self.pulls.iter().filter(|(_, t)| t.session == number) {
            open.push((*seq, pull.processes.clone()));
        }
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        if matches!(session.phase, SessionPhase::Lost(_)) {
            return false;
        }
        session.processes.iter_mut().for_each(|e| e.silent += 1);
        if session.processes.iter().any(|e| e.silent > silent_beats) {
            self.lose(number, "it has not answered for too long", true, actions);
            return false;
        }
        // Until all processes have welcomed this decoder, leases wait.
        let leases = match session.phase {
            SessionPhase::Open => std::mem::take(&mut session.leases),
            SessionPhase::Greeting | SessionPhase::Lost(_) => Vec::new(),
        };
        for process in 0..session.processes.len() {
            if session.processes[process].incarnation.is_none() {
                continue;
            }
            let there = |processes: &Vec<ProcessState>| {
                matches!(
                    processes[process],
                    ProcessState::Requested { .. } | ProcessState::Cancelling
                )
            };
            let asked: Vec<u64> =
                open.iter().filter(|(_, e)| there(e)).map(|(seq, _)| *seq).collect();
            let floor = open.first().map_or(next_seq, |(seq, _)| *seq);
            for message in Message::beats(number, floor, &asked, &leases) {
                actions.extend(session.send(number, process, message.to_bytes(), None));
            }
        }
        true
    }
}
