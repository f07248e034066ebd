//! Outcomes of engine operations, and what the state does about them.

use std::{sync::Arc, time::Duration};

use fabric_engine::{locks::MutexGuard, EngineError, Outcome, Result};

use super::{
    actions::{Action, Operation, WritePurpose},
    link::{MessageKind, PeerEndpoint},
    state::ExchangeState,
    Inner,
};

impl Inner {
    /// Advances the device, and wakes waiting calls if a condition of theirs holds.
    pub(super) fn wake(&self, state: &mut ExchangeState, actions: &mut Vec<Action>) {
        state.advance(actions);
        if state.awaited.iter().any(|condition| state.holds(*condition)) {
            self.changed.notify_all();
        }
    }

    /// Applies the effects of an event to the device, the caller, and an exchange that stays alive
    /// until peers have everything.
    pub(super) fn apply(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, ExchangeState>,
        mut actions: Vec<Action>,
    ) {
        self.wake(&mut state, &mut actions);
        let done = state.keep_alive.is_some() && !state.has_undelivered();
        let lingered = state.keep_alive.take_if(|_| done);
        drop(state);
        self.run(actions);
        if let Some(inner) = lingered {
            inner.revoke_all();
        }
    }

    /// A region was revoked, or can't be.
    pub(crate) fn on_revoked(self: &Arc<Self>, rank: u32, end: Result<()>) {
        if let Err(error) = end {
            tracing::warn!(%error, "memory of a lost rank can't be revoked");
            self.state.lock().device_is_stuck(Duration::ZERO, &error.to_string());
            self.changed.notify_all();
            return;
        }
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        if let Some(at) = state.revoking.iter().position(|r| *r == rank) {
            state.revoking.swap_remove(at);
            // `AllToAll::descriptor` waits for it, outside of the exchange's calls.
            self.changed.notify_all();
        }
        state.go_on(&mut actions);
        self.apply(state, actions);
    }

    /// Applies outcomes in order, then their common effects once.
    pub(crate) fn on_outcomes<'a>(
        self: &Arc<Self>,
        events: impl Iterator<Item = (&'a PeerEndpoint, Operation, Outcome)>,
    ) {
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        for (endpoint, what, outcome) in events {
            match outcome {
                Outcome::Ended(end) => {
                    self.on_ended(&mut state, (endpoint, what), end, &mut actions)
                }
                // The source of a failed write isn't read any more.
                Outcome::Quiesced(_) if what.holds_source() => state.failed_in_flight -= 1,
                Outcome::Quiesced(_) => {}
            }
        }
        state.go_on(&mut actions);
        self.apply(state, actions);
    }

    /// An operation has completed or failed.
    fn on_ended(
        &self,
        state: &mut ExchangeState,
        (endpoint, what): (&PeerEndpoint, Operation),
        end: Result<()>,
        actions: &mut Vec<Action>,
    ) {
        if let Operation::Write(purpose, _) = what {
            state.written(endpoint, purpose, end.is_ok(), actions);
        }
        if !state.is_current(endpoint) || matches!(what, Operation::Write(WritePurpose::Signal, _))
        {
            return;
        }
        let kind = match what {
            Operation::Arrival(kind) | Operation::Write(_, kind) => kind,
        };
        // A rank whose operations fail is given up, so that no call waits for it (RS-4).
        if let Err(error) = end {
            let cause = state.loss_cause(endpoint.rank, &error);
            return match error {
                EngineError::Timeout { .. } => state.give_up(endpoint.rank, kind, cause, actions),
                _ => state.lose(endpoint.rank, kind, cause, actions),
            };
        }
        if let Operation::Arrival(kind) = what {
            state.wait_times.on_message(endpoint.rank, kind, state.phase);
            let words = self.words(endpoint.rank, kind);
            if let Err(cause) = state.on_message(endpoint.rank, kind, &words, actions) {
                state.give_up(endpoint.rank, kind, cause, actions);
            }
        }
    }

    /// The words of the block that a peer wrote.
    fn words(&self, rank: u32, kind: MessageKind) -> Vec<u32> {
        let (offset, len) = match kind {
            MessageKind::Routes => self.memory.routes(rank),
            MessageKind::SlotOffer => self.memory.slot_offer(rank),
            _ => return Vec::new(),
        };
        let words = |bytes: &[u8]| {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|w| u32::from_le_bytes(*w)).collect()
        };
        self.control.with_bytes(offset, len, words).unwrap_or_default()
    }
}
