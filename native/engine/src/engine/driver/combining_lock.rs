//! A lock that no thread waits for on a fast path. A thread that finds it taken leaves a command in
//! the inbox. The holder runs the command before, or right after, it unlocks.

use crate::sync::{
    atomic::{AtomicU32, Ordering::SeqCst},
    total_order, Mutex, MutexGuard, Queue,
};

/// Execution of a command by the holder of the lock.
pub(crate) trait CarryOut<T, C> {
    fn carry_out(&self, state: &mut T, command: C);
}

#[derive(Debug)]
pub(crate) struct CombiningLock<T, C> {
    state: Mutex<T>,
    inbox: Queue<C>,
    /// Threads in `lock`. One that unlocks and would lock again at once leaves them their turn.
    waiting: AtomicU32,
}

/// The held lock. Dropping it empties the inbox.
pub(crate) struct CombiningGuard<'a, T, C, D: CarryOut<T, C>> {
    state: Option<MutexGuard<'a, T>>,
    lock: &'a CombiningLock<T, C>,
    duty: D,
}

impl<T, C> CombiningLock<T, C> {
    pub fn new(state: T) -> Self {
        Self { state: Mutex::new(state), inbox: Queue::new(), waiting: AtomicU32::new(0) }
    }

    pub fn lock<D: CarryOut<T, C>>(&self, duty: D) -> CombiningGuard<'_, T, C, D> {
        let state = self.state.try_lock().unwrap_or_else(|| {
            self.waiting.fetch_add(1, SeqCst);
            let state = self.state.lock();
            self.waiting.fetch_sub(1, SeqCst);
            state
        });
        CombiningGuard { state: Some(state), lock: self, duty }
    }

    /// Fails also while a thread waits in [`lock`](Self::lock): that one holds the lock next, and does
    /// what a holder does.
    #[inline]
    pub fn try_lock<D: CarryOut<T, C>>(&self, duty: D) -> Option<CombiningGuard<'_, T, C, D>> {
        if self.waiting.load(SeqCst) > 0 {
            return None;
        }
        let state = self.state.try_lock()?;
        Some(CombiningGuard { state: Some(state), lock: self, duty })
    }

    /// Runs `command`: on this thread if the lock is free, else on its holder.
    pub fn post<D: CarryOut<T, C>>(&self, duty: D, command: C) {
        self.inbox.push(command);
        total_order();
        // If this fails, the holder runs the command: it checks the inbox again after it unlocks.
        drop(self.try_lock(duty));
    }
}

impl<T, C, D: CarryOut<T, C>> std::ops::Deref for CombiningGuard<'_, T, C, D> {
    type Target = T;

    fn deref(&self) -> &T {
        self.state.as_ref().expect("held until dropped")
    }
}

impl<T, C, D: CarryOut<T, C>> std::ops::DerefMut for CombiningGuard<'_, T, C, D> {
    fn deref_mut(&mut self) -> &mut T {
        self.state.as_mut().expect("held until dropped")
    }
}

impl<T, C, D: CarryOut<T, C>> CombiningGuard<'_, T, C, D> {
    #[cold]
    fn run_commands(&mut self) {
        let Some(state) = self.state.as_mut() else { return };
        while let Some(command) = self.lock.inbox.pop() {
            self.duty.carry_out(state, command);
        }
    }
}

impl<T, C, D: CarryOut<T, C>> Drop for CombiningGuard<'_, T, C, D> {
    #[inline]
    fn drop(&mut self) {
        loop {
            // Looked at first: a `pop` of an empty queue costs a fence.
            if !self.lock.inbox.is_empty() {
                self.run_commands();
            }
            drop(self.state.take());
            total_order();
            // Since the last check another thread may have left a command and failed to get the
            // lock.
            if self.lock.inbox.is_empty() {
                return;
            }
            self.state = self.lock.state.try_lock();
            if self.state.is_none() {
                return;
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{
        sync::{
            atomic::{AtomicU32, Ordering::SeqCst},
            Arc,
        },
        thread,
    };

    use super::*;

    struct Add;

    impl CarryOut<u32, u32> for Add {
        fn carry_out(&self, state: &mut u32, command: u32) {
            *state += command;
        }
    }

    #[test]
    fn no_command_is_left_behind() {
        // Two preemptions suffice to lose a command; all interleavings would take minutes.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let lock = Arc::new(CombiningLock::new(0));
            let theirs = Arc::clone(&lock);
            let other = thread::spawn(move || theirs.post(Add, 10));
            lock.post(Add, 1);
            other.join().unwrap();
            // No thread takes the lock any more, so every command must have run.
            assert!(lock.inbox.is_empty());
            assert_eq!(*lock.state.lock(), 11);
        });
    }

    #[test]
    fn a_thread_that_waits_runs_what_is_left_behind_meanwhile() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let lock = Arc::new(CombiningLock::new(0));
            let theirs = Arc::clone(&lock);
            let other = thread::spawn(move || drop(theirs.lock(Add)));
            let held = lock.lock(Add);
            drop(held);
            lock.post(Add, 1);
            other.join().unwrap();
            assert!(lock.inbox.is_empty());
            assert_eq!(*lock.state.lock(), 1);
        });
    }

    #[test]
    fn a_command_sees_what_its_sender_did_before() {
        struct See(Arc<AtomicU32>);

        impl CarryOut<u32, ()> for See {
            fn carry_out(&self, state: &mut u32, (): ()) {
                *state = self.0.load(SeqCst);
            }
        }

        loom::model(|| {
            let lock = Arc::new(CombiningLock::new(0));
            let word = Arc::new(AtomicU32::new(0));
            let (b, w) = (Arc::clone(&lock), Arc::clone(&word));
            let sender = thread::spawn(move || {
                w.store(7, SeqCst);
                b.post(See(w), ());
            });
            drop(lock.try_lock(See(word)));
            sender.join().unwrap();
            assert_eq!(*lock.state.lock(), 7);
        });
    }
}
