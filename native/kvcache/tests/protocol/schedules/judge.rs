//! State that all parts of a run share: the time, and the errors found.

use std::sync::{
    atomic::{AtomicU64, Ordering::SeqCst},
    Arc,
};

use fabric_engine::locks::Mutex;

#[derive(Debug, Default)]
pub struct Judge {
    now: AtomicU64,
    wrong: Mutex<Vec<String>>,
}

impl Judge {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Virtual nanoseconds.
    pub fn now(&self) -> u64 {
        self.now.load(SeqCst)
    }

    pub fn at(&self, now: u64) {
        self.now.store(now, SeqCst);
    }

    pub fn wrong(&self, promise: &str, what: impl std::fmt::Display) {
        let at = self.now();
        self.wrong.lock().push(format!("{promise} at {at} ns: {what}"));
    }

    /// The first thing that was wrong.
    pub fn verdict(&self) -> Result<(), String> {
        self.wrong.lock().first().cloned().map_or(Ok(()), Err)
    }
}
