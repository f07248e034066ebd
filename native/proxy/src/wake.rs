//! How a proxy thread sleeps: whoever has news for it looks at one word, which is written only when it goes to sleep.

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
/// For good: nobody will take what is pushed.
const CLOSED: u32 = 2;

/// On a line of its own: pushers read it with every command.
#[derive(Debug)]
#[repr(align(128))]
pub struct Bed(AtomicU32);

impl Default for Bed {
    fn default() -> Self {
        prepare();
        Self(AtomicU32::new(AWAKE))
    }
}

impl Bed {
    /// To be called after the news is there for [`Bed::sleep`]'s `news` to see. A load and a branch while the
    /// sleeper is awake. False if nobody will look any more.
    #[inline]
    pub fn wake(&self) -> bool {
        light();
        match self.0.load(Relaxed) {
            AWAKE => true,
            ASLEEP => {
                self.rouse();
                true
            }
            _ => false,
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.load(Acquire) == CLOSED
    }

    /// The sleeper goes away.
    pub(crate) fn close(&self) {
        self.0.store(CLOSED, SeqCst);
    }

    #[cold]
    fn rouse(&self) {
        if self.0.compare_exchange(ASLEEP, AWAKE, SeqCst, SeqCst).is_ok() {
            self.ring();
        }
    }

    /// Sleeps until woken or for so long; not at all if there is news. One thread only.
    pub fn sleep(&self, limit: Duration, news: impl FnOnce() -> bool) {
        self.0.store(ASLEEP, SeqCst);
        heavy();
        if !news() {
            self.wait(limit);
        }
        self.0.store(AWAKE, SeqCst);
    }

    #[cfg(not(loom))]
    fn ring(&self) {
        use rustix::thread::futex;
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
    }

    #[cfg(not(loom))]
    fn wait(&self, limit: Duration) {
        use rustix::thread::futex;
        let limit = futex::Timespec {
            tv_sec: limit.as_secs().min(3600) as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        let _ = futex::wait(&self.0, futex::Flags::PRIVATE, ASLEEP, Some(&limit));
    }

    #[cfg(loom)]
    fn ring(&self) {}

    /// There is no time in loom: who isn't woken never ends, and the model says so.
    #[cfg(loom)]
    fn wait(&self, _limit: Duration) {
        while self.0.load(SeqCst) == ASLEEP {
            loom::thread::yield_now();
        }
    }
}
