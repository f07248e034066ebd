//! What is let go of without the interpreter.

use std::ops::Deref;

use pyo3::prelude::*;

/// Part of a Python object whose end waits for threads of its own, which may be waiting for the interpreter, with which
/// CPython ends objects.
pub struct Apart<T: Send>(Option<T>);

impl<T: Send> Apart<T> {
    pub fn new(part: T) -> Self {
        Self(Some(part))
    }
}

impl<T: Send> Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is there until the drop")
    }
}

impl<T: Send> Drop for Apart<T> {
    fn drop(&mut self) {
        let mut part = self.0.take();
        Python::try_attach(|py| py.detach(|| drop(part.take())));
    }
}
