use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        Arc,
    },
};

use crossbeam_queue::SegQueue;
use fabric_engine::{Notify, ProcessLocal};
use pyo3::{exceptions::PyOSError, prelude::*};
use rustix::event::{eventfd, EventfdFlags};

use crate::errors::OrRaise;

struct Inner {
    event: ProcessLocal<OwnedFd>,
    keys: SegQueue<u64>,
    raised: AtomicBool,
}

impl Notify for Inner {
    fn notify(&self, key: u64) {
        self.keys.push(key);
        // One wake-up for however many completions until the next drain.
        if !self.raised.swap(true, SeqCst) {
            if let Ok(event) = self.event.get() {
                let _ = rustix::io::write(event, &1u64.to_ne_bytes());
            }
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
        let event = ProcessLocal::new(event);
        let inner = Inner { event, keys: SegQueue::new(), raised: AtomicBool::new(false) };
        Ok(Self { inner: Arc::new(inner) })
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.inner.event.get().map(AsRawFd::as_raw_fd).or_raise(py)
    }

    /// The keys of what is over since the last call.
    fn drain(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let event = self.inner.event.get().or_raise(py)?;
        let _ = rustix::io::read(event, &mut [0u8; 8]);
        self.inner.raised.store(false, SeqCst);
        Ok(std::iter::from_fn(|| self.inner.keys.pop()).collect())
    }
}
