use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        Arc,
    },
};

use crossbeam_queue::SegQueue;
use fabric_engine::Notify;
use pyo3::{exceptions::PyOSError, prelude::*};
use rustix::event::{eventfd, EventfdFlags};

struct Inner {
    event: OwnedFd,
    keys: SegQueue<u64>,
    raised: AtomicBool,
}

impl Notify for Inner {
    fn notify(&self, key: u64) {
        self.keys.push(key);
        // One wake-up for however many completions until the next drain.
        if !self.raised.swap(true, SeqCst) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

/// Completions for an event loop: a descriptor that becomes readable, and the keys of what is over.
/// Nothing here takes the GIL on the engine's threads.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct CompletionQueue {
    inner: Arc<Inner>,
}

impl CompletionQueue {
    pub fn notifier(&self) -> Arc<dyn Notify> {
        Arc::clone(&self.inner) as Arc<dyn Notify>
    }
}

#[pymethods]
impl CompletionQueue {
    #[new]
    fn new() -> PyResult<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| PyOSError::new_err((e.raw_os_error(), format!("eventfd: {e}"))))?;
        let inner = Inner { event, keys: SegQueue::new(), raised: AtomicBool::new(false) };
        Ok(Self { inner: Arc::new(inner) })
    }

    fn fileno(&self) -> i32 {
        self.inner.event.as_raw_fd()
    }

    /// The keys of what is over since the last call.
    fn drain(&self) -> Vec<u64> {
        let _ = rustix::io::read(&self.inner.event, &mut [0u8; 8]);
        self.inner.raised.store(false, SeqCst);
        std::iter::from_fn(|| self.inner.keys.pop()).collect()
    }
}
