//! Helper threads for calls that may block for a second (address resolution, connection set-up), so
//! that the polling thread never waits.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::{mpsc, Arc},
};

use crate::domain::DomainError;

/// Threads for local requests and for strangers' requests. Each has its own limit, so that
/// strangers can't delay local connections.
const MOST: [usize; 2] = [12, 4];

/// Strangers' jobs that may wait.
const MOST_WAITING: usize = 256;

/// The origin of a job.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    Own,
    Stranger,
}

type Job<T> = Box<dyn FnOnce() -> T + Send>;

pub(super) struct Helper<T> {
    waiting: [VecDeque<Job<T>>; 2],
    running: [usize; 2],
    done: mpsc::Receiver<(Whose, T)>,
    report: mpsc::Sender<(Whose, T)>,
    /// Readable when a job is done.
    pub bell: Arc<OwnedFd>,
}

impl<T: Send + 'static> Helper<T> {
    pub fn new() -> Result<Self, DomainError> {
        use rustix::event::{eventfd, EventfdFlags};
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(DomainError::io("eventfd"))?;
        let (report, done) = mpsc::channel();
        let waiting = [VecDeque::new(), VecDeque::new()];
        Ok(Self { waiting, running: [0; 2], done, report, bell: Arc::new(bell) })
    }

    /// Queues `job`; [`Helper::next`] returns its result. If too many jobs of strangers wait, the
    /// oldest is dropped: its deadline is over anyway.
    pub fn run(&mut self, whose: Whose, job: impl FnOnce() -> T + Send + 'static) {
        if whose == Whose::Stranger && self.waiting[whose as usize].len() >= MOST_WAITING {
            self.waiting[whose as usize].pop_front();
        }
        self.waiting[whose as usize].push_back(Box::new(job));
        self.start(whose);
    }

    fn start(&mut self, whose: Whose) {
        let i = whose as usize;
        while self.running[i] < MOST[i] {
            let Some(job) = self.waiting[i].pop_front() else { return };
            // Shared, so that the job is kept if the thread does not start.
            let slot = Arc::new(parking_lot::Mutex::new(Some(job)));
            let job = Arc::clone(&slot);
            let (report, bell) = (self.report.clone(), Arc::clone(&self.bell));
            let work = move || {
                let Some(job) = job.lock().take() else { return };
                let _ = report.send((whose, job()));
                let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
            };
            match std::thread::Builder::new().name("fabric-verbs".into()).spawn(work) {
                Ok(_) => self.running[i] += 1,
                Err(error) => {
                    tracing::warn!(%error, "can't start a thread for a connection's set-up; it is retried later");
                    self.waiting[i].extend(slot.lock().take());
                    return;
                }
            }
        }
    }

    /// Clears the event. Call it before [`Helper::next`].
    pub fn quiet(&self) {
        let _ = rustix::io::read(&*self.bell, &mut [0u8; 8]);
    }

    /// The next result, if any.
    pub fn next(&mut self) -> Option<T> {
        let (whose, outcome) = self.done.try_recv().ok()?;
        self.running[whose as usize] -= 1;
        self.start(whose);
        Some(outcome)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn strangers_that_block_delay_no_local_job() {
        let mut helper = Helper::new().unwrap();
        let (open, shut) = mpsc::channel::<()>();
        let shut = Arc::new(parking_lot::Mutex::new(shut));
        for _ in 0..50 {
            let shut = Arc::clone(&shut);
            helper.run(Whose::Stranger, move || {
                let _ = shut.lock().recv();
                0
            });
        }
        helper.run(Whose::Own, || 7);
        let wait = |helper: &mut Helper<i32>| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(5) {
                helper.quiet();
                if let Some(n) = helper.next() {
                    return Some(n);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        };
        assert_eq!(wait(&mut helper), Some(7));
        drop(open);
        assert_eq!((0..50).map_while(|_| wait(&mut helper)).sum::<i32>(), 0);
        assert_eq!(helper.running, [0, 0]);
    }
}
