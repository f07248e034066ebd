use std::{
    sync::{atomic::Ordering::SeqCst, Arc},
    thread::JoinHandle,
    time::Duration,
};

use rustix::thread::{sched_setaffinity, CpuSet};

use super::GroupDriver;
use crate::{engine::Shared, process::ProcessLocal, EngineError, Result};

/// The thread that drives a group when no caller does, and the one that drives it when that one is
/// late. Both end with `stop`.
#[derive(Debug)]
pub(crate) struct Worker {
    threads: ProcessLocal<[JoinHandle<()>; 2]>,
}

impl Worker {
    /// Starts the threads; `cpus` pins the worker. `peer_timeout` sets when it is late.
    pub fn start(
        shared: &Arc<Shared>,
        cpus: Option<CpuSet>,
        peer_timeout: Duration,
    ) -> Result<Self> {
        let worker = spawn(shared, "fabric-worker", move |driver, shared| {
            if let Some(Err(error)) = cpus.map(|cpus| sched_setaffinity(None, &cpus)) {
                tracing::warn!(%error, "the worker can't be pinned near its NICs");
            }
            driver.work(shared);
        })?;
        let heartbeats = spawn(shared, "fabric-beats", move |driver, shared| {
            driver.keep_beating(shared, peer_timeout);
        });
        match heartbeats {
            Ok(heartbeats) => Ok(Self { threads: ProcessLocal::new([worker, heartbeats]) }),
            Err(error) => {
                stop(shared, [worker]);
                Err(error)
            }
        }
    }

    /// Stops the threads, and joins them unless called on one.
    pub fn stop(self, shared: &Arc<Shared>) {
        if let Some(threads) = self.threads.into_inner() {
            stop(shared, threads);
        }
    }
}

fn spawn(
    shared: &Arc<Shared>,
    name: &str,
    run: impl FnOnce(&GroupDriver, &Arc<Shared>) + Send + 'static,
) -> Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    let work = move || {
        if let Ok(driver) = shared.driver() {
            run(driver, &shared);
        }
    };
    std::thread::Builder::new().name(name.into()).spawn(work).map_err(|e| EngineError::Resource {
        call: "pthread_create",
        cause: e.to_string(),
        hint: "raise the limit of threads or processes (ulimit -u)".into(),
    })
}

fn stop(shared: &Arc<Shared>, threads: impl IntoIterator<Item = JoinHandle<()>>) {
    let Ok(driver) = shared.driver() else { return };
    driver.stopping.store(true, SeqCst);
    driver.heartbeats.stop();
    driver.kick_worker();
    for thread in threads {
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}
