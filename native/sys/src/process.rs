//! Forks of this process, and statics that each process makes for itself.

use std::sync::{
    atomic::{
        AtomicPtr, AtomicU32,
        Ordering::{Relaxed, SeqCst},
    },
    Once,
};

/// Number of forks between this process and the one that called [`count_forks`] first. A process id
/// is not enough: a child in its own PID namespace may have its parent's.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    FORKS.fetch_add(1, Relaxed);
}

/// Counts forks from now on, and returns their number.
pub fn count_forks() -> u32 {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only adds to an atomic, which is safe in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    forks()
}

/// Their number until now: one load.
#[inline]
pub fn forks() -> u32 {
    FORKS.load(Relaxed)
}

/// A static with a value for each process.
///
/// A forked child makes its own, because another thread may have held a lock in its parent's at the
/// fork, for good. The parent's is leaked there. A child by `clone` or `_Fork`, which run no fork
/// handlers, is not told from its parent.
#[derive(Debug)]
pub struct PerProcess<T> {
    current: AtomicPtr<OfProcess<T>>,
}

#[derive(Debug)]
struct OfProcess<T> {
    forks: u32,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Without a value in any process.
    pub const fn empty() -> Self {
        Self { current: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// This process's value, if it has been made.
    pub fn get(&'static self) -> Option<&'static T> {
        // SAFETY: null, or a value that is never freed.
        let current = unsafe { self.current.load(SeqCst).as_ref() };
        current.filter(|c| c.forks == forks()).map(|c| &c.value)
    }

    /// This process's value; `make` makes it, perhaps in several threads at once, all but one of
    /// whose values are dropped. `None` if `make` returns none.
    pub fn get_or_try_init(&'static self, make: impl FnOnce() -> Option<T>) -> Option<&'static T> {
        let forks = count_forks();
        let before = self.current.load(SeqCst);
        if let Some(value) = self.get() {
            return Some(value);
        }
        let Some(value) = make() else { return self.get() };
        let new = Box::into_raw(Box::new(OfProcess { forks, value }));
        if self.current.compare_exchange(before, new, SeqCst, SeqCst).is_err() {
            // SAFETY: not handed out.
            drop(unsafe { Box::from_raw(new) });
        }
        self.get()
    }
}

impl<T: Send + Sync + Default> PerProcess<T> {
    /// This process's value, by default an empty one.
    pub fn get_or_default(&'static self) -> &'static T {
        self.get_or_try_init(|| Some(T::default())).expect("made above, or by another thread")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_child_has_a_value_of_its_own() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::empty();
        let held = VALUE.get_or_default().lock().unwrap();
        // SAFETY: the child only uses an atomic and memory, and ends itself.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let free = VALUE.get().is_none()
                && VALUE.get_or_default().try_lock().is_ok_and(|value| *value == 0);
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(i32::from(!free)) };
        }
        let mut status = 0;
        // SAFETY: waits for a child of this process.
        let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((ended, status), (child, 0));
        assert!(std::ptr::eq(VALUE.get_or_default(), VALUE.get().unwrap()));
        drop(held);
    }

    #[test]
    fn threads_agree_on_one_value() {
        static VALUE: PerProcess<u32> = PerProcess::empty();
        let at = |n| VALUE.get_or_try_init(|| Some(n)).map(std::ptr::from_ref).map(|p| p as usize);
        let found: Vec<_> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..8).map(|n| s.spawn(move || at(n))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(found.iter().all(|f| f.is_some() && *f == found[0]));
    }
}
