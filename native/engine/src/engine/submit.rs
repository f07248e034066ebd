//! Submits a request: checks and binds it, then posts it on this thread or queues it for the lock's
//! holder.

use std::{
    sync::{
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
        Arc,
    },
    time::Duration,
};

use smallvec::SmallVec;

use super::{
    bind,
    driver::Core,
    handle::{self, Handle, HandleOperation},
    Op, Shared,
};
use crate::{
    api::{Priority, Span},
    group::{BoundOp, PeerHold, RequestInfo, SmallWrites, Submitted},
    EngineError, Result,
};

/// Options of one request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Submit {
    /// The engine's `op_timeout` if `None`.
    pub timeout: Option<Duration>,
    /// The only rail that may carry the request: an index among the NICs of the transport in use.
    pub rail: Option<u8>,
    /// If `None`: [`Priority::Latency`] for messages and barriers, [`Priority::Bulk`] for data.
    pub priority: Option<Priority>,
    /// The caller's request that this one serves, for flight records.
    pub span: Span,
}

/// Bytes after which a submitting call reads the clock again.
pub(super) const CLOCK_READ_BYTES: u64 = 32 << 10;

impl Submit {
    pub(super) fn priority(&self, ops: &[Op<'_>]) -> Priority {
        let control = |op: &Op<'_>| matches!(op, Op::Send { .. } | Op::Barrier { .. });
        self.priority.unwrap_or_else(|| match ops.iter().all(control) {
            true => Priority::Latency,
            false => Priority::Bulk,
        })
    }
}

impl Shared {
    #[inline]
    fn mark(&self, at: Option<&AtomicU64>) {
        if let Some(at) = at {
            at.store(self.now().0.max(1), Relaxed);
        }
    }

    /// The handle of a request that was posted under the lock.
    #[inline]
    fn handle_of(
        self: &Arc<Self>,
        sealed: Submitted,
        name: &'static str,
        ops: &[Op<'_>],
        core: &mut Core,
    ) -> Handle {
        let key = match sealed {
            Submitted::Done(result) => return Handle::done(name, result),
            Submitted::Pending(key) => key,
        };
        let pending = handle::HandleState::of_transfer(self, Some(key), self.keep(ops));
        core.group.attach(key, (pending.clone(), 0));
        self.set_alarm(core.group.next_deadline());
        Handle::pending(name, pending)
    }

    #[inline]
    pub(super) fn submit(
        self: &Arc<Self>,
        ops: &[Op<'_>],
        options: Submit,
        (only_prepare, posted): (bool, Option<&AtomicU64>),
    ) -> Result<Handle> {
        let driver = self.driver()?;
        // Checked before the lock is tried, so that a queued request is refused too.
        if self.draining.load(SeqCst) {
            return Err(EngineError::Draining);
        }
        let revocations = self.revocations.load(SeqCst);
        for (i, op) in ops.iter().enumerate() {
            self.check(op).map_err(|e| if ops.len() > 1 { e.in_operation(i) } else { e })?;
        }
        let name = match ops {
            [] => {
                return Err(EngineError::Invalid("a request needs at least one operation".into()))
            }
            [op] => op.name(),
            _ => "batch",
        };
        let timeout = options.timeout.unwrap_or(self.op_timeout);
        let priority = options.priority(ops);
        let called = (name, options.span);
        let mut writes = SmallWrites::new();
        let small = match (options.rail, only_prepare, posted) {
            (None, false, None) => bind::small_request(ops, &mut writes),
            _ => None,
        };
        if let Some(mut core) = driver.try_lock(self) {
            let core = &mut *core;
            core.check_open()?;
            self.check_again(ops, revocations)?;
            if let Some(request) = small.map(|request| (request, &*writes)) {
                let info = RequestInfo { name, span: options.span, priority, timeout };
                let clock = || self.now();
                match core.group.post_small(request, info, clock, &mut core.domains) {
                    // In place: results are large to move.
                    Some(Submitted::Done(Ok(()))) => return Ok(Handle::done(name, Ok(()))),
                    Some(sealed) => return Ok(self.handle_of(sealed, name, ops, core)),
                    None => {}
                }
            }
            let now = self.now();
            core.domains.iter_mut().for_each(|d| d.begin_request());
            let key = core.group.open(now, called, priority);
            let mut bytes = 0;
            for op in ops {
                self.bind(op, (options.rail, only_prepare), &mut |bound| {
                    bytes += bound.bytes();
                    core.group.push(now, key, bound, &mut core.domains, &**self);
                });
            }
            let end = if bytes < CLOCK_READ_BYTES { now } else { self.now() };
            let sealed = core.group.seal((now, end), key, timeout);
            self.mark(posted);
            core.domains.iter_mut().for_each(|d| d.flush());
            return Ok(self.handle_of(sealed, name, ops, core));
        }
        // Another thread holds the lock, and posts the request.
        let mut bound: SmallVec<[BoundOp; 1]> = SmallVec::with_capacity(ops.len());
        // Until the request is posted, only these references keep its peers.
        let mut peers: SmallVec<[PeerHold; 1]> = SmallVec::new();
        for op in ops {
            op.each_peer(|peer| {
                if !peers.last().is_some_and(|last| Arc::ptr_eq(last, &peer.hold)) {
                    peers.push(Arc::clone(&peer.hold));
                }
            });
            self.bind(op, (options.rail, only_prepare), &mut |b| bound.push(b));
        }
        let pending = handle::HandleState::of_transfer(self, None, self.keep(ops));
        if let Err(e) = self.check_again(ops, revocations) {
            pending.release_memory(true);
            return Err(e);
        }
        self.mark(posted);
        let handle = Handle::pending(name, Arc::clone(&pending));
        let queued = self.now();
        self.post(Box::new(move |core, shared| {
            let ended = |result| {
                pending.release_memory(true);
                pending.complete(result);
            };
            if let Err(e) = core.check_open() {
                return ended(Err(e));
            }
            let now = shared.now();
            core.domains.iter_mut().for_each(|d| d.begin_request());
            let key = core.group.open(queued, called, priority);
            for b in bound {
                core.group.push(now, key, b, &mut core.domains, &**shared);
            }
            drop(peers);
            let sealed = core.group.seal((now, shared.now()), key, timeout);
            core.domains.iter_mut().for_each(|d| d.flush());
            match sealed {
                Submitted::Done(result) => ended(result),
                Submitted::Pending(key) => {
                    pending.is_of(HandleOperation::Transfer(key));
                    core.group.attach(key, (pending, 0));
                    shared.set_alarm(core.group.next_deadline());
                }
            }
        }));
        Ok(handle)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Instant;

    use crate::{
        api::{EngineConfig, TransportKind},
        engine::{Local, Remote, TransferEngine},
    };

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn engine() -> TransferEngine {
        TransferEngine::open(EngineConfig {
            transports: vec![TransportKind::Shm],
            token: Some(b"t".to_vec()),
            ..Default::default()
        })
        .unwrap()
    }

    #[test]
    fn a_small_write_waits_behind_work_of_its_class() {
        let (a, b) = (engine(), engine());
        let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
        let (counter, there) = (b.counter().unwrap(), a.import(&dst.descriptor()).unwrap());
        let write = |len, counts: bool, priority| {
            let src = Local { region: &src, offset: 0 };
            let dst = Remote { region: &there, offset: 0 };
            let op = Op::Write { src, dst, len, imm: counts.then(|| counter.imm()) };
            a.submit(&[op], Submit { priority: Some(priority), ..Default::default() }).unwrap()
        };
        write(8, false, Priority::Bulk).wait(TIMEOUT).unwrap().unwrap();
        // Joined: counts find no room in the end, and nothing makes any.
        b.worker.lock().take().unwrap().stop(&b.shared);
        let mut counts = (0..1 << 20).map(|_| write(0, true, Priority::Bulk));
        let waits = counts.find(|count| !count.is_done()).expect("a count that finds no room");
        let behind = write(8, false, Priority::Bulk);
        assert!(!behind.is_done(), "it overtakes a count of its class");
        assert!(!write(8, false, Priority::Background).is_done(), "it overtakes a more urgent one");
        assert!(write(8, false, Priority::Latency).is_done(), "nothing as urgent waits");
        let start = Instant::now();
        for handle in [waits, behind] {
            while handle.wait(Duration::from_millis(1)).is_none() {
                assert!(start.elapsed() < TIMEOUT, "there is room again");
                b.poll().unwrap();
            }
        }
    }
}
