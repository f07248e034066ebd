use std::{
    sync::{
        atomic::{AtomicBool, Ordering::Acquire},
        Arc,
    },
    time::Duration,
};

use fabric_engine::{
    self as fe, api::TransportKind, memory::device::DeviceWord, Handle, PeerTransport, Quiescence,
};
use pyo3::{
    exceptions::{PyAttributeError, PyRuntimeError, PyTimeoutError},
    prelude::*,
    sync::PyOnceLock,
    types::PyDict,
};

use super::{
    deferred_release::DeferredRelease, queue::CompletionQueue, seconds, watcher::gpu_array,
};
use crate::{
    callback::Callback,
    errors::{raise, OrRaise},
};

/// Signals (Ctrl-C) are looked at this often during a blocking wait.
const SIGNAL_CHECK: Duration = Duration::from_millis(100);
const FOREVER: Duration = Duration::MAX;

static AWAITING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The future of one request or expectation: wait for it, await it, poll it, hang a callback on it.
///
/// Dropping it cancels nothing.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct Transfer {
    pub handle: Handle,
    /// Towards its peer, if there was one.
    peer_transport: Option<PeerTransport>,
}

impl Transfer {
    pub fn new(handle: Handle, peer_transport: Option<PeerTransport>) -> Self {
        Self { handle, peer_transport }
    }

    /// Waits with the GIL released; `None` if it is not over in time.
    pub fn wait_for(py: Python<'_>, handle: &Handle, timeout: Duration) -> PyResult<Option<()>> {
        let mut left = timeout;
        loop {
            let step = left.min(SIGNAL_CHECK);
            if let Some(result) = py.detach(|| handle.wait(step)) {
                return result.or_raise(py).map(Some);
            }
            py.check_signals()?;
            left = match left {
                FOREVER => FOREVER,
                left => left.saturating_sub(step),
            };
            if left.is_zero() {
                return Ok(None);
            }
        }
    }
}

#[pymethods]
impl Transfer {
    /// Blocks until it is over; raises what it failed with, or `TimeoutError` after `timeout`
    /// seconds (it then goes on).
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        if let Some(result) = self.handle.poll() {
            return result.or_raise(py);
        }
        let timeout = seconds(py, timeout, FOREVER)?;
        Self::wait_for(py, &self.handle, timeout)?.ok_or_else(|| {
            PyTimeoutError::new_err(format!(
                "the {} is not over after {timeout:?}; it goes on",
                self.handle.op()
            ))
        })
    }

    /// Whether it is over, whatever the result. Moves the engine on for a moment.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        match self.handle.drive() {
            Some(Err(e @ fe::EngineError::Forked { .. })) => Err(raise(py, &e)),
            result => Ok(result.is_some()),
        }
    }

    /// Nothing if it succeeded; raises what it failed with, or `RuntimeError` if it isn't over.
    fn result(&self, py: Python<'_>) -> PyResult<()> {
        match self.handle.poll() {
            Some(result) => result.or_raise(py),
            None => Err(PyRuntimeError::new_err(format!("the {} is not over", self.handle.op()))),
        }
    }

    /// The error of a failed transfer, or `None`.
    fn exception(&self, py: Python<'_>) -> Option<PyErr> {
        self.handle.poll()?.err().map(|e| raise(py, &e))
    }

    /// Calls `callback(self)` on the engine's callback thread when it is over, at once if it is.
    fn add_done_callback(slf: &Bound<'_, Self>, callback: Callback) {
        let this = DeferredRelease::new(slf.clone().unbind());
        let handle = slf.get().handle.clone();
        // Detached: the callback runs on this thread if the transfer is over.
        slf.py().detach(|| {
            handle.on_done(move |_| {
                callback.call_once(|py, f| (f, this.into_inner(py)).into_pyobject(py));
            });
        });
    }

    /// A flag that is set when it is over, for loops that poll; with `device`, for kernels on that
    /// GPU that wait until the word is 1.
    #[pyo3(signature = (device=None))]
    fn flag(&self, py: Python<'_>, device: Option<i32>) -> PyResult<Flag> {
        let flag = Arc::new(AtomicBool::new(false));
        let word = match device {
            None => None,
            Some(device) => Some(Arc::new(py.detach(|| DeviceWord::new(device)).or_raise(py)?)),
        };
        self.handle.on_done_flag(Arc::clone(&flag));
        if let Some(word) = &word {
            self.handle.on_done_notify(Arc::clone(word) as Arc<dyn fe::Notify>, 1);
        }
        Ok(Flag { flag, word })
    }

    /// Ends it with `Cancelled` unless it is over. What was not posted never will be; what is under
    /// way may still land: see `quiesced`.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.handle.cancel());
    }

    /// Whether nothing of it can land any more; `None` if that can't be known.
    #[getter]
    fn quiesced(&self) -> Option<bool> {
        known(self.handle.quiescence())
    }

    /// Waits until nothing of it can land any more, at most `timeout` seconds; returns `quiesced`.
    #[pyo3(signature = (timeout=None))]
    fn wait_quiesced(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<bool>> {
        let mut left = seconds(py, timeout, FOREVER)?;
        loop {
            let step = left.min(SIGNAL_CHECK);
            let quiet = py.detach(|| self.handle.wait_quiesced(step));
            py.check_signals()?;
            left = if left == FOREVER { left } else { left.saturating_sub(step) };
            if quiet != Quiescence::InFlight || left.is_zero() {
                return Ok(known(quiet));
            }
        }
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let awaiting = AWAITING.get_or_try_init(py, || {
            PyModule::import(py, "fabric_ray.engine.aio")?.getattr("awaiting").map(Bound::unbind)
        })?;
        awaiting.bind(py).call1((slf,))
    }

    /// For `await`: drives the engine for at most so many microseconds; true if it is over.
    fn _spin(&self, py: Python<'_>, microseconds: u64) -> bool {
        if self.handle.drive().is_some() {
            return true;
        }
        py.detach(|| self.handle.spin(Duration::from_micros(microseconds))).is_some()
    }

    /// For `await`: has `queue` told `key` when it is over.
    fn _notify(&self, queue: &CompletionQueue, key: u64) {
        self.handle.on_done_notify(queue.notifier(), key);
    }

    /// The kind of request: `write`, `read`, `expectation`, ...
    #[getter]
    fn op(&self) -> &'static str {
        self.handle.op()
    }

    /// The transport in use towards its peer; `None` before the first connection, for batches over
    /// several peers, and for expectations.
    #[getter]
    fn transport(&self, py: Python<'_>) -> Option<&'static str> {
        let peer_transport = self.peer_transport.as_ref()?;
        py.detach(|| peer_transport.transport()).map(TransportKind::name)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = match self.handle.poll() {
            None => "pending".to_owned(),
            Some(Ok(())) => "done".to_owned(),
            Some(Err(e)) => format!("failed: {e}"),
        };
        match self.transport(py) {
            Some(t) => format!("Transfer({} over {t}, {state})", self.handle.op()),
            None => format!("Transfer({}, {state})", self.handle.op()),
        }
    }
}

fn known(quiet: Quiescence) -> Option<bool> {
    match quiet {
        Quiescence::InFlight => Some(false),
        Quiescence::Quiesced => Some(true),
        Quiescence::Unknown => None,
    }
}

/// Set when a transfer is over.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct Flag {
    flag: Arc<AtomicBool>,
    word: Option<Arc<DeviceWord>>,
}

#[pymethods]
impl Flag {
    fn __bool__(&self) -> bool {
        self.flag.load(Acquire)
    }

    /// For torch and cupy: the flag as a GPU array of one int64, 0 until the transfer is over.
    #[getter]
    fn __cuda_array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let Some(word) = &slf.get().word else {
            return Err(PyAttributeError::new_err("kernels can't use it: name a device"));
        };
        gpu_array(slf.py(), word.device_addr(), 1, "<i8")
    }

    fn __repr__(&self) -> String {
        format!("Flag({})", self.__bool__())
    }
}
