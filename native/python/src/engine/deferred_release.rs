//! Releases Python objects that the engine keeps alive, on a thread of its own.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc, OnceLock,
    },
    time::Duration,
};

use pyo3::prelude::*;

/// Longest wait of the interpreter's exit for an object that is being released.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The owner of registered memory, released by another thread when this is dropped.
///
/// The engine drops it on its own threads, under locks that a holder of the GIL may wait for. PyO3
/// alone would keep the object until the next call into this module.
pub struct DeferredRelease(Option<Py<PyAny>>);

impl DeferredRelease {
    pub fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

impl Drop for DeferredRelease {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        if ENDED.load(SeqCst) {
            return std::mem::forget(object);
        }
        match releaser() {
            // A forked child has no such thread and leaks the object, as all of the engine.
            Some(releaser) => drop(releaser.messages.send(ReleaseMessage::Release(object))),
            None => drop(object),
        }
    }
}

enum ReleaseMessage {
    Release(Py<PyAny>),
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
                    ReleaseMessage::Release(object) => {
                        // Fails when the interpreter ends, and everything with it.
                        let mut object = Some(object);
                        Python::try_attach(|_| drop(object.take()));
                        std::mem::forget(object);
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
