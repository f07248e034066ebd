//! Python objects that the engine keeps alive, and how they are let go.

use std::sync::{mpsc, OnceLock};

use pyo3::prelude::*;

/// The owner of registered memory.
///
/// The engine drops it on threads of its own, with locks held that others may be waiting for with
/// the interpreter's: so another thread lets it go. Left to itself, PyO3 would keep it until
/// somebody calls into this module again.
pub struct Keep(Option<Py<PyAny>>);

impl Keep {
    pub fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        match releaser() {
            // A child by fork has no such thread: there it stays, as all of the engine does.
            Some(releaser) => drop(releaser.send(object)),
            None => drop(object),
        }
    }
}

fn releaser() -> Option<&'static mpsc::Sender<Py<PyAny>>> {
    static RELEASER: OnceLock<Option<mpsc::Sender<Py<PyAny>>>> = OnceLock::new();
    let start = || {
        let (sender, objects) = mpsc::channel::<Py<PyAny>>();
        let release = move || {
            for object in objects {
                // Fails when the interpreter ends, and everything with it.
                let mut object = Some(object);
                Python::try_attach(|_| drop(object.take()));
                std::mem::forget(object);
            }
        };
        let thread = std::thread::Builder::new().name("fabric-release".into()).spawn(release);
        thread.is_ok().then_some(sender)
    };
    RELEASER.get_or_init(start).as_ref()
}
