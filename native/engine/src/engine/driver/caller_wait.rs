//! A caller that waits: it polls, sleeps until an event where that holds up no other, or else until
//! the worker ends its handle.

use std::{
    sync::{atomic::Ordering::Relaxed, Arc},
    time::Duration,
};

use super::{parker::Parker, waiters::Dependent, GroupDriver};
use crate::{
    engine::{HandleState, Shared},
    time::Time,
};

/// Time that a caller sleeps until an event, at most a second. epoll counts milliseconds: for less
/// there is none, and the caller sleeps on its handle.
fn sleep_time(deadline: Time) -> Option<Duration> {
    let left = deadline.since(Time::now()).as_millis().min(1000);
    (left > 0).then(|| Duration::from_millis(left as u64))
}

impl GroupDriver {
    /// Polls during progress and for the spin time after it. Then the caller sleeps until an event
    /// and polls again, unless others depend on events. Returns where they do, and shortly before
    /// `deadline`: the caller can sleep on its handle, and keeps what is returned meanwhile.
    pub fn wait(
        &self,
        shared: &Arc<Shared>,
        pending: &HandleState,
        deadline: Time,
    ) -> Option<Dependent> {
        let parker = self.parker.as_ref()?;
        self.enter();
        let mut has_slept = false;
        loop {
            if self.poll_until_quiet(shared, pending, deadline) {
                if !has_slept {
                    self.leave();
                    return None;
                }
                break;
            }
            let may_sleep = !self.always && sleep_time(deadline).is_some() && self.runs_as_worker();
            if !may_sleep || !self.waiters.begin_sleep() {
                break;
            }
            has_slept = true;
            pending.begin_event_sleep();
            let in_time = match self.hand_over(shared) {
                true => self.sleep_until_event(parker, pending, deadline),
                false => Time::now() < deadline,
            };
            pending.end_event_sleep();
            self.waiters.end_sleep();
            if !in_time {
                break;
            }
        }
        let dependent = (!pending.is_done()).then(|| self.waiters.begin_dependent());
        if dependent.is_some() {
            self.waiters.give_events_to_worker();
        }
        // Also after a sleep: arming costs less than a timer that wakes the worker to arm.
        if !self.hand_over(shared) {
            self.kick_worker();
        }
        dependent
    }

    /// Whether this thread gets a core as soon as the worker, by their priorities.
    fn runs_as_worker(&self) -> bool {
        rustix::process::getpriority_process(None)
            .is_ok_and(|nice| nice <= self.worker_nice.load(Relaxed))
    }

    /// Has events wake the worker while the result lives: what depends on them must not wait for a
    /// caller that gets no core.
    pub fn begin_dependent(&self) -> Dependent {
        let dependent = self.waiters.begin_dependent();
        if self.waiters.give_events_to_worker() {
            // Awake, it drives, and arms its own descriptors.
            self.kick_worker();
        }
        dependent
    }

    /// Polls until `pending` is done, then true, or until nothing has moved for the spin time.
    fn poll_until_quiet(
        &self,
        shared: &Arc<Shared>,
        pending: &HandleState,
        deadline: Time,
    ) -> bool {
        let mut idle = 0;
        let mut quiet_since = None;
        for turn in 1u32.. {
            if pending.is_done() {
                return true;
            }
            self.step(shared, &mut idle);
            if idle == 0 {
                quiet_since = None;
            }
            if turn % 16 == 0 {
                let now = Time::now();
                let quiet = now.since(*quiet_since.get_or_insert(now));
                if now >= deadline || quiet >= self.spin {
                    break;
                }
            }
        }
        false
    }

    /// Sleeps until an event or a kick, unless another thread polls, or until `pending` is done;
    /// false if `deadline` is near.
    fn sleep_until_event(&self, parker: &Parker, pending: &HandleState, deadline: Time) -> bool {
        while !pending.is_done() {
            let Some(time) = sleep_time(deadline) else { return false };
            if parker.sleep_caller(time) && !self.waiters.are_polling() {
                return true;
            }
        }
        true
    }

    /// Ends the sleep of the caller that sleeps until an event.
    pub fn wake_caller(&self) {
        if let Some(parker) = &self.parker {
            parker.kick_caller();
        }
    }
}
