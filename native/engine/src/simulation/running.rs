//! Drives thousands of engines over time: only those that have something to do.

use std::collections::{BTreeSet, HashMap};

use super::{Member, SimNet};
use crate::{api::EngineId, time::Time, transport::sim::ByName};

/// A network on which time passes; users act in callbacks, or between two calls on engines that
/// they [`wake`](Self::wake).
pub struct Running<'n> {
    net: &'n mut SimNet,
    timers: Timers,
    places: HashMap<EngineId, usize, ByName>,
}

impl std::fmt::Debug for Running<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Running({:?})", self.net)
    }
}

impl SimNet {
    pub fn running(&mut self) -> Running<'_> {
        while self.drive_all() {}
        let mut timers = Timers::default();
        for member in &self.engines {
            timers.set(member);
        }
        self.world.lock().stirred.clear();
        let places = self.engines.iter().map(|m| m.id).zip(0..).collect();
        Running { net: self, timers, places }
    }
}

impl Running<'_> {
    pub fn now(&self) -> Time {
        self.net.now()
    }

    /// An engine's user is about to act: its clock is set, and it is driven next.
    pub fn wake(&mut self, engine: EngineId) {
        if let Some(at) = self.places.get(&engine) {
            let member = &self.net.engines[*at];
            member.clock.set(self.net.now());
            self.net.world.lock().stirred.insert(engine);
        }
    }

    /// Lets everything happen that happens by `limit`, and time pass until then; false if it was
    /// stopped before, as soon as `stop` said so.
    pub fn until(&mut self, limit: Time, mut stop: impl FnMut() -> bool) -> bool {
        loop {
            self.settle();
            if stop() {
                return false;
            }
            if !self.net.happen_until(self.timers.first(), limit) {
                self.net.pass(limit);
                return true;
            }
        }
    }

    /// Has engines act that have something to do now.
    fn settle(&mut self) {
        let now = self.net.now();
        let mut busy = self.timers.due(now);
        loop {
            busy.append(&mut self.net.world.lock().stirred);
            let Some(id) = busy.pop_first() else { return };
            let Some(member) = self.places.get(&id).map(|at| &self.net.engines[*at]) else {
                continue;
            };
            if let Some(engine) = member.engine.upgrade() {
                while engine.drive(member.clock.set(now)) {}
            }
            self.timers.set(member);
        }
    }
}

/// When engines must be driven although no event arrives.
#[derive(Default)]
struct Timers {
    ordered: BTreeSet<(Time, EngineId)>,
    of: HashMap<EngineId, Time, ByName>,
}

impl Timers {
    fn set(&mut self, member: &Member) {
        let at = member.next_timer();
        if let Some(before) = self.of.insert(member.id, at).filter(|before| *before != at) {
            self.ordered.remove(&(before, member.id));
        }
        if at != Time::NEVER {
            self.ordered.insert((at, member.id));
        }
    }

    fn first(&self) -> Time {
        self.ordered.first().map_or(Time::NEVER, |(at, _)| *at)
    }

    fn due(&self, now: Time) -> BTreeSet<EngineId> {
        self.ordered.iter().take_while(|(at, _)| *at <= now).map(|(_, id)| *id).collect()
    }
}
