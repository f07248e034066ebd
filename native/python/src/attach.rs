//! Attaches threads of the engine that call into Python repeatedly.

use std::{
    ffi::c_void,
    sync::OnceLock,
    time::{Duration, Instant},
};

use pyo3::{ffi, prelude::*};

/// Time that a thread spins for the GIL before it sleeps. A thread that stores to a word or submits
/// often releases the GIL sooner than a wake-up takes.
const SPIN_TIME: Duration = Duration::from_micros(20);

thread_local! {
    static THREAD_STATE: Option<ThreadState> = ThreadState::new();
}

/// Runs `f` with the GIL; `None` if the interpreter has ended.
///
/// When a thread without a thread state attaches, CPython makes one and maps memory for its frames,
/// which takes several microseconds. A thread that calls this keeps its first state until it ends.
pub fn attached<R>(f: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    if THREAD_STATE.with(Option::is_some) {
        let begun = Instant::now();
        while is_taken() && begun.elapsed() < SPIN_TIME {
            std::hint::spin_loop();
        }
    }
    Python::try_attach(f)
}

/// Whether some thread holds the GIL. CPython up to 3.11 tells this to any thread; later versions
/// report the calling thread only.
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

/// This thread's state in the interpreter, kept until this is dropped.
struct ThreadState(ffi::PyGILState_STATE);

impl ThreadState {
    /// `None` on a thread of Python's, which has a state already, and without an interpreter.
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

impl Drop for ThreadState {
    /// Runs when the thread ends. An interpreter that ended earlier has freed the state.
    fn drop(&mut self) {
        // SAFETY: attached, as `new` was when it took the state, so that letting go of it leaves
        // the thread attached.
        Python::try_attach(|_| unsafe { ffi::PyGILState_Release(self.0) });
    }
}
