//! Values that belong to one process. A fork copies an engine's memory, but its threads, sockets,
//! queue pairs and locks stay the parent's. A child that read from them would take events that the
//! parent must count once (IC-3).

use std::mem::ManuallyDrop;

pub use fabric_sys::PerProcess;
use fabric_sys::{count_forks, forks};

use crate::{EngineError, Result};

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
        let owner = std::process::id();
        Self { value: ManuallyDrop::new(value), forks: count_forks(), owner }
    }

    #[inline]
    fn is_local(&self) -> bool {
        forks() == self.forks
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
