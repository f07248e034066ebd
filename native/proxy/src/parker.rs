//! The sleep of a proxy thread. Producers read one word, which is written only when the thread
//! sleeps.

use std::time::Duration;

use crate::sync::{
    atomic::{
        AtomicU32,
        Ordering::{Acquire, Relaxed, SeqCst},
    },
    heavy, light, prepare,
};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;
/// Permanent: the thread has ended, and pushed commands will not be taken.
const CLOSED: u32 = 2;

/// On a cache line of its own: pushers read it with every command.
#[derive(Debug)]
#[repr(align(128))]
pub struct Parker(AtomicU32);

impl Default for Parker {
    fn default() -> Self {
        prepare();
        Self(AtomicU32::new(AWAKE))
    }
}

impl Parker {
    /// Call after the event is visible to [`Parker::park`]'s `has_work`. Costs a load and a branch
    /// while the thread is awake. Returns false if the thread has ended.
    #[inline]
    pub fn wake(&self) -> bool {
        light();
        match self.0.load(Relaxed) {
            AWAKE => true,
            ASLEEP => {
                self.wake_sleeper();
                true
            }
            _ => false,
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.load(Acquire) == CLOSED
    }

    /// The thread ends.
    pub(crate) fn close(&self) {
        self.0.store(CLOSED, SeqCst);
    }

    #[cold]
    fn wake_sleeper(&self) {
        if self.0.compare_exchange(ASLEEP, AWAKE, SeqCst, SeqCst).is_ok() {
            self.futex_wake();
        }
    }

    /// Sleeps until woken or for `limit`; returns at once if `has_work` is true. One thread only.
    pub fn park(&self, limit: Duration, has_work: impl FnOnce() -> bool) {
        self.0.store(ASLEEP, SeqCst);
        heavy();
        if !has_work() {
            self.futex_wait(limit);
        }
        self.0.store(AWAKE, SeqCst);
    }

    #[cfg(not(loom))]
    fn futex_wake(&self) {
        use rustix::thread::futex;
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
    }

    #[cfg(not(loom))]
    fn futex_wait(&self, limit: Duration) {
        use rustix::thread::futex;
        let limit = futex::Timespec {
            tv_sec: limit.as_secs().min(3600) as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        let _ = futex::wait(&self.0, futex::Flags::PRIVATE, ASLEEP, Some(&limit));
    }

    #[cfg(loom)]
    fn futex_wake(&self) {}

    /// Loom has no time: a thread that isn't woken never ends, which the model reports.
    #[cfg(loom)]
    fn futex_wait(&self, _limit: Duration) {
        while self.0.load(SeqCst) == ASLEEP {
            loom::thread::yield_now();
        }
    }
}
