//! User callbacks run here, one after another, and never on a thread that moves bytes.

use std::{
    panic::{catch_unwind, AssertUnwindSafe},
    sync::Arc,
    thread::JoinHandle,
};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::request_batch::{BatchEvent, RequestBatch};

type Call = Box<dyn FnOnce() + Send>;

enum Job {
    Call(Call),
    /// Grows while nothing is queued behind it, so that all is told in the order in which it ended.
    Batch(Arc<RequestBatch>, Vec<BatchEvent>),
}

#[derive(Default)]
struct Queue {
    jobs: Vec<Job>,
    /// The thread ends when nothing is queued.
    closed: bool,
    /// It has.
    over: bool,
    /// No thread: whoever drives the engine runs them (simulator).
    manual: bool,
    /// The thread, once there was a first job.
    thread: Option<JoinHandle<()>>,
}

/// The queue of one engine's callbacks. Its thread starts with the first callback.
#[derive(Clone, Default)]
pub(crate) struct Callbacks {
    inner: Arc<(Mutex<Queue>, Condvar)>,
}

impl Callbacks {
    pub fn manual() -> Self {
        let this = Self::default();
        this.inner.0.lock().manual = true;
        this
    }

    /// Runs what is queued on this thread; true if there was something.
    pub fn run_queued(&self) -> bool {
        let jobs = std::mem::take(&mut self.inner.0.lock().jobs);
        let any = !jobs.is_empty();
        jobs.into_iter().for_each(run);
        any
    }

    /// Queues a job; after `close` it runs at once on the caller's thread, so that no completion
    /// goes untold.
    pub fn push(&self, call: Call) {
        self.add(self.inner.0.lock(), Job::Call(call));
    }

    /// Queues what is told to one listener, as [`Callbacks::push`] does.
    pub(super) fn tell(&self, each: Arc<RequestBatch>, news: impl Iterator<Item = BatchEvent>) {
        let mut q = self.inner.0.lock();
        match q.jobs.last_mut() {
            Some(Job::Batch(last, told)) if Arc::ptr_eq(last, &each) => told.extend(news),
            _ => self.add(q, Job::Batch(each, news.collect())),
        }
    }

    fn add(&self, mut q: MutexGuard<'_, Queue>, job: Job) {
        if q.over {
            drop(q);
            return run(job);
        }
        q.jobs.push(job);
        if q.thread.is_none() && !q.manual && !q.closed {
            let inner = Arc::clone(&self.inner);
            let spawned = std::thread::Builder::new()
                .name("fabric-callback".into())
                .spawn(move || serve(&inner));
            match spawned {
                Ok(t) => q.thread = Some(t),
                Err(e) => {
                    tracing::error!(error = %e, "no thread for callbacks; they run on the worker");
                    let jobs = std::mem::take(&mut q.jobs);
                    drop(q);
                    jobs.into_iter().for_each(run);
                    return;
                }
            }
        }
        self.inner.1.notify_one();
    }

    /// Has what is queued run, in its order, and ends the thread.
    pub fn close(&self) {
        let (queue, wake) = &*self.inner;
        let thread = {
            let mut q = queue.lock();
            q.closed = true;
            wake.notify_one();
            q.thread.take()
        };
        // A callback may close the engine: it can't wait for itself.
        if let Some(t) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = t.join();
        }
        while self.run_queued() {}
        self.inner.0.lock().over = true;
        self.run_queued();
    }
}

fn serve((queue, wake): &(Mutex<Queue>, Condvar)) {
    loop {
        let jobs = {
            let mut q = queue.lock();
            while q.jobs.is_empty() {
                if q.closed {
                    return;
                }
                wake.wait(&mut q);
            }
            std::mem::take(&mut q.jobs)
        };
        jobs.into_iter().for_each(run);
    }
}

fn run(job: Job) {
    let call = || match job {
        Job::Call(call) => call(),
        Job::Batch(each, news) => each.hear(news),
    };
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        tracing::error!("a completion callback panicked; the engine goes on");
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_closes_does_not_overtake_what_is_queued() {
        let (callbacks, seen) = (Callbacks::default(), Arc::new(Mutex::new(Vec::new())));
        let (begun, first) = std::sync::mpsc::channel();
        for i in 0..8 {
            let (seen, begun) = (Arc::clone(&seen), begun.clone());
            callbacks.push(Box::new(move || {
                let _ = begun.send(());
                std::thread::sleep(Duration::from_millis(if i == 0 { 50 } else { 0 }));
                seen.lock().push(i);
            }));
            if i == 0 {
                // The thread is at it, and the others queue behind.
                first.recv().unwrap();
            }
        }
        callbacks.close();
        assert_eq!(*seen.lock(), (0..8).collect::<Vec<_>>());
    }
}
