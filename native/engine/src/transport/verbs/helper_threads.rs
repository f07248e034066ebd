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
const MAX_THREADS: [usize; 2] = [12, 4];

/// Strangers' jobs that may wait.
const MAX_WAITING: usize = 256;

/// The origin of a job.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum JobOrigin {
    Local,
    Stranger,
}

type Job<T> = Box<dyn FnOnce() -> T + Send>;

pub(super) struct HelperThreads<T> {
    waiting: [VecDeque<Job<T>>; 2],
    running: [usize; 2],
    done: mpsc::Receiver<(JobOrigin, T)>,
    report: mpsc::Sender<(JobOrigin, T)>,
    /// Readable when a job is done.
    pub event: Arc<OwnedFd>,
}

impl<T: Send + 'static> HelperThreads<T> {
    pub fn new() -> Result<Self, DomainError> {
        use rustix::event::{eventfd, EventfdFlags};
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(DomainError::io("eventfd"))?;
        let (report, done) = mpsc::channel();
        let waiting = [VecDeque::new(), VecDeque::new()];
        Ok(Self { waiting, running: [0; 2], done, report, event: Arc::new(event) })
    }

    /// Queues `job`; [`HelperThreads::next`] returns its result. If too many jobs of strangers
    /// wait, the oldest is dropped: its deadline is over anyway.
    pub fn run(&mut self, origin: JobOrigin, job: impl FnOnce() -> T + Send + 'static) {
        if origin == JobOrigin::Stranger && self.waiting[origin as usize].len() >= MAX_WAITING {
            self.waiting[origin as usize].pop_front();
        }
        self.waiting[origin as usize].push_back(Box::new(job));
        self.start(origin);
    }

    fn start(&mut self, origin: JobOrigin) {
        let i = origin as usize;
        while self.running[i] < MAX_THREADS[i] {
            let Some(job) = self.waiting[i].pop_front() else { return };
            // Shared, so that the job is kept if the thread does not start.
            let slot = Arc::new(crate::locks::Mutex::new(Some(job)));
            let job = Arc::clone(&slot);
            let (report, event) = (self.report.clone(), Arc::clone(&self.event));
            let work = move || {
                let Some(job) = job.lock().take() else { return };
                let _ = report.send((origin, job()));
                let _ = rustix::io::write(&*event, &1u64.to_ne_bytes());
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

    /// Clears the event. Call it before [`HelperThreads::next`].
    pub fn clear_event(&self) {
        let _ = rustix::io::read(&*self.event, &mut [0u8; 8]);
    }

    /// The next result, if any.
    pub fn next(&mut self) -> Option<T> {
        let (origin, outcome) = self.done.try_recv().ok()?;
        self.running[origin as usize] -= 1;
        self.start(origin);
        Some(outcome)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn strangers_that_block_delay_no_local_job() {
        let mut helper = HelperThreads::new().unwrap();
        let (open, shut) = mpsc::channel::<()>();
        let shut = Arc::new(crate::locks::Mutex::new(shut));
        for _ in 0..50 {
            let shut = Arc::clone(&shut);
            helper.run(JobOrigin::Stranger, move || {
                let _ = shut.lock().recv();
                0
            });
        }
        helper.run(JobOrigin::Local, || 7);
        let wait = |helper: &mut HelperThreads<i32>| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(5) {
                helper.clear_event();
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
