use std::time::Duration;

use fabric_engine as fe;
use fe::api::PageIndices;
use pyo3::{
    exceptions::PyAttributeError,
    prelude::*,
    types::{PyBytes, PyDict, PySlice},
};

use super::{
    checked_int,
    peers::{EngineIdArg, Peer},
    seconds,
    transfer::Transfer,
    values::RegionDescriptor,
    watcher::gpu_array,
};
use crate::errors::{raise, OrRaise};

/// A registered memory region of this engine, or a part of one. Keeps the memory alive; when the
/// last view is gone, the registration ends.
#[pyclass(frozen, subclass, module = "fabric_ray._native")]
pub(crate) struct Region(pub fe::Region);

#[pymethods]
impl Region {
    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len()
    }

    /// Address of the first byte in this process. Files have none.
    #[getter]
    fn addr(&self, py: Python<'_>) -> PyResult<usize> {
        self.in_memory(py)?;
        Ok(self.0.addr())
    }

    /// The file that it lies in; `None` for memory.
    #[getter]
    fn path(&self) -> Option<std::path::PathBuf> {
        self.0.location().file().map(|file| file.path().to_owned())
    }

    /// Returns when what was written to a file region is on its disk; at once for memory.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.sync()).or_raise(py)
    }

    /// Whether peers on this host can map it: memory that the engine allocated.
    #[getter]
    fn mappable(&self) -> bool {
        self.0.is_mappable()
    }

    fn __len__(&self) -> usize {
        self.0.len() as usize
    }

    /// A part of it: `nbytes` bytes from `offset`. Same registration, own bounds.
    fn slice(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] offset: u64,
        #[pyo3(from_py_with = checked_int)] nbytes: u64,
    ) -> PyResult<Self> {
        self.0.slice(offset, nbytes).map(Self).or_raise(py)
    }

    /// A part of it as a registration of its own, for one peer, or for a while, or both.
    #[pyo3(signature = (offset=0, nbytes=None, *, peer=None, ttl=None))]
    fn grant(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] offset: u64,
        #[pyo3(from_py_with = checked_int)] nbytes: Option<u64>,
        peer: Option<EngineIdArg>,
        ttl: Option<f64>,
    ) -> PyResult<Self> {
        let ttl = ttl.map(|s| lifetime(py, s)).transpose()?;
        let terms = fe::Grant { peer: peer.map(|peer| peer.0), ttl };
        let nbytes = nbytes.unwrap_or_else(|| self.0.len().saturating_sub(offset));
        py.detach(|| self.0.grant(offset, nbytes, terms)).map(Self).or_raise(py)
    }

    /// The descriptor with which a peer accesses the region.
    fn descriptor(&self) -> RegionDescriptor {
        RegionDescriptor(self.0.descriptor())
    }

    /// Ends the registration for all views and waits until no peer can reach the memory; raises
    /// `NotQuiesced` if that can't be shown within `timeout` seconds.
    #[pyo3(signature = (timeout=10.0))]
    fn deregister(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds(py, Some(timeout), Duration::ZERO)?;
        py.detach(|| self.0.deregister(timeout)).or_raise(py)
    }

    /// Ends the registration for all views, without waiting: the transfer is done when no peer can
    /// reach the memory.
    fn revoke(&self, py: Python<'_>) -> PyResult<Transfer> {
        Ok(Transfer::new(self.0.revoke().or_raise(py)?, None))
    }

    /// `region[a:b]`: the bytes from `a` to `b`.
    fn __getitem__(&self, py: Python<'_>, part: &Bound<'_, PySlice>) -> PyResult<Self> {
        let (offset, nbytes) = part_of(part, self.0.len())?;
        self.0.slice(offset, nbytes).map(Self).or_raise(py)
    }

    /// The GPU that the memory is part of, as this process numbers it; `None` on the host.
    #[getter]
    fn cuda_device(&self) -> Option<i32> {
        self.0.location().cuda().map(|range| range.device)
    }

    /// The memory as a numpy array of bytes; it keeps the region.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(device) = slf.get().cuda_device() {
            let text = format!("the region lies in memory of cuda:{device}; use tensor()");
            return Err(raise(slf.py(), &fe::EngineError::Invalid(text)));
        }
        slf.get().in_memory(slf.py())?;
        PyModule::import(slf.py(), "numpy")?.call_method1("asarray", (slf,))
    }

    /// The memory as a torch tensor of `dtype` (bytes if not named) and `shape` (flat if not
    /// named); it keeps the region.
    #[pyo3(signature = (dtype=None, shape=None))]
    fn tensor<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        shape: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let torch = PyModule::import(slf.py(), "torch")?;
        let mut tensor = match slf.get().cuda_device() {
            None => torch.call_method1("from_numpy", (Self::numpy(slf)?,))?,
            Some(device) => {
                let options = PyDict::new(slf.py());
                options.set_item("device", format!("cuda:{device}"))?;
                torch.call_method("as_tensor", (slf,), Some(&options))?
            }
        };
        if let Some(dtype) = dtype {
            tensor = tensor.call_method1("view", (dtype,))?;
        }
        match shape {
            None => Ok(tensor),
            Some(shape) => tensor.call_method1("view", (shape,)),
        }
    }

    /// For numpy: an array of bytes that shares this memory and keeps the region.
    #[getter]
    fn __array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let py = slf.py();
        let this = slf.get();
        if !this.0.location().is_host() {
            return Err(PyAttributeError::new_err(
                "GPU memory and files are no arrays of the host",
            ));
        }
        let d = PyDict::new(py);
        d.set_item("version", 3)?;
        d.set_item("shape", (this.0.len(),))?;
        d.set_item("typestr", "|u1")?;
        d.set_item("data", (this.0.addr(), false))?;
        Ok(d)
    }

    /// For torch and cupy: a GPU array of bytes that shares this memory and keeps the region.
    #[getter]
    fn __cuda_array_interface__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let this = slf.get();
        if this.cuda_device().is_none() {
            return Err(PyAttributeError::new_err("host memory is no array of a GPU"));
        }
        gpu_array(slf.py(), this.0.addr() as u64, this.0.len(), "|u1")
    }

    fn __repr__(&self) -> String {
        if let Some(path) = self.path() {
            return format!("Region({} bytes of file {})", self.0.len(), path.display());
        }
        let kind = match self.cuda_device() {
            _ if self.0.is_mappable() => "engine memory".to_owned(),
            None => "registered memory".to_owned(),
            Some(device) => format!("memory of cuda:{device}"),
        };
        format!("Region({} bytes of {kind} at {:#x})", self.0.len(), self.0.addr())
    }
}

impl Region {
    /// Raises for a file, which has neither address nor array.
    fn in_memory(&self, py: Python<'_>) -> PyResult<()> {
        let Some(path) = self.path() else { return Ok(()) };
        let text = format!(
            "the region lies in the file {}, which has no address; read it into memory with \
             engine.read from the engine's own import_region",
            path.display()
        );
        Err(raise(py, &fe::EngineError::Invalid(text)))
    }
}

/// Lifetime of a grant.
fn lifetime(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).ok().filter(|ttl| !ttl.is_zero()).ok_or_else(|| {
        let text = format!("a grant for {seconds} seconds: give a ttl above 0, or none");
        raise(py, &fe::EngineError::Invalid(text))
    })
}

/// A peer's region, ready to be named in requests.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct RemoteRegion(pub fe::RemoteRegion);

#[pymethods]
impl RemoteRegion {
    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len()
    }

    #[getter]
    fn peer(&self) -> Peer {
        Peer(self.0.peer().clone())
    }

    fn __len__(&self) -> usize {
        self.0.len() as usize
    }

    /// A part of it: `nbytes` bytes from `offset`.
    fn slice(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] offset: u64,
        #[pyo3(from_py_with = checked_int)] nbytes: u64,
    ) -> PyResult<Self> {
        self.0.slice(offset, nbytes).map(Self).or_raise(py)
    }

    /// `region[a:b]`: the bytes from `a` to `b`.
    fn __getitem__(&self, py: Python<'_>, part: &Bound<'_, PySlice>) -> PyResult<Self> {
        let (offset, nbytes) = part_of(part, self.0.len())?;
        self.0.slice(offset, nbytes).map(Self).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("RemoteRegion({} bytes at {:?})", self.0.len(), self.0.peer())
    }
}

/// Start and length of a Python slice of `len` bytes.
fn part_of(part: &Bound<'_, PySlice>, len: u64) -> PyResult<(u64, u64)> {
    let len = isize::try_from(len).unwrap_or(isize::MAX);
    let py = part.py();
    let part = part.indices(len)?;
    if part.step != 1 {
        let text = "a region can't be sliced in steps; use pages".into();
        return Err(raise(py, &fe::EngineError::Invalid(text)));
    }
    Ok((part.start as u64, part.slicelength as u64))
}

/// Pages of a region, in order: page `i` lies at `offset + indices[i] * stride` bytes.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct Pages(pub fe::api::Pages);

#[pymethods]
impl Pages {
    /// From 32-bit native-endian indices.
    #[staticmethod]
    fn _listed(
        py: Python<'_>,
        indices: &Bound<'_, PyBytes>,
        #[pyo3(from_py_with = checked_int)] stride: u64,
        #[pyo3(from_py_with = checked_int)] offset: u64,
    ) -> PyResult<Self> {
        let indices: Vec<u32> = indices
            .as_bytes()
            .chunks_exact(4)
            .map(|c| u32::from_ne_bytes([c[0], c[1], c[2], c[3]]))
            .collect();
        let indices = PageIndices::list(indices).or_raise(py)?;
        Ok(Self(fe::api::Pages::new(indices, stride, offset)))
    }

    /// `first, first + 1, ...`
    #[staticmethod]
    fn _range(
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] first: u32,
        #[pyo3(from_py_with = checked_int)] count: u32,
        #[pyo3(from_py_with = checked_int)] stride: u64,
        #[pyo3(from_py_with = checked_int)] offset: u64,
    ) -> PyResult<Self> {
        let indices = PageIndices::range(first, count).or_raise(py)?;
        Ok(Self(fe::api::Pages::new(indices, stride, offset)))
    }

    fn __len__(&self) -> usize {
        self.0.indices.len() as usize
    }

    #[getter]
    fn stride(&self) -> u64 {
        self.0.stride
    }

    #[getter]
    fn offset(&self) -> u64 {
        self.0.offset
    }

    fn __repr__(&self) -> String {
        let Self(p) = self;
        format!("Pages({} pages, stride {}, offset {})", p.indices.len(), p.stride, p.offset)
    }
}
