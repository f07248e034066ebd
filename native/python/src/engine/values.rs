//! Values that travel between processes. They pickle as their own checked encoding: unpickling one
//! runs the bounded decoder, nothing else.

use fabric_engine::api;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyTuple, PyType},
};

use super::checked_int;
use crate::errors::OrRaise;

macro_rules! value {
    ($(#[$doc:meta])* $name:ident { $($own:tt)* }) => {
        $(#[$doc])*
        #[pyclass(frozen, module = "fabric_ray._native")]
        pub(crate) struct $name(pub api::$name);

        #[pymethods]
        impl $name {
            $($own)*

            /// The encoded form: versioned, checksummed. Raises `InvalidArgument` if it is longer
            /// than peers accept.
            fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
                self.0.check_size().or_raise(py)?;
                Ok(PyBytes::new(py, &self.0.to_bytes()))
            }

            /// Decodes; raises `DecodeError` on anything but an intact encoding.
            #[classmethod]
            fn from_bytes(_: &Bound<'_, PyType>, py: Python<'_>, data: &[u8]) -> PyResult<Self> {
                api::$name::from_bytes(data).map(Self).or_raise(py)
            }

            fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
                let py = slf.py();
                let decode = slf.get_type().getattr("from_bytes")?;
                let bytes = slf.get().to_bytes(py)?;
                (decode, (bytes,)).into_pyobject(py)
            }

            fn __eq__(&self, other: &Self) -> bool {
                self.0 == other.0
            }

            fn __hash__(&self) -> u64 {
                use std::hash::{DefaultHasher, Hash, Hasher};
                let mut h = DefaultHasher::new();
                self.0.to_bytes().hash(&mut h);
                h.finish()
            }
        }
    };
}

value! {
    /// The address of an engine, and its incarnation.
    EngineAddress {
    /// The engine's id as hex: drawn anew each time an engine opens.
    #[getter]
    fn id(&self) -> String {
        hex(&self.0.id.0)
    }

    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// The transports it offers.
    #[getter]
    fn transports(&self) -> Vec<&'static str> {
        let kinds = self.0.endpoints.iter().map(|e| e.transport);
        // Does not reveal addresses to other processes.
        kinds.filter(|k| *k != api::TransportKind::File).map(|k| k.name()).collect()
    }

    fn __repr__(&self) -> String {
        format!("EngineAddress({}, {})", self.0.label(), self.transports().join("+"))
    }
    }
}

value! {
    /// A memory region, or part of one, as peers see it.
    RegionDescriptor {
    #[getter]
    fn owner(&self) -> EngineAddress {
        EngineAddress(self.0.owner.clone())
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len
    }

    /// A part of it: `nbytes` bytes from `offset`.
    fn slice(&self, py: Python<'_>, #[pyo3(from_py_with = checked_int)] offset: u64, #[pyo3(from_py_with = checked_int)] nbytes: u64) -> PyResult<Self> {
        self.0.slice(offset, nbytes).map(Self).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("RegionDescriptor({} bytes of {})", self.0.len, self.0.owner.label())
    }
    }
}

value! {
    /// A segment as peers see it: one address space over many regions of one engine.
    SegmentDescriptor {
    #[getter]
    fn owner(&self) -> EngineAddress {
        EngineAddress(self.0.owner.clone())
    }

    /// Bytes, from offset 0 to the end of the last part.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len()
    }

    /// Of each part: its offset, its bytes, where it lies, and the transports that reach it.
    #[getter]
    fn parts(&self) -> Vec<(u64, u64, String, Vec<&'static str>)> {
        let names = |kinds: &[api::TransportKind]| kinds.iter().map(|k| k.name()).collect();
        let parts = self.0.parts.iter();
        parts.map(|p| (p.at, p.len, p.location.to_string(), names(&p.transports))).collect()
    }

    fn __repr__(&self) -> String {
        let (n, owner) = (self.0.parts.len(), self.0.owner.label());
        format!("SegmentDescriptor({} bytes in {n} parts of {owner})", self.0.len())
    }
    }
}

value! {
    /// A reference to a counter, for its writers.
    CounterRef {
    /// The owning engine's id as hex.
    #[getter]
    fn owner(&self) -> String {
        hex(&self.0.owner.0)
    }

    fn __repr__(&self) -> String {
        format!("CounterRef({:?} of {})", self.0.imm(), self.0.owner)
    }
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The inverse of [`hex`], for 16 bytes.
pub fn unhex(text: &str) -> Option<[u8; 16]> {
    let digits = text.bytes().map(|b| (b as char).to_digit(16)).collect::<Option<Vec<_>>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|d| (d[0] << 4 | d[1]) as u8).collect();
    bytes.try_into().ok().filter(|_| digits.len() == 32)
}
