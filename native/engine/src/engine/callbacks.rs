//! Runs user callbacks one after another, and never on a thread that moves bytes.

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
    /// Takes further events while it is the last job, so that events keep the order of completion.
    Batch(Arc<RequestBatch>, Vec<BatchEvent>),
}

#[derive(Default)]
struct Queue {
    jobs: Vec<Job>,
    /// The thread ends once the queue is empty.
    closed: bool,
    /// The thread has ended: jobs run on the caller's thread.
    over: bool,
    /// No thread: `drive` runs the jobs (simulator).
    manual: bool,
    /// Started with the first job.
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

    /// Queues a job. After `close` it runs at once on the caller's thread, so that no completion is
    /// lost.
    pub fn push(&self, call: Call) {
        self.add(self.inner.0.lock(), Job::Call(call));
    }

    /// Queues events for one observer, as [`Callbacks::push`] does.
    pub(super) fn push_events(
        &self,
        batch: Arc<RequestBatch>,
        events: impl Iterator<Item = BatchEvent>,
    ) {
        let mut q = self.inner.0.lock();
        match q.jobs.last_mut() {
            Some(Job::Batch(last, told)) if Arc::ptr_eq(last, &batch) => told.extend(events),
            _ => self.add(q, Job::Batch(batch, events.collect())),
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
                    tracing::error!(error = %e, "can't start the callback thread; callbacks run on the worker");
                    let jobs = std::mem::take(&mut q.jobs);
                    drop(q);
                    jobs.into_iter().for_each(run);
                    return;
                }
            }
        }
        self.inner.1.notify_one();
    }

    /// Runs what is queued, in order, and ends the thread.
    pub fn close(&self) {
        let (queue, wake) = &*self.inner;
        let thread = {
            let mut q = queue.lock();
            q.closed = true;
            wake.notify_one();
            q.thread.take()
        };
        // A callback may close the engine, and the callback thread can't join itself.
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
        Job::Batch(batch, events) => batch.on_events(events),
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
    fn close_runs_queued_callbacks_in_order() {
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
                // The thread runs the first job; the others queue behind it.
                first.recv().unwrap();
            }
        }
        callbacks.close();
        assert_eq!(*seen.lock(), (0..8).collect::<Vec<_>>());
    }
}
