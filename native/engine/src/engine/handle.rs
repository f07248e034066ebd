//! Completion handles: blocking wait, poll, flag, callback, event queue.

mod spare;

use std::{
    any::Any,
    sync::{
        atomic::{
            AtomicBool, AtomicU32,
            Ordering::{AcqRel, Acquire, Release},
        },
        Arc, OnceLock, Weak,
    },
    time::Duration,
};

use rustix::thread::futex;
use smallvec::SmallVec;

use super::{callbacks::Callbacks, driver::Dependent, quiescence::Quiescence, Region, Shared};
use crate::{
    api::Imm,
    group::{OperationCompletion, TransferKey},
    locks::Mutex,
    time::Time,
    EngineError, Result,
};
pub(crate) use spare::SpareHandles;

/// Poll interval of [`Handle::wait_quiesced`].
const POLL_INTERVAL: Duration = Duration::from_micros(200);
const DONE: u32 = 1;
/// A thread sleeps on the state word.
const SLEEPER: u32 = 2;
/// A thread sleeps until an event of the engine's domains.
const EVENT_SLEEPER: u32 = 4;

/// A hook that runs once when a handle ends, on the thread that ends it. It must be quick and must
/// not call the engine.
pub trait Notify: Send + Sync {
    fn notify(&self, key: u64);
}

type QuiescedHook = (Callbacks, Box<dyn FnOnce(Quiescence) + Send>);

/// A hook of a handle that has not ended.
struct PendingHook {
    hook: CompletionHook,
    _dependent: Option<Dependent>,
}

enum CompletionHook {
    Flag(Arc<AtomicBool>),
    Callback(Callbacks, Box<dyn FnOnce(Result<()>) + Send>),
    Notify(Arc<dyn Notify>, u64),
}

/// The operation behind a handle, which `cancel` ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HandleOperation {
    Transfer(TransferKey),
    Expectation(Imm),
}

/// Local regions that requests use until they have ended; usually one.
pub(crate) type KeptRegions = SmallVec<[Region; 1]>;

/// What ends with the last byte under way.
#[derive(Default)]
struct Unquiesced {
    /// The memory of a transfer.
    keep: KeptRegions,
    /// Callbacks of [`Handle::on_quiesced`].
    hooks: Vec<QuiescedHook>,
}

/// State of an operation that its handles share.
#[derive(Default)]
pub(crate) struct HandleState {
    state: AtomicU32,
    /// 0 in flight, 1 quiesced, 2 unknown.
    quiescence: AtomicU32,
    /// The operation, if it is known when the handle is made; else `late_source`.
    source: Option<HandleOperation>,
    late_source: OnceLock<HandleOperation>,
    error: OnceLock<EngineError>,
    hooks: Mutex<Vec<PendingHook>>,
    unquiesced: Mutex<Unquiesced>,
    shared: Weak<Shared>,
}

pub(crate) type HandleRef = Arc<HandleState>;

impl OperationCompletion for HandleState {
    fn resolve(&self, _at: u32, result: Result<()>) {
        self.complete(result);
    }

    fn release(&self, _at: u32, proven: bool, result: Option<Result<()>>) {
        self.release_memory(proven);
        if let Some(result) = result {
            self.complete(result);
        }
    }

    fn recycle(self: Arc<Self>) {
        spare::recycle(self);
    }
}

impl HandleState {
    pub fn new(shared: &Arc<Shared>) -> HandleRef {
        Arc::new(Self { shared: Arc::downgrade(shared), ..Self::default() })
    }

    /// The state of a transfer, which keeps its regions until `release_memory`. A queued transfer
    /// has no key yet.
    pub fn of_transfer(
        shared: &Arc<Shared>,
        key: Option<TransferKey>,
        keep: KeptRegions,
    ) -> HandleRef {
        let source = key.map(HandleOperation::Transfer);
        shared.spare_handles.take(source, keep).unwrap_or_else(|keep| {
            let unquiesced = Mutex::new(Unquiesced { keep, hooks: Vec::new() });
            Arc::new(Self { shared: Arc::downgrade(shared), source, unquiesced, ..Self::default() })
        })
    }

    /// Releases the memory: nothing is under way. `proven`: no byte can still land.
    pub fn release_memory(&self, proven: bool) {
        let Unquiesced { keep, hooks } = {
            // Under the lock: a hook is in the list by now, or reads the new state itself.
            let mut unquiesced = self.unquiesced.lock();
            self.quiescence.store(if proven { 1 } else { 2 }, Release);
            std::mem::take(&mut *unquiesced)
        };
        Shared::release_users(&keep);
        drop(keep);
        let quiet = self.quiescence();
        for (callbacks, f) in hooks {
            callbacks.push(Box::new(move || f(quiet)));
        }
    }

    #[inline]
    pub fn is_done(&self) -> bool {
        self.state.load(Acquire) & DONE != 0
    }

    /// Sets the operation behind the handle.
    pub fn is_of(&self, source: HandleOperation) {
        let _ = self.late_source.set(source);
    }

    fn source(&self) -> Option<HandleOperation> {
        self.source.or_else(|| self.late_source.get().copied())
    }

    fn quiescence(&self) -> Quiescence {
        match self.quiescence.load(Acquire) {
            0 => Quiescence::InFlight,
            1 => Quiescence::Quiesced,
            _ => Quiescence::Unknown,
        }
    }

    /// Fails in a forked child, where a pending handle never ends.
    fn check_process(&self) -> Result<()> {
        if self.is_done() {
            return Ok(());
        }
        self.shared.upgrade().map_or(Ok(()), |shared| shared.driver().map(drop))
    }

    fn result(&self) -> Result<()> {
        self.error.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Ends the handle; only the first call counts.
    pub fn complete(&self, result: Result<()>) {
        let hooks = {
            // Under the lock: a hook is in the list by now, or reads the new state itself.
            let mut hooks = self.hooks.lock();
            if self.is_done() {
                return;
            }
            if let Err(e) = result {
                let _ = self.error.set(e);
            }
            let before = self.state.swap(DONE, AcqRel);
            if before & SLEEPER != 0 {
                let _ = futex::wake(&self.state, futex::Flags::PRIVATE, i32::MAX as u32);
            }
            if before & EVENT_SLEEPER != 0 {
                self.wake_caller();
            }
            std::mem::take(&mut *hooks)
        };
        for PendingHook { hook, .. } in hooks {
            self.run(hook);
        }
    }

    /// An observer of this handle must not wait for a caller that gets no core.
    fn begin_dependent(&self) -> Option<Dependent> {
        let shared = self.shared.upgrade()?;
        let driver = shared.driver().ok()?;
        Some(driver.begin_dependent())
    }

    fn wake_caller(&self) {
        if let Some(driver) = self.shared.upgrade().as_ref().and_then(|s| s.driver().ok()) {
            driver.wake_caller();
        }
    }

    /// From now on [`complete`](Self::complete) wakes the caller that sleeps until an event.
    pub fn begin_event_sleep(&self) {
        self.state.fetch_or(EVENT_SLEEPER, AcqRel);
    }

    pub fn end_event_sleep(&self) {
        self.state.fetch_and(!EVENT_SLEEPER, AcqRel);
    }

    fn run(&self, hook: CompletionHook) {
        match hook {
            CompletionHook::Flag(flag) => flag.store(true, Release),
            CompletionHook::Callback(callbacks, f) => {
                let result = self.result();
                callbacks.push(Box::new(move || f(result)));
            }
            CompletionHook::Notify(n, key) => n.notify(key),
        }
    }

    fn add(&self, hook: CompletionHook) {
        if let Err(e) = self.check_process() {
            // In a forked child nothing ends, and the callback thread is the parent's.
            return match hook {
                CompletionHook::Callback(_, f) => f(Err(e)),
                hook => self.run(hook),
            };
        }
        let _dependent = self.begin_dependent();
        {
            let mut hooks = self.hooks.lock();
            if !self.is_done() {
                hooks.push(PendingHook { hook, _dependent });
                return;
            }
        }
        self.run(hook);
    }

    /// Sleeps until done or `deadline`; true if done.
    fn sleep(&self, deadline: Time) -> bool {
        loop {
            let before = self.state.fetch_or(SLEEPER, AcqRel);
            if before & DONE != 0 {
                self.state.fetch_and(!SLEEPER, AcqRel);
                return true;
            }
            let now = Time::now();
            if now >= deadline {
                return false;
            }
            // Bounded: a far deadline needs no arithmetic, and a lost wake-up delays by one second
            // at most.
            let left = deadline.since(now).min(Duration::from_secs(1));
            let left = futex::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, before | SLEEPER, Some(&left));
            if self.is_done() {
                return true;
            }
        }
    }
}

enum Repr {
    /// Ended before the call returned.
    Done(Result<()>),
    Pending(HandleRef),
}

/// The pending result of one request or expectation. Cheap to clone; dropping it cancels nothing.
pub struct Handle {
    repr: Repr,
    op: &'static str,
    /// An object that must outlive the wait: an expectation's counter.
    keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({}, {:?})", self.op, self.poll())
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        let repr = match &self.repr {
            Repr::Done(r) => Repr::Done(r.clone()),
            Repr::Pending(p) => Repr::Pending(Arc::clone(p)),
        };
        Self { repr, op: self.op, keep: self.keep.clone() }
    }
}

impl Handle {
    pub(crate) fn done(op: &'static str, result: Result<()>) -> Self {
        Self { repr: Repr::Done(result), op, keep: None }
    }

    pub(crate) fn pending(op: &'static str, pending: HandleRef) -> Self {
        Self { repr: Repr::Pending(pending), op, keep: None }
    }

    pub(super) fn keeping(mut self, keep: Arc<dyn Any + Send + Sync>) -> Self {
        self.keep = Some(keep);
        self
    }

    /// The name of the operation.
    pub fn op(&self) -> &'static str {
        self.op
    }

    #[inline]
    pub fn is_done(&self) -> bool {
        match &self.repr {
            Repr::Done(_) => true,
            Repr::Pending(p) => p.is_done(),
        }
    }

    /// The result, if there is one. In a forked child, [`EngineError::Forked`] for a handle that
    /// was pending at the fork. Does not drive the engine; see [`Handle::drive`].
    pub fn poll(&self) -> Option<Result<()>> {
        match &self.repr {
            Repr::Done(r) => Some(r.clone()),
            Repr::Pending(p) if p.is_done() => Some(p.result()),
            Repr::Pending(p) => p.check_process().err().map(Err),
        }
    }

    /// Drives the engine once on this thread, then polls. For callers that spin.
    #[inline]
    pub fn drive(&self) -> Option<Result<()>> {
        let Repr::Pending(p) = &self.repr else { return self.poll() };
        if !p.is_done() {
            if let Some(shared) = p.shared.upgrade() {
                match shared.driver() {
                    Ok(driver) => drop(driver.poll_once(&shared)),
                    Err(e) => return Some(Err(e)),
                }
            }
        }
        self.poll()
    }

    /// Waits at most `timeout`. Returns `None` if the operation is still pending; it continues.
    ///
    /// The waiting thread drives the engine and copies for a while before it sleeps. Where nothing
    /// else of this process waits for the engine, events of the transports wake this thread, which
    /// drives again.
    pub fn wait(&self, timeout: Duration) -> Option<Result<()>> {
        let Repr::Pending(p) = &self.repr else { return self.poll() };
        if p.is_done() {
            return Some(p.result());
        }
        let deadline = Time::now().after(timeout);
        let mut _dependent = None;
        if let Some(shared) = p.shared.upgrade() {
            match shared.driver() {
                Ok(driver) => _dependent = driver.wait(&shared, p, deadline),
                Err(e) => return Some(Err(e)),
            }
        }
        p.sleep(deadline).then(|| p.result())
    }

    /// As [`Handle::wait`], but drives for at most `spin` and never sleeps.
    pub fn spin(&self, spin: Duration) -> Option<Result<()>> {
        let Repr::Pending(p) = &self.repr else { return self.poll() };
        if !p.is_done() {
            let shared = p.shared.upgrade()?;
            match shared.driver() {
                Ok(driver) => driver.spin(&shared, &|| p.is_done(), Time::now().after(spin)),
                Err(e) => return Some(Err(e)),
            }
        }
        self.poll()
    }

    /// Ends the operation with [`EngineError::Cancelled`] unless it has ended. Unposted slices are
    /// never posted. Bytes under way may still land; see [`Handle::quiescence`].
    pub fn cancel(&self) {
        let Repr::Pending(p) = &self.repr else { return };
        let Some(shared) = p.shared.upgrade().filter(|_| !p.is_done()) else { return };
        let pending = Arc::clone(p);
        // Queued behind the request, which may still wait for the lock.
        shared.post(Box::new(move |core, shared| match pending.source() {
            Some(HandleOperation::Transfer(key)) => {
                core.group.cancel(shared.now(), key);
                core.end_drains(shared);
            }
            Some(HandleOperation::Expectation(imm)) => {
                shared.counters.cancel(shared.now(), imm, &pending);
                core.end_drains(shared);
            }
            None => {}
        }));
    }

    /// Whether bytes of the transfer may still land. An expectation moves no bytes.
    pub fn quiescence(&self) -> Quiescence {
        match &self.repr {
            Repr::Done(_) => Quiescence::Quiesced,
            Repr::Pending(p) if matches!(p.source(), Some(HandleOperation::Expectation(_))) => {
                Quiescence::Quiesced
            }
            Repr::Pending(p) => p.quiescence(),
        }
    }

    /// Waits at most `timeout` until nothing of the transfer is under way; see
    /// [`Handle::quiescence`].
    pub fn wait_quiesced(&self, timeout: Duration) -> Quiescence {
        let deadline = Time::now().after(timeout);
        loop {
            let quiet = self.quiescence();
            let Repr::Pending(p) = &self.repr else { return quiet };
            if quiet != Quiescence::InFlight || Time::now() >= deadline {
                return quiet;
            }
            match p.shared.upgrade() {
                Some(shared) => match shared.driver() {
                    Ok(driver) => drop(driver.poll_once(&shared)),
                    // Only the parent process drives the transfer.
                    Err(_) => return Quiescence::Unknown,
                },
                None => return quiet,
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Runs `f` on the engine's callback thread when nothing of the transfer is under way. That may
    /// be long after it was cancelled or failed; see [`Handle::quiescence`].
    pub fn on_quiesced(&self, f: impl FnOnce(Quiescence) + Send + 'static) {
        if let Repr::Pending(p) = &self.repr {
            let here = p.shared.upgrade().filter(|shared| shared.driver().is_ok());
            let Some(shared) = here else { return f(Quiescence::Unknown) };
            let dependent = p.begin_dependent();
            let mut unquiesced = p.unquiesced.lock();
            if self.quiescence() == Quiescence::InFlight {
                let f = move |quiescence| {
                    drop(dependent);
                    f(quiescence);
                };
                return unquiesced.hooks.push((shared.callbacks.clone(), Box::new(f)));
            }
        }
        f(self.quiescence());
    }

    /// Sets `flag` when the operation ends, whatever the result.
    pub fn on_done_flag(&self, flag: Arc<AtomicBool>) {
        match &self.repr {
            Repr::Done(_) => flag.store(true, Release),
            Repr::Pending(p) => p.add(CompletionHook::Flag(flag)),
        }
    }

    /// Runs `f` on the engine's callback thread when the operation ends.
    pub fn on_done(&self, f: impl FnOnce(Result<()>) + Send + 'static) {
        match &self.repr {
            Repr::Done(r) => f(r.clone()),
            Repr::Pending(p) => match p.shared.upgrade() {
                Some(shared) => {
                    p.add(CompletionHook::Callback(shared.callbacks.clone(), Box::new(f)))
                }
                None => f(Err(EngineError::Closed)),
            },
        }
    }

    /// Calls `notify` when the operation ends, or at once if it has ended.
    pub fn on_done_notify(&self, notify: Arc<dyn Notify>, key: u64) {
        match &self.repr {
            Repr::Done(_) => notify.notify(key),
            Repr::Pending(p) => p.add(CompletionHook::Notify(notify, key)),
        }
    }
}
