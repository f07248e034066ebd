//! What is let go of without the interpreter, and by its own process alone.

use std::ops::Deref;

use fabric_engine::ProcessLocal;
use pyo3::prelude::*;

/// Part of a Python object whose end waits for threads of its own, which may be waiting for the
/// interpreter, with which CPython ends objects. A child by fork, which has none of these threads,
/// forgets it.
pub struct Apart<T: Send> {
    part: Option<T>,
    process: ProcessLocal<()>,
}

impl<T: Send> Apart<T> {
    pub fn new(part: T) -> Self {
        Self { part: Some(part), process: ProcessLocal::new(()) }
    }
}

impl<T: Send> Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.part.as_ref().expect("it is there until the drop")
    }
}

impl<T: Send> Drop for Apart<T> {
    fn drop(&mut self) {
        let mut part = self.part.take();
        if self.process.get().is_err() {
            return std::mem::forget(part);
        }
        Python::try_attach(|py| py.detach(|| drop(part.take())));
    }
}
