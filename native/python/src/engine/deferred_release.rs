//! Releases Python objects that the engine keeps alive, on a thread of its own.

use std::{
    ops::Deref,
    sync::{
        atomic::{AtomicBool, AtomicPtr, Ordering::SeqCst},
        mpsc,
    },
    time::Duration,
};

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
            return std::mem::forget(objects);
        }
        match Releaser::get() {
            Some(releaser) => {
                drop(releaser.messages.send(ReleaseMessage::Release(Box::new(objects))))
            }
            None => drop(objects),
        }
    }
}

enum ReleaseMessage {
    Release(Box<dyn Send>),
    /// No message follows; the thread answers.
    End(mpsc::Sender<()>),
}

struct Releaser {
    messages: mpsc::Sender<ReleaseMessage>,
    process: u32,
}

/// The releaser of this process, or of the one that forked it.
static RELEASER: AtomicPtr<Releaser> = AtomicPtr::new(std::ptr::null_mut());
/// The interpreter ends: objects are leaked from now on.
static ENDED: AtomicBool = AtomicBool::new(false);

impl Releaser {
    /// The one of this process, if its thread has been started.
    fn current() -> Option<&'static Self> {
        // SAFETY: null, or a releaser that is never freed.
        let releaser = unsafe { RELEASER.load(SeqCst).as_ref() };
        releaser.filter(|r| r.process == std::process::id())
    }

    /// The one of this process; a forked child starts its own. Takes no lock, which another thread
    /// might have held at the fork.
    fn get() -> Option<&'static Self> {
        if let Some(current) = Self::current() {
            return Some(current);
        }
        let (messages, received) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("fabric-release".into())
            .spawn(move || release(received));
        thread.ok()?;
        let before = RELEASER.load(SeqCst);
        let new = Box::into_raw(Box::new(Self { messages, process: std::process::id() }));
        // SAFETY: null, or a releaser that is never freed.
        let theirs = unsafe { before.as_ref() };
        if theirs.is_some_and(|r| r.process == std::process::id())
            || RELEASER.compare_exchange(before, new, SeqCst, SeqCst).is_err()
        {
            // SAFETY: not handed out. Its thread ends with the sender.
            drop(unsafe { Box::from_raw(new) });
        }
        Self::current()
    }
}

fn release(received: mpsc::Receiver<ReleaseMessage>) {
    for message in received {
        match message {
            ReleaseMessage::Release(objects) => {
                // Fails when the interpreter ends, and everything with it.
                let mut objects = Some(objects);
                Python::try_attach(|_| drop(objects.take()));
                std::mem::forget(objects);
            }
            ReleaseMessage::End(answer) => {
                let _ = answer.send(());
                return;
            }
        }
    }
}

/// Waits until the thread has released all objects. If the interpreter ended in the middle of a
/// release, the process would abort.
#[pyfunction]
fn end_releases(py: Python<'_>) {
    ENDED.store(true, SeqCst);
    let Some(releaser) = Releaser::current() else { return };
    let (answer, over) = mpsc::channel();
    if releaser.messages.send(ReleaseMessage::End(answer)).is_ok() {
        let _ = py.detach(move || over.recv_timeout(TIMEOUT));
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let end = wrap_pyfunction!(end_releases, module)?;
    module.py().import("atexit")?.call_method1("register", (end,)).map(drop)
}
