//! Which callers poll while they wait, and whether one sleeps until an event.

use std::sync::Arc;

use super::parker::Sleeper;
use crate::sync::{
    atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    total_order,
};

#[derive(Debug)]
pub(super) struct Waiters {
    pollers: AtomicU32,
    /// A caller sleeps until an event of the domains. The worker sleeps until kicks and timers.
    caller_sleeps: AtomicBool,
    /// Events wake the worker until that caller begins to sleep anew: the worker found what an event
    /// should have had the caller find, or others depend on events since.
    worker_has_events: AtomicBool,
    /// What else in this process depends on events. A caller that gets no core must hold up no more
    /// than its own wait.
    dependents: Arc<AtomicU32>,
}

/// A caller that sleeps on its handle, or an observer of results. While it lives, events wake the
/// worker.
#[derive(Debug)]
pub(crate) struct Dependent(Arc<AtomicU32>);

impl Drop for Dependent {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Waiters {
    pub fn new() -> Self {
        Self {
            pollers: AtomicU32::new(0),
            caller_sleeps: AtomicBool::new(false),
            worker_has_events: AtomicBool::new(false),
            dependents: Arc::new(AtomicU32::new(0)),
        }
    }

    /// No caller begins to sleep until an event while the result lives. One that does so already
    /// must [give events to the worker](Self::give_events_to_worker).
    pub fn begin_dependent(&self) -> Dependent {
        self.dependents.fetch_add(1, SeqCst);
        // Either this thread sees the caller that sleeps, or the thread that arms sees this count.
        total_order();
        Dependent(Arc::clone(&self.dependents))
    }

    fn has_dependents(&self) -> bool {
        self.dependents.load(SeqCst) > 0
    }

    /// Whether a caller sleeps until an event.
    pub fn does_caller_sleep(&self) -> bool {
        self.caller_sleeps.load(SeqCst)
    }

    /// A caller begins to poll.
    pub fn enter(&self) {
        self.pollers.fetch_add(1, SeqCst);
    }

    /// A caller stops polling; it hands over, or sets a timer that wakes the worker.
    pub fn leave(&self) {
        self.pollers.fetch_sub(1, SeqCst);
    }

    #[inline]
    pub fn are_polling(&self) -> bool {
        self.pollers.load(SeqCst) > 0
    }

    /// Makes this caller the one that sleeps until an event; false if there is one, or if it would
    /// hold up others.
    pub fn begin_sleep(&self) -> bool {
        if self.has_dependents() {
            return false;
        }
        let begun = self.caller_sleeps.compare_exchange(false, true, SeqCst, SeqCst).is_ok();
        if begun {
            self.worker_has_events.store(false, SeqCst);
        }
        begun
    }

    /// Has events wake the worker until the caller that sleeps begins to sleep anew; false if none
    /// sleeps, or if they do already. They do once a thread arms.
    pub fn give_events_to_worker(&self) -> bool {
        self.does_caller_sleep() && !self.worker_has_events.swap(true, SeqCst)
    }

    /// The caller that slept begins to poll. It must hand over, or set a timer, when it leaves.
    pub fn end_sleep(&self) {
        self.enter();
        self.caller_sleeps.store(false, SeqCst);
    }

    /// The thread that events wake. Read under the driver's lock, by the thread that arms.
    pub fn sleeper(&self) -> Sleeper {
        let caller = self.does_caller_sleep() && !self.worker_has_events.load(SeqCst);
        total_order();
        // A caller that sleeps ignores events while another one polls.
        match caller && !self.has_dependents() && !self.are_polling() {
            true => Sleeper::Caller,
            false => Sleeper::Worker,
        }
    }

    /// A caller stops polling. The last one arms everything, so that a thread can sleep until an
    /// event; false if `arm` found work to do first. `set_timer` wakes the worker later where
    /// another thread drives.
    pub fn hand_over<G>(
        &self,
        try_lock: impl FnOnce() -> Option<G>,
        arm: impl FnOnce(&mut G) -> bool,
        set_timer: impl FnOnce(),
    ) -> bool {
        self.leave();
        match try_lock().filter(|_| !self.are_polling()) {
            Some(mut core) => arm(&mut core),
            None => {
                set_timer();
                true
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;
    use crate::sync::Mutex;

    /// The driver, as far as it decides whom an event wakes.
    struct Driver {
        waiters: Waiters,
        armed_for: Mutex<Sleeper>,
        timer: AtomicBool,
    }

    impl Driver {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                waiters: Waiters::new(),
                armed_for: Mutex::new(Sleeper::Worker),
                timer: AtomicBool::new(false),
            })
        }

        fn hand_over(&self) {
            self.waiters.hand_over(
                || self.armed_for.try_lock(),
                |armed_for| {
                    **armed_for = self.waiters.sleeper();
                    true
                },
                || self.timer.store(true, SeqCst),
            );
        }

        /// `GroupDriver::wait` of a caller whose handle ends, or whose time is over.
        fn wait(&self, ends: bool) {
            self.waiters.enter();
            if self.waiters.begin_sleep() {
                self.hand_over();
                self.waiters.end_sleep();
                if ends {
                    self.waiters.leave();
                    return self.timer.store(true, SeqCst);
                }
            }
            self.hand_over();
        }

        /// `GroupDriver::work_awake` of a worker that finds work, or none.
        fn work(&self, has_moved: bool) {
            if self.waiters.are_polling() {
                return;
            }
            match self.armed_for.try_lock() {
                Some(mut armed_for) => {
                    if has_moved {
                        self.waiters.give_events_to_worker();
                    }
                    *armed_for = self.waiters.sleeper();
                }
                None => self.timer.store(true, SeqCst),
            }
        }

        /// No caller sleeps, so an event must wake the worker, now or after a timer.
        fn check(&self) {
            assert_eq!(self.waiters.sleeper(), Sleeper::Worker);
            let armed_for = *self.armed_for.lock();
            assert!(
                armed_for == Sleeper::Worker || self.timer.load(SeqCst),
                "an event wakes no thread"
            );
        }
    }

    #[test]
    fn events_wake_the_worker_once_others_depend_on_them() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let driver = Driver::new();
            let caller = Arc::clone(&driver);
            let caller = thread::spawn(move || {
                caller.waiters.enter();
                caller.waiters.begin_sleep();
                caller.hand_over();
            });
            let worker = Arc::clone(&driver);
            let worker = thread::spawn(move || worker.work(true));
            let dependent = driver.waiters.begin_dependent();
            if driver.waiters.give_events_to_worker() {
                // Kicks the worker.
                driver.timer.store(true, SeqCst);
            }
            caller.join().unwrap();
            worker.join().unwrap();
            driver.check();
            drop(dependent);
        });
    }

    fn check(ends: [bool; 2], callers: usize, has_moved: bool) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let driver = Driver::new();
            let others: Vec<_> = (1..callers)
                .map(|_| {
                    let driver = Arc::clone(&driver);
                    thread::spawn(move || driver.wait(ends[1]))
                })
                .collect();
            let worker = Arc::clone(&driver);
            let worker = thread::spawn(move || worker.work(has_moved));
            driver.wait(ends[0]);
            worker.join().unwrap();
            others.into_iter().for_each(|other| other.join().unwrap());
            driver.check();
        });
    }

    #[test]
    fn a_caller_that_slept_hands_back_to_the_worker() {
        check([false, false], 1, false);
        check([true, true], 1, false);
    }

    #[test]
    fn of_two_callers_the_last_hands_back_to_the_worker() {
        check([false, false], 2, false);
        check([true, false], 2, false);
    }

    #[test]
    fn a_caller_that_was_late_hands_back_to_the_worker() {
        check([false, true], 1, true);
        check([false, true], 2, true);
    }
}
