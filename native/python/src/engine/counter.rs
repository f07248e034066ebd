use std::time::Duration;

use fabric_engine as fe;
use pyo3::{
    exceptions::{PyTimeoutError, PyTypeError},
    prelude::*,
};

use super::{
    checked_int, class_arg::ClassArg, peers::Peer, seconds, span, transfer::Transfer,
    values::CounterRef,
};
use crate::errors::{raise, OrRaise};

/// An argument that names an immediate: a counter's reference, or a small pre-agreed integer.
pub(crate) enum ImmArg {
    Plain(fe::api::Imm),
    Of(fe::api::CounterRef),
}

impl ImmArg {
    pub fn extract(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(r) = value.cast::<CounterRef>() {
            return Ok(Self::Of(r.get().0));
        }
        if let Ok(n) = value.extract::<u32>() {
            return fe::api::Imm::plain(n).map(Self::Plain).or_raise(value.py());
        }
        Err(PyTypeError::new_err(
            "imm must be the `ref` of a counter of the receiver (counter.ref) or a non-negative \
             integer below 2^19",
        ))
    }

    /// The immediate for a write to `peer`.
    pub fn for_peer(&self, py: Python<'_>, peer: &fe::Peer) -> PyResult<fe::api::Imm> {
        match self {
            Self::Plain(imm) => Ok(*imm),
            Self::Of(r) if r.owner == peer.id() => Ok(r.imm()),
            Self::Of(r) => Err(raise(
                py,
                &fe::EngineError::Invalid(format!(
                    "the counter belongs to engine {}, the write goes to {}: name a counter of the \
                     receiver",
                    r.owner,
                    peer.address().label()
                )),
            )),
        }
    }
}

/// Counts logical writes that name it: one per write, per page, per scatter destination.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct Counter {
    pub counter: fe::Counter,
    pub timeout: Duration,
}

impl Counter {
    fn expectation(
        &self,
        py: Python<'_>,
        n: u32,
        writers: Option<Vec<ClassArg<'_, Peer>>>,
        timeout: Option<f64>,
    ) -> PyResult<fe::Handle> {
        let timeout = seconds(py, timeout, self.timeout)?;
        let writers: Vec<fe::Peer> =
            writers.unwrap_or_default().iter().map(|p| p.0.clone()).collect();
        let span = span::current(py)?;
        let expect = || self.counter.expect_for(span, n, &writers, timeout);
        // With writers, this waits for the engine's lock.
        let handle = if writers.is_empty() { expect() } else { py.detach(expect) };
        handle.or_raise(py)
    }
}

#[pymethods]
impl Counter {
    /// The reference to give to writers.
    #[getter]
    fn r#ref(&self) -> CounterRef {
        CounterRef(self.counter.reference())
    }

    /// Writes counted so far.
    #[getter]
    fn value(&self, py: Python<'_>) -> PyResult<u64> {
        self.counter.check_process().or_raise(py)?;
        Ok(self.counter.arrived())
    }

    /// Moves the engine on for a moment, then returns the value: for loops that spin.
    fn poll(&self, py: Python<'_>) -> PyResult<u64> {
        self.counter.poll().or_raise(py)
    }

    /// Writes counted that no expectation has taken.
    #[getter]
    fn unclaimed(&self, py: Python<'_>) -> PyResult<u64> {
        self.counter.check_process().or_raise(py)?;
        Ok(self.counter.unclaimed())
    }

    /// Done when the next `n` writes that no earlier expectation takes have been counted; those
    /// that came before count. `writers` are the peers that are to write: if one is lost first, the
    /// expectation fails with `PeerLost`. Without names only `timeout` ends a wait in vain.
    #[pyo3(signature = (n=1, *, writers=None, timeout=None))]
    fn expect(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] n: u32,
        writers: Option<Vec<ClassArg<'_, Peer>>>,
        timeout: Option<f64>,
    ) -> PyResult<Transfer> {
        self.expectation(py, n, writers, timeout).map(|h| Transfer::new(h, None))
    }

    /// `expect(n)` and wait for it.
    #[pyo3(signature = (n=1, *, writers=None, timeout=None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] n: u32,
        writers: Option<Vec<ClassArg<'_, Peer>>>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let handle = self.expectation(py, n, writers, timeout)?;
        Transfer::wait_for(py, &handle, Duration::MAX)?
            .ok_or_else(|| PyTimeoutError::new_err("the expectation is not over"))
    }

    fn __repr__(&self) -> String {
        format!("Counter({} arrived)", self.counter.arrived())
    }
}
