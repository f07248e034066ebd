//! Results of engine operations: passed to the state, which then requests further actions.

use std::{sync::Arc, time::Duration};

use fabric_engine::{Outcome, Result};
use parking_lot::MutexGuard;

use super::{
    act::{Act, Ended, Load},
    link::{Stage, Wire},
    state::State,
    Inner,
};

impl Inner {
    /// Tells the device what it may know now, and wakes the caller if what it waits for is there.
    pub(super) fn wake(&self, state: &mut State, acts: &mut Vec<Act>) {
        state.advance(acts);
        if state.awaited.is_some_and(|until| state.holds(until)) {
            self.changed.notify_all();
        }
    }

    /// The effects of an event: for the device, the caller, and an exchange that lingers for other
    /// ranks.
    pub(super) fn follow(self: &Arc<Self>, mut state: MutexGuard<'_, State>, mut acts: Vec<Act>) {
        self.wake(&mut state, &mut acts);
        let done = state.lingers.is_some() && !state.owes();
        let lingered = state.lingers.take_if(|_| done);
        drop(state);
        self.run(acts);
        if let Some(inner) = lingered {
            inner.part();
        }
    }

    /// Memory was taken back, or never will be.
    pub(crate) fn revoked(self: &Arc<Self>, rank: u32, end: Result<()>) {
        if let Err(error) = end {
            tracing::warn!(%error, "memory can't be taken back from a lost rank");
            self.state.lock().device_is_stuck(Duration::ZERO, &error.to_string());
            return;
        }
        let mut acts = Vec::new();
        let mut state = self.state.lock();
        if let Some(at) = state.revoking.iter().position(|r| *r == rank) {
            state.revoking.swap_remove(at);
            // A caller of `descriptor` waits for one rank, outside of the exchange's calls.
            self.changed.notify_all();
        }
        state.go_on(&mut acts);
        self.follow(state, acts);
    }

    /// What has become of several things, in turn; what follows from them for all follows once.
    pub(crate) fn heard<'a>(
        self: &Arc<Self>,
        news: impl Iterator<Item = (&'a Wire, Ended, Outcome)>,
    ) {
        let mut acts = Vec::new();
        let mut state = self.state.lock();
        for (wire, what, outcome) in news {
            match outcome {
                Outcome::Ended(end) => self.ended(&mut state, (wire, what), end, &mut acts),
                // What a write that failed was to send isn't read any more.
                Outcome::Quiet(_) if what.is_load() => state.unsettled -= 1,
                Outcome::Quiet(_) => {}
            }
        }
        state.go_on(&mut acts);
        self.follow(state, acts);
    }

    /// Something has ended, well or not.
    fn ended(
        &self,
        state: &mut State,
        (wire, what): (&Wire, Ended),
        end: Result<()>,
        acts: &mut Vec<Act>,
    ) {
        if let Ended::Written(load, _) = what {
            state.written(wire, load, end.is_ok(), acts);
        }
        if !state.is_current(wire) || matches!(what, Ended::Written(Load::Word, _)) {
            return;
        }
        let stage = match what {
            Ended::Came(stage) | Ended::Written(_, stage) => stage,
        };
        let end = end.map_err(|e| state.why(wire.rank, &e)).and_then(|()| match what {
            Ended::Came(stage) => {
                let words = self.words(wire.rank, stage);
                state.came(wire.rank, stage, &words, acts)
            }
            Ended::Written(..) => Ok(()),
        });
        // No caller waits for a rank that can't be waited for (RS-4).
        if let Err(cause) = end {
            state.lose(wire.rank, stage, cause, acts);
        }
    }

    /// The block that a peer wrote.
    fn words(&self, rank: u32, stage: Stage) -> Vec<u32> {
        let (offset, len) = match stage {
            Stage::Routes => self.memory.routes(rank),
            Stage::Grant => self.memory.grant(rank),
            _ => return Vec::new(),
        };
        let words = |bytes: &[u8]| {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|w| u32::from_le_bytes(*w)).collect()
        };
        self.control.with_bytes(offset, len, words).unwrap_or_default()
    }
}
