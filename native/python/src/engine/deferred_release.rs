//! Releases Python objects that the engine keeps alive, on a thread of its own.

use std::{
    mem,
    ops::Deref,
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    },
    time::Duration,
};

use fabric_engine::PerProcess;
use pyo3::prelude::*;

/// Longest wait of the interpreter's exit for an object that is being released.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Python objects that the engine owns, released by another thread when this is dropped.
///
/// The engine drops it under locks that a holder of the GIL may wait for. If the dropping thread has
/// the GIL, the end of an object may run Python code, which lets another thread have it; if not,
/// PyO3 alone would keep the objects until the next call into this module.
pub struct DeferredRelease<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> DeferredRelease<T> {
    pub fn new(objects: T) -> Self {
        Self(Some(objects))
    }

    /// Gives the objects to a caller that has the GIL and no lock.
    pub fn into_inner(mut self, _: Python<'_>) -> T {
        self.0.take().expect("present until the drop")
    }
}

impl<T: Send + 'static> Deref for DeferredRelease<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("present until the drop")
    }
}

impl<T: Send + 'static> Drop for DeferredRelease<T> {
    fn drop(&mut self) {
        let Some(objects) = self.0.take() else { return };
        if ENDED.load(SeqCst) {
            return mem::forget(objects);
        }
        let Some(releaser) = releaser() else { return drop(objects) };
        // Fails once the interpreter ends.
        releaser.send(ReleaseMessage::Release(Box::new(objects))).unwrap_or_else(mem::forget);
    }
}

enum ReleaseMessage {
    Release(Box<dyn Send>),
    /// No message follows; the thread answers.
    End(mpsc::Sender<()>),
}

/// To the thread that releases; a forked child starts its own.
static RELEASER: PerProcess<mpsc::Sender<ReleaseMessage>> = PerProcess::empty();
/// The interpreter ends: objects are leaked from now on.
static ENDED: AtomicBool = AtomicBool::new(false);

/// The releasing thread of this process; `None` if it can't be started.
fn releaser() -> Option<&'static mpsc::Sender<ReleaseMessage>> {
    RELEASER.get_or_try_init(|| {
        let (messages, received) = mpsc::channel();
        // Ends with the sender.
        let thread = std::thread::Builder::new().name("fabric-release".into());
        thread.spawn(move || release(received)).ok().map(|_| messages)
    })
}

/// Stays attached to the interpreter. An attachment takes a lock that a child which is forked
/// meanwhile would find held for good, in Python 3.11 (`_PyEval_ReInitThreads`).
fn release(mut received: mpsc::Receiver<ReleaseMessage>) {
    // Fails for a thread that is one too many.
    let Ok(first) = received.recv() else { return };
    let mut next = Some(first);
    // Fails when the interpreter ends, and everything with it.
    let answer = Python::try_attach(|py| loop {
        match next.take()? {
            ReleaseMessage::Release(objects) => drop(objects),
            ReleaseMessage::End(answer) => break Some(answer),
        }
        let message;
        (message, received) = py.detach(move || (received.recv(), received));
        next = message.ok();
    });
    mem::forget(next);
    if let Some(answer) = answer.flatten() {
        let _ = answer.send(());
    }
}

/// Waits until the thread has released all objects. If the interpreter ended in the middle of a
/// release, the process would abort.
#[pyfunction]
fn end_releases(py: Python<'_>) {
    ENDED.store(true, SeqCst);
    // If there is none, one without a thread takes its place.
    let Some(releaser) = RELEASER.get_or_try_init(|| Some(mpsc::channel().0)) else { return };
    let (answer, over) = mpsc::channel();
    if releaser.send(ReleaseMessage::End(answer)).is_ok() {
        let _ = py.detach(move || over.recv_timeout(TIMEOUT));
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let end = wrap_pyfunction!(end_releases, module)?;
    module.py().import("atexit")?.call_method1("register", (end,)).map(drop)
}
