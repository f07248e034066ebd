//! Mutexes and condition variables of the standard library, without poisoning.
//!
//! Their state is in themselves alone, so that a forked child's own engine can use them.
//! parking_lot keeps all waiters of a process in one table, as links between thread-local values. In
//! a child the table still holds the parent's threads; new threads get the memory of their values,
//! the links break, and wakeups are lost.

use std::{
    ops::{Deref, DerefMut},
    sync::{self, PoisonError, WaitTimeoutResult},
    time::{Duration, Instant},
};

/// A mutual exclusion that stays usable after a panic of its holder.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(sync::Mutex<T>);

/// The held mutex. `None` only while it is unlocked for a wait or a call.
#[derive(Debug)]
pub struct MutexGuard<'a, T: ?Sized> {
    mutex: &'a Mutex<T>,
    held: Option<sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: self, held: Some(self.hold()) }
    }

    #[inline]
    fn hold(&self) -> sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let held = match self.0.try_lock() {
            Ok(held) => held,
            Err(sync::TryLockError::Poisoned(error)) => error.into_inner(),
            Err(sync::TryLockError::WouldBlock) => return None,
        };
        Some(MutexGuard { mutex: self, held: Some(held) })
    }
}

impl<T: ?Sized> MutexGuard<'_, T> {
    /// Calls `f` with the mutex unlocked.
    pub fn unlocked<U>(guard: &mut Self, f: impl FnOnce() -> U) -> U {
        /// Locks again, also after a panic.
        struct Relock<'g, 'a, T: ?Sized>(&'g mut MutexGuard<'a, T>);

        impl<T: ?Sized> Drop for Relock<'_, '_, T> {
            fn drop(&mut self) {
                self.0.held = Some(self.0.mutex.hold());
            }
        }

        let relock = Relock(guard);
        relock.0.held = None;
        f()
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.held.as_ref().expect("locked but for a wait or a call")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect("locked but for a wait or a call")
    }
}

/// A condition variable of [`Mutex`]es.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    pub const fn new() -> Self {
        Self(sync::Condvar::new())
    }

    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.held.take().expect("locked but for a wait or a call");
        guard.held = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
    }

    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, limit: Duration) -> WaitTimeoutResult {
        let held = guard.held.take().expect("locked but for a wait or a call");
        let waited = self.0.wait_timeout(held, limit);
        let (held, result) = waited.unwrap_or_else(PoisonError::into_inner);
        guard.held = Some(held);
        result
    }

    pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, end: Instant) -> WaitTimeoutResult {
        self.wait_for(guard, end.saturating_duration_since(Instant::now()))
    }
}
