//! Values that belong to one process. A fork copies an engine's memory, but its threads, sockets,
//! queue pairs and locks stay the parent's. A child that read from them would take events that the
//! parent must count once (IC-3).

use std::{
    mem::ManuallyDrop,
    sync::{
        atomic::{AtomicU32, Ordering::Relaxed},
        Once,
    },
};

use crate::{EngineError, Result};

/// Number of forks between this process and the one that made the first [`ProcessLocal`]. A process
/// id is not enough: a child in its own PID namespace may have its parent's.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Relaxed);
}

/// A value that only the process which made it may use.
///
/// In a forked child [`get`](Self::get) fails, and a drop does nothing, because the value's
/// resources are the parent's. The check is one load: a fork handler updates the number.
#[derive(Debug)]
pub struct ProcessLocal<T> {
    value: ManuallyDrop<T>,
    forks: u32,
    /// Process id of the owner, for the error.
    owner: u32,
}

impl<T> ProcessLocal<T> {
    pub fn new(value: T) -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the handler only adds to an atomic, which is safe in a forked child.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        let owner = std::process::id();
        Self { value: ManuallyDrop::new(value), forks: FORKS.load(Relaxed), owner }
    }

    #[inline]
    fn is_local(&self) -> bool {
        FORKS.load(Relaxed) == self.forks
    }

    /// The value.
    ///
    /// # Errors
    /// [`EngineError::Forked`] in a child by fork.
    #[inline]
    pub fn get(&self) -> Result<&T> {
        match self.is_local() {
            true => Ok(&self.value),
            false => Err(self.forked()),
        }
    }

    /// The value, if this is its process.
    pub fn into_inner(self) -> Option<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used, and not dropped, after this.
        this.is_local().then(|| unsafe { ManuallyDrop::take(&mut this.value) })
    }

    #[cold]
    fn forked(&self) -> EngineError {
        EngineError::Forked { owner: self.owner, here: std::process::id() }
    }
}

impl<T> Drop for ProcessLocal<T> {
    fn drop(&mut self) {
        if self.is_local() {
            // SAFETY: the value is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
