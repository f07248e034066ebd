//! Messages from other threads to an executor.

use std::sync::{
    atomic::{
        AtomicBool,
        Ordering::{Acquire, Release},
    },
    Arc,
};

use fabric_engine::{locks::Mutex, EngineError, Notify};

use crate::{descriptor::ThreadDescriptor, Parker};

/// A change of a peer's membership.
#[derive(Debug)]
pub(crate) enum MembershipChange {
    /// The engine has lost a rank.
    Lost {
        rank: usize,
        incarnation: u32,
        error: EngineError,
    },
    Join {
        rank: usize,
        incarnation: u32,
        descriptor: Box<ThreadDescriptor>,
    },
    Mask {
        rank: usize,
    },
}

#[derive(Debug)]
pub(crate) struct Inbox {
    any: AtomicBool,
    /// Whether `changes` has entries.
    has_changes: AtomicBool,
    /// Values of tagged immediates, and how many writes carried each.
    tags: Mutex<Vec<(u32, u32)>>,
    changes: Mutex<Vec<MembershipChange>>,
    parker: Arc<Parker>,
}

impl Inbox {
    pub fn new(parker: Arc<Parker>) -> Self {
        Self {
            any: AtomicBool::new(false),
            has_changes: AtomicBool::new(false),
            tags: Mutex::default(),
            changes: Mutex::default(),
            parker,
        }
    }

    /// Called with the engine's lock held.
    pub fn tag(&self, value: u32, n: u32) {
        self.tags.lock().push((value, n));
        self.notify_thread();
    }

    pub fn push(&self, change: MembershipChange) {
        let mut all = self.changes.lock();
        all.push(change);
        // Set with the lock held, like the reset: the flag mirrors the list.
        self.has_changes.store(true, Release);
        drop(all);
        self.notify_thread();
    }

    fn notify_thread(&self) {
        self.any.store(true, Release);
        self.parker.wake();
    }

    /// Closes the inbox and the FIFOs: pushers fail from now on.
    pub fn close(&self) {
        self.parker.close();
    }

    pub fn is_empty(&self) -> bool {
        !self.any.load(Acquire)
    }

    /// Whether membership changed since the last [`Inbox::take`].
    #[inline]
    pub fn has_changes(&self) -> bool {
        self.has_changes.load(Acquire)
    }

    /// Takes everything that arrived since the last call; `tags` must be empty.
    #[inline]
    pub fn take(&self, tags: &mut Vec<(u32, u32)>) -> Vec<MembershipChange> {
        if self.is_empty() {
            return Vec::new();
        }
        // Reset before reading, so that later arrivals set the flag again.
        self.any.store(false, std::sync::atomic::Ordering::SeqCst);
        std::mem::swap(tags, &mut self.tags.lock());
        let mut changes = self.changes.lock();
        self.has_changes.store(false, Release);
        std::mem::take(&mut changes)
    }
}

/// Wakes the thread when a transfer that it waits for has ended.
impl Notify for Inbox {
    fn notify(&self, _key: u64) {
        self.notify_thread();
    }
}
