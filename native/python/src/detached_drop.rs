//! A value whose drop must not hold the GIL.

use std::ops::Deref;

use fabric_engine::ProcessLocal;
use pyo3::prelude::*;

/// A part of a Python object whose drop waits for threads that may wait for the GIL. CPython ends
/// objects with the GIL held, so the GIL is released for this drop. A forked child has none of
/// these threads and leaks the part.
pub struct DetachedDrop<T: Send> {
    part: Option<T>,
    process: ProcessLocal<()>,
}

impl<T: Send> DetachedDrop<T> {
    pub fn new(part: T) -> Self {
        Self { part: Some(part), process: ProcessLocal::new(()) }
    }
}

impl<T: Send> Deref for DetachedDrop<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.part.as_ref().expect("present until the drop")
    }
}

impl<T: Send> Drop for DetachedDrop<T> {
    fn drop(&mut self) {
        let mut part = self.part.take();
        if self.process.get().is_err() {
            return std::mem::forget(part);
        }
        Python::try_attach(|py| py.detach(|| drop(part.take())));
    }
}
