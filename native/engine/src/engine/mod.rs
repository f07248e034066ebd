//! The engine layer: what users call. Requests are checked here, before anything is sent; counters,
//! handles and callbacks live here; everything below is reached through the group's lock.

mod bind;
mod callbacks;
mod counters;
mod draw;
mod driver;
mod expected;
mod grants;
mod handle;
mod op;
mod open;
mod paths;
mod peers;
mod rails;
mod receives;
mod regions;
mod register;
mod request_batch;
mod seeing;
mod segment;
mod shared;
mod submit;
mod watcher;

use std::{
    sync::{
        atomic::{AtomicU64, Ordering::SeqCst},
        Arc, Weak,
    },
    time::Duration,
};

use parking_lot::Mutex;

use self::{
    driver::{Core, Worker},
    register::Segments,
};
use crate::{
    api::{CounterRef, EngineAddress, EngineId, Imm, RegionDescriptor, Span, TransportKind},
    domain::Aperture,
    group::Verdict,
    memory::device::DeviceWord,
    time::Time,
    EngineError, Result,
};

pub use grants::Grant;
pub use handle::{Handle, Notify, Quiet};
pub(crate) use handle::{HandleRef, Source};
pub use op::{Local, Op, Remote, ScatterDst, SegmentPiece};
pub use open::Transports;
pub use paths::Path;
pub use peers::{Peer, PeerGroup};
pub use rails::Rail;
pub use receives::Delivery;
pub use regions::{Region, RemoteRegion};
pub use request_batch::{Expect, Listener, Outcome};
pub use segment::{RemoteSegment, Segment};

pub(crate) use shared::Shared;
pub use shared::Stats;
pub use submit::Submit;
pub use watcher::Watcher;

/// Moves bytes between processes and counts them.
///
/// All methods may be called from any thread. Dropping the engine closes it: outstanding handles
/// end with [`EngineError::Closed`], peers see the engine as lost.
pub struct TransferEngine {
    shared: Arc<Shared>,
    stage_foreign: bool,
    takes_files: bool,
    segments: Segments,
    worker: Mutex<Option<Worker>>,
}

impl std::fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TransferEngine({})", self.shared.address.label())
    }
}

/// The way from an engine to a peer, whatever it is by now.
#[derive(Debug, Clone)]
pub struct Way {
    shared: Weak<Shared>,
    peer: Peer,
}

impl Way {
    /// The transport in use; `None` before the first connection and after the engine is gone.
    pub fn transport(&self) -> Option<TransportKind> {
        let shared = self.shared.upgrade()?;
        let core = shared.lock().ok()?;
        core.group.kind(self.peer.key, &core.domains)
    }
}

/// A counter handed out by this engine. When it and the handles of its expectations are gone, its
/// slot is given back, and writes that name this use of it count for nobody (IC-6).
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

    /// To be given to those who write.
    pub fn reference(&self) -> CounterRef {
        CounterRef::new(self.inner.shared.address.id, self.inner.imm)
    }

    /// Logical writes counted so far (IC-1).
    #[inline]
    pub fn arrived(&self) -> u64 {
        self.inner.shared.counters.arrived(self.inner.imm)
    }

    /// Moves the engine on for a moment on this thread, then reads: for callers that spin.
    ///
    /// # Errors
    /// [`EngineError::Forked`]
    #[inline]
    pub fn poll(&self) -> Result<u64> {
        self.inner.shared.cell()?.poll_once(&self.inner.shared);
        Ok(self.arrived())
    }

    /// Whether it counts in this process: in a child by fork its value no longer changes.
    ///
    /// # Errors
    /// [`EngineError::Forked`]
    pub fn check_process(&self) -> Result<()> {
        self.inner.shared.cell().map(drop)
    }

    /// Arrivals that no expectation has taken yet.
    pub fn unclaimed(&self) -> u64 {
        self.inner.shared.counters.unclaimed(self.inner.imm)
    }

    /// Done when the next `n` arrivals that no earlier expectation takes have been counted; those
    /// that came before the call count (IC-5).
    ///
    /// `writers` are the peers that are to write: if one of them is lost first, the handle ends
    /// with [`EngineError::PeerLost`]; without names, only `timeout` ends a wait in vain.
    pub fn expect(&self, n: u32, writers: &[Peer], timeout: Duration) -> Result<Handle> {
        self.expect_for(Span::NONE, n, writers, timeout)
    }

    /// As [`Counter::expect`], for a request that has a name.
    pub fn expect_for(
        &self,
        span: Span,
        n: u32,
        writers: &[Peer],
        timeout: Duration,
    ) -> Result<Handle> {
        self.wait_for(n, writers, (timeout, Some(span)))
    }

    /// Ends with [`EngineError::Timeout`] when `after` has passed: a timer, which the flight recorder leaves out. For a
    /// counter that nothing is written to.
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

/// What the engine knows of its way to a peer.
#[derive(Clone, Debug)]
pub struct Explanation {
    pub peer: String,
    /// The transport in use, if connected.
    pub transport: Option<String>,
    /// One verdict for every transport of this engine.
    pub verdicts: Vec<Verdict>,
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

    /// The time by this engine's clock: the machine's monotonic one, or a simulation's.
    #[inline]
    pub fn now(&self) -> Time {
        self.shared.now()
    }

    /// A number that this engine has not given before, for names in messages that may come late (MR-2): 2^32 and on, so
    /// that all of them are encoded in as many bytes.
    pub fn number(&self) -> u64 {
        self.shared.take_number()
    }

    /// Makes a peer known. Connects with the first use.
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

    /// A peer's region, to be named in requests.
    pub fn import(&self, descriptor: &RegionDescriptor) -> Result<RemoteRegion> {
        let peer = self.peer(&descriptor.owner)?;
        let (key, offset, len) = (descriptor.key, descriptor.offset, descriptor.len);
        let rail_keys = descriptor.rail_keys.clone();
        Ok(RemoteRegion { peer, key, rail_keys, offset, len })
    }

    /// Peers to address together. Connects to all of them now.
    pub fn peer_group(&self, peers: &[Peer]) -> Result<PeerGroup> {
        for p in peers {
            self.connect(p)?;
        }
        Ok(PeerGroup { peers: peers.into() })
    }

    /// Begins to connect, so that the first transfer doesn't have to.
    pub fn connect(&self, peer: &Peer) -> Result<()> {
        self.shared.watch(peer)
    }

    /// A counter of this engine that nobody else uses.
    pub fn counter(&self) -> Result<Counter> {
        self.shared.check_open()?;
        let imm = self.shared.counters.allocate()?;
        Ok(self.make_counter(imm, true))
    }

    fn make_counter(&self, imm: Imm, allocated: bool) -> Counter {
        let inner = CounterInner { shared: Arc::clone(&self.shared), imm, allocated };
        Counter { inner: Arc::new(inner) }
    }

    /// The counter behind a pre-agreed value. Its count outlives this object, and it has no
    /// generation: use [`TransferEngine::counter`] where writes may be cancelled.
    pub fn plain_counter(&self, imm: Imm) -> Counter {
        self.make_counter(imm, false)
    }

    /// Has `take` told the value of every tagged immediate ([`Imm::tagged`]) that arrives, and how many writes carried
    /// it, when their bytes are readable (IC-2) and once for each write (IC-3). Before anybody is told this engine's
    /// address, for what came earlier is lost. Plain counters from 2^18 on are tags to this engine from then on.
    ///
    /// It is called under the engine's lock by whatever thread moves the engine on: it must be quick and must not call
    /// the engine.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if the tags of this engine are taken already.
    pub fn take_tags(&self, take: impl Fn(u32, u32) + Send + Sync + 'static) -> Result<()> {
        self.shared.check_open()?;
        match self.shared.counters.take_tags(Box::new(take)) {
            true => Ok(()),
            false => Err(EngineError::Invalid(
                "tags of this engine are received already; open another engine".into(),
            )),
        }
    }

    /// Moves the engine on for a moment on this thread, unless another one is at it: for threads that spin.
    ///
    /// # Errors
    /// [`EngineError::Forked`]
    #[inline]
    pub fn poll(&self) -> Result<bool> {
        Ok(self.shared.cell()?.poll_once(&self.shared))
    }

    /// Opens the rotating pool for messages, in place of the one before: up to `count` at a time are in users' hands, each of at
    /// most `max_len` bytes. Further ones wait at their senders.
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
        self.shared.receives.open(max_len, count, Arc::new(on_message));
        self.shared.cell()?.kick_worker();
        Ok(())
    }

    /// Submits one request of one or more operations. The handle is done when all of them are:
    /// writes when their bytes are in the peer's memory, reads when they are in ours, messages when
    /// the peer's pool has taken them.
    ///
    /// # Errors
    /// Whatever can be found wrong without asking the peer, before anything is sent.
    #[inline]
    pub fn submit(&self, ops: &[Op<'_>], options: Submit) -> Result<Handle> {
        self.shared.submit(ops, options, (false, None))
    }

    /// As [`TransferEngine::submit`]; `posted` gets the time, in nanoseconds of this engine's clock, when all that the links
    /// take now was given to them. Peers that sleep are woken after that.
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

    /// Makes everything ready that writes of `ops` will need: connections, keys, mappings, page
    /// tables. The first of many pushes over the same ranges is then as quick as the others. No byte
    /// moves and nothing is counted; operations other than writes are passed over.
    pub fn prepare(&self, ops: &[Op<'_>], options: Submit) -> Result<Handle> {
        self.shared.submit(ops, options, (true, None))
    }

    /// Where a device of this process stores to a peer's region by itself: GPU `by`, or its processors. Of a region that
    /// a request has named before ([`TransferEngine::prepare`] will do), at a peer that is connected.
    ///
    /// # Errors
    /// Why it can't, in words.
    pub fn aperture(
        &self,
        region: &RemoteRegion,
        by: Option<i32>,
    ) -> std::result::Result<Arc<Aperture>, String> {
        self.shared.check_open().map_err(|e| e.to_string())?;
        let part = "it is a part of a region; name the whole".to_owned();
        if region.offset != 0 {
            return Err(part);
        }
        let mut core = self.shared.lock().map_err(|e| e.to_string())?;
        let Core { group, domains, .. } = &mut *core;
        let whole = group.aperture(region.peer.key, (region.key, by), domains)?;
        match whole.len() <= region.len {
            true => Ok(whole),
            false => Err(part),
        }
    }

    /// A word that others write and this engine watches; see [`Watcher`].
    pub fn watch(&self, on_change: impl Fn(u64, u64) + Send + Sync + 'static) -> Result<Watcher> {
        self.shared.check_open()?;
        self.shared.watchers.add(Box::new(on_change), None)
    }

    /// As [`TransferEngine::watch`], for a word that kernels on a GPU write and read as well; see
    /// [`DeviceWord`].
    pub fn watch_device(
        &self,
        device: i32,
        on_change: impl Fn(u64, u64) + Send + Sync + 'static,
    ) -> Result<Watcher> {
        self.shared.check_open()?;
        self.shared.watchers.add(Box::new(on_change), Some(DeviceWord::new(device)?))
    }

    /// Which transport leads to a peer, and why not the others.
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

    /// For asking [`TransferEngine::transport`] later, without keeping the engine.
    #[inline]
    pub fn way(&self, peer: &Peer) -> Way {
        Way { shared: Arc::downgrade(&self.shared), peer: peer.clone() }
    }

    /// Takes nothing new from now on: requests and expectations fail with [`EngineError::Draining`]. The handle is
    /// done when everything that was begun here is over, as it is by its deadline at the latest. Peers can still
    /// write; they see the engine as lost when it is closed, which comes next.
    pub fn drain(&self) -> Result<Handle> {
        self.shared.check_open()?;
        let pending = handle::Pending::new(&self.shared);
        let theirs = Arc::clone(&pending);
        self.shared.draining.store(true, SeqCst);
        self.shared.post(Box::new(move |core, shared| {
            if core.closed {
                return theirs.complete(Err(EngineError::Closed));
            }
            core.drains.push(theirs);
            core.end_drains(shared);
        }));
        Ok(Handle::pending("drain", pending))
    }

    /// Ends everything; may be called more than once, from any thread but not from under a lock
    /// that callbacks need. In a child by fork it does nothing: all that it would end is the parent's.
    pub fn close(&self) {
        if self.shared.cell().is_err() {
            return;
        }
        let worker = self.worker.lock().take();
        self.shared.close();
        if let Some(worker) = worker {
            worker.stop(&self.shared);
        }
        self.shared.callbacks.close();
    }

    /// Advances an engine that was opened without threads and runs its callbacks; see
    /// [`Transports`].
    pub fn drive(&self, now: Time) -> bool {
        let Ok(mut core) = self.shared.lock() else { return false };
        let moved = core.drive_at(now, &self.shared);
        drop(core);
        self.shared.callbacks.run_queued() | moved
    }

    /// When `drive` wants to be called next even if nothing arrives.
    pub fn next_timer(&self) -> Time {
        self.shared.lock().map_or(Time::NEVER, |core| core.next_timer(&self.shared))
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        self.close();
    }
}
