use fabric_engine as fe;
use pyo3::{exceptions::PyAttributeError, prelude::*, types::PyDict};

use super::checked_int;
use crate::{callback::RecurringCallback, errors::OrRaise};

/// A 64-bit word that the engine watches: it calls back with the old and the new value.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct Watcher(pub fe::Watcher);

#[pymethods]
impl Watcher {
    /// Address of the word: 8 bytes, aligned. The engine polls the word from the first use on.
    #[getter]
    fn addr(&self) -> usize {
        self.0.addr()
    }

    #[getter]
    fn value(&self) -> u64 {
        self.0.load()
    }

    /// The value last seen by the watching thread, and how many seconds ago.
    #[getter]
    fn seen(&self) -> (u64, f64) {
        let (value, ago) = self.0.seen();
        (value, ago.as_secs_f64())
    }

    /// Changes the word and wakes the watching thread.
    fn store(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] value: u64,
    ) -> PyResult<()> {
        self.0.store(value).or_raise(py)
    }

    /// Adds to the word and wakes the watching thread.
    #[pyo3(signature = (n=1))]
    fn add(&self, py: Python<'_>, #[pyo3(from_py_with = checked_int)] n: u64) -> PyResult<()> {
        self.0.add(n).or_raise(py)
    }

    /// For numpy: the word as an array of one uint64 that shares its memory.
    #[getter]
    fn __array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let d = PyDict::new(slf.py());
        d.set_item("version", 3)?;
        d.set_item("shape", (1,))?;
        d.set_item("typestr", "=u8")?;
        d.set_item("data", (slf.get().0.addr(), false))?;
        Ok(d)
    }

    /// Memory of the word: `host memory`, `pinned host memory`, or GPU memory.
    #[getter]
    fn home(&self) -> &'static str {
        self.0.device_word().map_or("host memory", fe::memory::device::DeviceWord::home)
    }

    /// For torch and cupy: the word as a GPU array of one int64 that shares its memory.
    #[getter]
    fn __cuda_array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let Some(word) = slf.get().0.device_word() else {
            return Err(PyAttributeError::new_err("kernels can't use it: watch with a device"));
        };
        gpu_array(slf.py(), word.device_addr(), 1, "<i8")
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// The change callback as the engine wants it. Runs on the watching thread.
pub fn on_change(callback: RecurringCallback) -> impl Fn(u64, u64) + Send + Sync + 'static {
    move |old, new| callback.call(|py, f| (f, old, new).into_pyobject(py))
}

/// A flat array in GPU memory, as other libraries take it.
pub fn gpu_array<'py>(
    py: Python<'py>,
    addr: u64,
    n: u64,
    typestr: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let d = PyDict::new(py);
    d.set_item("version", 3)?;
    d.set_item("shape", (n,))?;
    d.set_item("typestr", typestr)?;
    d.set_item("data", (addr, false))?;
    d.set_item("strides", py.None())?;
    // There is no work to wait for.
    d.set_item("stream", py.None())?;
    Ok(d)
}
