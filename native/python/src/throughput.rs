//! One rank of a high-throughput exchange. Tensors come in as addresses: `fabric_ray.moe` looks
//! after their types.

use std::sync::Arc;

use fabric_engine::api::EngineId;
use fabric_moe::{
    self as moe,
    kernels::{Part, PartMut},
    routes::Order,
    throughput::{
        device::{AtomicWords, QueueLayout, DEPTH},
        KernelMemory, Layout, Member, Spec, Throughput,
    },
};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    detached_drop::DetachedDrop,
    engine::{checked_int, DeferredRelease, Engine, Region},
    errors::OrRaise,
    moe::{at, float, integers, part, part_mut, placing, timeout, PartArg, PlacingResult},
};

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<MoeThroughput>()
}

/// One rank of an exchange; `fabric_ray.moe.ThroughputAllToAll` is the class to use.
#[pyclass(frozen, module = "fabric_ray._native")]
struct MoeThroughput(DetachedDrop<Throughput>);

impl MoeThroughput {
    /// One of the exchanges of an engine.
    fn of(exchange: Throughput, engine: EngineId) -> Self {
        Self(DetachedDrop::new(exchange.of_engine(engine)))
    }
}

/// Memory for an exchange that kernels carry out, as `allocate` gives it for so many bytes and
/// words.
fn kernel_memory(
    py: Python<'_>,
    spec: &Spec,
    (workers, allocate): (u32, Bound<'_, PyAny>),
) -> PyResult<KernelMemory> {
    let nbytes = Layout::new(*spec).or_raise(py)?.nbytes();
    let n = QueueLayout::new(spec, workers).or_raise(py)?.words;
    let (region, words, keep): (Bound<'_, Region>, usize, Py<PyAny>) =
        allocate.call1((nbytes, n))?.extract()?;
    let keep = Arc::new(DeferredRelease::new(keep));
    // SAFETY: the Python caller gives so many zero words of its own, which `keep` holds; kernels
    // read and write them in turns with the host, in 8 bytes.
    let words = unsafe { AtomicWords::over(at(py, words)?, n, keep) };
    Ok(KernelMemory { region: region.get().0.clone(), words, workers })
}

#[pymethods]
impl MoeThroughput {
    /// `engine` is the model for the configuration of the proxy threads' engines. Its exchanges
    /// count the signals of one another.
    #[new]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (engine, *, rank, ranks, ranks_per_node, experts, topk, max_tokens, row_nbytes, elements, dtype, channels, chunk, ring_chunks, threads, timeout, incarnation=0, kernels=None))]
    fn new(
        py: Python<'_>,
        engine: &Engine,
        #[pyo3(from_py_with = checked_int)] rank: u32,
        #[pyo3(from_py_with = checked_int)] ranks: u32,
        #[pyo3(from_py_with = checked_int)] ranks_per_node: u32,
        #[pyo3(from_py_with = checked_int)] experts: u32,
        #[pyo3(from_py_with = checked_int)] topk: u32,
        #[pyo3(from_py_with = checked_int)] max_tokens: u32,
        #[pyo3(from_py_with = checked_int)] row_nbytes: u32,
        #[pyo3(from_py_with = checked_int)] elements: u32,
        dtype: &str,
        #[pyo3(from_py_with = checked_int)] channels: u32,
        #[pyo3(from_py_with = checked_int)] chunk: u32,
        #[pyo3(from_py_with = checked_int)] ring_chunks: u32,
        #[pyo3(from_py_with = checked_int)] threads: u32,
        timeout: f64,
        #[pyo3(from_py_with = checked_int)] incarnation: u32,
        kernels: Option<(u32, Bound<'_, PyAny>)>,
    ) -> PyResult<Self> {
        let back = moe::AnswerFormat { elements, float: float(py, dtype)? };
        let shape = moe::Shape {
            ranks,
            experts,
            topk,
            max_tokens,
            row_nbytes,
            back,
            private_rows: 0,
            shared_rows: None,
        };
        let spec = Spec { shape, ranks_per_node, channels, chunk, ring_chunks, threads };
        let member = Member { rank, incarnation };
        let timeout = self::timeout(py, timeout)?;
        let (config, id) = (engine.config.clone(), engine.engine.id());
        if let Some(kernels) = kernels {
            let memory = kernel_memory(py, &spec, kernels)?;
            let open = || Throughput::open_with_kernels(&config, spec, member, timeout, memory);
            return py.detach(open).map(|t| Self::of(t, id)).or_raise(py);
        }
        let opened = py.detach(|| Throughput::open(&config, spec, member, timeout));
        opened.map(|t| Self::of(t, id)).or_raise(py)
    }

    /// The memory areas of this rank: purpose, content, bytes.
    #[getter]
    fn areas(&self) -> Vec<(&'static str, String, u64)> {
        self.0.layout().explain()
    }

    /// The descriptor of this rank for other ranks.
    fn descriptor<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let descriptor = py.detach(|| self.0.descriptor());
        PyBytes::new(py, &descriptor)
    }

    /// Takes a rank in by its descriptor; returns its number.
    fn admit(&self, py: Python<'_>, descriptor: &[u8]) -> PyResult<u32> {
        py.detach(|| self.0.admit(descriptor)).or_raise(py)
    }

    fn set_timeout(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        self.0.set_timeout(timeout(py, seconds)?);
        Ok(())
    }

    /// Marks a rank that has yet to join as absent: no rank waits for it.
    fn leave_out(&self, py: Python<'_>, rank: u32) -> PyResult<()> {
        py.detach(|| self.0.leave_out(rank)).or_raise(py)
    }

    /// Gives a rank up, which ends the calls under way.
    fn mask(&self, py: Python<'_>, rank: u32, cause: &str) -> PyResult<()> {
        py.detach(|| self.0.mask(rank, cause)).or_raise(py)
    }

    /// All calls of this rank are done: other ranks may leave from now on, which isn't logged as a
    /// loss.
    fn expect_departures(&self) {
        self.0.expect_departures();
    }

    /// This rank, if others go on without it, and why.
    #[getter]
    fn broken(&self, py: Python<'_>) -> Option<(u32, String)> {
        py.detach(|| self.0.broken()).map(|b| (b.rank, b.cause))
    }

    /// Ranks that were given up and haven't come again, and why.
    #[getter]
    fn lost(&self, py: Python<'_>) -> Vec<(u32, String)> {
        py.detach(|| self.0.lost()).into_iter().map(|b| (b.rank, b.cause)).collect()
    }

    /// Whether each rank is here.
    #[getter]
    fn present(&self, py: Python<'_>) -> Vec<bool> {
        py.detach(|| self.0.present())
    }

    /// Ranks whose answers are missing in the last sums.
    #[getter]
    fn left_out(&self, py: Python<'_>) -> Vec<u32> {
        py.detach(|| self.0.left_out())
    }

    /// Rows sent so far: tokens to other nodes, tokens on this node, answers on this node, sums to
    /// other nodes.
    #[getter]
    fn traffic(&self, py: Python<'_>) -> (u64, u64, u64, u64) {
        let t = py.detach(|| self.0.traffic());
        (t.rail_tokens, t.node_tokens, t.node_answers, t.rail_sums)
    }

    /// # Errors
    /// As `Throughput::dispatch_send`. `indices`: address and number of 64-bit integers.
    #[pyo3(signature = (parts, indices, weights))]
    fn dispatch_send(
        &self,
        py: Python<'_>,
        parts: Vec<PartArg>,
        indices: (usize, usize),
        weights: Option<PartArg>,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: the Python caller holds the tensors during the call.
            let parts: Vec<Part<'_>> = parts.into_iter().map(|p| unsafe { part(p) }).collect();
            // SAFETY: as above.
            let weights = weights.map(|w| unsafe { part(w) });
            // SAFETY: as above; the address is that of an int64 tensor.
            self.0.dispatch_send(&parts, unsafe { integers(indices) }, weights)
        })
        .or_raise(py)
    }

    /// As `MoeExchange.arriving`.
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

    fn combine_recv(&self, py: Python<'_>, out: PartArg, dtype: &str) -> PyResult<()> {
        let float = float(py, dtype)?;
        // SAFETY: the Python caller holds the tensor during the call, for exclusive use.
        py.detach(|| self.0.combine_recv(&mut unsafe { part_mut(out) }, float)).or_raise(py)
    }

    /// Of what the host shares with so many workers: the first job's word, words from one job to
    /// the next, jobs of a worker; bytes from one token to the next, and ahead of each.
    fn work_form(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] workers: u32,
    ) -> PyResult<(usize, usize, usize, u64, u64)> {
        let spec = self.0.spec();
        let queue_layout = QueueLayout::new(&spec, workers).or_raise(py)?;
        Ok((queue_layout.jobs, queue_layout.job, DEPTH, spec.out_stride(), spec.meta()))
    }

    /// The number of the next call, which its workers are launched with.
    fn begin_work(&self, py: Python<'_>) -> PyResult<u64> {
        self.0.begin_work().or_raise(py)
    }

    /// The workers of a call end.
    fn end_work(&self, call: u64) {
        self.0.end_work(call);
    }

    /// As `dispatch_send`, of tokens that kernels know.
    fn kernel_dispatch_send(
        &self,
        py: Python<'_>,
        indices: (usize, usize),
        weights: Option<PartArg>,
    ) -> PyResult<()> {
        py.detach(|| {
            // SAFETY: the Python caller holds the tensors during the call.
            let weights = weights.map(|w| unsafe { part(w) });
            // SAFETY: as above; the address is that of an int64 tensor.
            self.0.kernel_dispatch_send(unsafe { integers(indices) }, weights)
        })
        .or_raise(py)
    }

    fn kernel_dispatch_recv(&self, py: Python<'_>, rows: u64) -> PyResult<()> {
        py.detach(|| self.0.kernel_dispatch_recv(rows)).or_raise(py)
    }

    fn kernel_combine_send(&self, py: Python<'_>, rows: u64) -> PyResult<()> {
        py.detach(|| self.0.kernel_combine_send(rows)).or_raise(py)
    }

    /// Of how many tokens there are sums.
    fn kernel_combine_recv(&self, py: Python<'_>) -> PyResult<u32> {
        py.detach(|| self.0.kernel_combine_recv()).or_raise(py)
    }
}
