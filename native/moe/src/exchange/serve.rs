//! The thread that executes a device's commands.
//!
//! Any thread that learns of an event tells the device, engine threads included. So this thread is
//! on the path of commands only.

use std::{
    num::NonZeroU64,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        Arc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use fabric_engine::{EngineError, ProcessLocal, Result};
use fabric_proxy::{
    fifo::{fifo_in, Popper},
    raw::Area,
    Parker,
};

use super::{device::Device, AllToAll, Inner};
use crate::device::{Said, Shared};

/// How long it looks for commands before it sleeps, and how long it sleeps: a GPU can't wake it.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(50);
/// What it sleeps when nothing has come for [`IDLE`]. Until then the next exchange is near.
const LONG_NAP: Duration = Duration::from_micros(500);
const IDLE: Duration = Duration::from_millis(100);
/// While each polling rank has this many cores, it polls until [`IDLE`]; with fewer, another thread
/// needs the core.
const CORES: usize = 8;
/// What it sleeps then, if there are so many cores at all.
const SHORT_NAP: Duration = Duration::from_micros(10);
/// Ranks that may be on one host, and look as this one does: one for each of its GPUs.
const NEIGHBOURS: u32 = 8;
/// Ranks of this process that look, and their neighbours.
static LOOKING: AtomicUsize = AtomicUsize::new(0);
/// Interval of checks whether the device waits for a lost rank.
const LOOK: Duration = Duration::from_millis(5);

/// The thread, for as long as the exchange is there.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: ProcessLocal<JoinHandle<()>>,
}

impl AllToAll {
    /// From now on kernels carry the exchange out: they push what they have done into the FIFO, as
    /// [`device`](crate::device) says, and wait for what is shared. If they are to store to peers'
    /// memory by themselves, where they reach it, before any rank is admitted.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if there is a device, or for a FIFO that can't be;
    /// [`EngineError::Resource`] without a thread.
    pub fn serve(&self, fifo: Area, shared: Shared, stores: bool) -> Result<()> {
        let wrong = |e: fabric_proxy::fifo::FifoError| EngineError::Invalid(e.to_string());
        // The device has the other end.
        let (_, popper) = fifo_in(fifo, Arc::new(Parker::default())).map_err(wrong)?;
        let mut server = self.server.lock();
        self.attach(shared, stores)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, ended) = (Arc::clone(&self.inner), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("fabric-moe".into())
            .spawn(move || work(&theirs, popper, &ended))
            .map_err(|e| EngineError::Resource {
                call: "pthread_create",
                cause: e.to_string(),
                hint: "raise the limit of threads or processes (ulimit -u)".into(),
            })?;
        *server = Some(Server { stop, thread: ProcessLocal::new(thread) });
        Ok(())
    }

    /// As [`AllToAll::serve`], without a thread: the driver of the exchange passes commands to
    /// [`AllToAll::tell`].
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if there is a device.
    pub fn attach(&self, shared: Shared, stores: bool) -> Result<()> {
        let mut state = self.inner.state.lock();
        if state.device.is_some() {
            return Err(EngineError::Invalid("a device carries this exchange out already".into()));
        }
        state.device = Some(Device::new(shared, &self.inner.shape, stores));
        Ok(())
    }

    /// A command of the device, in its FIFO's words.
    pub fn tell(&self, words: [u64; 2]) {
        self.inner.told(words);
    }

    /// What went wrong on the device since the last call: tokens that go nowhere, once; for good
    /// that it has left the exchange, or was made to.
    ///
    /// # Errors
    /// That.
    pub fn check(&self) -> Result<()> {
        self.inner.state.lock().device.as_mut().map_or(Ok(()), Device::check)
    }

    /// Ranks whose answers are missing in the last sums that the device has told of.
    pub fn left_out(&self) -> Vec<u32> {
        self.inner.state.lock().device.as_ref().map(Device::left_out).unwrap_or_default()
    }

    /// Whether tokens that the device has told of wait for the exchange before to be over.
    pub fn begins(&self) -> bool {
        self.inner.state.lock().device.as_ref().is_some_and(Device::begins)
    }

    /// No kernel that was launched runs any more, and none comes: nothing is stored to peers'
    /// memory.
    pub fn settled(&self) {
        let over = self.inner.state.lock().device.as_mut().map(Device::settled);
        // Without the lock, which is released by now.
        drop(over);
    }

    /// Ends every wait of the device, now and later, and hears it no more: but for when it has
    /// ended what it stores to peers' memory, which they wait for if they need it (MR-1).
    pub fn leave(&self) {
        let mut storing = false;
        let mut state = self.inner.state.lock();
        state.left = true;
        if let Some(device) = state.device.as_mut() {
            let cause = "the exchange was closed".into();
            device.end(EngineError::Cancelled { what: "exchange on the device", cause });
            storing = device.is_storing();
        }
        drop(state);
        let Some(Server { stop, thread }) = self.server.lock().take() else { return };
        let Some(thread) = thread.into_inner() else { return };
        stop.store(true, SeqCst);
        if !storing && thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn told(self: &Arc<Self>, words: [u64; 2]) {
        let mut acts = Vec::new();
        let mut state = self.state.lock();
        let over = state.told(Said::of(words, self.rank), &mut acts);
        self.follow(state, acts);
        drop(over);
    }

    /// Whether the device may be storing to peers' memory.
    fn is_storing(&self) -> bool {
        self.state.lock().device.as_ref().is_some_and(Device::is_storing)
    }

    /// Ends the exchange of a device that hangs on lost ranks for longer than the timeout, as a
    /// caller's wait would end. `since` is when it was first seen to.
    fn end_if_stuck(&self, since: &mut Option<Instant>) {
        let mut state = self.state.lock();
        if !state.device_hangs() {
            *since = None;
            return;
        }
        if since.get_or_insert_with(Instant::now).elapsed() >= self.timeout() {
            state.device_is_stuck(self.timeout(), "the device waits for that");
        }
    }
}

/// One that looks for commands, as long as the next may be near.
struct Looking<'a> {
    all: &'a AtomicUsize,
    ranks: usize,
    counted: bool,
}

impl<'a> Looking<'a> {
    fn new(all: &'a AtomicUsize, ranks: u32) -> Self {
        Self { all, ranks: ranks.min(NEIGHBOURS) as usize, counted: false }
    }

    /// Counts, or not.
    fn set(&mut self, near: bool) {
        match (self.counted, near) {
            (false, true) => self.all.fetch_add(self.ranks, SeqCst),
            (true, false) => self.all.fetch_sub(self.ranks, SeqCst),
            _ => return,
        };
        self.counted = near;
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.set(false);
    }
}

fn work(inner: &Arc<Inner>, mut popper: Popper, stop: &AtomicBool) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Or else each nap is longer by 50 microseconds; it is no harm where that can't be had.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1_000));
    let mut looking = Looking::new(&LOOKING, inner.shape.ranks);
    let mut quiet_since = Instant::now();
    let (mut looked, mut hangs_since) = (quiet_since, None);
    while !stop.load(SeqCst) || inner.is_storing() {
        if looked.elapsed() >= LOOK {
            inner.end_if_stuck(&mut hangs_since);
            looked = Instant::now();
        }
        if let Some(words) = popper.poll(0) {
            inner.told(words);
            // Completed when all that follows from it was posted.
            popper.pop(1);
            quiet_since = Instant::now();
            continue;
        }
        let quiet = quiet_since.elapsed();
        looking.set(quiet < IDLE);
        match nap(quiet, cores, LOOKING.load(SeqCst)) {
            None => std::thread::yield_now(),
            Some(nap) => std::thread::sleep(nap),
        }
    }
}

/// How long to sleep when no command has come for so long, while so many look; `None`: look again.
fn nap(quiet: Duration, cores: usize, looking: usize) -> Option<Duration> {
    match quiet {
        _ if quiet >= IDLE => Some(LONG_NAP),
        _ if quiet < SPIN || looking * CORES <= cores => None,
        _ if cores >= CORES => Some(SHORT_NAP),
        _ => Some(NAP),
    }
}

#[cfg(test)]
mod tests {
    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig};

    use super::*;
    use crate::{
        device::{Add, AtomicWords, Command, Layout, Told},
        shape::Shape,
    };

    /// A device that has begun, while a lost rank holds on to memory.
    fn hanging() -> (SimNet, AllToAll) {
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        let shape = Shape::small(2);
        let all = AllToAll::new(engine, shape, 0).unwrap();
        let layout = Layout::new(&shape);
        let words = AtomicWords::allocate(layout.words);
        // No fault.
        words[layout.note.0].store(u64::MAX, SeqCst);
        all.attach(Shared::new(words, &shape).unwrap(), false).unwrap();
        all.inner.state.lock().revoking.push(1);
        let add = Add { slot: Told::Begun as u16, value: 1, ordered: true };
        all.tell(Command::Atomic { rank: 0, channel: 0, add }.encode().unwrap());
        assert!(all.begins());
        (net, all)
    }

    #[test]
    fn a_core_is_spent_on_looking_only_where_there_are_many_for_each_and_only_for_a_while() {
        let soon = Duration::from_millis(1);
        assert_eq!(nap(Duration::ZERO, 1, 8), None);
        assert_eq!(nap(soon, CORES - 1, 1), Some(NAP));
        assert_eq!(nap(soon, CORES, 1), None);
        assert_eq!(nap(soon, CORES, 2), Some(SHORT_NAP));
        assert_eq!(nap(soon, 3 * CORES, 3), None);
        assert_eq!(nap(soon, 3 * CORES, 4), Some(SHORT_NAP));
        for cores in [1, CORES, 1000] {
            assert_eq!(nap(IDLE, cores, 1), Some(LONG_NAP));
        }
    }

    #[test]
    fn a_rank_that_looks_counts_for_all_of_its_host_and_no_longer_than_it_looks() {
        let all = AtomicUsize::new(0);
        let (mut few, mut many) = (Looking::new(&all, 2), Looking::new(&all, 64));
        let mut counts = |near: [bool; 2]| {
            few.set(near[0]);
            many.set(near[1]);
            all.load(SeqCst)
        };
        assert_eq!(counts([false, false]), 0);
        // Of 64 ranks as many may be here as a host has GPUs.
        assert_eq!(
            [counts([true, true]), counts([true, true]), counts([false, true])],
            [10, 10, 8]
        );
        drop(many);
        assert_eq!(all.load(SeqCst), 0);
    }

    #[test]
    fn rs_4_a_device_that_hangs_on_a_lost_rank_is_let_go_after_the_timeout() {
        let (_net, all) = hanging();
        let mut since = None;
        all.inner.end_if_stuck(&mut since);
        assert!(since.is_some() && all.check().is_ok());
        all.set_timeout(Duration::ZERO);
        all.inner.end_if_stuck(&mut since);
        assert!(matches!(all.check(), Err(EngineError::NotQuiesced { .. })));
        assert!(!all.begins());
    }

    #[test]
    fn a_device_goes_on_when_the_lost_rank_lets_go() {
        let (_net, all) = hanging();
        let mut since = Some(Instant::now());
        all.inner.revoked(1, Ok(()));
        all.set_timeout(Duration::ZERO);
        all.inner.end_if_stuck(&mut since);
        assert!(since.is_none() && all.check().is_ok() && !all.begins());
    }

    #[test]
    fn rs_4_a_device_waits_for_no_memory_that_never_comes_back() {
        let (_net, all) = hanging();
        all.inner.revoked(1, Err(EngineError::Closed));
        assert!(matches!(all.check(), Err(EngineError::NotQuiesced { .. })));
    }
}
