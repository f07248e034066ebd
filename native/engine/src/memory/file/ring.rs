//! File work by io_uring. One thread owns the ring. It may block, its requests don't end with
//! another thread, and the kernel never copies under the engine's lock.

use std::{collections::VecDeque, os::fd::AsRawFd, sync::Arc};

use io_uring::IoUring;
use rustix::io::Errno;
use slab::Slab;

use super::{
    queue::Inbox,
    raw,
    work::{FileWork, Progress, RemainingRange},
};
use crate::error::DomainError;

/// Requests under way at a time.
pub(super) const DEPTH: u32 = 64;
const EVENTFD_TAG: u64 = u64::MAX;

/// File work that is not complete.
struct Job {
    work: Arc<FileWork>,
    /// The next of its ranges to be begun.
    next: usize,
    under_way: usize,
    error: Option<DomainError>,
}

/// A request under way.
struct Flight {
    job: usize,
    rest: RemainingRange,
}

pub(super) struct Ring<'a> {
    ring: IoUring,
    inbox: &'a Inbox,
    jobs: Slab<Job>,
    flights: Slab<Flight>,
    /// Jobs with ranges to begin, in order.
    open: VecDeque<usize>,
    /// Requests of which a call moved only a part.
    again: Vec<Flight>,
    /// Buffer for the kernel's read of the eventfd.
    word: Box<u64>,
    listening: bool,
}

impl<'a> Ring<'a> {
    pub fn new(ring: IoUring, inbox: &'a Inbox) -> Self {
        Self {
            ring,
            inbox,
            jobs: Slab::new(),
            flights: Slab::new(),
            open: VecDeque::new(),
            again: Vec::new(),
            word: Box::new(0),
            listening: false,
        }
    }

    /// Runs the thread until the inbox is closed and nothing is in flight.
    pub fn serve(mut self) {
        loop {
            self.listen();
            while let Some(work) = self.inbox.try_take() {
                if work.begin() {
                    let job = Job { work, next: 0, under_way: 0, error: None };
                    let key = self.jobs.insert(job);
                    self.open.push_back(key);
                }
            }
            self.issue();
            if self.inbox.is_closed() && self.jobs.is_empty() && !self.listening {
                return;
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                // The completion queue must be emptied first.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => {
                    tracing::error!(%error, "io_uring_enter");
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            }
            self.reap();
        }
    }

    /// Has the ring end its wait when there is new work. Not any more once closed: the last ring of
    /// the bell has then been asked for already.
    fn listen(&mut self) {
        if self.listening || self.inbox.is_closed() {
            return;
        }
        let entry = raw::poll_eventfd(self.inbox.bell.as_raw_fd(), &mut self.word, EVENTFD_TAG);
        // SAFETY: word and bell outlive the request: the thread doesn't end while it listens.
        self.listening = unsafe { raw::push(&mut self.ring, &entry) };
    }

    fn issue(&mut self) {
        while self.flights.len() < DEPTH as usize {
            let flight = match self.again.pop() {
                Some(flight) => flight,
                None => {
                    let Some(key) = self.open.front().copied() else { return };
                    let job = &mut self.jobs[key];
                    match job.work.range(job.next).filter(|_| job.error.is_none()) {
                        Some(rest) => {
                            job.next += 1;
                            job.under_way += 1;
                            Flight { job: key, rest }
                        }
                        None => {
                            self.open.pop_front();
                            self.settle(key);
                            continue;
                        }
                    }
                }
            };
            let work = &self.jobs[flight.job].work;
            let entry = raw::entry(work, flight.rest, self.flights.vacant_key() as u64);
            // SAFETY: the job keeps its file until it is over; the caller that queued the work
            // keeps its memory until then.
            if unsafe { !raw::push(&mut self.ring, &entry) } {
                return self.again.push(flight);
            }
            self.flights.insert(flight);
        }
    }

    fn reap(&mut self) {
        let mut ended: Vec<(u64, i32)> = Vec::new();
        ended.extend(self.ring.completion().map(|c| (c.user_data(), c.result())));
        for (tag, result) in ended {
            if tag == EVENTFD_TAG {
                self.listening = false;
                continue;
            }
            let Flight { job: key, rest } = self.flights.remove(tag as usize);
            let job = &mut self.jobs[key];
            let n = usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
            match job.work.after(rest, n) {
                Progress::All => job.under_way -= 1,
                Progress::Some(rest) if job.error.is_none() => {
                    self.again.push(Flight { job: key, rest });
                    continue;
                }
                Progress::Some(_) => job.under_way -= 1,
                Progress::Failed(e) => {
                    job.under_way -= 1;
                    job.error.get_or_insert(e);
                }
            }
            self.settle(key);
        }
    }

    /// Ends a job of which nothing is left, once.
    fn settle(&mut self, key: usize) {
        let Some(job) = self.jobs.get(key) else { return };
        let begun = job.error.is_some() || job.work.range(job.next).is_none();
        if job.under_way > 0 || !begun {
            return;
        }
        self.open.retain(|open| *open != key);
        let Job { work, error, .. } = self.jobs.remove(key);
        work.finish(error.map_or(Ok(()), Err));
        self.inbox.waker.wake();
    }
}
