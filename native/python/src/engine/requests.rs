//! Common parts of requests: keywords, and submission to the engine.

use std::time::Duration;

use fabric_engine as fe;
use fe::{api::Priority, Op, Submit};
use pyo3::prelude::*;

use super::{core::Engine, seconds, span, transfer::Transfer};
use crate::errors::{raise, OrRaise};

/// A submit that moves at most this much holds on to the GIL: letting go costs more.
const GIL_HELD_BYTES: u64 = 16 << 10;

/// One of `latency`, `bulk` and `background`.
#[derive(Clone, Copy)]
pub(super) struct PriorityArg(Priority);

impl<'a, 'py> FromPyObject<'a, 'py> for PriorityArg {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match obj.extract::<&str>()? {
            "latency" => Ok(Self(Priority::Latency)),
            "bulk" => Ok(Self(Priority::Bulk)),
            "background" => Ok(Self(Priority::Background)),
            other => {
                let text = format!("priority {other:?}: use 'latency', 'bulk' or 'background'");
                Err(raise(obj.py(), &fe::EngineError::Invalid(text)))
            }
        }
    }
}

/// Options from the keywords of a request.
pub(super) fn options(
    py: Python<'_>,
    timeout: Option<f64>,
    rail: Option<u8>,
    priority: Option<PriorityArg>,
) -> PyResult<Submit> {
    let timeout = match timeout {
        None => None,
        some => Some(seconds(py, some, Duration::ZERO)?),
    };
    Ok(Submit { timeout, rail, priority: priority.map(|p| p.0), span: span::current(py)? })
}

impl Engine {
    #[inline]
    pub(super) fn submit_one(
        &self,
        py: Python<'_>,
        op: Op<'_>,
        (bytes, peer): (u64, Option<&fe::Peer>),
        (timeout, rail, priority): (Option<f64>, Option<u8>, Option<PriorityArg>),
    ) -> PyResult<Transfer> {
        let options = options(py, timeout, rail, priority)?;
        let submit = || self.engine.submit(std::slice::from_ref(&op), options);
        let handle = if bytes <= GIL_HELD_BYTES { submit() } else { py.detach(submit) };
        Ok(Transfer::new(handle.or_raise(py)?, peer.map(|p| self.engine.peer_transport(p))))
    }
}
