//! The engine's classes.

use fabric_engine::EngineError;
use pyo3::{
    exceptions::PyOverflowError,
    prelude::*,
    types::{PyBytes, PyInt, PyList, PyTuple},
};

use crate::errors::{raise, OrRaise};

mod batch;
mod class_arg;
mod config;
mod copies;
mod core;
mod counter;
mod deferred_release;
mod delta;
mod digest;
mod memory;
mod peers;
mod queue;
mod requests;
mod segment;
mod span;
mod telemetry;
mod threads;
mod transfer;
mod values;
mod watcher;

pub(crate) use self::{
    core::Engine,
    deferred_release::DeferredRelease,
    memory::Region,
    span::{current as current_span, without as without_span},
    watcher::Watcher,
};

/// The key that handshakes use in place of a token; computed once per process and token.
#[pyfunction]
fn stretched_token<'py>(py: Python<'py>, token: Vec<u8>) -> PyResult<Bound<'py, PyBytes>> {
    let key = py.detach(|| fabric_engine::transport::stretched_token(&token)).or_raise(py)?;
    Ok(PyBytes::new(py, &key))
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    deferred_release::register(m)?;
    m.add_function(wrap_pyfunction!(span::_span_variable, m)?)?;
    m.add_function(wrap_pyfunction!(span::span_of, m)?)?;
    m.add_function(wrap_pyfunction!(stretched_token, m)?)?;
    m.add_function(wrap_pyfunction!(copies::copy_rows, m)?)?;
    m.add_function(wrap_pyfunction!(copies::bind_copies, m)?)?;
    m.add_function(wrap_pyfunction!(copies::digest_copies, m)?)?;
    m.add_class::<batch::Batch>()?;
    m.add_class::<core::Engine>()?;
    m.add_class::<peers::Message>()?;
    m.add_class::<peers::Peer>()?;
    m.add_class::<peers::PeerGroup>()?;
    m.add_class::<counter::Counter>()?;
    m.add_class::<delta::DeltaDecoder>()?;
    m.add_class::<delta::DeltaEncoder>()?;
    m.add_class::<digest::Digest>()?;
    m.add_class::<memory::Pages>()?;
    m.add_class::<memory::Region>()?;
    m.add_class::<memory::RemoteRegion>()?;
    m.add_class::<segment::RemoteSegment>()?;
    m.add_class::<segment::Segment>()?;
    m.add_class::<queue::CompletionQueue>()?;
    m.add_class::<transfer::Flag>()?;
    m.add_class::<transfer::Transfer>()?;
    m.add_class::<values::CounterRef>()?;
    m.add_class::<values::EngineAddress>()?;
    m.add_class::<values::RegionDescriptor>()?;
    m.add_class::<values::SegmentDescriptor>()?;
    m.add_class::<watcher::Watcher>()
}

/// Seconds as a duration; `None` means `default`.
fn seconds(
    py: Python<'_>,
    value: Option<f64>,
    default: std::time::Duration,
) -> PyResult<std::time::Duration> {
    let Some(s) = value else { return Ok(default) };
    std::time::Duration::try_from_secs_f64(s).map_err(|_| {
        let text = format!("a timeout of {s} seconds is not a length of time: give 0 or more");
        raise(py, &EngineError::Invalid(text))
    })
}

/// A size, an offset, a count or an index, or several; one that doesn't fit is `InvalidArgument`,
/// which names it, not `OverflowError`.
pub(crate) fn checked_int<'py, T>(value: &Bound<'py, PyAny>) -> PyResult<T>
where
    for<'a> T: FromPyObject<'a, 'py, Error: Into<PyErr>>,
{
    let py = value.py();
    value.extract::<T>().map_err(Into::into).map_err(|e: PyErr| {
        if !e.is_instance_of::<PyOverflowError>(py) {
            return e;
        }
        let what = unfit(value).unwrap_or_else(|_| "a number".to_owned());
        let text =
            format!("{what} is no size, offset, count or index: it is negative or too large");
        raise(py, &EngineError::Invalid(text))
    })
}

/// Of a number, or of numbers in lists and tuples: the first negative one, else the largest, and
/// where it is.
fn unfit(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let mut found = Vec::new();
    numbers(value, String::new(), &mut found)?;
    let mut worst: Option<(Bound<'_, PyAny>, String)> = None;
    for (number, place) in found {
        if number.lt(0)? {
            return Ok(format!("{number}{place}"));
        }
        let larger = match &worst {
            Some((other, _)) => number.gt(other)?,
            None => true,
        };
        if larger {
            worst = Some((number, place));
        }
    }
    let (number, place) = worst.ok_or_else(|| PyOverflowError::new_err(""))?;
    Ok(format!("{number}{place}"))
}

fn numbers<'py>(
    value: &Bound<'py, PyAny>,
    place: String,
    found: &mut Vec<(Bound<'py, PyAny>, String)>,
) -> PyResult<()> {
    if value.is_instance_of::<PyInt>() {
        found.push((value.clone(), place));
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let place = if place.is_empty() { " at ".to_owned() } else { place };
        for (i, item) in value.try_iter()?.enumerate() {
            numbers(&item?, format!("{place}[{i}]"), found)?;
        }
    }
    Ok(())
}
