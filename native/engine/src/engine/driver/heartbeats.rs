//! The thread that drives an engine whose worker is late, so that heartbeats leave in time (RS-4).

use std::{
    sync::{
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
        Arc,
    },
    time::Duration,
};

use super::GroupDriver;
use crate::{
    engine::Shared,
    locks::{Condvar, Mutex},
    time::Time,
};

/// Priority of the thread where the process may raise it. It runs for one round at a time.
const NICE: i32 = -10;

/// When the engine was driven last, and the sleep of the thread.
#[derive(Debug, Default)]
pub(super) struct Heartbeats {
    driven_at: AtomicU64,
    /// Whether some link has a timer.
    needed: AtomicBool,
    stopping: Mutex<bool>,
    wake: Condvar,
}

impl Heartbeats {
    /// A thread begins a round.
    #[inline]
    pub fn on_driven(&self, now: Time) {
        self.driven_at.store(now.0, Relaxed);
    }

    /// When a round began last.
    pub fn driven_at(&self) -> Time {
        Time(self.driven_at.load(Relaxed))
    }

    /// Whether some link needs heartbeats. Without one the thread sleeps.
    pub fn set_needed(&self, needed: bool) {
        if self.needed.load(Relaxed) != needed {
            let _stopping = self.stopping.lock();
            self.needed.store(needed, SeqCst);
            self.wake.notify_one();
        }
    }

    pub fn stop(&self) {
        *self.stopping.lock() = true;
        self.wake.notify_one();
    }

    /// Sleeps until no thread has driven for `limit`, but at least until `earliest`; false once the
    /// engine stops.
    fn wait(&self, limit: Duration, earliest: Time) -> bool {
        let mut stopping = self.stopping.lock();
        while !*stopping {
            if !self.needed.load(SeqCst) {
                self.wake.wait(&mut stopping);
                continue;
            }
            let due = self.driven_at().after(limit).max(earliest);
            let now = Time::now();
            if now >= due {
                return true;
            }
            self.wake.wait_for(&mut stopping, due.since(now));
        }
        false
    }
}

impl GroupDriver {
    /// The loop of the thread. The worker drives at every quarter of `peer_timeout`; where it gets
    /// no core, or waits for one, this thread drives after three eighths.
    pub(super) fn keep_beating(&self, shared: &Arc<Shared>, peer_timeout: Duration) {
        // Only root may.
        let _ = rustix::process::setpriority_process(None, NICE);
        let mut earliest = Time(0);
        while self.heartbeats.wait(peer_timeout * 3 / 8, earliest) {
            self.poll_here(shared);
            // Another thread may hold the lock.
            earliest = Time::now().after(peer_timeout / 16);
        }
    }
}
