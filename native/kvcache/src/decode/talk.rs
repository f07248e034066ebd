//! What a decoder and its prefillers say to each other.

use std::sync::{atomic::AtomicUsize, atomic::Ordering::SeqCst, Arc};

use fabric_engine::{api::EngineId, EngineError, Op, Result, Submit};

use super::{
    is_loss,
    state::{Act, AtEnd, MeetingPhase, Phase, State},
    Inner,
};
use crate::{
    terms::Cause,
    timer::after,
    wire::{Message, State as At},
};

/// Beats that a prefiller may answer without knowing a request, before the request counts as lost: the message
/// that brings it may be slower than a beat.
const UNKNOWN: u32 = 2;

impl Inner {
    /// Does what was decided under the lock.
    pub(super) fn run(self: &Arc<Self>, acts: Vec<Act>) {
        for act in acts {
            match act {
                Act::Send { meeting, end, peer, bytes, request } => {
                    let op = Op::Send { peer: &peer, message: &bytes };
                    let sent = self.control().submit(&[op], Submit::default());
                    let weak = Arc::downgrade(self);
                    let told = move |result: Result<()>| {
                        if let (Err(error), Some(inner)) = (result, weak.upgrade()) {
                            inner.unsent(meeting, end, request, &error);
                        }
                    };
                    match sent {
                        Ok(handle) => handle.on_done(told),
                        Err(error) => told(Err(error)),
                    }
                }
                Act::Tell(seq, event) => (self.on_event)(seq, event),
                Act::Cancel(handles) => handles.iter().for_each(fabric_engine::Handle::cancel),
                Act::Drop(counters, handles) => drop((counters, handles)),
                Act::Revoke { meeting, regions } => self.revoke(meeting, &regions),
            }
        }
    }

    fn revoke(self: &Arc<Self>, meeting: u64, regions: &[fabric_engine::Region]) {
        let left = Arc::new(AtomicUsize::new(regions.len()));
        for region in regions {
            let (weak, left) = (Arc::downgrade(self), Arc::clone(&left));
            // It fails only when the engine is closed, and then nothing lands any more.
            let over = move |_| {
                let last = left.fetch_sub(1, SeqCst) == 1;
                if let Some(inner) = weak.upgrade().filter(|_| last) {
                    let mut acts = Vec::new();
                    inner.state.lock().revoked(meeting, &mut acts);
                    inner.run(acts);
                }
            };
            match region.revoke() {
                Ok(handle) => handle.on_done(over),
                Err(error) => over(Err(error)),
            }
        }
    }

    /// A message didn't get there.
    fn unsent(
        self: &Arc<Self>,
        meeting: u64,
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
                state.lose(meeting, &error.to_string(), &mut acts);
            } else {
                tracing::warn!(meeting, end, %error, "a message to a prefiller was not sent");
            }
        }
        self.run(acts);
    }

    /// A message has come.
    pub(super) fn hear(self: &Arc<Self>, from: EngineId, bytes: &[u8]) {
        let message = match Message::from_bytes(bytes) {
            Ok(message) => message,
            Err(error) => {
                tracing::warn!(%from, %error, "what a peer sent is no message of a prefiller");
                return;
            }
        };
        let mut acts = Vec::new();
        self.state.lock().hear(from, message, &mut acts);
        self.run(acts);
    }

    /// The next beat of a meeting, a while from now.
    pub(super) fn beat_later(self: &Arc<Self>, meeting: u64) {
        let weak = Arc::downgrade(self);
        let beat = move || {
            if let Some(inner) = weak.upgrade() {
                inner.beat(meeting);
            }
        };
        if let Err(error) = after(self.control(), self.terms.beat, beat) {
            tracing::debug!(meeting, %error, "no more beats");
        }
    }

    fn beat(self: &Arc<Self>, meeting: u64) {
        let mut acts = Vec::new();
        let goes_on = self.state.lock().beat(meeting, self.terms.silent_beats(), &mut acts);
        self.run(acts);
        if goes_on {
            self.beat_later(meeting);
        }
    }
}

impl State {
    fn hear(&mut self, from: EngineId, message: Message, acts: &mut Vec<Act>) {
        let number = message.meeting();
        let Some(meeting) = self.meetings.get_mut(&number) else { return };
        // Only those that we met with this number speak for it.
        let Some(end) = meeting.ends.iter().position(|e| e.peer.id() == from) else { return };
        meeting.ends[end].silent = 0;
        match message {
            Message::Welcome { .. } => {
                meeting.ends[end].welcome = true;
                let all = meeting.ends.iter().all(|e| e.welcome);
                if all && meeting.phase == MeetingPhase::Greeting {
                    meeting.phase = MeetingPhase::Open;
                    let early = std::mem::take(&mut meeting.early);
                    self.ask(number, &early, acts);
                }
            }
            Message::Declined { why, .. } | Message::Goodbye { why, .. } => {
                self.lose(number, &why, acts);
            }
            Message::Status { states, .. } => {
                for (seq, at) in states {
                    self.learn(number, end, seq, at, acts);
                }
            }
            other => tracing::warn!(%from, ?other, "a prefiller sent what only decoders send"),
        }
    }

    /// Sends what waited for the prefiller's welcome.
    fn ask(&mut self, number: u64, early: &[u64], acts: &mut Vec<Act>) {
        let Some(meeting) = self.meetings.get_mut(&number) else { return };
        for seq in early {
            let Some(ticket) = self.tickets.get_mut(seq) else { continue };
            let Some(message) = ticket.message.take() else { continue };
            for end in 0..ticket.ends.len() {
                ticket.ends[end] = AtEnd::Asked { unknown: 0 };
                acts.extend(meeting.send(number, end, message.clone(), Some(*seq)));
            }
        }
    }

    /// What a process of the prefiller says of a request.
    fn learn(&mut self, number: u64, end: usize, seq: u64, at: At, acts: &mut Vec<Act>) {
        let Some(ticket) = self.tickets.get_mut(&seq).filter(|t| t.meeting == number) else {
            return;
        };
        let Some(place) = ticket.ends.get_mut(end).filter(|p| **p != AtEnd::Unasked) else {
            return;
        };
        match (at, *place) {
            (_, AtEnd::Over | AtEnd::Unasked) => {}
            (At::Open, AtEnd::Asked { .. }) => *place = AtEnd::Asked { unknown: 0 },
            (At::Open, AtEnd::Stopping) => {}
            (At::Unknown, AtEnd::Asked { unknown }) if unknown < UNKNOWN => {
                *place = AtEnd::Asked { unknown: unknown + 1 };
            }
            (At::Unknown, AtEnd::Asked { .. }) if ticket.phase == Phase::Waiting => {
                // Told to stop, it will not take the request either, should that still come.
                let why = "it does not know of the request, whose message was lost".into();
                self.fail(seq, Cause::Lost(why), acts);
            }
            (At::Unknown, _) => {
                // It has forgotten, or has not heard, that it was told to stop.
                *place = AtEnd::Stopping;
                if let Some(meeting) = self.meetings.get_mut(&number) {
                    let message = Message::Cancel { meeting: number, seq };
                    acts.extend(meeting.send(number, end, message.to_bytes(), None));
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
        }
    }

    /// True if there is to be another beat.
    fn beat(&mut self, number: u64, silent_beats: u32, acts: &mut Vec<Act>) -> bool {
        let next_seq = self.next_seq;
        let mut open = Vec::new();
        for (seq, ticket) in self.tickets.iter().filter(|(_, t)| t.meeting == number) {
            open.push((*seq, ticket.ends.clone()));
        }
        let Some(meeting) = self.meetings.get_mut(&number) else { return false };
        if matches!(meeting.phase, MeetingPhase::Lost(_)) {
            return false;
        }
        meeting.ends.iter_mut().for_each(|e| e.silent += 1);
        if meeting.ends.iter().any(|e| e.silent > silent_beats) {
            self.lose(number, "it has not answered for too long", acts);
            return false;
        }
        for end in 0..meeting.ends.len() {
            if !meeting.ends[end].welcome {
                continue;
            }
            let there =
                |ends: &Vec<AtEnd>| matches!(ends[end], AtEnd::Asked { .. } | AtEnd::Stopping);
            let asked: Vec<u64> =
                open.iter().filter(|(_, e)| there(e)).map(|(seq, _)| *seq).collect();
            let floor = open.first().map_or(next_seq, |(seq, _)| *seq);
            let message = Message::Beat { meeting: number, floor, open: asked };
            acts.extend(meeting.send(number, end, message.to_bytes(), None));
        }
        true
    }
}
