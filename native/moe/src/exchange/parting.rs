//! How a rank leaves: after other ranks have what was handed in for them.
//!
//! Answers wait here until their receiver opens its memory. A rank that has its own sums by then
//! makes no further call, and would otherwise drop the others' answers when it leaves.

use std::{sync::Arc, time::Instant};

use fabric_engine::Result;
use parking_lot::MutexGuard;

use super::{
    link::{Link, Ours},
    state::State,
    waits::Until,
    AllToAll, Inner,
};
use crate::phase::Phase;

impl State {
    /// Whether anything that was handed in hasn't reached other ranks. If an exchange ends before
    /// all rows or answers are handed in, those that have left still arrive; the rest is dropped.
    pub fn owes(&self) -> bool {
        let all_in = !matches!(self.phase, Phase::Dispatched | Phase::Answering);
        // A fence that waits for writes to a lost rank may never come.
        let fence = !self.fenced && self.unsettled == 0;
        let waits = |l: &Link| {
            let rows = !l.out.routed || l.out.sent < l.out.rows;
            rows || fence || !l.out.answers.is_empty()
        };
        self.here().any(|l| l.flying + l.telling > 0 || all_in && waits(l))
    }
}

impl AllToAll {
    /// All calls of this rank are done: other ranks may leave from now on, which isn't reported as
    /// a loss.
    pub fn expect_departures(&self) {
        self.inner.state.lock().parting = true;
    }

    /// Waits until others have what was handed in for them, or were given up since they don't take
    /// it: then the engine may be closed. An exchange that is dropped lingers as long, if its
    /// engine does.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] while another thread is in a call.
    pub fn finish(&self) -> Result<()> {
        let _caller = self.alone()?;
        self.inner.wait_for_others();
        Ok(())
    }
}

impl Inner {
    /// Waits while data is owed, for a bounded time: a child process hears of no completions.
    fn wait_for_others(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if !state.owes() {
            return;
        }
        state.awaited = Some(Until::NothingOwed);
        let (mut acts, deadline) = (Vec::new(), Instant::now() + self.patience());
        state.start_pulse(&mut acts);
        MutexGuard::unlocked(&mut state, || self.run(acts));
        while state.owes() && !self.changed.wait_until(&mut state, deadline).timed_out() {}
        state.awaited = None;
    }

    /// Revokes the access of other ranks.
    pub(super) fn part(&self) {
        let mut state = self.state.lock();
        state.left = true;
        let ours = std::mem::take(&mut state.ours);
        let mut links = std::mem::take(&mut state.links);
        links.append(&mut state.newcomers);
        drop(state);
        let given = links.iter().flatten().map(|l| &l.wire.ours).chain(ours.iter().flatten());
        for memory in given.flat_map(Ours::memory) {
            // Without a wait: the engine keeps the memory until it is quiesced.
            drop(memory.revoke());
        }
        drop(self.control.revoke());
        drop(self.rows.revoke());
    }
}

impl Drop for AllToAll {
    fn drop(&mut self) {
        let inner = &self.inner;
        self.leave();
        let mut state = inner.state.lock();
        if !state.owes() {
            drop(state);
            return inner.part();
        }
        state.lingers = Some(Arc::clone(inner));
        let mut acts = Vec::new();
        state.start_pulse(&mut acts);
        drop(state);
        inner.run(acts);
    }
}
