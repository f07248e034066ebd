//! Releases Python objects that the engine keeps alive, on a thread of its own.

use std::{
    ops::Deref,
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc, OnceLock,
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
        match releaser() {
            // A forked child has no such thread and leaks the objects, as all of the engine.
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

static RELEASER: OnceLock<Option<Releaser>> = OnceLock::new();
/// The interpreter ends: objects are leaked from now on.
static ENDED: AtomicBool = AtomicBool::new(false);

fn releaser() -> Option<&'static Releaser> {
    let start = || {
        let (messages, received) = mpsc::channel();
        let release = move || {
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
        };
        let thread = std::thread::Builder::new().name("fabric-release".into()).spawn(release);
        thread.is_ok().then(|| Releaser { messages, process: std::process::id() })
    };
    RELEASER.get_or_init(start).as_ref()
}

/// Waits until the thread has released all objects. If the interpreter ended in the middle of a
/// release, the process would abort.
#[pyfunction]
fn end_releases(py: Python<'_>) {
    ENDED.store(true, SeqCst);
    let Some(Some(releaser)) = RELEASER.get() else { return };
    if releaser.process != std::process::id() {
        return;
    }
    let (answer, over) = mpsc::channel();
    if releaser.messages.send(ReleaseMessage::End(answer)).is_ok() {
        let _ = py.detach(move || over.recv_timeout(TIMEOUT));
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let end = wrap_pyfunction!(end_releases, module)?;
    module.py().import("atexit")?.call_method1("register", (end,)).map(drop)
}
