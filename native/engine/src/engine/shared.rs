//! State that all objects of one engine share.

use std::{
    sync::{
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
        Arc, Weak,
    },
    time::Duration,
};

use super::{
    callbacks::Callbacks,
    counters::Counters,
    driver::{Command, Core, GroupDriver, Guard},
    grants::Leases,
    handle::SpareHandles,
    receives::Receives,
    watcher::Watchers,
    Handle, HandleRef, Peer, Region,
};
use crate::{
    api::{EngineAddress, EngineId, Imm, RegionKey, Span},
    domain::{Count, RegionRelease},
    group::GroupEvents,
    locks::Mutex,
    memory::{Backing, RegionIndex, RegionIndices, RegionMemory, FIRST_INTERNAL_INDEX},
    process::ProcessLocal,
    time::Time,
    wake::{WakeAction, Waker},
    EngineError, Result,
};

/// Counts for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub counted: u64,
    /// Immediates of an earlier generation of their counter, which were dropped (IC-6).
    pub ghosts: u64,
    pub regions: usize,
    pub retiring: usize,
}

/// A deregistration that has not completed (MR-1: failed, quiesced and reusable are three states).
struct PendingDeregistration {
    memory: Arc<RegionMemory>,
    /// Domains through which a peer may still reach the memory.
    rails: u32,
    handle: Option<HandleRef>,
    /// The engine is closed, and a peer that may reach the memory will not tell any more.
    kept: bool,
}

impl PendingDeregistration {
    /// Whether no byte can land there any more. With a handle, also whether all grants have ended.
    fn is_over(&self) -> bool {
        let granted = self.handle.is_some() && self.memory.grants.load(SeqCst) > 0;
        self.rails == 0 && self.memory.users.load(SeqCst) == 0 && !granted
    }
}

pub(crate) struct Shared {
    pub address: EngineAddress,
    driver: ProcessLocal<GroupDriver>,
    pub counters: Counters,
    pub callbacks: Callbacks,
    pub receives: Receives,
    pub watchers: Watchers,
    pub leases: Leases,
    pub op_timeout: Duration,
    pub max_message: usize,
    /// Virtual time if the caller drives the engine.
    pub clock: Clock,
    pub spare_handles: SpareHandles,
    counted: AtomicU64,
    regions: Mutex<Vec<Weak<RegionMemory>>>,
    indices: Arc<RegionIndices>,
    next_number: AtomicU64,
    retiring: Mutex<Vec<PendingDeregistration>>,
    /// Number of revocations of local regions that have begun.
    pub revocations: AtomicU64,
    closed: AtomicBool,
    /// Requests and expectations are refused.
    pub draining: AtomicBool,
}

/// The source of time.
#[derive(Debug)]
pub(crate) enum Clock {
    Machine,
    /// Set by the caller of `drive`.
    Manual(Arc<AtomicU64>),
}

impl Shared {
    pub fn new(
        address: EngineAddress,
        driver: GroupDriver,
        clock: Clock,
        (op_timeout, max_message, records): (Duration, usize, usize),
        waker: Waker,
    ) -> Result<Arc<Self>> {
        let (callbacks, counters) = match clock {
            Clock::Machine => (Callbacks::default(), Counters::with_random_slots(records)?),
            Clock::Manual(_) => (Callbacks::manual(), Counters::recording(records)),
        };
        let shared = Arc::new(Self {
            address,
            driver: ProcessLocal::new(driver),
            counters,
            callbacks,
            receives: Receives::new(waker.clone()),
            watchers: Watchers::default(),
            leases: Leases::default(),
            op_timeout,
            max_message,
            clock,
            spare_handles: SpareHandles::default(),
            counted: AtomicU64::new(0),
            regions: Mutex::default(),
            indices: Arc::default(),
            next_number: AtomicU64::new(1 << 32),
            retiring: Mutex::default(),
            revocations: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            draining: AtomicBool::new(false),
        });
        let engine = Arc::downgrade(&shared);
        waker.set(move |action| {
            let Some(engine) = engine.upgrade() else { return };
            let Ok(driver) = engine.driver() else { return };
            match action {
                WakeAction::WakeThread => driver.kick(),
                WakeAction::PollHere => driver.poll_here(&engine),
            }
        });
        Ok(shared)
    }

    #[inline]
    pub fn now(&self) -> Time {
        match &self.clock {
            Clock::Machine => Time::now(),
            Clock::Manual(t) => Time(t.load(SeqCst)),
        }
    }

    pub fn take_number(&self) -> u64 {
        self.next_number.fetch_add(1, SeqCst)
    }

    /// The only access to the transports, their lock, and the threads that drive them.
    ///
    /// # Errors
    /// [`EngineError::Forked`] in a forked child, where all of these are the parent's.
    #[inline]
    pub fn driver(&self) -> Result<&GroupDriver> {
        self.driver.get()
    }

    /// Takes the group's lock.
    ///
    /// # Errors
    /// [`EngineError::Forked`]
    pub fn lock(self: &Arc<Self>) -> Result<Guard<'_>> {
        Ok(self.driver()?.lock(self))
    }

    /// Runs `command` under the group's lock, on this thread or on the lock's holder. A forked
    /// child leaks it.
    pub fn post(self: &Arc<Self>, command: Command) {
        match self.driver() {
            Ok(driver) => driver.post(self, command),
            // Its contents are the parent's.
            Err(_) => std::mem::forget(command),
        }
    }

    /// Makes a sleeping worker wake at `at` or earlier.
    pub fn set_alarm(&self, at: Time) {
        if let Ok(driver) = self.driver() {
            driver.set_alarm(at);
        }
    }

    /// Fails if the engine is closed or belongs to a parent process.
    pub fn check_open(&self) -> Result<()> {
        self.driver()?;
        match self.closed.load(SeqCst) {
            true => Err(EngineError::Closed),
            false => Ok(()),
        }
    }

    /// Allocates an unused region index.
    ///
    /// # Errors
    /// [`EngineError::Resource`] if none is left.
    pub fn take_region_index(&self) -> Result<RegionIndex> {
        self.indices.take().ok_or_else(|| EngineError::Resource {
            call: "register",
            cause: format!("this engine has {FIRST_INTERNAL_INDEX} regions and grants"),
            hint: "deregister some, or open another engine".into(),
        })
    }

    pub fn remember(&self, memory: &Arc<RegionMemory>) {
        let mut regions = self.regions.lock();
        if regions.len() % 64 == 63 {
            regions.retain(|r| r.strong_count() > 0);
        }
        regions.push(Arc::downgrade(memory));
    }

    /// The memory of a key of this engine.
    pub fn own_region(&self, key: RegionKey) -> Option<Weak<RegionMemory>> {
        let memories: Vec<_> = self.regions.lock().iter().filter_map(Weak::upgrade).collect();
        memories.iter().find(|memory| memory.key == key).map(Arc::downgrade)
    }

    /// The allocation of this engine that a range lies in, if any.
    pub fn backing_of(&self, addr: usize, len: u64) -> Backing {
        let end = addr as u64 + len;
        // Each may be the last to be dropped here, and its owner's end may take any lock.
        let memories: Vec<_> = self.regions.lock().iter().filter_map(Weak::upgrade).collect();
        for memory in memories {
            if let Backing::Owned { allocation, .. } = &memory.backing {
                let base = allocation.base();
                if base <= addr && end <= base as u64 + allocation.len() {
                    let offset = (addr - base) as u64;
                    return Backing::Owned { allocation: Arc::clone(allocation), offset };
                }
            }
        }
        Backing::Foreign
    }

    pub fn watch(self: &Arc<Self>, peer: &Peer) -> Result<()> {
        let mut core = self.lock()?;
        self.watch_under(&mut core, self.now(), peer)
    }

    fn watch_under(&self, core: &mut Core, now: Time, peer: &Peer) -> Result<()> {
        self.check_peer(peer)?;
        if core.closed {
            return Err(EngineError::Closed);
        }
        core.group.watch(now, peer.key, &mut core.domains, self)
    }

    pub fn expect(
        self: &Arc<Self>,
        imm: Imm,
        n: u32,
        writers: &[Peer],
        (timeout, span): (Duration, Option<Span>),
    ) -> Result<Handle> {
        self.driver()?;
        // Later it would pass for the loss of that peer, to all expectations.
        writers.iter().try_for_each(|peer| self.check_peer(peer))?;
        if n == 0 {
            return Ok(Handle::done("expectation", Ok(())));
        }
        let pending = super::handle::HandleState::new(self);
        pending.is_of(super::HandleOperation::Expectation(imm));
        let now = self.now();
        if self.draining.load(Relaxed) {
            return Err(EngineError::Draining);
        }
        let completion = (Arc::clone(&pending) as _, 0);
        self.counters.expect((imm, n, span), (now, timeout), writers.into(), completion);
        self.begin_to_expect((now, timeout), std::iter::once(imm), writers.iter());
        Ok(Handle::pending("expectation", pending))
    }

    /// Starts expectations that were queued. From now on arrivals, lost peers and deadlines end
    /// them.
    pub fn begin_to_expect<'a>(
        self: &Arc<Self>,
        (now, timeout): (Time, Duration),
        counters: impl Iterator<Item = Imm> + Clone,
        writers: impl Iterator<Item = &'a Peer>,
    ) {
        let mut writers = writers.peekable();
        let deadline = Some(now.after(timeout));
        let ends = deadline.filter(|at| *at != Time::NEVER || writers.peek().is_some());
        self.counters.look((now, ends), counters);
        if let Some(mut core) = writers.peek().and_then(|_| self.lock().ok()) {
            for peer in writers {
                if let Err(error) = self.watch_under(&mut core, now, peer) {
                    self.counters.peer_lost(now, peer.id(), &error);
                }
            }
        }
        self.set_alarm(self.counters.next_deadline());
        if self.closed.load(SeqCst) {
            self.counters.close(now);
        }
    }

    /// Deregisters a region from all domains. Its memory is kept until no peer can reach it.
    pub fn retire(self: &Arc<Self>, memory: &Arc<RegionMemory>, handle: Option<HandleRef>) {
        let memory = Arc::clone(memory);
        self.post(Box::new(move |core, shared| {
            let index = memory.key.index;
            let kept = core.closed && core.keeps(&memory);
            let pending = PendingDeregistration { memory, rails: 0, handle, kept };
            shared.retiring.lock().push(pending);
            let later = core.domains.iter_mut().filter_map(|d| match d.deregister(index) {
                RegionRelease::Now => None,
                RegionRelease::Later => Some(()),
            });
            let rails = later.count() as u32;
            if let Some(r) = shared.retiring.lock().iter_mut().find(|r| r.memory.key.index == index)
            {
                // After `close` all links are down: nothing can land any more.
                r.rails = if core.closed { 0 } else { rails };
            }
            shared.reap();
            // A domain that has to inform its peers may have set a timer.
            shared.set_alarm(core.next_timer(shared));
        }));
    }

    /// Why a deregistration has not completed, as text.
    pub fn waits_for(self: &Arc<Self>, memory: &RegionMemory) -> String {
        let mut why = Vec::new();
        match memory.users.load(SeqCst) {
            0 => {}
            1 => why.push("a transfer of this engine uses it".to_owned()),
            n => why.push(format!("{n} uses of it by transfers of this engine are not over")),
        }
        match memory.grants.load(SeqCst) {
            0 => {}
            n => why.push(format!("{n} grants from it are not over")),
        }
        let Ok(core) = self.lock() else {
            return "the engine belongs to the parent process".into();
        };
        for domain in &core.domains {
            let Some(reason) = domain.waits_for(memory.key.index) else { continue };
            why.push(match domain.device() {
                "" => format!("{}: {reason}", domain.kind()),
                device => format!("{} {device}: {reason}", domain.kind()),
            });
        }
        if why.is_empty() {
            return "a transfer is going on, or a peer that mapped it does not answer".into();
        }
        why.join("; ")
    }

    /// Releases retired regions that no peer can reach any more.
    pub fn reap(&self) {
        let mut over = Vec::new();
        {
            let mut retiring = self.retiring.lock();
            let mut i = 0;
            while i < retiring.len() {
                match retiring[i].is_over() {
                    true => over.push(retiring.swap_remove(i)),
                    false => i += 1,
                }
            }
        }
        let mut more = false;
        for PendingDeregistration { memory, handle, kept, .. } in over {
            for grantor in memory.grantors() {
                more |= grantor.grants.fetch_sub(1, SeqCst) == 1;
            }
            if let Some(handle) = handle {
                handle.release_memory(!kept);
                handle.complete(match kept {
                    false => Ok(()),
                    true => Err(EngineError::NotQuiesced {
                        what: format!("{memory:?}"),
                        after: Duration::ZERO,
                        cause: "the engine was closed before a peer had released it".into(),
                    }),
                });
            }
            if memory.keep.is_some() || memory.grantor.is_some() {
                // The user's `keep` object may run any code when dropped: the callback thread drops
                // it.
                self.callbacks.push(Box::new(move || drop(memory)));
            }
        }
        if more {
            // Their grantors may have waited for the last grant.
            self.reap();
        }
    }

    /// Ends the use of regions of one engine by requests.
    pub fn release_users(keep: &[Region]) {
        for region in keep {
            region.inner.memory.users.fetch_sub(1, SeqCst);
        }
        let Some(Region { inner, .. }) = keep.first() else { return };
        if !inner.shared.retiring.lock().is_empty() {
            inner.shared.reap();
        }
    }

    pub fn stats(&self) -> Stats {
        let regions = self.regions.lock().iter().filter(|r| r.strong_count() > 0).count();
        Stats {
            counted: self.counted.load(Relaxed),
            ghosts: self.counters.ghosts(),
            regions,
            retiring: self.retiring.lock().len(),
        }
    }

    /// False if another call has begun it.
    pub fn close(self: &Arc<Self>) -> bool {
        let Ok(driver) = self.driver() else { return false };
        if self.closed.swap(true, SeqCst) {
            return false;
        }
        self.watchers.close();
        {
            let mut core = driver.lock(self);
            let core = &mut *core;
            core.closed = true;
            core.drains.drain(..).for_each(|d| d.complete(Err(EngineError::Closed)));
            core.domains.iter_mut().for_each(|d| d.close());
            core.group.close(self.now());
            // All links are down: nothing can land any more, but where a peer has not let go.
            let mut retiring = self.retiring.lock();
            let memories = retiring.iter().map(|r| Arc::clone(&r.memory));
            let kept: Vec<_> = memories.filter(|memory| core.keeps(memory)).collect();
            for r in retiring.iter_mut() {
                // A grant that is kept keeps the region that it comes from.
                let is_of = |m: &Arc<RegionMemory>| {
                    Arc::ptr_eq(m, &r.memory) || m.grantors().any(|g| Arc::ptr_eq(g, &r.memory))
                };
                (r.rails, r.kept) = (0, kept.iter().any(is_of));
            }
        }
        self.counters.close(self.now());
        self.reap();
        true
    }
}

impl GroupEvents for Shared {
    #[inline]
    fn counted(&self, now: Time, count: Count) {
        self.counted.fetch_add(u64::from(count.n), Relaxed);
        self.counters.arrive(now, count);
    }

    fn message(&self, from: EngineId, message: Box<[u8]>) {
        self.receives.deliver(&self.callbacks, from, message);
    }

    fn peer_lost(&self, now: Time, peer: EngineId, error: &EngineError) {
        tracing::info!(%peer, %error, "peer lost");
        self.counters.peer_lost(now, peer, error);
    }

    fn region_released(&self, _rail: usize, index: u32) {
        if let Some(r) = self.retiring.lock().iter_mut().find(|r| r.memory.key.index == index) {
            r.rails = r.rails.saturating_sub(1);
        }
        self.reap();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{api::EngineConfig, engine::TransferEngine};

    #[test]
    fn mr_2_an_engine_that_has_no_index_left_registers_nothing_more() {
        let engine = TransferEngine::open(EngineConfig::default()).unwrap();
        let last = engine.alloc(64).unwrap();
        engine.shared.indices.begin_at(FIRST_INTERNAL_INDEX);
        for _ in 0..2 {
            let e = engine.alloc(64).unwrap_err();
            assert!(e.to_string().contains("open another engine"), "{e}");
        }
        last.put(0, &[1; 64]).unwrap();
    }
}
