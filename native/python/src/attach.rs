//! Threads of the engine that call into Python again and again.

use std::{
    ffi::c_void,
    sync::OnceLock,
    time::{Duration, Instant},
};

use pyo3::{ffi, prelude::*};

/// How long a thread looks for the interpreter to be free before it sleeps until another thread
/// wakes it. A thread that stores to a word or submits often releases it soon after, sooner than a
/// wake-up takes.
const LOOK: Duration = Duration::from_micros(20);

thread_local! {
    static KEPT: Option<Kept> = Kept::new();
}

/// Runs `f` with the interpreter; `None` if the interpreter is gone.
///
/// CPython makes a thread state, and maps memory for its frames, each time that a thread attaches
/// which has none, and unmaps it again: several microseconds before a callback begins. A thread
/// that comes here keeps its first until it ends.
pub fn attached<R>(f: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    if KEPT.with(Option::is_some) {
        let begun = Instant::now();
        while is_taken() && begun.elapsed() < LOOK {
            std::hint::spin_loop();
        }
    }
    Python::try_attach(f)
}

/// Whether some thread has the interpreter, as far as CPython tells those that don't have it: up to
/// 3.11 it does, later ones tell of the asking thread alone.
fn is_taken() -> bool {
    type Current = unsafe extern "C" fn() -> *mut c_void;
    static CURRENT: OnceLock<Option<Current>> = OnceLock::new();
    let current = CURRENT.get_or_init(|| {
        // SAFETY: the name ends with a zero; what is found is a function of CPython's of this type.
        unsafe {
            let found = libc::dlsym(libc::RTLD_DEFAULT, c"_PyThreadState_UncheckedGet".as_ptr());
            std::mem::transmute::<*mut c_void, Option<Current>>(found)
        }
    });
    // SAFETY: reads a pointer, atomically; any thread may call it at any time; the pointer is not
    // dereferenced.
    current.is_some_and(|current| unsafe { !current().is_null() })
}

/// This thread's state in the interpreter, which stays until this is dropped.
struct Kept(ffi::PyGILState_STATE);

impl Kept {
    /// `None` on a thread of Python's own, which has a state anyway, and without an interpreter.
    fn new() -> Option<Self> {
        // SAFETY: asks about this thread, and needs nothing.
        if unsafe { !ffi::PyGILState_GetThisThreadState().is_null() } {
            return None;
        }
        // SAFETY: attached; counts one more user of the thread's state, which `drop` takes back on
        // the same thread.
        Python::try_attach(|_| Self(unsafe { ffi::PyGILState_Ensure() }))
    }
}

impl Drop for Kept {
    /// As the thread ends. An interpreter that has ended before has taken the state with it.
    fn drop(&mut self) {
        // SAFETY: attached, as `new` was when it took the state, so that letting go of it leaves
        // the thread attached.
        Python::try_attach(|_| unsafe { ffi::PyGILState_Release(self.0) });
    }
}
