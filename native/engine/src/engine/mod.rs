//! The engine layer: the public API. It validates requests before anything is sent, and owns
//! counters, handles and callbacks. It reaches the layers below through the group's lock.

mod bind;
mod callbacks;
mod closing;
mod counters;
mod driver;
mod expectation_log;
mod grants;
mod handle;
mod op;
mod open;
mod overlap;
mod paths;
mod peers;
mod quiescence;
mod rails;
mod receives;
mod regions;
mod register;
mod request_batch;
mod segment;
mod shared;
mod slot_order;
mod submit;
mod telemetry;
mod watcher;

use std::{
    sync::{atomic::AtomicU64, Arc, Weak},
    time::Duration,
};

use self::{
    driver::{Core, Worker},
    register::Segments,
};
use crate::{
    api::{CounterRef, EngineAddress, EngineId, Imm, RegionDescriptor, Span, TransportKind},
    domain::PeerMapping,
    group::TransportVerdict,
    locks::{Condvar, Mutex},
    memory::device::DeviceWord,
    time::Time,
    EngineError, Result,
};

pub use grants::Grant;
pub use handle::{Handle, Notify};
pub(crate) use handle::{HandleOperation, HandleRef, HandleState};
pub use op::{Local, Op, Remote, ScatterDst, SegmentPiece};
pub use open::Transports;
pub use paths::Path;
pub use peers::{Peer, PeerGroup};
pub use quiescence::Quiescence;
pub use rails::Rail;
pub use receives::Delivery;
pub use regions::{Region, RemoteRegion};
pub use request_batch::{BatchObserver, Expect, Outcome};
pub use segment::{RemoteSegment, Segment};

pub(crate) use shared::Shared;
pub use shared::Stats;
pub use submit::Submit;
pub use watcher::Watcher;

/// Moves bytes between processes and counts them.
///
/// All methods may be called from any thread. Dropping the engine closes it: pending handles end
/// with [`EngineError::Closed`], and peers see the engine as lost.
pub struct TransferEngine {
    shared: Arc<Shared>,
    stage_foreign: bool,
    takes_files: bool,
    segments: Segments,
    worker: Mutex<Option<Worker>>,
    /// Whether the engine is closed, for calls of `close` beside the first.
    closed: (Mutex<bool>, Condvar),
}

impl std::fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TransferEngine({})", self.shared.address.label())
    }
}

/// The transport from an engine to a peer. It does not keep the engine alive.
#[derive(Debug, Clone)]
pub struct PeerTransport {
    shared: Weak<Shared>,
    peer: Peer,
}

impl PeerTransport {
    /// The transport in use; `None` before the first connection and after the engine is gone.
    pub fn transport(&self) -> Option<TransportKind> {
        let shared = self.shared.upgrade()?;
        let core = shared.lock().ok()?;
        core.group.kind(self.peer.key, &core.domains)
    }
}

/// A counter that this engine allocated. Its slot is released when the counter and the handles of
/// its expectations are dropped. Later writes that carry this generation are not counted (IC-6).
pub struct Counter {
    inner: Arc<CounterInner>,
}

struct CounterInner {
    shared: Arc<Shared>,
    imm: Imm,
    allocated: bool,
}

impl std::fmt::Debug for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Counter({:?}, arrived {})", self.imm(), self.arrived())
    }
}

impl Drop for CounterInner {
    fn drop(&mut self) {
        if self.allocated {
            let imm = self.imm;
            // Under the lock, because arrivals are counted there.
            self.shared.post(Box::new(move |core, shared| {
                shared.counters.release(shared.now(), imm);
                core.end_drains(shared);
            }));
        }
    }
}

impl Counter {
    pub fn imm(&self) -> Imm {
        self.inner.imm
    }

    /// The reference that writers need.
    pub fn reference(&self) -> CounterRef {
        CounterRef::new(self.inner.shared.address.id, self.inner.imm)
    }

    /// Logical writes counted so far (IC-1).
    #[inline]
    pub fn arrived(&self) -> u64 {
        self.inner.shared.counters.arrived(self.inner.imm)
    }

    /// Drives the engine once on this thread, then returns the count. For callers that spin.
    ///
    /// # Errors
    /// [`EngineError::Forked`]
    #[inline]
    pub fn poll(&self) -> Result<u64> {
        self.inner.shared.driver()?.poll_once(&self.inner.shared);
        Ok(self.arrived())
    }

    /// Checks that the counter belongs to this process. In a forked child its value no longer
    /// changes.
    ///
    /// # Errors
    /// [`EngineError::Forked`]
    pub fn check_process(&self) -> Result<()> {
        self.inner.shared.driver().map(drop)
    }

    /// Arrivals that no expectation has claimed yet.
    pub fn unclaimed(&self) -> u64 {
        self.inner.shared.counters.unclaimed(self.inner.imm)
    }

    /// Waits for the next `n` arrivals that no earlier expectation has claimed. Arrivals before the
    /// call count (IC-5).
    ///
    /// `writers` are the peers that will write. If one of them is lost first, the handle ends with
    /// [`EngineError::PeerLost`]. Without writers, only `timeout` ends the wait.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for a writer that another engine made.
    pub fn expect(&self, n: u32, writers: &[Peer], timeout: Duration) -> Result<Handle> {
        self.expect_for(Span::NONE, n, writers, timeout)
    }

    /// As [`Counter::expect`]; flight records show it under `span`.
    pub fn expect_for(
        &self,
        span: Span,
        n: u32,
        writers: &[Peer],
        timeout: Duration,
    ) -> Result<Handle> {
        self.wait_for(n, writers, (timeout, Some(span)))
    }

    /// A timer: ends with [`EngineError::Timeout`] after `after`. The flight recorder leaves it
    /// out. The counter must be one that no peer writes to.
    pub fn alarm(&self, after: Duration) -> Result<Handle> {
        self.wait_for(u32::MAX, &[], (after, None))
    }

    fn wait_for(
        &self,
        n: u32,
        writers: &[Peer],
        (timeout, span): (Duration, Option<Span>),
    ) -> Result<Handle> {
        let handle = self.inner.shared.expect(self.inner.imm, n, writers, (timeout, span))?;
        Ok(handle.keeping(self.inner.clone()))
    }
}

/// The transport to a peer, and the verdict on each transport.
#[derive(Clone, Debug)]
pub struct Explanation {
    pub peer: String,
    /// The transport in use, if connected.
    pub transport: Option<String>,
    /// One verdict for every transport of this engine.
    pub verdicts: Vec<TransportVerdict>,
}

impl TransferEngine {
    pub fn address(&self) -> &EngineAddress {
        &self.shared.address
    }

    pub fn id(&self) -> EngineId {
        self.shared.address.id
    }

    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    /// The longest message that [`Op::Send`] takes, bytes.
    pub fn max_message(&self) -> usize {
        self.shared.max_message
    }

    /// The current time of this engine's clock: monotonic, or virtual in a simulation.
    #[inline]
    pub fn now(&self) -> Time {
        self.shared.now()
    }

    /// A number that is unique within this engine. It names messages that may arrive late (MR-2).
    /// Returns a number of at least 2^32, so that all numbers have the same encoded size.
    pub fn number(&self) -> u64 {
        self.shared.take_number()
    }

    /// Makes a peer from its address. The engine connects on first use.
    pub fn peer(&self, address: &EngineAddress) -> Result<Peer> {
        let mut core = self.shared.lock()?;
        if core.closed {
            return Err(EngineError::Closed);
        }
        let (key, hold) = core.group.name(self.shared.now(), address);
        drop(core);
        let address = Arc::new(address.clone());
        Ok(Peer { key, known_to: self.shared.address.id, hold, address })
    }

    /// Imports a peer's region for use in requests.
    pub fn import(&self, descriptor: &RegionDescriptor) -> Result<RemoteRegion> {
        let peer = self.peer(&descriptor.owner)?;
        let (key, offset, len) = (descriptor.key, descriptor.offset, descriptor.len);
        let rail_keys = descriptor.rail_keys.clone();
        let is_own = peer.id() == self.shared.address.id;
        let own = if is_own { self.shared.own_region(key) } else { None };
        Ok(RemoteRegion { peer, key, rail_keys, offset, len, own })
    }

    /// Makes a group of peers for scatters and barriers, and starts to connect to all of them.
    pub fn peer_group(&self, peers: &[Peer]) -> Result<PeerGroup> {
        for p in peers {
            self.connect(p)?;
        }
        Ok(PeerGroup { peers: peers.into() })
    }

    /// Starts to connect, so that the first transfer need not wait for the connection.
    pub fn connect(&self, peer: &Peer) -> Result<()> {
        self.shared.watch(peer)
    }

    /// Allocates a counter.
    pub fn counter(&self) -> Result<Counter> {
        self.shared.check_open()?;
        let imm = self.shared.counters.allocate()?;
        Ok(self.make_counter(imm, true))
    }

    fn make_counter(&self, imm: Imm, allocated: bool) -> Counter {
        let inner = CounterInner { shared: Arc::clone(&self.shared), imm, allocated };
        Counter { inner: Arc::new(inner) }
    }

    /// The counter of an immediate that both sides agreed on. Its count outlives this object. It
    /// has no generation: use [`TransferEngine::counter`] where writes may be cancelled.
    pub fn plain_counter(&self, imm: Imm) -> Counter {
        self.make_counter(imm, false)
    }

    /// Calls `take` with each tagged immediate ([`Imm::tagged`]) that arrives and the number of
    /// writes that carried it. Their bytes are readable by then (IC-2), and each write is reported
    /// once (IC-3). Call this before any peer learns this engine's address, because earlier tags
    /// are lost. From then on this engine treats plain counters from 2^18 on as tags.
    ///
    /// `take` runs under the engine's lock, on any thread that drives the engine. It must be quick
    /// and must not call the engine.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if it was called before.
    pub fn take_tags(&self, take: impl Fn(u32, u32) + Send + Sync + 'static) -> Result<()> {
        self.shared.check_open()?;
        match self.shared.counters.take_tags(Box::new(take)) {
            true => Ok(()),
            false => Err(EngineError::Invalid(
                "tags of this engine are received already; open another engine".into(),
            )),
        }
    }

    /// Drives the engine once on this thread, unless another thread drives it. For callers that
    /// spin.
    ///
    /// # Errors
    /// [`EngineError::Forked`]
    #[inline]
    pub fn poll(&self) -> Result<bool> {
        Ok(self.shared.driver()?.poll_once(&self.shared))
    }

    /// Opens the receive pool, and replaces an earlier one. Users hold at most `count` messages at
    /// a time, of at most `max_len` bytes each. Further messages wait at their senders.
    pub fn receive(
        &self,
        max_len: usize,
        count: u32,
        on_message: impl Fn(Delivery) + Send + Sync + 'static,
    ) -> Result<()> {
        self.shared.check_open()?;
        if count == 0 || max_len == 0 {
            return Err(EngineError::Invalid("a receive pool needs a count and a length".into()));
        }
        let driver = self.shared.driver()?;
        let dependent = driver.begin_dependent();
        let on_message = move |delivery| {
            let _ = &dependent;
            on_message(delivery);
        };
        self.shared.receives.open(max_len, count, Arc::new(on_message));
        driver.kick_worker();
        Ok(())
    }

    /// Submits one request of one or more operations. The handle is done when all of them are:
    /// writes when their bytes are in the peer's memory, reads when they are in local memory,
    /// messages when the peer's pool has taken them.
    ///
    /// # Errors
    /// Everything that can be checked without the peer, before anything is sent.
    #[inline]
    pub fn submit(&self, ops: &[Op<'_>], options: Submit) -> Result<Handle> {
        self.shared.submit(ops, options, (false, None))
    }

    /// As [`TransferEngine::submit`]. Stores the time in `posted`, in nanoseconds of this engine's
    /// clock, once the links have accepted all that they can take now. Sleeping peers are woken
    /// after that.
    ///
    /// # Errors
    /// As [`TransferEngine::submit`].
    pub fn submit_timed(
        &self,
        ops: &[Op<'_>],
        options: Submit,
        posted: &AtomicU64,
    ) -> Result<Handle> {
        self.shared.submit(ops, options, (false, Some(posted)))
    }

    /// Prepares everything that writes of `ops` need: connections, keys, mappings, page tables. The
    /// first of many pushes over the same ranges is then as quick as the others. No byte moves and
    /// nothing is counted. Operations other than writes are ignored.
    pub fn prepare(&self, ops: &[Op<'_>], options: Submit) -> Result<Handle> {
        self.shared.submit(ops, options, (true, None))
    }

    /// Maps a peer's region for direct stores by GPU `by`, or by the CPU if `None`. An earlier
    /// request must have named the region ([`TransferEngine::prepare`] suffices), and the peer must
    /// be connected.
    ///
    /// # Errors
    /// The reason, as text.
    pub fn map_peer_region(
        &self,
        region: &RemoteRegion,
        by: Option<i32>,
    ) -> std::result::Result<Arc<PeerMapping>, String> {
        self.shared.check_open().map_err(|e| e.to_string())?;
        let part = "it is a part of a region; name the whole".to_owned();
        if region.offset != 0 {
            return Err(part);
        }
        let mut core = self.shared.lock().map_err(|e| e.to_string())?;
        let Core { group, domains, .. } = &mut *core;
        let whole = group.map_peer_region(region.peer.key, (region.key, by), domains)?;
        match whole.len() <= region.len {
            true => Ok(whole),
            false => Err(part),
        }
    }

    /// Makes a word that this engine watches for changes; see [`Watcher`].
    pub fn watch(&self, on_change: impl Fn(u64, u64) + Send + Sync + 'static) -> Result<Watcher> {
        self.shared.check_open()?;
        self.shared.watchers.add(Box::new(on_change), None)
    }

    /// As [`TransferEngine::watch`], for a word that kernels on GPU `device` also read and write;
    /// see [`DeviceWord`].
    pub fn watch_device(
        &self,
        device: i32,
        on_change: impl Fn(u64, u64) + Send + Sync + 'static,
    ) -> Result<Watcher> {
        self.shared.check_open()?;
        self.shared.watchers.add(Box::new(on_change), Some(DeviceWord::new(device)?))
    }

    /// The transport in use towards a peer, and why the others are not.
    pub fn explain(&self, peer: &Peer) -> Result<Explanation> {
        let core = self.shared.lock()?;
        self.shared.check_peer(peer)?;
        let (transport, verdicts) = core.group.explain(peer.key, &core.domains);
        Ok(Explanation { peer: peer.address.label(), transport, verdicts })
    }

    /// The transport in use towards a peer; `None` before the first connection.
    pub fn transport(&self, peer: &Peer) -> Option<TransportKind> {
        let core = self.shared.lock().ok()?;
        core.group.kind(peer.key, &core.domains)
    }

    /// A weak reference for [`PeerTransport::transport`], which does not keep the engine alive.
    #[inline]
    pub fn peer_transport(&self, peer: &Peer) -> PeerTransport {
        PeerTransport { shared: Arc::downgrade(&self.shared), peer: peer.clone() }
    }

    /// Advances an engine that was opened without threads, and runs its callbacks; see
    /// [`Transports`].
    pub fn drive(&self, now: Time) -> bool {
        let Ok(mut core) = self.shared.lock() else { return false };
        let moved = core.drive_at(now, &self.shared);
        drop(core);
        self.shared.callbacks.run_queued() | moved
    }

    /// When `drive` must be called next even if nothing arrives.
    pub fn next_timer(&self) -> Time {
        self.shared.lock().map_or(Time::NEVER, |core| core.next_timer(&self.shared))
    }
}
