//! The sleep of the worker: one epoll with the domains' descriptors, an eventfd and a timer. And
//! the sleep of one waiting caller: another epoll with the same descriptors and another eventfd.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::atomic::{
        AtomicBool, AtomicU64,
        Ordering::{Relaxed, SeqCst},
    },
    time::Duration,
};

use rustix::{
    event::{epoll, eventfd, EventfdFlags},
    time::{
        timerfd_create, timerfd_settime, Itimerspec, TimerfdClockId, TimerfdFlags,
        TimerfdTimerFlags, Timespec,
    },
};

use crate::{domain::Domain, locks::Mutex, time::Time, EngineError, Result};

const DOMAIN: u64 = 0;
const KICK: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

/// The thread that the domains' descriptors wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sleeper {
    Worker,
    Caller,
}

/// An epoll with the domains' descriptors, which end one sleep each time they are enabled, and an
/// eventfd.
#[derive(Debug)]
struct EventSet {
    epoll: OwnedFd,
    kick: OwnedFd,
    /// Whether the domains' descriptors were enabled and not disabled since; changed under the
    /// driver's lock only.
    enabled: AtomicBool,
}

impl EventSet {
    fn new(domains: &[Box<dyn Domain>]) -> Result<Self> {
        let fail = |call| move |e| EngineError::resource(call, e);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(fail("epoll_create"))?;
        let kick =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(fail("eventfd"))?;
        let this = Self { epoll, kick, enabled: AtomicBool::new(false) };
        this.add(&this.kick, KICK)?;
        for fd in domains.iter().flat_map(|d| d.wake_fds()) {
            // SAFETY: a domain keeps its descriptors open, and outlives the threads that sleep
            // here.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let data = epoll::EventData::new_u64(DOMAIN);
            epoll::add(&this.epoll, fd, data, epoll::EventFlags::ONESHOT)
                .map_err(fail("epoll_ctl"))?;
        }
        Ok(this)
    }

    fn add(&self, fd: &OwnedFd, tag: u64) -> Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(tag), epoll::EventFlags::IN)
            .map_err(|e| EngineError::resource("epoll_ctl", e))
    }

    fn enable(&self, domains: &[Box<dyn Domain>]) {
        self.enabled.store(true, Relaxed);
        self.modify(domains, epoll::EventFlags::IN | epoll::EventFlags::ONESHOT);
    }

    fn disable(&self, domains: &[Box<dyn Domain>]) {
        if self.enabled.swap(false, Relaxed) {
            self.modify(domains, epoll::EventFlags::ONESHOT);
        }
    }

    fn modify(&self, domains: &[Box<dyn Domain>], flags: epoll::EventFlags) {
        for fd in domains.iter().flat_map(|d| d.wake_fds()) {
            // SAFETY: as in `new`.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let _ = epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(DOMAIN), flags);
        }
    }

    fn kick(&self) {
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// Sleeps until an event or `timeout`, and clears kicks. Calls `event` with the tag of each.
    fn sleep(&self, timeout: Option<Duration>, mut event: impl FnMut(u64)) {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 8];
        let timeout = timeout
            .map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        let n = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref()).unwrap_or(0);
        for tag in events[..n].iter().map(|e| e.data.u64()) {
            if tag == KICK {
                let _ = rustix::io::read(&self.kick, &mut [0u8; 8]);
            }
            event(tag);
        }
    }
}

#[derive(Debug)]
pub(super) struct Parker {
    worker: EventSet,
    caller: EventSet,
    timer: OwnedFd,
    /// When the timer fires; callers with a later alarm skip the lock.
    alarm: AtomicU64,
    /// Keeps `alarm` and the timer consistent.
    setting: Mutex<()>,
}

impl Parker {
    pub fn new(domains: &[Box<dyn Domain>]) -> Result<Self> {
        let fail = |call| move |e| EngineError::resource(call, e);
        let parker = Self {
            worker: EventSet::new(domains)?,
            caller: EventSet::new(domains)?,
            timer: timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )
            .map_err(fail("timerfd_create"))?,
            alarm: AtomicU64::new(u64::MAX),
            setting: Mutex::new(()),
        };
        parker.worker.add(&parker.timer, TIMER)?;
        Ok(parker)
    }

    /// Enables the domains' descriptors to end one sleep of `sleeper`, and of no other thread. A
    /// thread that polls anyway is thus not woken for every packet.
    pub fn arm(&self, domains: &[Box<dyn Domain>], sleeper: Sleeper) {
        let (sleeping, other) = match sleeper {
            Sleeper::Worker => (&self.worker, &self.caller),
            Sleeper::Caller => (&self.caller, &self.worker),
        };
        other.disable(domains);
        sleeping.enable(domains);
    }

    /// Ends the worker's current or next sleep.
    pub fn kick(&self) {
        self.worker.kick();
    }

    /// Ends the caller's current or next sleep.
    pub fn kick_caller(&self) {
        self.caller.kick();
    }

    /// Ends the sleep at `at`. Keeps an alarm that is set already, if it is at most `slack` later.
    #[inline]
    pub fn set_timer(&self, at: Time, slack: Duration) {
        if self.alarm.load(SeqCst) > at.after(slack).0 {
            self.set_alarm(at);
        }
    }

    fn set_alarm(&self, at: Time) {
        let _setting = self.setting.lock();
        if at.0 >= self.alarm.load(SeqCst) {
            return;
        }
        self.alarm.store(at.0, SeqCst);
        let value = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec {
                tv_sec: (at.0 / 1_000_000_000) as i64,
                tv_nsec: (at.0 % 1_000_000_000).max(1) as i64,
            },
        };
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &value);
    }

    /// Sleeps until a kick, an event of a domain, or the alarm; true if only the alarm ended it.
    /// Must be called by one thread only.
    pub fn sleep(&self) -> bool {
        let (mut alarm, mut others) = (false, false);
        self.worker.sleep(None, |tag| match tag {
            TIMER => {
                let _setting = self.setting.lock();
                let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
                self.alarm.store(u64::MAX, SeqCst);
                alarm = true;
            }
            _ => others = true,
        });
        alarm && !others
    }

    /// Sleeps until a kick, an event of a domain, or `timeout`, whole milliseconds; false if
    /// neither came. Must be called by one thread at a time.
    pub fn sleep_caller(&self, timeout: Duration) -> bool {
        let mut woken = false;
        self.caller.sleep(Some(timeout), |_| woken = true);
        woken
    }
}
