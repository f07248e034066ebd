//! The request that a call is made for: a context variable, so that it follows threads' and tasks'
//! ways.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use fabric_engine::api::Span;
use pyo3::{prelude::*, sync::PyOnceLock, types::PyDict};

static VARIABLE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
/// The context is not read while no request was ever named.
static IN_USE: AtomicBool = AtomicBool::new(false);

fn variable(py: Python<'_>) -> PyResult<&Bound<'_, PyAny>> {
    let made = VARIABLE.get_or_try_init(py, || {
        let kwargs = PyDict::new(py);
        kwargs.set_item("default", 0u64)?;
        let class = PyModule::import(py, "contextvars")?.getattr("ContextVar")?;
        class.call(("fabric_ray_span",), Some(&kwargs)).map(Bound::unbind)
    })?;
    Ok(made.bind(py))
}

/// The span of the caller's context.
#[inline]
pub(crate) fn current(py: Python<'_>) -> PyResult<Span> {
    match IN_USE.load(Relaxed) {
        false => Ok(Span::NONE),
        true => variable(py)?.call_method0("get")?.extract().map(Span),
    }
}

/// Takes the span, if any, out of a context that isn't the present one.
pub(crate) fn without(context: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = context.py();
    match IN_USE.load(Relaxed) {
        false => Ok(()),
        true => context.call_method1("run", (variable(py)?.getattr("set")?, 0u64)).map(drop),
    }
}

/// The variable that holds the span of the present context; engines look at it from now on.
#[pyfunction]
pub(crate) fn _span_variable(py: Python<'_>) -> PyResult<Py<PyAny>> {
    let variable = variable(py)?;
    IN_USE.store(true, Relaxed);
    Ok(variable.clone().unbind())
}

/// The span of a name, the same in every process.
#[pyfunction]
pub(crate) fn span_of(name: &str) -> u64 {
    Span::named(name).0
}
