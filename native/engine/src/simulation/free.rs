//! A network whose events happen in the order that a test chooses.

use super::SimNet;
use crate::transport::sim::{mix, NextEvent};

/// For networks whose [`free`](crate::transport::sim::SimConfig::free) is set.
impl SimNet {
    /// The possible next events, arrivals before losses. Empty while an engine still has something
    /// to do.
    pub fn choices(&mut self) -> Vec<NextEvent> {
        while self.drive_all() {}
        self.world.lock().choices()
    }

    /// Lets one of the choices happen and all engines act on it.
    pub fn take(&mut self, choice: NextEvent) {
        self.world.lock().take(choice);
        while self.drive_all() {}
    }

    /// Lets time pass until an engine's next timer; false if there is none.
    pub fn pass_time(&mut self) -> bool {
        let passed = self.step();
        let now = self.now().0;
        let engines = self.incarnations.clone();
        let mut world = self.world.lock();
        let free = world.free.as_mut().filter(|_| passed);
        free.into_iter().for_each(|f| engines.iter().for_each(|e| f.record_seen(*e, now)));
        passed
    }

    /// The user of a node does something now that is named by a number.
    pub fn user_acts(&mut self, node: usize, what: u64) {
        let engine = self.incarnations[node];
        if let Some(free) = &mut self.world.lock().free {
            free.record_seen(engine, mix(what, 3));
        }
    }

    /// A number that two runs share only if the same may happen next, and with the same outcome.
    pub fn state(&self) -> u64 {
        let world = self.world.lock();
        world.free.as_ref().map_or(0, |free| free.seen(world.now()))
    }

    /// A choice in words.
    pub fn describe(&self, choice: NextEvent) -> String {
        self.world.lock().describe(choice, &self.incarnations)
    }
}
