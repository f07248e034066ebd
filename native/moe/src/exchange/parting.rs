//! How a rank leaves: not before others have what was handed in for them.
//!
//! Answers wait here until their asker says that its memory may be written. Whoever has its own sums by then has no further
//! call to make, and would take the others' with it.

use std::{sync::Arc, time::Instant};

use fabric_engine::Result;
use parking_lot::MutexGuard;

use super::{
    link::{Link, Ours},
    state::{State, Step},
    waits::Until,
    AllToAll, Inner,
};

impl State {
    /// Whether anything that was handed in hasn't reached others. Of an exchange that breaks off while rows or answers are
    /// still to be handed in, what has left arrives, and nobody gets the rest.
    pub fn owes(&self) -> bool {
        let all_in = !matches!(self.step, Step::Dispatched | Step::Answering);
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
    /// All calls of this rank are done: other ranks may leave from now on, which isn't reported as a loss.
    pub fn expect_departures(&self) {
        self.inner.state.lock().parting = true;
    }

    /// Waits until others have what was handed in for them, or were given up since they don't take it: then the engine may be
    /// closed. An exchange that is dropped lingers as long, if its engine does.
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
    /// Waits while anything is owed, but not for ever: in a child process nobody hears of what happens.
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

    /// Takes back what others may use.
    pub(super) fn part(&self) {
        let mut state = self.state.lock();
        state.left = true;
        let ours = std::mem::take(&mut state.ours);
        let mut links = std::mem::take(&mut state.links);
        links.append(&mut state.newcomers);
        drop(state);
        let given = links.iter().flatten().map(|l| &l.wire.ours).chain(ours.iter().flatten());
        for memory in given.flat_map(Ours::memory) {
            // Nobody waits: the engine keeps the memory until it is quiet.
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
