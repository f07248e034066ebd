//! One completion, seen in several ways: blocking wait, poll, flag, callback, event queue.

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

use parking_lot::Mutex;
use rustix::thread::futex;

use super::{callbacks::Callbacks, Region, Shared};
use crate::{
    api::Imm,
    group::{OperationCompletion, TransferKey},
    time::Time,
    EngineError, Result,
};

/// How often a thread that waits for quiet looks.
const LOOK: Duration = Duration::from_micros(200);
const DONE: u32 = 1;
/// Somebody sleeps on the state word.
const SLEEPER: u32 = 2;

/// Told once when a handle is over; called on whatever thread finds out, so it must be quick and
/// must not call the engine.
pub trait Notify: Send + Sync {
    fn notify(&self, key: u64);
}

type WhenQuiet = (Callbacks, Box<dyn FnOnce(Quiet) + Send>);

enum Hook {
    Flag(Arc<AtomicBool>),
    Callback(Callbacks, Box<dyn FnOnce(Result<()>) + Send>),
    Notify(Arc<dyn Notify>, u64),
}

/// What a handle stands for, once that is known: how to end it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    Transfer(TransferKey),
    Expectation(Imm),
}

/// Whether bytes of a transfer may still land (MR-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quiet {
    /// Some may: they are under way.
    NotYet,
    /// None can land any more, and no memory of it is touched.
    Quiet,
    /// The links that carried them are gone, and their other ends have not said so.
    Unknown,
}

#[derive(Default)]
pub(crate) struct Pending {
    state: AtomicU32,
    /// 0 under way, 1 quiet, 2 unknown.
    quiet: AtomicU32,
    source: OnceLock<Source>,
    error: OnceLock<EngineError>,
    hooks: Mutex<Vec<Hook>>,
    /// Who waits for quiet.
    quieted: Mutex<Vec<WhenQuiet>>,
    /// The memory of a transfer under way.
    keep: Mutex<Vec<Region>>,
    shared: Weak<Shared>,
}

pub(crate) type HandleRef = Arc<Pending>;

impl OperationCompletion for Pending {
    fn resolve(&self, _at: u32, result: Result<()>) {
        self.complete(result);
    }

    fn release(&self, _at: u32, proven: bool, result: Option<Result<()>>) {
        self.let_go(proven);
        if let Some(result) = result {
            self.complete(result);
        }
    }
}

impl Pending {
    pub fn new(shared: &Arc<Shared>) -> HandleRef {
        Arc::new(Self { shared: Arc::downgrade(shared), ..Self::default() })
    }

    /// Nothing of it is under way any more; `proven`: nor can any byte of it still land.
    pub fn let_go(&self, proven: bool) {
        let waiting = {
            // Under the lock, so that a hook is either in the list now or sees it itself.
            let mut waiting = self.quieted.lock();
            self.quiet.store(if proven { 1 } else { 2 }, Release);
            std::mem::take(&mut *waiting)
        };
        let keep = std::mem::take(&mut *self.keep.lock());
        if let Some(shared) = self.shared.upgrade().filter(|_| !keep.is_empty()) {
            shared.unkeep(keep);
        }
        let quiet = self.quiet();
        for (callbacks, f) in waiting {
            callbacks.push(Box::new(move || f(quiet)));
        }
    }

    #[inline]
    pub fn is_done(&self) -> bool {
        self.state.load(Acquire) & DONE != 0
    }

    /// Says what it stands for.
    pub fn is_of(&self, source: Source) {
        let _ = self.source.set(source);
    }

    /// What a transfer needs stays until it is over.
    pub fn needs(&self, memory: Vec<Region>) {
        *self.keep.lock() = memory;
    }

    fn quiet(&self) -> Quiet {
        match self.quiet.load(Acquire) {
            0 => Quiet::NotYet,
            1 => Quiet::Quiet,
            _ => Quiet::Unknown,
        }
    }

    /// Whether it can still end here: in a child by fork nothing does.
    fn check_process(&self) -> Result<()> {
        if self.is_done() {
            return Ok(());
        }
        self.shared.upgrade().map_or(Ok(()), |shared| shared.cell().map(drop))
    }

    fn result(&self) -> Result<()> {
        self.error.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Ends the handle; only the first call counts.
    pub fn complete(&self, result: Result<()>) {
        let hooks = {
            // Under the lock, so that a hook is either in the list now or sees the end itself.
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
            std::mem::take(&mut *hooks)
        };
        for hook in hooks {
            self.run(hook);
        }
    }

    fn run(&self, hook: Hook) {
        match hook {
            Hook::Flag(flag) => flag.store(true, Release),
            Hook::Callback(callbacks, f) => {
                let result = self.result();
                callbacks.push(Box::new(move || f(result)));
            }
            Hook::Notify(n, key) => n.notify(key),
        }
    }

    fn add(&self, hook: Hook) {
        if let Err(e) = self.check_process() {
            // Nothing ends here, and the thread for callbacks is the parent's.
            return match hook {
                Hook::Callback(_, f) => f(Err(e)),
                hook => self.run(hook),
            };
        }
        {
            let mut hooks = self.hooks.lock();
            if !self.is_done() {
                hooks.push(hook);
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
            // Bounded, so that a deadline far away needs no arithmetic and no wake-up can be lost
            // for good.
            let left = deadline.since(now).min(Duration::from_secs(1));
            let left = futex::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, SLEEPER, Some(&left));
            if self.is_done() {
                return true;
            }
        }
    }
}

enum Repr {
    /// Over before the call returned.
    Done(Result<()>),
    Pending(HandleRef),
}

/// The future of one request or expectation. Cheap to clone; dropping it cancels nothing.
pub struct Handle {
    repr: Repr,
    op: &'static str,
    /// What must not go away while somebody may wait: an expectation's counter.
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

    /// What was asked for, in a word.
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

    /// The result, if there is one; in a child by fork, [`EngineError::Forked`] for what was not over at the fork. Makes
    /// no progress by itself; see [`Handle::drive`].
    pub fn poll(&self) -> Option<Result<()>> {
        match &self.repr {
            Repr::Done(r) => Some(r.clone()),
            Repr::Pending(p) if p.is_done() => Some(p.result()),
            Repr::Pending(p) => p.check_process().err().map(Err),
        }
    }

    /// Moves the engine on for a moment on this thread, then polls: what a spinning caller wants.
    #[inline]
    pub fn drive(&self) -> Option<Result<()>> {
        let Repr::Pending(p) = &self.repr else { return self.poll() };
        if !p.is_done() {
            if let Some(shared) = p.shared.upgrade() {
                match shared.cell() {
                    Ok(cell) => drop(cell.poll_once(&shared)),
                    Err(e) => return Some(Err(e)),
                }
            }
        }
        self.poll()
    }

    /// Waits at most `timeout`; `None` if it isn't over by then (it goes on, nothing is cancelled).
    ///
    /// The waiting thread helps: it drives the engine and copies for a while before it sleeps.
    pub fn wait(&self, timeout: Duration) -> Option<Result<()>> {
        let Repr::Pending(p) = &self.repr else { return self.poll() };
        if p.is_done() {
            return Some(p.result());
        }
        let deadline = Time::now().after(timeout);
        if let Some(shared) = p.shared.upgrade() {
            match shared.cell() {
                Ok(cell) => cell.wait(&shared, &|| p.is_done(), deadline),
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
            match shared.cell() {
                Ok(cell) => cell.spin(&shared, &|| p.is_done(), Time::now().after(spin)),
                Err(e) => return Some(Err(e)),
            }
        }
        self.poll()
    }

    /// Ends it with [`EngineError::Cancelled`] unless it is over already. What was not posted never will
    /// be; what is under way may still land: see [`Handle::quiet`].
    pub fn cancel(&self) {
        let Repr::Pending(p) = &self.repr else { return };
        let Some(shared) = p.shared.upgrade().filter(|_| !p.is_done()) else { return };
        let pending = Arc::clone(p);
        // After the request itself, should that still wait for the lock.
        shared.post(Box::new(move |core, shared| match pending.source.get() {
            Some(Source::Transfer(key)) => {
                core.group.cancel(shared.now(), *key);
                core.end_drains(shared);
            }
            Some(Source::Expectation(imm)) => {
                shared.counters.cancel(shared.now(), *imm, &pending);
                core.end_drains(shared);
            }
            None => {}
        }));
    }

    /// Whether bytes of it may still land. An expectation has none.
    pub fn quiet(&self) -> Quiet {
        match &self.repr {
            Repr::Done(_) => Quiet::Quiet,
            Repr::Pending(p) if matches!(p.source.get(), Some(Source::Expectation(_))) => {
                Quiet::Quiet
            }
            Repr::Pending(p) => p.quiet(),
        }
    }

    /// Waits at most `timeout` until nothing of it is under way any more; see [`Handle::quiet`].
    pub fn wait_quiet(&self, timeout: Duration) -> Quiet {
        let deadline = Time::now().after(timeout);
        loop {
            let quiet = self.quiet();
            let Repr::Pending(p) = &self.repr else { return quiet };
            if quiet != Quiet::NotYet || Time::now() >= deadline {
                return quiet;
            }
            match p.shared.upgrade() {
                Some(shared) => match shared.cell() {
                    Ok(cell) => drop(cell.poll_once(&shared)),
                    // What becomes of it is seen by the parent.
                    Err(_) => return Quiet::Unknown,
                },
                None => return quiet,
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Runs `f` on the engine's callback thread when nothing of it is under way any more, which may be long
    /// after it was cancelled or failed; see [`Handle::quiet`].
    pub fn on_quiet(&self, f: impl FnOnce(Quiet) + Send + 'static) {
        if let Repr::Pending(p) = &self.repr {
            let here = p.shared.upgrade().filter(|shared| shared.cell().is_ok());
            let Some(shared) = here else { return f(Quiet::Unknown) };
            let mut waiting = p.quieted.lock();
            if self.quiet() == Quiet::NotYet {
                return waiting.push((shared.callbacks.clone(), Box::new(f)));
            }
        }
        f(self.quiet());
    }

    /// Sets `flag` when the transfer is over, whatever the result.
    pub fn on_done_flag(&self, flag: Arc<AtomicBool>) {
        match &self.repr {
            Repr::Done(_) => flag.store(true, Release),
            Repr::Pending(p) => p.add(Hook::Flag(flag)),
        }
    }

    /// Runs `f` on the engine's callback thread when it is over.
    pub fn on_done(&self, f: impl FnOnce(Result<()>) + Send + 'static) {
        match &self.repr {
            Repr::Done(r) => f(r.clone()),
            Repr::Pending(p) => match p.shared.upgrade() {
                Some(shared) => p.add(Hook::Callback(shared.callbacks.clone(), Box::new(f))),
                None => f(Err(EngineError::Closed)),
            },
        }
    }

    /// Tells `notify` when it is over, at once if it is already.
    pub fn on_done_notify(&self, notify: Arc<dyn Notify>, key: u64) {
        match &self.repr {
            Repr::Done(_) => notify.notify(key),
            Repr::Pending(p) => p.add(Hook::Notify(notify, key)),
        }
    }
}
