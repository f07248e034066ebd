//! One rank of an expert-parallel exchange. Tensors come in as addresses: `fabric_ray.moe` looks
//! after their types.

use std::{ptr::NonNull, sync::Arc, time::Duration};

use fabric_engine as fe;
use fabric_moe::{
    self as moe, device,
    kernels::{Float, Part, PartMut},
    memory::Memory,
    routes::Order,
};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    detached_drop::DetachedDrop,
    engine::{checked_int, DeferredRelease, Engine, Region},
    errors::{raise, OrRaise},
};

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<MoeExchange>()
}

/// Address, bytes from the first row to the end of the last, bytes between rows, bytes of a row.
pub(crate) type PartArg = (usize, usize, usize, usize);

/// # Safety
/// The bytes must stay readable and unmodified as long as the slice is used.
unsafe fn slice<'a>(address: usize, nbytes: usize) -> &'a [u8] {
    if nbytes == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(address as *const u8, nbytes) }
}

/// # Safety
/// As for [`slice`].
pub(crate) unsafe fn part<'a>((address, nbytes, stride, width): PartArg) -> Part<'a> {
    // SAFETY: the caller's promise.
    Part { bytes: unsafe { slice(address, nbytes) }, stride, width }
}

/// # Safety
/// The bytes must stay writable, for exclusive use, as long as the part is used.
pub(crate) unsafe fn part_mut<'a>((address, nbytes, stride, width): PartArg) -> PartMut<'a> {
    let bytes: &mut [u8] = match nbytes {
        0 => &mut [],
        // SAFETY: the caller's promise.
        _ => unsafe { std::slice::from_raw_parts_mut(address as *mut u8, nbytes) },
    };
    PartMut { bytes, stride, width }
}

pub(crate) fn float(py: Python<'_>, name: &str) -> PyResult<Float> {
    Float::named(name).ok_or_else(|| {
        let text = format!("answers of {name} can't be summed; use float32, bfloat16 or float16");
        raise(py, &fe::EngineError::Invalid(text))
    })
}

pub(crate) fn timeout(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    let timeout = Duration::try_from_secs_f64(seconds).ok().filter(|t| !t.is_zero());
    timeout.ok_or_else(|| {
        let text =
            format!("a timeout of {seconds} seconds is not a length of time: give more than 0");
        raise(py, &fe::EngineError::Invalid(text))
    })
}

/// The integers at an address.
///
/// # Safety
/// The address must be that of `n` 64-bit integers, which nothing writes while the slice is used.
pub(crate) unsafe fn integers<'a>((address, n): (usize, usize)) -> &'a [i64] {
    match n {
        0 => &[],
        // SAFETY: the caller's promise; every bit pattern is an integer.
        _ => unsafe { std::slice::from_raw_parts(address as *const i64, n) },
    }
}

/// # Errors
/// Address 0, or one that nothing of this type lies at.
pub(crate) fn at<T>(py: Python<'_>, address: usize) -> PyResult<NonNull<T>> {
    NonNull::new(address as *mut T).filter(|p| p.is_aligned()).ok_or_else(|| {
        let text = format!("address {address:#x} is no multiple of {}", align_of::<T>());
        raise(py, &fe::EngineError::Invalid(text))
    })
}

/// Rows of each expert, the first of each, all.
pub(crate) type PlacingResult = (Vec<u32>, Vec<u32>, u64);

pub(crate) fn placing(placing: &moe::Dispatched) -> PlacingResult {
    (placing.counts.clone(), placing.starts.clone(), placing.rows)
}

/// One rank of an exchange; `fabric_ray.moe.AllToAll` is the class to use.
#[pyclass(frozen, module = "fabric_ray._native")]
struct MoeExchange(DetachedDrop<moe::AllToAll>);

#[pymethods]
impl MoeExchange {
    #[new]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (engine, *, rank, ranks, experts, topk, max_tokens, row_nbytes, elements, dtype, private_rows, shared_rows, allocate=None))]
    fn new(
        py: Python<'_>,
        engine: &Engine,
        #[pyo3(from_py_with = checked_int)] rank: u32,
        #[pyo3(from_py_with = checked_int)] ranks: u32,
        #[pyo3(from_py_with = checked_int)] experts: u32,
        #[pyo3(from_py_with = checked_int)] topk: u32,
        #[pyo3(from_py_with = checked_int)] max_tokens: u32,
        #[pyo3(from_py_with = checked_int)] row_nbytes: u32,
        #[pyo3(from_py_with = checked_int)] elements: u32,
        dtype: &str,
        #[pyo3(from_py_with = checked_int)] private_rows: u32,
        #[pyo3(from_py_with = checked_int)] shared_rows: Option<u32>,
        allocate: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let back = moe::AnswerFormat { elements, float: float(py, dtype)? };
        let shape = moe::Shape {
            ranks,
            experts,
            topk,
            max_tokens,
            row_nbytes,
            back,
            private_rows,
            shared_rows,
        };
        let engine = Arc::clone(&engine.engine);
        let Some(allocate) = allocate else {
            let exchange = py.detach(|| moe::AllToAll::new(engine, shape, rank)).or_raise(py)?;
            return Ok(Self(DetachedDrop::new(exchange)));
        };
        let nbytes = Memory::new(shape).or_raise(py)?.rows_nbytes();
        let rows = allocate.call1((nbytes,))?.cast_into::<Region>()?.get().0.clone();
        let exchange = py.detach(|| moe::AllToAll::over(engine, shape, rank, rows)).or_raise(py)?;
        Ok(Self(DetachedDrop::new(exchange)))
    }

    /// Where this rank's own rows begin in its rows, bytes; bytes from one row to the next, and
    /// from one answer.
    #[getter]
    fn own_rows(&self) -> (u64, u64, u64) {
        let shape = self.0.shape();
        (self.0.memory().own(0), shape.row_stride(), shape.back_stride())
    }

    /// Words of 8 bytes that a device and its exchange share.
    #[getter]
    fn device_words(&self) -> usize {
        device::Layout::new(self.0.shape()).words
    }

    /// The areas of device words: name, first word, number of words.
    #[getter]
    fn device_areas(&self) -> Vec<(&'static str, usize, usize)> {
        device::Layout::new(self.0.shape()).areas()
    }

    /// The rounds in which rows come to a device, and answers leave it.
    #[getter]
    fn device_turns(&self) -> (u64, u64) {
        device::rounds(self.0.shape())
    }

    /// The path of rows to each other rank, as text.
    #[getter]
    fn ways(&self, py: Python<'_>) -> Vec<(u32, String)> {
        py.detach(|| self.0.paths())
    }

    /// Kernels carry the exchange out from now on, and store to peers' memory by themselves if they
    /// are to. Addresses of the FIFO's parts and of what is shared, which `keep` keeps, all zero
    /// now.
    fn serve(
        &self,
        py: Python<'_>,
        fifo: (usize, u32, usize, usize),
        words: usize,
        keep: Py<PyAny>,
        stores: bool,
    ) -> PyResult<()> {
        let (slots, capacity, pushers, completed) = fifo;
        let keep = Arc::new(DeferredRelease::new(keep));
        let parts = device::Parts {
            slots: at(py, slots)?,
            capacity,
            pushers: at(py, pushers)?,
            completed: at(py, completed)?,
        };
        let n = device::Layout::new(self.0.shape()).words;
        // SAFETY: the Python caller gives memory of its own of these sizes, zeroed, and `keep`
        // holds it.
        let area = unsafe { device::Area::over(parts, Arc::clone(&keep) as _) };
        // SAFETY: as above; kernels read and write it in 8 bytes, or when the host doesn't.
        let words = unsafe { device::AtomicWords::over(at(py, words)?, n, keep) };
        let shared = device::SharedWords::new(words, self.0.shape()).or_raise(py)?;
        py.detach(|| self.0.serve(area, shared, stores)).or_raise(py)
    }

    /// Raises what went wrong on the device since the last call.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.check()).or_raise(py)
    }

    /// No kernel runs any more that could store to a peer's memory.
    fn settled(&self, py: Python<'_>) {
        py.detach(|| self.0.settled());
    }

    /// Ends every wait of the device.
    fn leave(&self, py: Python<'_>) {
        py.detach(|| self.0.leave());
    }

    /// All calls of this rank are done: other ranks may leave from now on, which isn't reported as
    /// a loss.
    fn expect_departures(&self, py: Python<'_>) {
        py.detach(|| self.0.expect_departures());
    }

    /// Waits until others have what was handed in for them.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.finish()).or_raise(py)
    }

    /// Whether tokens that the device has told of wait for the exchange before to be over.
    #[getter]
    fn begins(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.begins())
    }

    /// Ranks whose answers are missing in the last sums that the device has told of.
    #[getter]
    fn left_out(&self, py: Python<'_>) -> Vec<u32> {
        py.detach(|| self.0.left_out())
    }

    /// Nanoseconds that the last receiving call waited for each rank.
    #[getter]
    fn wait_times(&self) -> Vec<u64> {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0.wait_times().into_iter().map(nanos).collect()
    }

    /// The memory areas of a rank of such an exchange: purpose, content, bytes.
    #[getter]
    fn areas(&self) -> Vec<(&'static str, String, u64)> {
        self.0.memory().explain()
    }

    /// The descriptor of this rank for other ranks; with `only`, for one rank that joins again.
    #[pyo3(signature = (only=None))]
    fn descriptor<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = checked_int)] only: Option<u32>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let descriptor = py.detach(|| self.0.descriptor(only)).or_raise(py)?;
        Ok(PyBytes::new(py, &descriptor))
    }

    /// Takes a rank in by its descriptor; returns its number.
    fn admit(&self, py: Python<'_>, descriptor: &[u8]) -> PyResult<u32> {
        py.detach(|| self.0.admit(descriptor)).or_raise(py)
    }

    fn set_timeout(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        self.0.set_timeout(timeout(py, seconds)?);
        Ok(())
    }

    /// Gives a rank up.
    fn mask(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] rank: u32,
        cause: &str,
    ) -> PyResult<()> {
        py.detach(|| self.0.mask(rank, cause)).or_raise(py)
    }

    /// Lets go of all other ranks between two exchanges, so that all can connect again.
    fn disconnect(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.disconnect()).or_raise(py)
    }

    /// Whether `disconnect` may be called.
    #[getter]
    fn between_exchanges(&self) -> bool {
        self.0.between_exchanges()
    }

    /// Ranks that have told that they have given this one up.
    #[getter]
    fn given_up_by(&self) -> Vec<u32> {
        self.0.given_up_by()
    }

    /// Whether no rank was lost, and none has given this one up.
    #[getter]
    fn is_whole(&self) -> bool {
        self.0.is_whole()
    }

    /// Ranks that were given up: number, what was under way, cause.
    #[getter]
    fn lost(&self) -> Vec<(u32, String, String)> {
        self.0.lost().into_iter().map(|l| (l.rank, l.kind.to_string(), l.cause)).collect()
    }

    /// Whether each rank is here.
    #[getter]
    fn present(&self) -> Vec<bool> {
        self.0.present()
    }

    /// # Errors
    /// As `AllToAll::dispatch_send`. `indices`: address and number of 64-bit integers.
    fn dispatch_send(
        &self,
        py: Python<'_>,
        parts: Vec<PartArg>,
        indices: (usize, usize),
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: the Python caller holds the tensors during the call.
            let parts: Vec<Part<'_>> = parts.into_iter().map(|p| unsafe { part(p) }).collect();
            // SAFETY: as above; the address is that of an int64 tensor.
            self.0.dispatch_send(&parts, unsafe { integers(indices) })
        })
        .or_raise(py)
    }

    /// Waits for the routes: rows of each expert, the first row of each, rows in all. With
    /// `stride`, each expert's rows begin at a multiple of it; else they follow one another, filled
    /// up to a multiple of `multiple`.
    #[pyo3(signature = (*, multiple, stride))]
    fn arriving(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] multiple: u32,
        #[pyo3(from_py_with = checked_int)] stride: Option<u32>,
    ) -> PyResult<PlacingResult> {
        let order = stride.map_or(Order::Packed { multiple }, |rows| Order::Strided { rows });
        py.detach(|| self.0.wait_arriving(order)).map(|p| placing(&p)).or_raise(py)
    }

    /// Waits for `seconds` at most for the routes of the device's dispatch with this ticket: rows of
    /// each expert, or `None`.
    fn arriving_on_device(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] ticket: u32,
        seconds: f64,
    ) -> PyResult<Option<Vec<u32>>> {
        let limit = timeout(py, seconds)?;
        let found = py.detach(|| self.0.wait_arriving_on_device(ticket, limit)).or_raise(py)?;
        Ok(found.map(|placing| placing.counts.clone()))
    }

    fn dispatch_recv(&self, py: Python<'_>, parts: Vec<PartArg>) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: the Python caller holds the tensors during the call, for exclusive use.
            let mut parts: Vec<PartMut<'_>> =
                parts.into_iter().map(|p| unsafe { part_mut(p) }).collect();
            self.0.dispatch_recv(&mut parts).map(drop)
        })
        .or_raise(py)
    }

    fn combine_send(&self, py: Python<'_>, answers: PartArg) -> PyResult<()> {
        // SAFETY: the Python caller holds the tensor during the call.
        py.detach(|| self.0.combine_send(unsafe { part(answers) })).or_raise(py)
    }

    fn combine_answers(&self, py: Python<'_>, out: PartArg) -> PyResult<()> {
        // SAFETY: the Python caller holds the tensor during the call, for exclusive use.
        py.detach(|| self.0.combine_answers(&mut unsafe { part_mut(out) })).or_raise(py)
    }

    /// Returns the ranks whose answers are left out.
    #[pyo3(signature = (weights, out, dtype))]
    fn combine_recv(
        &self,
        py: Python<'_>,
        weights: Option<PartArg>,
        out: PartArg,
        dtype: &str,
    ) -> PyResult<Vec<u32>> {
        let float = float(py, dtype)?;
        py.detach(|| {
            // SAFETY: the Python caller holds the tensors during the call, and uses `out`
            // exclusively.
            let weights = weights.map(|w| unsafe { part(w) });
            // SAFETY: as above.
            let mut out = unsafe { part_mut(out) };
            self.0.combine_recv(weights, &mut out, float)
        })
        .or_raise(py)
    }
}
