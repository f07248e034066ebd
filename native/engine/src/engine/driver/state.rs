//! What the driver's lock is held for.

use std::sync::Arc;

use super::{heartbeats::Heartbeats, share::HostShare};
use crate::{
    api::Priority,
    domain::{Completion, Domain},
    engine::{HandleRef, Shared},
    group::Group,
    memory::RegionMemory,
    time::Time,
    EngineError, Result,
};

/// Work that the holder of the lock does for other threads.
pub(crate) type Command = Box<dyn FnOnce(&mut Core, &Arc<Shared>) + Send>;

/// The state under the lock.
pub(crate) struct Core {
    pub group: Group,
    pub domains: Vec<Box<dyn Domain>>,
    pub(super) completions: Vec<Completion>,
    /// Polled first: the rail after the last that delivered a message. None takes all the room.
    pub(super) first_rail: usize,
    /// Peers and the kernel will signal, so no thread needs to poll.
    pub(super) armed: bool,
    pub closed: bool,
    /// Handles of `drain`, which end when nothing is pending. Requests are refused if there is one.
    pub drains: Vec<HandleRef>,
    /// Shares of NICs that other engines of this host may use as well.
    pub(super) shares: Vec<(usize, HostShare)>,
    pub(super) rail_window: u64,
    pub(super) heartbeats: Arc<Heartbeats>,
}

impl Core {
    /// One round: polls every domain, handles its completions, posts backlogs, expires deadlines.
    pub(super) fn drive(&mut self, shared: &Shared) -> bool {
        let began = Time::now();
        self.drive_at(began, shared)
    }

    /// One round that began at `began`. A poll takes long if it moves bytes or the thread loses its
    /// core, so what it found has the time after it: no event is recorded before its cause.
    /// Timers keep `began`: what came by then has been found, and no timer fires early.
    pub(crate) fn drive_at(&mut self, began: Time, shared: &Shared) -> bool {
        let (mut now, mut moved) = (began, false);
        self.heartbeats.on_driven(began);
        shared.receives.begin_round();
        let first = self.first_rail.min(self.domains.len());
        for rail in (first..self.domains.len()).chain(0..first) {
            moved |= self.domains[rail].poll(began, &shared.receives, &mut self.completions);
            if self.completions.is_empty() {
                continue;
            }
            now = shared.now().max(began);
            let mut completions = std::mem::take(&mut self.completions);
            let mut has_messages = false;
            for c in completions.drain(..) {
                match c {
                    Completion::LinkUp { .. } => self.heartbeats.set_needed(true),
                    Completion::Message { .. } => {
                        self.first_rail = rail + 1;
                        has_messages = true;
                    }
                    _ => {}
                }
                self.group.on_completion(now, rail, c, &mut self.domains, shared);
            }
            self.completions = completions;
            if has_messages {
                shared.receives.end_poll();
            }
        }
        if self.group.is_due(began) || shared.counters.next_deadline() <= began {
            now = shared.now().max(began);
        }
        moved |= self.group.progress((began, now), &mut self.domains, shared);
        moved |= shared.counters.expire((began, now));
        moved |= shared.leases.end(began);
        for (rail, share) in &mut self.shares {
            share.publish(now, self.group.demand(*rail));
            self.group.limit(*rail, share.window(self.rail_window, Priority::Bulk));
        }
        self.end_drains(shared);
        moved
    }

    /// Ends `drain` handles if nothing is pending.
    pub fn end_drains(&mut self, shared: &Shared) {
        if self.drains.iter().any(|d| !d.is_done())
            && self.group.is_idle()
            && !shared.counters.is_expecting()
        {
            self.drains.iter().for_each(|d| d.complete(Ok(())));
        }
    }

    /// Fails if the engine is closed or draining.
    pub fn check_open(&self) -> Result<()> {
        match (self.closed, self.drains.is_empty()) {
            (true, _) => Err(EngineError::Closed),
            (false, false) => Err(EngineError::Draining),
            _ => Ok(()),
        }
    }

    /// Whether a peer may still reach memory of a closed engine.
    pub fn keeps(&self, memory: &RegionMemory) -> bool {
        self.domains.iter().any(|d| d.keeps(memory.key.index))
    }

    pub(crate) fn next_timer(&self, shared: &Shared) -> Time {
        let domains = self.domains.iter().map(|d| d.next_timer()).fold(Time::NEVER, Time::min);
        self.heartbeats.set_needed(domains != Time::NEVER);
        let ours = self.group.next_deadline().min(shared.counters.next_deadline());
        let ours = ours.min(shared.leases.next_end());
        let shares = self.shares.iter().map(|(_, share)| share.next_timer());
        shares.fold(ours.min(domains), Time::min)
    }

    pub(super) fn arm_domains(&mut self) -> bool {
        for i in 0..self.domains.len() {
            if !self.domains[i].arm() {
                self.domains[..=i].iter_mut().for_each(|d| d.disarm());
                return false;
            }
        }
        self.armed = true;
        true
    }

    pub(super) fn disarm(&mut self) {
        self.domains.iter_mut().for_each(|d| d.disarm());
        self.armed = false;
    }
}
