//! Runs user callbacks one after another, and never on a thread that moves bytes.

use std::{
    cell::Cell,
    panic::{catch_unwind, AssertUnwindSafe},
    sync::Arc,
    thread::JoinHandle,
};

use super::request_batch::{BatchEvent, RequestBatch};
use crate::locks::{Condvar, Mutex, MutexGuard};

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
    /// No thread: `drive` runs the jobs (simulator).
    manual: bool,
    /// The thread runs, or is about to.
    served: bool,
    thread: Option<JoinHandle<()>>,
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Whether a user's callback runs on this thread.
pub(super) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Runs a user's callback; what it panics with is returned.
pub(super) fn run_callback<R>(call: impl FnOnce() -> R) -> std::thread::Result<R> {
    let outer = IN_CALLBACK.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    IN_CALLBACK.set(outer);
    result
}

/// The queue of one engine's callbacks. A job may be queued under any lock: it never runs within
/// `push`, for it may wait for that lock, or for a thread that does. The thread that runs jobs
/// starts with the first one.
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

    /// Queues a job. After `close` a thread runs it that ends with the queue, so that no completion
    /// is lost.
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
        q.jobs.push(job);
        if !q.served && !q.manual {
            let inner = Arc::clone(&self.inner);
            let spawned = std::thread::Builder::new()
                .name("fabric-callback".into())
                .spawn(move || serve(&inner));
            match spawned {
                Ok(t) => (q.thread, q.served) = (Some(t), true),
                Err(e) => tracing::error!(
                    error = %e,
                    "can't start the callback thread: callbacks wait for the next one"
                ),
            }
        }
        drop(q);
        self.inner.1.notify_one();
    }

    /// Runs what is queued, in order, and ends the thread. One thread calls it, once.
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
    }
}

fn serve((queue, wake): &(Mutex<Queue>, Condvar)) {
    loop {
        let jobs = {
            let mut q = queue.lock();
            while q.jobs.is_empty() {
                if q.closed {
                    q.served = false;
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
    if run_callback(call).is_err() {
        tracing::error!("a completion callback panicked; the engine goes on");
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{api::EngineConfig, TransferEngine};

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

    #[test]
    fn a_job_that_is_queued_under_a_lock_may_take_that_lock() {
        let (callbacks, lock) = (Callbacks::default(), Arc::new(Mutex::new(())));
        let (done, all) = std::sync::mpsc::channel();
        for closed in [false, true] {
            if closed {
                callbacks.close();
            }
            let (queue, lock, done) = (callbacks.clone(), Arc::clone(&lock), done.clone());
            std::thread::spawn(move || {
                let held = lock.lock();
                let theirs = Arc::clone(&lock);
                queue.push(Box::new(move || {
                    drop(theirs.lock());
                    let _ = done.send(());
                }));
                drop(held);
            });
            all.recv_timeout(Duration::from_secs(30)).expect("the end of the job");
        }
    }

    #[test]
    fn callbacks_that_close_their_engine_at_once_do_not_wait_for_each_other() {
        for _ in 0..20 {
            let engine = Arc::new(TransferEngine::open(EngineConfig::default()).unwrap());
            let (together, (done, all)) =
                (Arc::new(std::sync::Barrier::new(2)), std::sync::mpsc::channel());
            let close = || {
                let (engine, together, done) =
                    (Arc::downgrade(&engine), Arc::clone(&together), done.clone());
                move || {
                    together.wait();
                    if let Some(engine) = engine.upgrade() {
                        engine.close();
                    }
                    let _ = done.send(());
                }
            };
            let closes = close();
            let watcher = engine.watch(move |_, _| closes()).unwrap();
            watcher.store(1).unwrap();
            let (closes, counter) = (close(), engine.counter().unwrap());
            let pending = counter.expect(1, &[], Duration::MAX).unwrap();
            pending.on_done(move |_| closes());
            pending.cancel();
            for _ in 0..2 {
                all.recv_timeout(Duration::from_secs(30)).expect("both have closed it");
            }
        }
    }

    #[test]
    fn a_call_beside_another_one_returns_when_the_engine_is_closed() {
        let engine = Arc::new(TransferEngine::open(EngineConfig::default()).unwrap());
        let ((begun, begins), (go, goes)) =
            (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
        let goes = Mutex::new(goes);
        let watcher = engine.watch(move |_, _| {
            let _ = begun.send(());
            let _ = goes.lock().recv();
        });
        watcher.as_ref().unwrap().store(1).unwrap();
        begins.recv().unwrap();
        // A callback that runs as the engine closes may use it.
        let (done, all) = std::sync::mpsc::channel();
        let (pending, peer) = (engine.counter().unwrap(), engine.address().clone());
        let (theirs, told) = (Arc::downgrade(&engine), done.clone());
        pending.expect(1, &[], Duration::MAX).unwrap().on_done(move |result| {
            if let Some(engine) = theirs.upgrade() {
                assert!(engine.peer(&peer).is_err());
            }
            let _ = told.send(result);
        });
        let closers: Vec<_> = (0..2)
            .map(|_| {
                let engine = Arc::clone(&engine);
                std::thread::spawn(move || engine.close())
            })
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        assert!(!closers.iter().any(std::thread::JoinHandle::is_finished));
        drop(go);
        let ended = all.recv_timeout(Duration::from_secs(30)).expect("the expectation ends");
        assert!(matches!(ended, Err(crate::EngineError::Closed)), "{ended:?}");
        closers.into_iter().for_each(|t| t.join().unwrap());
    }
}
