//! Engine errors as exceptions of `fabric_ray.errors`, one class for each kind.

use fabric_engine::{EngineError, LostLink};
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
        EngineError::OutOfBounds { what, offset, len, limit } => {
            fields.set_item("what", what)?;
            fields.set_item("offset", offset)?;
            fields.set_item("nbytes", len)?;
            fields.set_item("limit", limit)?;
            "OutOfBounds"
        }
        EngineError::PeerLost { peer, transport, nic, link, .. } => {
            lost_fields(&fields, peer, transport, nic, link)?;
            "PeerLost"
        }
        EngineError::RailLost { peer, transport, nic, link, .. } => {
            lost_fields(&fields, peer, transport, nic, link)?;
            "RailLost"
        }
        EngineError::Unreachable { peer, .. } => {
            fields.set_item("peer", peer)?;
            "Unreachable"
        }
        EngineError::Stale { what, .. } => {
            fields.set_item("what", what)?;
            "Stale"
        }
        EngineError::Refused { peer, op, .. } => {
            fields.set_item("peer", peer)?;
            fields.set_item("operation", op)?;
            "Refused"
        }
        EngineError::Timeout { op, peer, missing, after, quiesced, .. } => {
            fields.set_item("operation", op)?;
            fields.set_item("peer", peer)?;
            fields.set_item("missing", missing)?;
            fields.set_item("after", after.as_secs_f64())?;
            fields.set_item("quiesced", quiesced)?;
            "TransferTimeout"
        }
        EngineError::Storage { peer, op, .. } => {
            fields.set_item("peer", peer)?;
            fields.set_item("operation", op)?;
            "StorageError"
        }
        EngineError::NotQuiesced { what, after, .. } => {
            fields.set_item("what", what)?;
            fields.set_item("after", after.as_secs_f64())?;
            "NotQuiesced"
        }
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
        EngineError::Decode { what, .. } => {
            fields.set_item("what", what)?;
            "DecodeError"
        }
        EngineError::Cancelled { what, .. } => {
            fields.set_item("operation", what)?;
            "Cancelled"
        }
        _ => "FabricError",
    };
    let exception = module.getattr(class)?.call((error.to_string(),), Some(&fields))?;
    Ok(PyErr::from_value(exception))
}

fn lost_fields(
    fields: &Bound<'_, PyDict>,
    peer: &str,
    transport: &str,
    nic: &str,
    link: &LostLink,
) -> PyResult<()> {
    fields.set_item("peer", peer)?;
    fields.set_item("transport", transport)?;
    fields.set_item("nic", nic)?;
    fields.set_item("errno", link.errno.map(|errno| errno.raw_os_error()))?;
    fields.set_item("rail", link.rail)?;
    fields.set_item("incarnation", link.incarnation.as_deref())
}

/// One exception of each kind that the engine raises, as it raises them.
#[pyfunction]
pub fn _one_of_each_error(py: Python<'_>) -> Vec<Py<PyAny>> {
    EngineError::one_of_each().iter().map(|e| raise(py, e).into_value(py).into_any()).collect()
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
