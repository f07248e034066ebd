//! Arguments of the engine's classes. Another type raises a `TypeError` that names the call which
//! makes one.

use std::ops::Deref;

use pyo3::{exceptions::PyTypeError, prelude::*, pyclass::PyClass};

use super::{
    memory::{Pages, Region, RemoteRegion},
    peers::Peer,
    values::{EngineAddress, RegionDescriptor, SegmentDescriptor},
};

/// A class of the engine whose instances one call makes.
pub(crate) trait EngineClass: PyClass {
    const CLASS: &'static str;
    /// The call that makes an instance.
    const CALL: &'static str;
}

impl EngineClass for Region {
    const CLASS: &'static str = "Region";
    const CALL: &'static str = "engine.register(array) or engine.alloc(nbytes)";
}

impl EngineClass for RemoteRegion {
    const CLASS: &'static str = "RemoteRegion";
    const CALL: &'static str = "engine.import_region(descriptor)";
}

impl EngineClass for RegionDescriptor {
    const CLASS: &'static str = "RegionDescriptor";
    const CALL: &'static str = "region.descriptor()";
}

impl EngineClass for SegmentDescriptor {
    const CLASS: &'static str = "SegmentDescriptor";
    const CALL: &'static str = "segment.descriptor()";
}

impl EngineClass for EngineAddress {
    const CLASS: &'static str = "EngineAddress";
    const CALL: &'static str = "the other engine's address, or EngineAddress.from_bytes(data)";
}

impl EngineClass for Peer {
    const CLASS: &'static str = "Peer";
    const CALL: &'static str = "engine.peer(address)";
}

impl EngineClass for Pages {
    const CLASS: &'static str = "Pages";
    const CALL: &'static str = "pages(indices, stride=nbytes)";
}

/// An argument of class `T`.
pub(crate) struct ClassArg<'py, T: EngineClass> {
    value: PyRef<'py, T>,
}

impl<T: EngineClass> Deref for ClassArg<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<'py, T: EngineClass> FromPyObject<'_, 'py> for ClassArg<'py, T> {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(value) = given.cast::<T>() else {
            let class = given.get_type().name()?;
            let (name, call) = (T::CLASS, T::CALL);
            return Err(PyTypeError::new_err(format!(
                "expected a {name}, got {class}; pass {call}"
            )));
        };
        Ok(Self { value: value.try_borrow()? })
    }
}
