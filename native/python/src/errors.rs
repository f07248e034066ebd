//! Engine errors as exceptions of `fabric_ray.errors`, one class for each kind.

use fabric_engine::EngineError;
use pyo3::{prelude::*, sync::PyOnceLock, types::PyDict};

static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// The exception for an error, with the error's fields as attributes.
pub fn raise(py: Python<'_>, error: &EngineError) -> PyErr {
    build(py, error).unwrap_or_else(|failed| failed)
}

fn build(py: Python<'_>, error: &EngineError) -> PyResult<PyErr> {
    let module = MODULE
        .get_or_try_init(py, || PyModule::import(py, "fabric_ray.errors").map(Bound::unbind))?
        .bind(py);
    let fields = PyDict::new(py);
    let class = match error {
        EngineError::Invalid(_) => "InvalidArgument",
        EngineError::OutOfBounds { offset, len, limit, .. } => {
            fields.set_item("offset", offset)?;
            fields.set_item("nbytes", len)?;
            fields.set_item("limit", limit)?;
            "OutOfBounds"
        }
        EngineError::PeerLost { peer, transport, .. } => {
            fields.set_item("peer", peer)?;
            fields.set_item("transport", transport)?;
            "PeerLost"
        }
        EngineError::RailLost { peer, transport, .. } => {
            fields.set_item("peer", peer)?;
            fields.set_item("transport", transport)?;
            "RailLost"
        }
        EngineError::Unreachable { peer, .. } => {
            fields.set_item("peer", peer)?;
            "Unreachable"
        }
        EngineError::Stale { .. } => "Stale",
        EngineError::Refused { peer, .. } => {
            fields.set_item("peer", peer)?;
            "Refused"
        }
        EngineError::Timeout { peer, missing, after, quiesced, .. } => {
            fields.set_item("peer", peer)?;
            fields.set_item("missing", missing)?;
            fields.set_item("after", after.as_secs_f64())?;
            fields.set_item("quiesced", quiesced)?;
            "TransferTimeout"
        }
        EngineError::Storage { peer, .. } => {
            fields.set_item("peer", peer)?;
            "StorageError"
        }
        EngineError::NotQuiesced { .. } => "NotQuiesced",
        EngineError::Closed | EngineError::Draining => "EngineClosed",
        EngineError::Forked { .. } => "ForkedEngine",
        EngineError::Handshake { peer, .. } => {
            fields.set_item("peer", peer)?;
            "HandshakeError"
        }
        EngineError::TransportUnavailable { .. } => "TransportUnavailable",
        EngineError::Resource { call, .. } => {
            fields.set_item("call", call)?;
            "ResourceError"
        }
        EngineError::Decode { .. } => "DecodeError",
        EngineError::Cancelled { .. } => "Cancelled",
        _ => "FabricError",
    };
    let exception = module.getattr(class)?.call((error.to_string(),), Some(&fields))?;
    Ok(PyErr::from_value(exception))
}

pub trait OrRaise<T> {
    /// The value, or the exception for the error.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, EngineError> {
    #[inline]
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|e| raise(py, &e))
    }
}
