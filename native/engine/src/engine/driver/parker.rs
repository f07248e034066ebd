//! The sleep of a worker: one epoll with the domains' descriptors, an eventfd and a timer.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering::SeqCst},
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

const KICK: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

#[derive(Debug)]
pub(super) struct Parker {
    epoll: OwnedFd,
    kick: OwnedFd,
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
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(fail("epoll_create"))?,
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(fail("eventfd"))?,
            timer: timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )
            .map_err(fail("timerfd_create"))?,
            alarm: AtomicU64::new(u64::MAX),
            setting: Mutex::new(()),
        };
        for (fd, tag) in [(&parker.kick, KICK), (&parker.timer, TIMER)] {
            let data = epoll::EventData::new_u64(tag);
            epoll::add(&parker.epoll, fd, data, epoll::EventFlags::IN)
                .map_err(fail("epoll_ctl"))?;
        }
        for domain in domains {
            for fd in domain.wake_fds() {
                // SAFETY: a domain keeps its descriptors open, and outlives the worker that sleeps
                // here.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                epoll::add(
                    &parker.epoll,
                    fd,
                    epoll::EventData::new_u64(0),
                    Self::disabled_events(),
                )
                .map_err(fail("epoll_ctl"))?;
            }
        }
        Ok(parker)
    }

    fn disabled_events() -> epoll::EventFlags {
        epoll::EventFlags::ONESHOT
    }

    /// Enables the domains' descriptors to end one sleep. A thread that polls anyway is thus not
    /// woken for every packet.
    pub fn arm(&self, domains: &[Box<dyn Domain>]) {
        for fd in domains.iter().flat_map(|d| d.wake_fds()) {
            // SAFETY: as in `new`.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
            let _ = epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(0), flags);
        }
    }

    /// Ends the current or the next sleep.
    pub fn kick(&self) {
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
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
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 8];
        let n = epoll::wait(&self.epoll, &mut events[..], None).unwrap_or(0);
        let mut only_alarm = n > 0;
        for event in &events[..n] {
            only_alarm &= event.data.u64() == TIMER;
            let mut word = [0u8; 8];
            match event.data.u64() {
                KICK => {
                    let _ = rustix::io::read(&self.kick, &mut word);
                }
                TIMER => {
                    let _setting = self.setting.lock();
                    let _ = rustix::io::read(&self.timer, &mut word);
                    self.alarm.store(u64::MAX, SeqCst);
                }
                _ => {}
            }
        }
        only_alarm
    }
}
