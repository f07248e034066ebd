//! Arguments of the engine's own classes; another type is a `TypeError` that says how to get one.

use std::ops::Deref;

use pyo3::{exceptions::PyTypeError, prelude::*, pyclass::PyClass};

use super::{
    memory::{Pages, Region, RemoteRegion},
    peers::Peer,
    values::RegionDescriptor,
};

/// A class whose instances users make by one call.
pub(crate) trait Made: PyClass {
    const CLASS: &'static str;
    /// The call that makes one.
    const CALL: &'static str;
}

impl Made for Region {
    const CLASS: &'static str = "Region";
    const CALL: &'static str = "engine.register(array) or engine.alloc(nbytes)";
}

impl Made for RemoteRegion {
    const CLASS: &'static str = "RemoteRegion";
    const CALL: &'static str = "engine.import_region(descriptor)";
}

impl Made for RegionDescriptor {
    const CLASS: &'static str = "RegionDescriptor";
    const CALL: &'static str = "region.descriptor()";
}

impl Made for Peer {
    const CLASS: &'static str = "Peer";
    const CALL: &'static str = "engine.peer(address)";
}

impl Made for Pages {
    const CLASS: &'static str = "Pages";
    const CALL: &'static str = "pages(indices, stride=nbytes)";
}

/// An argument of class `T`.
pub(crate) struct Given<'py, T: Made> {
    value: PyRef<'py, T>,
}

impl<T: Made> Deref for Given<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<'py, T: Made> FromPyObject<'_, 'py> for Given<'py, T> {
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
