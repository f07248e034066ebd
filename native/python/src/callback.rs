//! Python callbacks, and the contexts in which they are called.

use std::ops::Deref;

use pyo3::{exceptions::PyTypeError, intern, prelude::*, sync::PyOnceLock, types::PyTuple};

use crate::{
    attach::attached,
    engine::{without_span, DeferredRelease},
};

static COPY_CONTEXT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// A function and its caller's context, as in asyncio's `call_soon`.
///
/// Engine threads make the calls. Each call has a copy of the context, so that no other call sees
/// the variables it sets, and several threads may be in the function.
pub struct Callback(DeferredRelease<Objects>);

struct Objects {
    function: Py<PyAny>,
    context: Py<PyAny>,
}

impl Callback {
    /// Calls the function, unless the interpreter has ended. `args` returns the function and then
    /// its arguments. An exception of the function goes to `sys.unraisablehook`.
    pub fn call<F>(&self, args: F)
    where
        F: for<'py> FnOnce(Python<'py>, &Py<PyAny>) -> PyResult<Bound<'py, PyTuple>>,
    {
        attached(|py| self.0.call(py, args));
    }

    /// As [`Self::call`], for the only call: the function ends with it.
    pub fn call_once<F>(self, args: F)
    where
        F: for<'py> FnOnce(Python<'py>, &Py<PyAny>) -> PyResult<Bound<'py, PyTuple>>,
    {
        attached(|py| self.0.into_inner(py).call(py, args));
    }
}

impl Objects {
    fn call<'py, F>(&self, py: Python<'py>, args: F)
    where
        F: FnOnce(Python<'py>, &Py<PyAny>) -> PyResult<Bound<'py, PyTuple>>,
    {
        if let Err(e) = args(py, &self.function).and_then(|args| self.run(&args)) {
            e.write_unraisable(py, Some(self.function.bind(py)));
        }
    }

    fn run(&self, args: &Bound<'_, PyTuple>) -> PyResult<()> {
        let py = args.py();
        let context = self.context.bind(py).call_method0(intern!(py, "copy"))?;
        context.call_method1(intern!(py, "run"), args).map(drop)
    }
}

/// A callback that is called repeatedly. Its calls belong to other requests than the one in whose
/// context it was given, so they have no span. The context is kept as long as the function.
pub struct RecurringCallback(Callback);

impl Deref for RecurringCallback {
    type Target = Callback;

    fn deref(&self) -> &Callback {
        &self.0
    }
}

impl<'py> FromPyObject<'_, 'py> for RecurringCallback {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let callback = Callback::extract(value)?;
        without_span(callback.0.context.bind(value.py()))?;
        Ok(Self(callback))
    }
}

impl<'py> FromPyObject<'_, 'py> for Callback {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if !value.is_callable() {
            let kind = value.get_type().name()?;
            let text = format!("the callback must be callable, not {kind}");
            return Err(PyTypeError::new_err(text));
        }
        let context = COPY_CONTEXT.import(value.py(), "contextvars", "copy_context")?.call0()?;
        let objects = Objects { function: value.to_owned().unbind(), context: context.unbind() };
        Ok(Self(DeferredRelease::new(objects)))
    }
}
