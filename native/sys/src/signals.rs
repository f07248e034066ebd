//! Keeps the process's signal handlers across library calls. libpsm2 and others replace the
//! handlers of SIGINT, SIGTERM and four more when they are loaded or first used, and then end the
//! process without running Python's `finally` and `atexit`.

use std::{
    ffi::c_void,
    mem::MaybeUninit,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::PerProcess;

/// Signals have numbers from 1 to this. Those that can't be caught or belong to libc are skipped.
const SIGNALS: i32 = 64;

/// The actions of all signals, by number.
type Actions = Vec<Option<libc::sigaction>>;

/// Number of running calls of [`keep_signals`].
#[derive(Default)]
struct RunningCalls {
    calls: u32,
    /// The actions before the first of them.
    before: Actions,
}

/// In a forked child the parent's calls don't run.
static RUNNING: PerProcess<Mutex<RunningCalls>> = PerProcess::empty();

fn running_calls() -> MutexGuard<'static, RunningCalls> {
    RUNNING.get_or_default().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `f`, which may load and initialise libraries, then restores all signal handlers and this
/// thread's signal mask. Calls may nest and run concurrently: each restores the handlers from
/// before the first of them. Handlers that another thread sets meanwhile by Python's
/// `signal.signal` stay.
pub fn keep_signals<T>(f: impl FnOnce() -> T) -> T {
    let mask = mask();
    {
        let mut running = running_calls();
        if running.calls == 0 {
            running.before = actions();
        }
        running.calls += 1;
    }
    let restore = RestoreSignals(mask);
    let result = f();
    drop(restore);
    result
}

/// Restores also if `f` panics.
struct RestoreSignals(libc::sigset_t);

impl Drop for RestoreSignals {
    fn drop(&mut self) {
        let mut running = running_calls();
        for ((signal, was), is) in (1..).zip(&running.before).zip(actions()) {
            let (Some(was), Some(is)) = (was, is) else { continue };
            if !is_same(was, &is) && !is_interpreters(is.sa_sigaction) {
                // SAFETY: `was` is the kernel's value for this signal.
                unsafe { libc::sigaction(signal, was, std::ptr::null_mut()) };
            }
        }
        running.calls = running.calls.saturating_sub(1);
        drop(running);
        // SAFETY: the mask is one that this thread had.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}

fn mask() -> libc::sigset_t {
    let mut mask = MaybeUninit::uninit();
    // SAFETY: the set is emptied first, so it is valid whatever the second call does.
    unsafe {
        libc::sigemptyset(mask.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
        mask.assume_init()
    }
}

fn actions() -> Actions {
    let action = |signal| {
        let mut action = MaybeUninit::zeroed();
        // SAFETY: only reads the action, which is written if the call succeeds.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
        // SAFETY: all its bytes are written.
        (asked == 0).then(|| unsafe { action.assume_init() })
    };
    (1..=SIGNALS).map(action).collect()
}

fn is_same(a: &libc::sigaction, b: &libc::sigaction) -> bool {
    let blocked = |action: &libc::sigaction, signal| {
        // SAFETY: reads a set that the kernel has filled.
        unsafe { libc::sigismember(&raw const action.sa_mask, signal) }
    };
    a.sa_sigaction == b.sa_sigaction
        && a.sa_flags == b.sa_flags
        && (1..=SIGNALS).all(|signal| blocked(a, signal) == blocked(b, signal))
}

/// Whether a handler is Python's trampoline for functions set by `signal.signal`.
fn is_interpreters(handler: libc::sighandler_t) -> bool {
    let base = |address: *const c_void| {
        let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: looks up the object that contains an address, which is not dereferenced.
        let known = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
        // SAFETY: all its bytes were written, at least with zeros.
        known.then(|| unsafe { found.assume_init() }.dli_fbase)
    };
    // SAFETY: the name is NUL-terminated.
    let python = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"PyOS_setsig".as_ptr()) };
    let handler = base(handler as *const c_void);
    !python.is_null() && handler.is_some() && handler == base(python)
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn theirs(_: i32) {}

    fn set(signal: i32, handler: libc::sighandler_t) {
        // SAFETY: a handler that does nothing.
        assert_ne!(unsafe { libc::signal(signal, handler) }, libc::SIG_ERR);
    }

    fn handlers() -> Vec<libc::sighandler_t> {
        actions().iter().flatten().map(|a| a.sa_sigaction).collect()
    }

    #[test]
    fn handlers_and_mask_are_as_they_were_however_calls_overlap() {
        let theirs = theirs as *const () as libc::sighandler_t;
        set(libc::SIGUSR1, libc::SIG_IGN);
        let (before, blocked) = (handlers(), |signal| {
            let mask = mask();
            // SAFETY: reads a set.
            unsafe { libc::sigismember(&raw const mask, signal) }
        });
        let answer = keep_signals(|| {
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGSEGV, libc::SIGPIPE, libc::SIGUSR1]
            {
                set(signal, theirs);
            }
            // SAFETY: blocks a signal in this thread.
            unsafe {
                let mut more = mask();
                libc::sigaddset(&raw mut more, libc::SIGUSR2);
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const more, std::ptr::null_mut());
            }
            let inner = std::thread::spawn(|| keep_signals(|| set(libc::SIGHUP, libc::SIG_IGN)));
            inner.join().unwrap();
            set(libc::SIGHUP, libc::SIG_IGN);
            7
        });
        assert_eq!((answer, handlers(), blocked(libc::SIGUSR2)), (7, before.clone(), 0));
        let panicked = std::panic::catch_unwind(|| {
            keep_signals(|| {
                set(libc::SIGTERM, theirs);
                panic!("as a library may");
            })
        });
        assert!(panicked.is_err());
        assert_eq!(handlers(), before);
        // Between calls, handlers belong to the application.
        set(libc::SIGTERM, theirs);
        assert_ne!(handlers(), before);
        set(libc::SIGTERM, libc::SIG_DFL);
    }
}
