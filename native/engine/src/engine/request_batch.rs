//! Batches: many requests, or expectations, in one call. The engine takes its locks once, and one
//! observer gets the events of all requests.

use std::{
    sync::{
        atomic::{
            AtomicUsize,
            Ordering::{AcqRel, SeqCst},
        },
        Arc, Weak,
    },
    time::Duration,
};

use super::{
    bind::small_request,
    callbacks::Callbacks,
    driver::{Core, Dependent},
    handle::KeptRegions,
    submit::CLOCK_READ_BYTES,
    Counter, Op, Peer, Quiescence, Shared, Submit, TransferEngine,
};
use crate::{
    api::{Priority, Span},
    group::{OperationCompletion, PeerHold, RequestInfo, SmallWrites, Submitted},
    locks::Mutex,
    EngineError, Result,
};

/// An event of one request of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The request succeeded or failed. Reported once for each request.
    Ended(Result<()>),
    /// After a failure: nothing of the request is under way any more.
    Quiesced(Quiescence),
}

/// The index of a request within its batch, and its event.
pub(super) type BatchEvent = (usize, Outcome);

/// Receives the events of requests or expectations that were submitted together.
///
/// The engine drops its reference to an observer on its callback thread or within the submitting
/// call, never under one of its locks. An observer may thus own anything, even the engine.
pub trait BatchObserver: Send + Sync {
    /// Receives events by request index. Requests that end within the submitting call are reported
    /// within it, on its thread. The callback thread reports all others, in the order of completion
    /// over all batches.
    fn on_events(&self, events: Vec<(usize, Outcome)>);
}

/// One expectation: `n` further writes at a counter, by these peers. See [`Counter::expect`].
#[derive(Clone, Copy, Debug)]
pub struct Expect<'a> {
    pub counter: &'a Counter,
    pub n: u32,
    pub writers: &'a [Peer],
}

/// The shared state of the requests of one call.
pub(super) struct RequestBatch {
    me: Weak<RequestBatch>,
    callbacks: Callbacks,
    /// `None` once dropped.
    observer: Option<Arc<dyn BatchObserver>>,
    /// Requests that have not ended.
    left: AtomicUsize,
    /// The regions of all requests.
    keep: Mutex<KeptRegions>,
    _dependent: Option<Dependent>,
}

impl RequestBatch {
    fn new(
        shared: &Arc<Shared>,
        observer: Arc<dyn BatchObserver>,
        ops: &[(usize, &Op<'_>)],
    ) -> Arc<Self> {
        let keep = shared.keep(ops.iter().map(|(_, op)| *op));
        let _dependent = shared.driver().ok().map(|driver| driver.begin_dependent());
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            callbacks: shared.callbacks.clone(),
            observer: Some(observer),
            left: AtomicUsize::new(ops.len()),
            keep: Mutex::new(keep),
            _dependent,
        })
    }

    /// Queues events for the callback thread.
    fn queue_events(&self, events: impl IntoIterator<Item = BatchEvent>) {
        if let Some(me) = self.me.upgrade() {
            self.callbacks.push_events(me, events.into_iter());
        }
    }

    /// Delivers events; runs on the callback thread.
    pub fn on_events(self: Arc<Self>, events: Vec<BatchEvent>) {
        if let Some(observer) = &self.observer {
            observer.on_events(events);
        }
        Self::drop_reference(self);
    }

    /// Drops a reference, and the observer with the last one. The caller must be allowed to run the
    /// observer's destructor.
    fn drop_reference(this: Arc<Self>) {
        if let Some(mut batch) = Arc::into_inner(this) {
            batch.observer = None;
        }
    }

    /// Counts `n` requests as ended, and releases the memory after the last one.
    fn count_ended(&self, n: usize) {
        if self.left.fetch_sub(n, AcqRel) > n {
            return;
        }
        let keep = std::mem::take(&mut *self.keep.lock());
        Shared::release_users(&keep);
    }
}

impl Drop for RequestBatch {
    /// The engine's lock may be held here, and the observer's destructor may run any code. The
    /// callback thread drops it.
    fn drop(&mut self) {
        if let Some(observer) = self.observer.take() {
            self.callbacks.push(Box::new(move || drop(observer)));
        }
    }
}

impl OperationCompletion for RequestBatch {
    fn resolve(&self, at: u32, result: Result<()>) {
        self.queue_events([(at as usize, Outcome::Ended(result))]);
    }

    fn release(&self, at: u32, proven: bool, result: Option<Result<()>>) {
        let failed = !matches!(result, Some(Ok(())));
        let quiet =
            Outcome::Quiesced(if proven { Quiescence::Quiesced } else { Quiescence::Unknown });
        self.count_ended(1);
        let ended = result.map(Outcome::Ended);
        let events = ended.into_iter().chain(failed.then_some(quiet));
        self.queue_events(events.map(|outcome| (at as usize, outcome)));
    }
}

/// Requests that end before the call returns.
#[derive(Default)]
struct ImmediateEvents {
    events: Vec<BatchEvent>,
    over: usize,
    /// The size of the batch.
    of: usize,
}

impl ImmediateEvents {
    fn ended(&mut self, at: usize, result: Result<()>) {
        let failed = result.is_err();
        self.over += 1;
        if self.events.capacity() == 0 {
            self.events.reserve(self.of);
        }
        self.events.push((at, Outcome::Ended(result)));
        if failed {
            self.events.push((at, Outcome::Quiesced(Quiescence::Quiesced)));
        }
    }
}

/// A request that waits for the lock, and its number of bound operations.
struct QueuedRequest {
    at: u32,
    called: (&'static str, Span),
    priority: Priority,
    ops: usize,
}

impl Shared {
    pub(super) fn submit_batch(
        self: &Arc<Self>,
        ops: &[Op<'_>],
        options: Submit,
        observer: Arc<dyn BatchObserver>,
    ) -> Result<()> {
        let driver = self.driver()?;
        // Checked before the lock is tried, so that a queued batch is refused too.
        if self.draining.load(SeqCst) {
            return Err(EngineError::Draining);
        }
        let revocations = self.revocations.load(SeqCst);
        let mut good = Vec::with_capacity(ops.len());
        let mut at_once = ImmediateEvents { of: ops.len(), ..ImmediateEvents::default() };
        for (at, op) in ops.iter().enumerate() {
            match self.check(op) {
                Ok(()) => good.push((at, op)),
                Err(e) => at_once.ended(at, Err(e)),
            }
        }
        let retained = Arc::clone(&observer);
        match driver.try_lock(self) {
            Some(mut core) => {
                core.check_open()?;
                self.post_batch(&mut core, &good, (options, revocations), retained, &mut at_once);
            }
            // Another thread holds the lock, and posts the requests.
            None => self.queue_batch(&good, (options, revocations), retained, &mut at_once),
        }
        if !at_once.events.is_empty() {
            observer.on_events(at_once.events);
        }
        Ok(())
    }

    fn post_batch(
        self: &Arc<Self>,
        core: &mut Core,
        ops: &[(usize, &Op<'_>)],
        (options, revocations): (Submit, u64),
        observer: Arc<dyn BatchObserver>,
        at_once: &mut ImmediateEvents,
    ) {
        let timeout = options.timeout.unwrap_or(self.op_timeout);
        let batch = RequestBatch::new(self, observer, ops);
        let (mut now, mut bytes, before) = (self.now(), 0, at_once.over);
        core.domains.iter_mut().for_each(|d| d.begin_request());
        for (at, op) in ops {
            if let Err(e) = self.check_again(std::slice::from_ref(*op), revocations) {
                at_once.ended(*at, Err(e));
                continue;
            }
            let priority = options.priority(std::slice::from_ref(*op));
            let begun = now;
            let mut writes = SmallWrites::new();
            let small = match options.rail {
                None => small_request(std::slice::from_ref(*op), &mut writes),
                Some(_) => None,
            };
            let posted = small.and_then(|request| {
                let info = RequestInfo { name: op.name(), span: options.span, priority, timeout };
                bytes += request.bytes;
                core.group.post_small((request, &writes), info, || begun, &mut core.domains)
            });
            let sealed = posted.unwrap_or_else(|| {
                let key = core.group.open(begun, (op.name(), options.span), priority);
                self.bind(op, (options.rail, false), &mut |bound| {
                    bytes += bound.bytes();
                    core.group.push(begun, key, bound, &mut core.domains, &**self);
                });
                if bytes >= CLOCK_READ_BYTES {
                    (now, bytes) = (self.now(), 0);
                }
                core.group.seal((begun, now), key, timeout)
            });
            match sealed {
                Submitted::Done(result) => at_once.ended(*at, result),
                Submitted::Pending(key) => core.group.attach(key, (batch.clone(), *at as u32)),
            }
        }
        core.domains.iter_mut().for_each(|d| d.flush());
        if at_once.over > before {
            batch.count_ended(at_once.over - before);
        }
        // The caller still holds the observer, so this does not drop it.
        RequestBatch::drop_reference(batch);
        self.set_alarm(core.group.next_deadline());
    }

    fn queue_batch(
        self: &Arc<Self>,
        ops: &[(usize, &Op<'_>)],
        (options, revocations): (Submit, u64),
        observer: Arc<dyn BatchObserver>,
        at_once: &mut ImmediateEvents,
    ) {
        let timeout = options.timeout.unwrap_or(self.op_timeout);
        let batch = RequestBatch::new(self, observer, ops);
        let (mut waiting, mut bound) = (Vec::with_capacity(ops.len()), Vec::new());
        // Until the batch is posted, only these references keep its peers.
        let mut peers: Vec<PeerHold> = Vec::new();
        for (at, op) in ops {
            if let Err(e) = self.check_again(std::slice::from_ref(*op), revocations) {
                at_once.ended(*at, Err(e));
                batch.count_ended(1);
                continue;
            }
            op.each_peer(|peer| peers.push(Arc::clone(&peer.hold)));
            let before = bound.len();
            self.bind(op, (options.rail, false), &mut |b| bound.push(b));
            waiting.push(QueuedRequest {
                at: *at as u32,
                called: (op.name(), options.span),
                priority: options.priority(std::slice::from_ref(*op)),
                ops: bound.len() - before,
            });
        }
        let queued = self.now();
        let command = move |core: &mut Core, shared: &Arc<Self>| {
            if let Err(e) = core.check_open() {
                return waiting
                    .iter()
                    .for_each(|w| batch.release(w.at, true, Some(Err(e.clone()))));
            }
            let mut now = shared.now();
            core.domains.iter_mut().for_each(|d| d.begin_request());
            let mut bound = bound.into_iter();
            for QueuedRequest { at, called, priority, ops } in waiting {
                let key = core.group.open(queued, called, priority);
                for b in bound.by_ref().take(ops) {
                    core.group.push(now, key, b, &mut core.domains, &**shared);
                }
                let begun = std::mem::replace(&mut now, shared.now());
                match core.group.seal((begun, now), key, timeout) {
                    Submitted::Done(result) => batch.release(at, true, Some(result)),
                    Submitted::Pending(key) => core.group.attach(key, (batch.clone(), at)),
                }
            }
            drop(peers);
            core.domains.iter_mut().for_each(|d| d.flush());
            shared.set_alarm(core.group.next_deadline());
        };
        self.post(Box::new(command));
    }

    pub(super) fn expect_batch(
        self: &Arc<Self>,
        expected: &[Expect<'_>],
        timeout: Duration,
        observer: Arc<dyn BatchObserver>,
    ) -> Result<()> {
        self.driver()?;
        if self.draining.load(SeqCst) {
            return Err(EngineError::Draining);
        }
        let (batch, now) = (RequestBatch::new(self, observer, &[]), self.now());
        for (at, Expect { counter, n, writers }) in expected.iter().enumerate() {
            let what = (counter.imm(), *n, Some(Span::NONE));
            self.counters.expect(
                what,
                (now, timeout),
                (*writers).into(),
                (batch.clone(), at as u32),
            );
        }
        let counters = expected.iter().map(|e| e.counter.imm());
        let writers = expected.iter().flat_map(|e| e.writers);
        self.begin_to_expect((now, timeout), counters, writers);
        Ok(())
    }
}

impl TransferEngine {
    /// Submits many requests of one operation each, with the same options. The effect is that of
    /// one [`TransferEngine::submit`] per operation, but the locks are taken once. `observer` gets
    /// the events by the index in `ops`. An invalid request fails, and the others continue. The
    /// local memory of all requests is in use until the last one has ended (MR-1).
    ///
    /// # Errors
    /// If the engine accepts no requests; there are no events then.
    pub fn submit_batch(
        &self,
        ops: &[Op<'_>],
        options: Submit,
        observer: Arc<dyn BatchObserver>,
    ) -> Result<()> {
        self.shared.submit_batch(ops, options, observer)
    }

    /// Expects writes at many counters of this engine. The effect is that of one
    /// [`Counter::expect`] per entry, but the locks are taken once, and the counters are not kept
    /// alive. `observer` gets the events by index.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for a counter or a writer of another engine or an `n` of 0, or if
    /// the engine accepts no expectations. There are no events then.
    pub fn expect_batch(
        &self,
        expected: &[Expect<'_>],
        timeout: Duration,
        observer: Arc<dyn BatchObserver>,
    ) -> Result<()> {
        let wrong = |text: &str| Err(EngineError::Invalid(text.into()));
        for Expect { counter, n, writers } in expected {
            if !Arc::ptr_eq(&counter.inner.shared, &self.shared) {
                return wrong("the counter belongs to another engine; make it with this one");
            }
            if *n == 0 {
                return wrong("an expectation of no writes; leave it out");
            }
            writers.iter().try_for_each(|peer| self.shared.check_peer(peer))?;
        }
        self.shared.expect_batch(expected, timeout, observer)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::{
        api::EngineConfig,
        engine::{Local, Remote},
        simulation::SimNet,
        transport::sim::SimConfig,
    };

    /// Records events, and whether it was dropped.
    #[derive(Default)]
    struct EventRecorder {
        events: Arc<Mutex<Vec<BatchEvent>>>,
        dropped: Arc<AtomicBool>,
    }

    impl BatchObserver for EventRecorder {
        fn on_events(&self, events: Vec<BatchEvent>) {
            self.events.lock().extend(events);
        }
    }

    impl Drop for EventRecorder {
        fn drop(&mut self) {
            self.dropped.store(true, SeqCst);
        }
    }

    #[test]
    fn an_observer_is_not_dropped_under_the_lock() {
        let mut net = SimNet::new(SimConfig::default());
        let a = net.engine(EngineConfig::default()).unwrap();
        let recorder = EventRecorder::default();
        let dropped = Arc::clone(&recorder.dropped);
        let batch = RequestBatch::new(&a.shared, Arc::new(recorder), &[]);
        let core = a.shared.lock().unwrap();
        drop(batch as Arc<dyn OperationCompletion>);
        assert!(!dropped.load(SeqCst));
        drop(core);
        a.shared.callbacks.run_queued();
        assert!(dropped.load(SeqCst));
    }

    #[test]
    fn requests_that_are_left_to_the_holder_of_the_lock_end_each_by_itself() {
        let mut net = SimNet::new(SimConfig::default());
        let mut open = || net.engine(EngineConfig::default()).unwrap();
        let (a, b, dead) = (open(), open(), open());
        let (src, here, there) =
            (a.alloc(64).unwrap(), b.alloc(64).unwrap(), dead.alloc(64).unwrap());
        src.put(0, &[7; 64]).unwrap();
        let (to_b, to_dead) =
            (a.import(&here.descriptor()).unwrap(), a.import(&there.descriptor()).unwrap());
        let write = |region, len| {
            let (src, dst) = (Local { region: &src, offset: 0 }, Remote { region, offset: 0 });
            Op::Write { src, dst, len, imm: None }
        };
        let ops = [write(&to_dead, 64), write(&to_b, 65), write(&to_b, 64)];
        let recorder = EventRecorder::default();
        let (events, dropped) = (Arc::clone(&recorder.events), Arc::clone(&recorder.dropped));
        net.kill(dead.id());

        let core = a.shared.lock().unwrap();
        a.submit_batch(&ops, Submit::default(), Arc::new(recorder)).unwrap();
        assert!(events.lock().iter().all(|(at, _)| *at == 1), "the others wait for the lock");
        drop(core);
        let end = net.now().after(Duration::from_millis(1));
        net.run_until(end);
        let of = |at| events.lock().iter().filter(|n| n.0 == at).map(|n| n.1.clone()).collect();
        let outcomes: [Vec<Outcome>; 3] = [of(0), of(1), of(2)];
        for failed in &outcomes[..2] {
            let two = matches!(failed[..], [Outcome::Ended(Err(_)), Outcome::Quiesced(_)]);
            assert!(two, "{failed:?}");
        }
        assert_eq!(outcomes[2], [Outcome::Ended(Ok(()))]);
        assert_eq!(here.get(0, 64).unwrap(), [7; 64]);
        assert!(dropped.load(SeqCst), "all have ended");
        let retired = src.revoke().unwrap();
        let end = net.now().after(Duration::from_millis(1));
        net.run_until(end);
        assert!(retired.is_done(), "the engine still holds their memory");

        // The engine is closed while they wait: none is posted, and each one fails.
        let src = a.alloc(64).unwrap();
        let late = Arc::new(EventRecorder::default());
        let (src, dst) = (Local { region: &src, offset: 0 }, Remote { region: &to_b, offset: 0 });
        let op = Op::Write { src, dst, len: 64, imm: None };
        let mut core = a.shared.lock().unwrap();
        a.submit_batch(&[op.clone(), op], Submit::default(), late.clone()).unwrap();
        core.closed = true;
        drop(core);
        a.close();
        let closed =
            [Outcome::Ended(Err(EngineError::Closed)), Outcome::Quiesced(Quiescence::Quiesced)];
        let closed = closed.as_slice();
        let told: Vec<Outcome> = late.events.lock().iter().map(|n| n.1.clone()).collect();
        assert_eq!(told, [closed, closed].concat());
    }
}
