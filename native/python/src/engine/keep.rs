//! Python objects that the engine keeps alive, and how they are let go.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc, OnceLock,
    },
    time::Duration,
};

use pyo3::prelude::*;

/// How long the end of the interpreter waits for an object that is being let go.
const PATIENCE: Duration = Duration::from_secs(5);

/// The owner of registered memory.
///
/// The engine drops it on its own threads while it holds locks that a holder of the interpreter's
/// lock may wait for, so another thread releases it. PyO3 alone would keep it until the next call
/// into this module.
pub struct Keep(Option<Py<PyAny>>);

impl Keep {
    pub fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        if ENDED.load(SeqCst) {
            return std::mem::forget(object);
        }
        match releaser() {
            // A child by fork has no such thread: there it stays, as all of the engine does.
            Some(releaser) => drop(releaser.words.send(Word::LetGo(object))),
            None => drop(object),
        }
    }
}

enum Word {
    LetGo(Py<PyAny>),
    /// Nothing follows; to be answered.
    End(mpsc::Sender<()>),
}

struct Releaser {
    words: mpsc::Sender<Word>,
    process: u32,
}

static RELEASER: OnceLock<Option<Releaser>> = OnceLock::new();
/// The interpreter ends: what is kept stays.
static ENDED: AtomicBool = AtomicBool::new(false);

fn releaser() -> Option<&'static Releaser> {
    let start = || {
        let (words, heard) = mpsc::channel();
        let release = move || {
            for word in heard {
                match word {
                    Word::LetGo(object) => {
                        // Fails when the interpreter ends, and everything with it.
                        let mut object = Some(object);
                        Python::try_attach(|_| drop(object.take()));
                        std::mem::forget(object);
                    }
                    Word::End(answer) => {
                        let _ = answer.send(());
                        return;
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("fabric-release".into()).spawn(release);
        thread.is_ok().then(|| Releaser { words, process: std::process::id() })
    };
    RELEASER.get_or_init(start).as_ref()
}

/// Before the interpreter ends, the thread has let go of what it was given: in the middle of it,
/// the end would take the thread away from under the object's own code, which aborts the process.
#[pyfunction]
fn end_releases(py: Python<'_>) {
    ENDED.store(true, SeqCst);
    let Some(Some(releaser)) = RELEASER.get() else { return };
    if releaser.process != std::process::id() {
        return;
    }
    let (answer, over) = mpsc::channel();
    if releaser.words.send(Word::End(answer)).is_ok() {
        let _ = py.detach(move || over.recv_timeout(PATIENCE));
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let end = wrap_pyfunction!(end_releases, module)?;
    module.py().import("atexit")?.call_method1("register", (end,)).map(drop)
}
