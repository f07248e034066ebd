use std::{sync::Arc, time::Duration};

use fabric_engine as fe;
use fe::{api::EngineConfig, Local, Op, Remote};
use pyo3::{prelude::*, types::PyDict};

use super::{
    batch::{build, length, Batch, OwnedOp},
    checked_int,
    class_arg::ClassArg,
    config::Settings,
    counter::Counter,
    deferred_release::DeferredRelease,
    memory::{Pages, Region, RemoteRegion},
    peers::{Message, Peer, PeerGroup},
    requests::{options, PriorityArg},
    segment::{self, RemoteSegment, Segment},
    telemetry,
    transfer::Transfer,
    values::{hex, EngineAddress, RegionDescriptor, SegmentDescriptor},
    watcher::{on_change, Watcher},
};
use crate::{
    callback::RecurringCallback,
    detached_drop::DetachedDrop,
    errors::{raise, OrRaise},
};

/// The native engine; `fabric_ray.TransferEngine` is the class to use.
#[pyclass(frozen, subclass, module = "fabric_ray._native")]
pub(crate) struct Engine {
    pub(crate) engine: DetachedDrop<Arc<fe::TransferEngine>>,
    /// As it was opened, for engines like it.
    pub(crate) config: EngineConfig,
    op_timeout: Duration,
}

#[pymethods]
impl Engine {
    #[new]
    fn new(py: Python<'_>, config: Settings) -> PyResult<Self> {
        let config = config.engine_config(py)?;
        let (like, op_timeout) = (config.clone(), config.op_timeout);
        let engine = py.detach(|| fe::TransferEngine::open(config)).or_raise(py)?;
        Ok(Self { engine: DetachedDrop::new(Arc::new(engine)), config: like, op_timeout })
    }

    /// To be sent to peers.
    #[getter]
    fn address(&self) -> EngineAddress {
        EngineAddress(self.engine.address().clone())
    }

    /// This engine's id as hex: drawn anew each time one opens.
    #[getter]
    fn id(&self) -> String {
        hex(&self.engine.id().0)
    }

    /// `nbytes` bytes of memory that peers on this host can map, zeroed.
    fn alloc(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] nbytes: u64,
    ) -> PyResult<Region> {
        if nbytes == 0 {
            let text = "a region needs at least one byte".into();
            return Err(raise(py, &fe::EngineError::Invalid(text)));
        }
        py.detach(|| self.engine.alloc(nbytes)).map(Region).or_raise(py)
    }

    /// Registers memory by address; `keep` is kept alive with it. With `segment`, the address and
    /// bytes of what it is a part of, that is registered once for all parts.
    #[pyo3(signature = (addr, nbytes, keep, segment=None))]
    fn _register(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] addr: usize,
        #[pyo3(from_py_with = checked_int)] nbytes: u64,
        keep: Py<PyAny>,
        segment: Option<(usize, u64)>,
    ) -> PyResult<Region> {
        let keep: fe::memory::Keep = Some(Box::new(DeferredRelease::new(keep)));
        // SAFETY: `keep` owns the memory at `addr`, and the segment around it;
        // `fabric_ray.engine.memory` sees to that.
        let region = py.detach(|| unsafe {
            match segment {
                None => self.engine.register(addr, nbytes, keep),
                Some(around) => self.engine.register_segment(addr, nbytes, around, keep),
            }
        });
        region.map(Region).or_raise(py)
    }

    /// Makes a file, or a part of one, a region.
    #[pyo3(signature = (path, *, nbytes=None, offset=0, create=false, writable=true))]
    fn register_file(
        &self,
        py: Python<'_>,
        path: std::path::PathBuf,
        #[pyo3(from_py_with = checked_int)] nbytes: Option<u64>,
        #[pyo3(from_py_with = checked_int)] offset: u64,
        create: bool,
        writable: bool,
    ) -> PyResult<Region> {
        let options = fe::FileOptions { offset, len: nbytes, create, writable };
        py.detach(|| self.engine.register_file(&path, options)).map(Region).or_raise(py)
    }

    /// One address space over regions: laid one after the other, or each at its offset.
    fn segment(&self, py: Python<'_>, parts: Vec<Bound<'_, PyAny>>) -> PyResult<Segment> {
        let parts = segment::parts(&parts)?;
        py.detach(|| self.engine.segment(&parts)).map(Segment).or_raise(py)
    }

    /// A peer's segment, or this engine's own, to be named in requests.
    fn open_segment(
        &self,
        py: Python<'_>,
        descriptor: ClassArg<'_, SegmentDescriptor>,
    ) -> PyResult<RemoteSegment> {
        let descriptor = &descriptor.0;
        py.detach(|| self.engine.open_segment(descriptor)).map(RemoteSegment).or_raise(py)
    }

    /// Makes a peer known; the first use connects.
    fn peer(&self, py: Python<'_>, address: ClassArg<'_, EngineAddress>) -> PyResult<Peer> {
        let address = &address.0;
        py.detach(|| self.engine.peer(address)).map(Peer).or_raise(py)
    }

    /// A peer's region, to be named in requests.
    fn import_region(
        &self,
        py: Python<'_>,
        descriptor: ClassArg<'_, RegionDescriptor>,
    ) -> PyResult<RemoteRegion> {
        let descriptor = &descriptor.0;
        py.detach(|| self.engine.import(descriptor)).map(RemoteRegion).or_raise(py)
    }

    /// Peers to address together; connects to all of them now.
    fn peer_group(&self, py: Python<'_>, peers: Vec<ClassArg<'_, Peer>>) -> PyResult<PeerGroup> {
        let peers: Vec<fe::Peer> = peers.iter().map(|p| p.0.clone()).collect();
        py.detach(|| self.engine.peer_group(&peers)).map(PeerGroup).or_raise(py)
    }

    /// Begins to connect, so that the first transfer doesn't have to.
    fn connect(&self, py: Python<'_>, peer: ClassArg<'_, Peer>) -> PyResult<()> {
        let peer = &peer.0;
        py.detach(|| self.engine.connect(peer)).or_raise(py)
    }

    /// A counter for the exclusive use of the caller.
    fn counter(&self, py: Python<'_>) -> PyResult<Counter> {
        let counter = self.engine.counter().or_raise(py)?;
        Ok(Counter { counter, timeout: self.op_timeout })
    }

    /// The counter behind a pre-agreed integer below 2^19.
    fn plain_counter(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] value: u32,
    ) -> PyResult<Counter> {
        let imm = fe::api::Imm::plain(value).or_raise(py)?;
        Ok(Counter { counter: self.engine.plain_counter(imm), timeout: self.op_timeout })
    }

    /// Writes `nbytes` bytes of `src` to `dst`. Without `nbytes`, all of both, which must be
    /// equally long. With `imm`, the receiver's counter counts 1 when they are readable there.
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (src, dst, nbytes=None, *, src_offset=0, dst_offset=0, imm=None, timeout=None, rail=None, priority=None))]
    fn write(
        &self,
        py: Python<'_>,
        src: ClassArg<'_, Region>,
        dst: ClassArg<'_, RemoteRegion>,
        #[pyo3(from_py_with = checked_int)] nbytes: Option<u64>,
        #[pyo3(from_py_with = checked_int)] src_offset: u64,
        #[pyo3(from_py_with = checked_int)] dst_offset: u64,
        imm: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        #[pyo3(from_py_with = checked_int)] rail: Option<u8>,
        priority: Option<PriorityArg>,
    ) -> PyResult<Transfer> {
        let (len, imm) = build::write(py, &src, &dst, nbytes, src_offset, dst_offset, imm)?;
        let op = Op::Write {
            src: Local { region: &src.0, offset: src_offset },
            dst: Remote { region: &dst.0, offset: dst_offset },
            len,
            imm,
        };
        self.submit_one(py, op, (len, Some(dst.0.peer())), (timeout, rail, priority))
    }

    /// Reads `nbytes` bytes of the peer's `src` into `dst`.
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (src, dst, nbytes=None, *, src_offset=0, dst_offset=0, timeout=None, rail=None, priority=None))]
    fn read(
        &self,
        py: Python<'_>,
        src: ClassArg<'_, RemoteRegion>,
        dst: ClassArg<'_, Region>,
        #[pyo3(from_py_with = checked_int)] nbytes: Option<u64>,
        #[pyo3(from_py_with = checked_int)] src_offset: u64,
        #[pyo3(from_py_with = checked_int)] dst_offset: u64,
        timeout: Option<f64>,
        #[pyo3(from_py_with = checked_int)] rail: Option<u8>,
        priority: Option<PriorityArg>,
    ) -> PyResult<Transfer> {
        let len = length(py, nbytes, (src.0.len(), src_offset), (dst.0.len(), dst_offset))?;
        let op = Op::Read {
            src: Remote { region: &src.0, offset: src_offset },
            dst: Local { region: &dst.0, offset: dst_offset },
            len,
        };
        self.submit_one(py, op, (len, Some(src.0.peer())), (timeout, rail, priority))
    }

    /// Writes pages of `page_nbytes` bytes: page `i` of `src_pages` to page `i` of `dst_pages`.
    /// With `imm`, the receiver's counter counts 1 for each page.
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (page_nbytes, src, src_pages, dst, dst_pages, *, imm=None, timeout=None, rail=None, priority=None))]
    fn write_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] page_nbytes: u64,
        src: ClassArg<'_, Region>,
        src_pages: ClassArg<'_, Pages>,
        dst: ClassArg<'_, RemoteRegion>,
        dst_pages: ClassArg<'_, Pages>,
        imm: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        #[pyo3(from_py_with = checked_int)] rail: Option<u8>,
        priority: Option<PriorityArg>,
    ) -> PyResult<Transfer> {
        let imm = imm
            .map(|i| super::counter::ImmArg::extract(i)?.for_peer(py, dst.0.peer()))
            .transpose()?;
        let op = Op::WritePages {
            page_len: page_nbytes,
            src: &src.0,
            src_pages: &src_pages.0,
            dst: &dst.0,
            dst_pages: &dst_pages.0,
            imm,
        };
        let bytes = page_nbytes.saturating_mul(u64::from(src_pages.0.indices.len()));
        self.submit_one(py, op, (bytes, Some(dst.0.peer())), (timeout, rail, priority))
    }

    /// Reads pages: page `i` of the peer's `src_pages` into page `i` of `dst_pages`.
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (page_nbytes, src, src_pages, dst, dst_pages, *, timeout=None, rail=None, priority=None))]
    fn read_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] page_nbytes: u64,
        src: ClassArg<'_, RemoteRegion>,
        src_pages: ClassArg<'_, Pages>,
        dst: ClassArg<'_, Region>,
        dst_pages: ClassArg<'_, Pages>,
        timeout: Option<f64>,
        #[pyo3(from_py_with = checked_int)] rail: Option<u8>,
        priority: Option<PriorityArg>,
    ) -> PyResult<Transfer> {
        let op = Op::ReadPages {
            page_len: page_nbytes,
            src: &src.0,
            src_pages: &src_pages.0,
            dst: &dst.0,
            dst_pages: &dst_pages.0,
        };
        let bytes = page_nbytes.saturating_mul(u64::from(src_pages.0.indices.len()));
        self.submit_one(py, op, (bytes, Some(src.0.peer())), (timeout, rail, priority))
    }

    /// Writes a part of `src` to each of several peers: parts are `(dst, dst_offset, src_offset,
    /// nbytes)`. With `imm`, each receiver's counter counts 1.
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (src, parts, *, group=None, imm=None, timeout=None, rail=None, priority=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        src: ClassArg<'_, Region>,
        #[pyo3(from_py_with = checked_int)] parts: Vec<(ClassArg<'_, RemoteRegion>, u64, u64, u64)>,
        group: Option<&PeerGroup>,
        imm: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        #[pyo3(from_py_with = checked_int)] rail: Option<u8>,
        priority: Option<PriorityArg>,
    ) -> PyResult<Transfer> {
        let owned = build::scatter(py, &src, parts, group, imm)?;
        self.submit_one(py, owned.op(), (u64::MAX, None), (timeout, rail, priority))
    }

    /// An immediate, and nothing else, to every peer of the group.
    #[pyo3(signature = (group, imm, *, timeout=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        group: &PeerGroup,
        imm: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Transfer> {
        let owned = build::barrier(py, group, imm)?;
        self.submit_one(py, owned.op(), (0, None), (timeout, None, None))
    }

    /// Sends a small message to the peer's receive pool; done when the pool has taken it.
    #[pyo3(signature = (peer, message, *, timeout=None))]
    fn send(
        &self,
        py: Python<'_>,
        peer: ClassArg<'_, Peer>,
        message: &[u8],
        timeout: Option<f64>,
    ) -> PyResult<Transfer> {
        self.submit_one(
            py,
            Op::Send { peer: &peer.0, message },
            (0, Some(&peer.0)),
            (timeout, None, None),
        )
    }

    /// Submits a batch: one transfer, done when all its operations are. May be called again and
    /// again with the same batch; `imm` stands in for the immediates of its writes this time.
    #[pyo3(signature = (batch, *, imm=None, timeout=None, rail=None, priority=None))]
    fn submit(
        &self,
        py: Python<'_>,
        batch: &Batch,
        imm: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        #[pyo3(from_py_with = checked_int)] rail: Option<u8>,
        priority: Option<PriorityArg>,
    ) -> PyResult<Transfer> {
        let options = options(py, timeout, rail, priority)?;
        let imm = imm.map(super::counter::ImmArg::extract).transpose()?;
        let ops: Vec<Op<'_>> =
            batch.ops.iter().map(|o| o.op_counted(py, imm.as_ref())).collect::<PyResult<_>>()?;
        let handle = py.detach(|| self.engine.submit(&ops, options)).or_raise(py)?;
        let mut peers = batch.ops.iter().map(OwnedOp::peer);
        let first = peers.next().flatten();
        let one = first.filter(|f| peers.all(|p| p.is_some_and(|p| p.id() == f.id())));
        Ok(Transfer::new(handle, one.map(|p| self.engine.peer_transport(p))))
    }

    /// Makes everything ready that the writes of a batch will need: connections, keys, mappings.
    /// The first of many pushes over the same ranges is then as quick as the others. No byte moves.
    #[pyo3(signature = (batch, *, timeout=None))]
    fn prepare(&self, py: Python<'_>, batch: &Batch, timeout: Option<f64>) -> PyResult<Transfer> {
        let options = options(py, timeout, None, None)?;
        let ops: Vec<Op<'_>> =
            batch.ops.iter().map(|o| o.op_counted(py, None)).collect::<PyResult<_>>()?;
        let handle = py.detach(|| self.engine.prepare(&ops, options)).or_raise(py)?;
        Ok(Transfer::new(handle, None))
    }

    /// Opens the receive pool, in place of the one before: `callback(message)` is called for each
    /// message of at most `max_nbytes` bytes. At most `count` messages are alive at a time; further
    /// ones wait at their senders until one is dropped.
    #[pyo3(signature = (callback, *, count=16, max_nbytes=65536))]
    fn receive(
        &self,
        py: Python<'_>,
        callback: RecurringCallback,
        #[pyo3(from_py_with = checked_int)] count: u32,
        #[pyo3(from_py_with = checked_int)] max_nbytes: usize,
    ) -> PyResult<()> {
        let deliver = move |delivery: fe::Delivery| {
            callback.call(|py, f| (f, Message(delivery)).into_pyobject(py));
        };
        self.engine.receive(max_nbytes, count, deliver).or_raise(py)
    }

    /// A 64-bit word that the engine watches: `callback(old, new)` runs when it has changed. With
    /// `device`, kernels on that GPU write and read it as well.
    #[pyo3(signature = (callback, device=None))]
    fn watch(
        &self,
        py: Python<'_>,
        callback: RecurringCallback,
        device: Option<i32>,
    ) -> PyResult<Watcher> {
        let on_change = on_change(callback);
        let watcher = match device {
            None => self.engine.watch(on_change),
            Some(device) => py.detach(|| self.engine.watch_device(device, on_change)),
        };
        watcher.map(Watcher).or_raise(py)
    }

    /// `(peer, transport or None, [(transport, device, chosen, reason), ...])`
    #[allow(clippy::type_complexity)] // a Python tuple
    fn _explain(
        &self,
        py: Python<'_>,
        peer: ClassArg<'_, Peer>,
    ) -> PyResult<(String, Option<String>, Vec<(&'static str, String, bool, String)>)> {
        let peer = &peer.0;
        let e = py.detach(|| self.engine.explain(peer)).or_raise(py)?;
        let verdicts = e.verdicts.into_iter();
        let verdicts =
            verdicts.map(|v| (v.transport.name(), v.device, v.chosen, v.reason)).collect();
        Ok((e.peer, e.transport, verdicts))
    }

    /// Of each piece of a batch: `(op, write, bytes, local, peer, remote, transport or None,
    /// description)`
    #[allow(clippy::type_complexity)] // a Python tuple
    fn _paths(
        &self,
        py: Python<'_>,
        batch: &Batch,
    ) -> PyResult<Vec<(usize, bool, u64, String, String, String, Option<&'static str>, String)>>
    {
        let ops: Vec<Op<'_>> = batch.ops.iter().map(OwnedOp::op).collect();
        let paths = py.detach(|| self.engine.paths(&ops)).or_raise(py)?;
        let tuple = |p: fe::Path| {
            let transport = p.transport.map(|t| t.name());
            (p.op, p.write, p.bytes, p.local, p.peer, p.remote, transport, p.description)
        };
        Ok(paths.into_iter().map(tuple).collect())
    }

    /// Of each rail: `(transport, device, window, under_way)`
    fn _rails(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, String, u64, u64)>> {
        let rails = py.detach(|| self.engine.rails()).or_raise(py)?;
        let tuple = |r: fe::Rail| (r.transport.name(), r.device, r.window, r.under_way);
        Ok(rails.into_iter().map(tuple).collect())
    }

    /// Counts since the engine was opened.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let s = self.engine.stats();
        let d = PyDict::new(py);
        d.set_item("counted", s.counted)?;
        d.set_item("ghosts", s.ghosts)?;
        d.set_item("regions", s.regions)?;
        d.set_item("retiring", s.retiring)?;
        Ok(d)
    }

    /// All metrics, as `fabric_ray.engine.observability` reads them.
    fn _metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metrics = py.detach(|| self.engine.metrics()).or_raise(py)?;
        telemetry::metrics(py, metrics)
    }

    /// The flight recorder's records since these numbers of transfers, arrivals, expectations and
    /// events.
    fn _records<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = checked_int)] since: (u64, u64, u64, u64),
    ) -> PyResult<Bound<'py, PyDict>> {
        let (transfers, arrivals, expectations, events) = since;
        let since = fe::flight::Cursor { transfers, arrivals, expectations, events };
        let records = py.detach(|| self.engine.records(since)).or_raise(py)?;
        telemetry::records(py, records)
    }

    /// Takes nothing new from now on; the transfer is done when all that was begun here is over.
    fn drain(&self, py: Python<'_>) -> PyResult<Transfer> {
        Ok(Transfer::new(self.engine.drain().or_raise(py)?, None))
    }

    /// Ends everything: outstanding transfers fail with `EngineClosed`, peers see this engine as
    /// lost. May be called more than once.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.engine.close());
    }

    fn __repr__(&self) -> String {
        format!("{:?}", *self.engine)
    }
}
