//! Other engines, and what they send.

use fabric_engine as fe;
use fe::api::EngineId;
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyBytes};

use super::values::{hex, unhex, EngineAddress};
use crate::errors::raise;

/// Another engine, as this one knows it.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct Peer(pub fe::Peer);

#[pymethods]
impl Peer {
    #[getter]
    fn address(&self) -> EngineAddress {
        EngineAddress(self.0.address().clone())
    }

    /// The peer's id as hex.
    #[getter]
    fn id(&self) -> String {
        hex(&self.0.id().0)
    }

    #[getter]
    fn name(&self) -> &str {
        &self.0.address().name
    }

    /// The name of the peer in errors.
    #[getter]
    fn label(&self) -> String {
        self.0.address().label()
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0.id() == other.0.id()
    }

    fn __hash__(&self) -> u64 {
        let id = self.0.id().0;
        id[..8].iter().fold(0, |h, b| h << 8 | u64::from(*b))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// An argument that names one incarnation of an engine: a `Peer`, an `EngineAddress`, or its id as
/// hex.
pub(super) struct EngineIdArg(pub EngineId);

impl<'a, 'py> FromPyObject<'a, 'py> for EngineIdArg {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(peer) = obj.cast::<Peer>() {
            return Ok(Self(peer.get().0.id()));
        }
        if let Ok(address) = obj.cast::<EngineAddress>() {
            return Ok(Self(address.get().0.id));
        }
        let Ok(id) = obj.extract::<&str>() else {
            let kind = obj.get_type().name()?;
            let text = format!("a peer is a Peer, an EngineAddress or an engine's id, not {kind}");
            return Err(PyTypeError::new_err(text));
        };
        unhex(id).map(|id| Self(EngineId(id))).ok_or_else(|| {
            let text = format!("{id:?} is no engine's id, which has 32 hex digits");
            raise(obj.py(), &fe::EngineError::Invalid(text))
        })
    }
}

/// Peers that are addressed together.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct PeerGroup(pub fe::PeerGroup);

#[pymethods]
impl PeerGroup {
    fn __len__(&self) -> usize {
        self.0.peers().len()
    }

    #[getter]
    fn peers(&self) -> Vec<Peer> {
        self.0.peers().iter().cloned().map(Peer).collect()
    }

    fn __repr__(&self) -> String {
        format!("PeerGroup({} peers)", self.0.peers().len())
    }
}

/// A small message from a peer. It holds its place in the receive pool until it is dropped.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct Message(pub fe::Delivery);

#[pymethods]
impl Message {
    /// The sending engine's id, as hex.
    #[getter]
    fn sender(&self) -> String {
        hex(&self.0.from().0)
    }

    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.message())
    }

    fn __repr__(&self) -> String {
        format!("Message({} bytes from {})", self.0.message().len(), self.0.from())
    }
}
