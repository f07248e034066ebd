//! Atomics, a mutex and a queue that loom can replace, for the lock-free protocols it checks.

#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(not(loom))]
pub use std::sync::atomic;

/// Orders an atomic write before a later read of another thread's write, in protocols where at
/// least one of two sides must see the other. The write before it is a read-modify-write or a
/// SeqCst store.
#[inline(always)]
pub(crate) fn total_order() {
    // On x86 such a write is a full barrier already.
    #[cfg(all(target_arch = "x86_64", not(loom)))]
    atomic::compiler_fence(atomic::Ordering::SeqCst);
    // loom takes SeqCst accesses for AcqRel ones, and knows a total order of fences only.
    #[cfg(any(not(target_arch = "x86_64"), loom))]
    atomic::fence(atomic::Ordering::SeqCst);
}

#[cfg(not(loom))]
pub(crate) use crate::locks::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use crossbeam_queue::SegQueue as Queue;

#[cfg(loom)]
pub(crate) use checked::{Mutex, MutexGuard, Queue};

#[cfg(loom)]
mod checked {
    use std::collections::VecDeque;

    use std::ops::{Deref, DerefMut};

    use loom::{
        cell::UnsafeCell,
        sync::atomic::{AtomicBool, Ordering::SeqCst},
    };

    /// A mutex with the interface of `crate::locks`. Not loom's own: that one blocks threads that
    /// are about to `try_lock`, so that a failed attempt is hardly ever explored.
    #[derive(Debug)]
    pub struct Mutex<T> {
        held: AtomicBool,
        value: UnsafeCell<T>,
    }

    // SAFETY: the value is only touched by the thread that holds the flag.
    unsafe impl<T: Send> Send for Mutex<T> {}
    // SAFETY: as above.
    unsafe impl<T: Send> Sync for Mutex<T> {}

    #[derive(Debug)]
    pub struct MutexGuard<'a, T>(&'a Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            // Not a swap: in loom a failed one may hide a release that happened meanwhile.
            let free = self.held.compare_exchange(false, true, SeqCst, SeqCst).is_ok();
            free.then(|| MutexGuard(self))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            loop {
                match self.try_lock() {
                    Some(guard) => return guard,
                    None => loom::thread::yield_now(),
                }
            }
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Self {
            Self::new(T::default())
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            // SAFETY: this guard holds the flag.
            self.0.value.with(|v| unsafe { &*v })
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            // SAFETY: as above.
            self.0.value.with_mut(|v| unsafe { &mut *v })
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            self.0.held.store(false, SeqCst);
        }
    }

    /// A queue with the promises of crossbeam's: linearizable, any number of threads.
    #[derive(Debug)]
    pub struct Queue<T>(Mutex<VecDeque<T>>);

    impl<T> Queue<T> {
        pub fn new() -> Self {
            Self(Mutex::default())
        }

        pub fn push(&self, value: T) {
            self.0.lock().push_back(value);
        }

        pub fn pop(&self) -> Option<T> {
            self.0.lock().pop_front()
        }

        pub fn is_empty(&self) -> bool {
            self.0.lock().is_empty()
        }
    }
}
