//! Departure of a rank, after its peers have received everything that it was to send; and loss.
//!
//! Answers are queued until their receiver opens its memory. A rank that has its own sums by then
//! makes no further call, and would drop queued answers if it left at once.

use std::{sync::Arc, time::Instant};

use fabric_engine::{locks::MutexGuard, Result};

use super::{
    actions::{Action, RemoteWrite, WritePurpose},
    conditions::Condition,
    link::{Counters, ExportedRegions, MessageKind, PeerLink},
    state::{ExchangeState, LostPeer},
    AllToAll, Inner,
};
use crate::phase::Phase;

impl ExchangeState {
    /// Whether rows or answers of complete calls haven't reached peers. In an exchange that ends
    /// before all are handed in, sent ones still arrive, and the others are dropped.
    pub fn has_undelivered(&self) -> bool {
        let all_in = !matches!(self.phase, Phase::Dispatched | Phase::Answering);
        // A fence that waits for writes to a lost rank may never come.
        let fence = !self.fenced && self.failed_in_flight == 0;
        let waits = |l: &PeerLink| {
            let rows = !l.outbound.routed || l.outbound.sent < l.outbound.rows;
            rows || fence || !l.outbound.answers.is_empty()
        };
        self.here().any(|l| l.data_in_flight + l.control_in_flight > 0 || all_in && waits(l))
    }

    /// Gives a rank up: waits for nothing from it, and revokes its access.
    pub fn lose(&mut self, rank: u32, kind: MessageKind, cause: String, actions: &mut Vec<Action>) {
        let Some(link) = self.take_link(rank) else { return };
        match self.departures_expected {
            true => tracing::debug!(rank, %cause, "a rank has left"),
            false => tracing::warn!(rank, %cause, "a rank was given up"),
        }
        self.lost_counters[rank as usize] = Some(Arc::clone(&link.endpoint.exported.counters));
        self.revoke(rank, &link.endpoint.exported, actions);
        self.lost.push(LostPeer { rank, kind, cause });
        self.go_on(actions);
    }

    /// As [`ExchangeState::lose`], for a rank that may live: it is told, so that it doesn't go on
    /// with a part of the ranks (RS-1). A rank that makes no further call tells none: the others go
    /// on together.
    pub fn give_up(
        &mut self,
        rank: u32,
        kind: MessageKind,
        cause: String,
        actions: &mut Vec<Action>,
    ) {
        let told = self.was_given_up_by(rank);
        let links = [&self.links, &self.newcomers].map(|all| all.get(rank as usize));
        let link = links.into_iter().flatten().flatten().next();
        if let Some(link) = link.filter(|_| !told && !self.departures_expected) {
            actions.push(Action::Write {
                endpoint: Arc::clone(&link.endpoint),
                write: RemoteWrite::count(MessageKind::GivenUp),
                purpose: WritePurpose::Signal,
            });
        }
        self.lose(rank, kind, cause, actions);
        if !told {
            // It gives this rank up as well, once it has heard of that.
            self.lost_counters[rank as usize] = None;
        }
    }

    /// Whether a rank has told that it has given this one up.
    pub fn was_given_up_by(&self, rank: u32) -> bool {
        let links = [&self.links, &self.newcomers].map(|all| all.get(rank as usize));
        let linked = links.into_iter().flatten().flatten();
        let counters = linked
            .map(|link| &link.endpoint.exported.counters)
            .chain(self.lost_counters.get(rank as usize).and_then(Option::as_ref));
        let told = |counters: &Arc<Counters>| counters[MessageKind::GivenUp as usize].arrived() > 0;
        counters.into_iter().any(told)
    }

    /// Revokes a rank's access.
    pub fn revoke(&mut self, rank: u32, exported: &ExportedRegions, actions: &mut Vec<Action>) {
        self.start_heartbeat(actions);
        for memory in exported.memory() {
            self.revoking.push(rank);
            actions.push(Action::Revoke { rank, memory });
        }
    }
}

impl AllToAll {
    /// Records that this rank makes no further call. Ranks that leave from now on are not reported
    /// as lost.
    pub fn expect_departures(&self) {
        self.inner.state.lock().departures_expected = true;
    }

    /// Waits until peers have received everything, or were given up: then the engine may be closed.
    /// A dropped exchange stays alive as long, if its engine does.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] while another thread is in a call.
    pub fn finish(&self) -> Result<()> {
        let _caller = self.alone()?;
        self.inner.wait_for_delivery();
        Ok(())
    }
}

impl Inner {
    /// Waits for delivery, for a bounded time: a child process gets no completions.
    fn wait_for_delivery(self: &Arc<Self>) {
        let mut state = self.state.lock();
        if !state.has_undelivered() {
            return;
        }
        state.awaited.push(Condition::AllDelivered);
        let (mut actions, deadline) = (Vec::new(), Instant::now() + self.max_wait());
        state.start_heartbeat(&mut actions);
        MutexGuard::unlocked(&mut state, || self.run(actions));
        while state.has_undelivered() && !self.changed.wait_until(&mut state, deadline).timed_out()
        {
        }
        state.end_wait(Condition::AllDelivered);
    }

    /// Revokes the access of other ranks.
    pub(super) fn revoke_all(&self) {
        let mut state = self.state.lock();
        state.left = true;
        let exported = std::mem::take(&mut state.exported);
        let mut links = std::mem::take(&mut state.links);
        links.append(&mut state.newcomers);
        drop(state);
        let given =
            links.iter().flatten().map(|l| &l.endpoint.exported).chain(exported.iter().flatten());
        for memory in given.flat_map(ExportedRegions::memory) {
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
        if !state.has_undelivered() {
            drop(state);
            return inner.revoke_all();
        }
        state.keep_alive = Some(Arc::clone(inner));
        let mut actions = Vec::new();
        state.start_heartbeat(&mut actions);
        drop(state);
        inner.run(actions);
    }
}
