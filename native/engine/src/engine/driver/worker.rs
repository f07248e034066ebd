use std::{
    sync::{atomic::Ordering::SeqCst, Arc},
    thread::JoinHandle,
};

use rustix::thread::{sched_setaffinity, CpuSet};

use crate::{engine::Shared, process::ProcessLocal, EngineError, Result};

/// The thread that drives a group when no caller does. Ends with `stop`.
#[derive(Debug)]
pub(crate) struct Worker {
    thread: ProcessLocal<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread; `cpus` pins it.
    pub fn start(shared: &Arc<Shared>, always: bool, cpus: Option<CpuSet>) -> Result<Self> {
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new()
            .name("fabric-worker".into())
            .spawn(move || {
                if let Some(Err(error)) = cpus.map(|cpus| sched_setaffinity(None, &cpus)) {
                    tracing::warn!(%error, "the worker can't be pinned near its NICs");
                }
                if let Ok(driver) = shared.driver() {
                    driver.work(&shared, always);
                }
            })
            .map_err(|e| EngineError::Resource {
                call: "pthread_create",
                cause: e.to_string(),
                hint: "raise the limit of threads or processes (ulimit -u)".into(),
            })?;
        Ok(Self { thread: ProcessLocal::new(thread) })
    }

    /// Stops the thread, and joins it unless called on it.
    pub fn stop(self, shared: &Arc<Shared>) {
        let (Ok(driver), Some(thread)) = (shared.driver(), self.thread.into_inner()) else {
            return;
        };
        driver.stopping.store(true, SeqCst);
        driver.kick_worker();
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}
