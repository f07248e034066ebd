//! Messages between a decoder and its prefillers.

use std::sync::{atomic::AtomicUsize, atomic::Ordering::SeqCst, Arc};

use fabric_engine::{api::EngineId, EngineError, Op, Result, Submit};

use super::{
    is_loss,
    state::{Act, AtEnd, Phase, SessionPhase, State},
    Inner,
};
use crate::{
    parts::cut,
    terms::Cause,
    timer::after,
    wire::{Message, State as At, BEAT_REQUESTS},
};

/// Beats that a prefiller may answer without knowing a request before the request counts as lost:
/// the request message may be slower than a beat.
const UNKNOWN: u32 = 2;

impl Inner {
    /// Executes actions that were decided under the lock.
    pub(super) fn run(self: &Arc<Self>, acts: Vec<Act>) {
        for act in acts {
            match act {
                Act::Send { session, end, peer, bytes, request } => {
                    let parts = cut(&bytes, self.control());
                    let send = |message| Op::Send { peer: &peer, message };
                    let ops: Vec<Op<'_>> = parts.iter().map(|part| send(part)).collect();
                    let sent = self.control().submit(&ops, Submit::default());
                    let weak = Arc::downgrade(self);
                    let told = move |result: Result<()>| {
                        if let (Err(error), Some(inner)) = (result, weak.upgrade()) {
                            inner.unsent(session, end, request, &error);
                        }
                    };
                    match sent {
                        Ok(handle) => handle.on_done(told),
                        Err(error) => told(Err(error)),
                    }
                }
                Act::Cancel(handles) => handles.iter().for_each(fabric_engine::Handle::cancel),
                Act::Drop(counters, handles) => drop((counters, handles)),
                Act::Revoke { session, regions } => self.revoke(session, &regions),
            }
        }
        self.events.tell();
    }

    fn revoke(self: &Arc<Self>, session: u64, regions: &[fabric_engine::Region]) {
        let left = Arc::new(AtomicUsize::new(regions.len()));
        for region in regions {
            // Kept until the memory is released; the caller is told so even after it dropped the
            // decoder.
            let (inner, left) = (Arc::clone(self), Arc::clone(&left));
            // It fails in a process that has been forked off only, whose engine does nothing.
            let over = move |_| {
                if left.fetch_sub(1, SeqCst) == 1 {
                    let mut acts = Vec::new();
                    inner.state.lock().revoked(session, &mut acts);
                    inner.run(acts);
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
        end: usize,
        request: Option<u64>,
        error: &EngineError,
    ) {
        let mut acts = Vec::new();
        {
            let mut state = self.state.lock();
            if let Some(seq) = request {
                // It may have come after all: the prefiller is told to stop.
                state.fail(seq, Cause::of(error), &mut acts);
            }
            if is_loss(error) || matches!(error, EngineError::Timeout { .. }) {
                state.lose(session, &error.to_string(), false, &mut acts);
            } else {
                tracing::warn!(session, end, %error, "a message to a prefiller was not sent");
            }
        }
        self.run(acts);
    }

    /// A message has come.
    pub(super) fn hear(self: &Arc<Self>, from: EngineId, bytes: &[u8]) {
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
        let mut acts = Vec::new();
        self.state.lock().hear(from, message, &mut acts);
        self.run(acts);
    }

    /// Schedules the next beat of a session.
    pub(super) fn beat_later(self: &Arc<Self>, session: u64) {
        let weak = Arc::downgrade(self);
        let beat = move || {
            if let Some(inner) = weak.upgrade() {
                inner.beat(session);
            }
        };
        if let Err(error) = after(self.control(), self.terms.beat, beat) {
            // Without beats the loss of the prefiller would go unnoticed.
            let mut acts = Vec::new();
            self.state.lock().mute(session, &error, &mut acts);
            self.run(acts);
        }
    }

    fn beat(self: &Arc<Self>, session: u64) {
        let mut acts = Vec::new();
        let goes_on = self.state.lock().beat(session, self.terms.silent_beats(), &mut acts);
        self.run(acts);
        self.parts.expire(self.control().now());
        if goes_on {
            self.beat_later(session);
        }
    }
}

impl State {
    fn hear(&mut self, from: EngineId, message: Message, acts: &mut Vec<Act>) {
        let number = message.session();
        let Some(session) = self.sessions.get_mut(&number) else { return };
        // Only processes of this session speak for the prefiller.
        let Some(end) = session.ends.iter().position(|e| e.peer.id() == from) else { return };
        session.ends[end].silent = 0;
        match message {
            Message::Welcome { incarnation, .. } => {
                let known = *session.ends[end].incarnation.get_or_insert(incarnation);
                if known != incarnation {
                    // Its earlier writes may still be under way, and it can't report them (MR-1).
                    return self.lose(number, "it has forgotten this decoder", true, acts);
                }
                let all = session.ends.iter().all(|e| e.incarnation.is_some());
                if all && session.phase == SessionPhase::Greeting {
                    session.phase = SessionPhase::Open;
                    let early = std::mem::take(&mut session.early);
                    self.ask(number, &early, acts);
                }
            }
            Message::Declined { why, .. } => {
                self.lose(number, &format!("it declined this decoder: {why}"), true, acts);
            }
            Message::Goodbye { why, .. } => self.lose(number, &why, true, acts),
            // A message of another incarnation says nothing about this one (MR-2).
            Message::Status { incarnation, .. }
                if session.ends[end].incarnation != Some(incarnation) => {}
            Message::Status { states, .. } => {
                for (seq, at) in states {
                    self.learn(number, end, seq, at, acts);
                }
            }
            other => tracing::warn!(%from, ?other, "a prefiller sent what only decoders send"),
        }
    }

    /// Ends the session with a prefiller because the local engine failed.
    fn mute(&mut self, number: u64, error: &EngineError, acts: &mut Vec<Act>) {
        if Cause::of(error) == Cause::Closed {
            for seq in self.of(number) {
                self.fail(seq, Cause::Closed, acts);
            }
        }
        self.lose(number, &format!("no more beats: {error}"), true, acts);
    }

    /// Sends what waited for the prefiller's welcome.
    fn ask(&mut self, number: u64, early: &[u64], acts: &mut Vec<Act>) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        for seq in early {
            let Some(ticket) = self.tickets.get_mut(seq) else { continue };
            let Some(request) = ticket.early.take() else { continue };
            for end in 0..ticket.ends.len() {
                ticket.ends[end] = AtEnd::Asked { unknown: 0 };
                acts.extend(session.ask(number, end, &request));
            }
        }
    }

    /// Handles a prefiller process's report on a request.
    fn learn(&mut self, number: u64, end: usize, seq: u64, at: At, acts: &mut Vec<Act>) {
        let Some(ticket) = self.tickets.get_mut(&seq).filter(|t| t.session == number) else {
            return;
        };
        let Some(place) = ticket.ends.get_mut(end).filter(|p| **p != AtEnd::Unasked) else {
            return;
        };
        match (at, *place) {
            (_, AtEnd::Over | AtEnd::Unasked) => {}
            (At::Open, AtEnd::Asked { .. }) => *place = AtEnd::Asked { unknown: 0 },
            (At::Unknown, AtEnd::Asked { unknown }) if unknown < UNKNOWN => {
                *place = AtEnd::Asked { unknown: unknown + 1 };
            }
            (At::Unknown, AtEnd::Asked { .. }) if ticket.phase == Phase::Waiting => {
                // Told to stop, it will not take the request either, should that still come.
                let why = "it does not know of the request, whose message was lost".into();
                self.fail(seq, Cause::Lost(why), acts);
            }
            (At::Unknown, _) | (At::Open, AtEnd::Stopping) => {
                // It may not have heard that it was told to stop.
                *place = AtEnd::Stopping;
                if let Some(session) = self.sessions.get(&number) {
                    acts.extend(session.cancel(number, end, seq));
                }
            }
            (At::Done, _) => {
                *place = AtEnd::Over;
                self.settle(seq, acts);
            }
            (At::Cancelled, _) => {
                *place = AtEnd::Over;
                self.fail(seq, Cause::Failed("it cancelled the request".into()), acts);
                self.settle(seq, acts);
            }
            (At::Failed(why), _) => {
                *place = AtEnd::Over;
                self.fail(seq, Cause::Failed(why), acts);
                self.settle(seq, acts);
            }
            (At::Refused { why, elsewhere, reason }, _) => {
                *place = AtEnd::Over;
                let name = self.sessions.get(&number).map_or("", |m| &m.facts.name);
                let why = format!("prefiller {name} refused the request: {why}");
                self.fail(seq, Cause::Refused { why, elsewhere, reason }, acts);
                self.settle(seq, acts);
            }
        }
    }

    /// Returns whether to send another beat.
    fn beat(&mut self, number: u64, silent_beats: u32, acts: &mut Vec<Act>) -> bool {
        let next_seq = self.next_seq;
        let mut ready = Vec::new();
        let mut stuck = None;
        for (seq, ticket) in self.tickets.iter_mut().filter(|(_, t)| t.session == number) {
            if ticket.phase == Phase::Waiting {
                continue;
            }
            ticket.lingers += 1;
            if ticket.phase == Phase::Ready && ticket.lingers == silent_beats {
                ready.push(*seq);
            }
            if ticket.lingers > 2 * silent_beats {
                stuck = Some(*seq);
            }
        }
        if let Some(seq) = stuck {
            // The prefiller answers but does not end its writes: its access is revoked after a
            // bound.
            let why = format!("it doesn't let go of request {seq}, which is over");
            self.lose(number, &why, true, acts);
            return false;
        }
        // All data has arrived; only the prefiller's confirmation is missing.
        ready.into_iter().for_each(|seq| self.stop(seq, acts));
        let mut open = Vec::new();
        for (seq, ticket) in self.tickets.iter().filter(|(_, t)| t.session == number) {
            open.push((*seq, ticket.ends.clone()));
        }
        let Some(session) = self.sessions.get_mut(&number) else { return false };
        if matches!(session.phase, SessionPhase::Lost(_)) {
            return false;
        }
        session.ends.iter_mut().for_each(|e| e.silent += 1);
        if session.ends.iter().any(|e| e.silent > silent_beats) {
            self.lose(number, "it has not answered for too long", true, acts);
            return false;
        }
        for end in 0..session.ends.len() {
            if session.ends[end].incarnation.is_none() {
                continue;
            }
            let there =
                |ends: &Vec<AtEnd>| matches!(ends[end], AtEnd::Asked { .. } | AtEnd::Stopping);
            let asked: Vec<u64> =
                open.iter().filter(|(_, e)| there(e)).map(|(seq, _)| *seq).collect();
            let floor = open.first().map_or(next_seq, |(seq, _)| *seq);
            let parts = asked.chunks(BEAT_REQUESTS).map(<[u64]>::to_vec);
            let none = asked.is_empty().then(Vec::new);
            for open in parts.chain(none) {
                let message = Message::Beat { session: number, floor, open };
                acts.extend(session.send(number, end, message.to_bytes(), None));
            }
        }
        true
    }
}
