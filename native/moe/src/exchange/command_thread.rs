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

use fabric_engine::{EngineError, PerProcess, ProcessLocal, Result};
use fabric_proxy::{
    fifo::{fifo_in, Popper},
    raw::Area,
    Parker,
};

use super::{conditions::Condition, device::Device, AllToAll, Dispatched, Inner};
use crate::device::{DeviceReport, SharedWords};

/// Time for which the thread polls before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Sleep of a thread without enough cores. A GPU can't wake it.
const SLEEP: Duration = Duration::from_micros(50);
/// Sleep after [`IDLE`] without a command; before that, the next exchange is expected.
const LONG_SLEEP: Duration = Duration::from_micros(500);
const IDLE: Duration = Duration::from_millis(100);
/// Cores per polling rank with which a thread polls until [`IDLE`]. With fewer, other threads need
/// the cores.
const CORES: usize = 8;
/// Sleep of a thread that shares its cores with more ranks, on a host with [`CORES`] or more.
const SHORT_SLEEP: Duration = Duration::from_micros(10);
/// Maximum number of ranks on one host: one per GPU.
const RANKS_PER_HOST: u32 = 8;
/// Polling ranks of this process, each counted with all ranks of its host.
static POLLING: PerProcess<AtomicUsize> = PerProcess::empty();
/// Interval of checks whether the device waits for a lost rank.
const STUCK_CHECK: Duration = Duration::from_millis(5);

/// The thread; it runs as long as the exchange.
#[derive(Debug)]
pub struct CommandThread {
    stop: Arc<AtomicBool>,
    thread: ProcessLocal<JoinHandle<()>>,
}

impl AllToAll {
    /// Lets kernels execute the exchange from now on. They push commands into the FIFO and wait for
    /// shared words, see [`device`](crate::device). With `stores`, they store to peers' memory
    /// themselves where they reach it; call this before any rank is admitted then.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if there is a device, or for an invalid FIFO;
    /// [`EngineError::Resource`] if no thread can be started.
    pub fn serve(&self, fifo: Area, shared: SharedWords, stores: bool) -> Result<()> {
        let wrong = |e: fabric_proxy::fifo::FifoError| EngineError::Invalid(e.to_string());
        // The device has the other end.
        let (_, popper) = fifo_in(fifo, Arc::new(Parker::default())).map_err(wrong)?;
        let mut command_thread = self.command_thread.lock();
        self.attach(shared, stores)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (theirs, on_ended) = (Arc::clone(&self.inner), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("fabric-moe".into())
            .spawn(move || work(&theirs, popper, &on_ended))
            .map_err(|e| EngineError::Resource {
                call: "pthread_create",
                cause: e.to_string(),
                hint: "raise the limit of threads or processes (ulimit -u)".into(),
            })?;
        *command_thread = Some(CommandThread { stop, thread: ProcessLocal::new(thread) });
        Ok(())
    }

    /// As [`AllToAll::serve`], without a thread: the driver of the exchange passes commands to
    /// [`AllToAll::on_command`].
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if there is a device.
    pub fn attach(&self, shared: SharedWords, stores: bool) -> Result<()> {
        let mut state = self.inner.state.lock();
        if state.device.is_some() {
            return Err(EngineError::Invalid("a device executes this exchange already".into()));
        }
        state.device = Some(Device::new(shared, &self.inner.shape, stores));
        Ok(())
    }

    /// Applies a command of the device, in its FIFO's words.
    pub fn on_command(&self, words: [u64; 2]) {
        self.inner.on_command(words);
    }

    /// Reports the device's fault since the last call.
    ///
    /// # Errors
    /// [`EngineError::Invalid`], once, for tokens with an invalid expert. On every call, the error
    /// that ended the exchange on the device.
    pub fn check(&self) -> Result<()> {
        self.inner.state.lock().device.as_mut().map_or(Ok(()), Device::check)
    }

    /// Placement of the rows of the device's dispatch with this ticket, packed: waits until every
    /// rank's routes are known, for `limit` at most; `None` then. Not 0, see [`DeviceReport`].
    ///
    /// # Errors
    /// The error that ended the exchange on the device; [`EngineError::Invalid`] without a device.
    pub fn wait_arriving_on_device(
        &self,
        ticket: u32,
        limit: Duration,
    ) -> Result<Option<Dispatched>> {
        let (inner, routes) = (&self.inner, Condition::DeviceRoutes(ticket));
        let begun = Instant::now();
        let mut state = inner.state.lock();
        state.awaited.push(routes);
        while !state.holds(routes) {
            let Some(left) = limit.checked_sub(begun.elapsed()) else { break };
            inner.changed.wait_for(&mut state, left);
        }
        state.end_wait(routes);
        let Some(device) = &state.device else {
            return Err(EngineError::Invalid("no device executes this exchange".into()));
        };
        device.check_failed()?;
        Ok(state.placing.clone().filter(|_| device.has_routes_of(ticket)))
    }

    /// Ranks whose answers are missing in the last sums that the device reported.
    pub fn left_out(&self) -> Vec<u32> {
        self.inner.state.lock().device.as_ref().map(Device::left_out).unwrap_or_default()
    }

    /// Whether tokens of the device wait for the end of the last exchange.
    pub fn begins(&self) -> bool {
        self.inner.state.lock().device.as_ref().is_some_and(Device::begins)
    }

    /// Records that no kernel runs or will be launched: nothing is stored to peers' memory.
    pub fn settled(&self) {
        let over = self.inner.state.lock().device.as_mut().map(Device::settled);
        // The lock is released by now.
        drop(over);
    }

    /// Ends every wait of the device, now and later, and ignores its commands, except those that
    /// end its stores to peers' memory: peers wait for these (MR-1).
    pub fn leave(&self) {
        let mut storing = false;
        let mut state = self.inner.state.lock();
        state.left = true;
        if let Some(device) = state.device.as_mut() {
            let cause = "the exchange was closed".into();
            device.end(EngineError::Cancelled { what: "exchange on the device", cause });
            storing = device.is_storing();
        }
        self.inner.changed.notify_all();
        drop(state);
        let Some(CommandThread { stop, thread }) = self.command_thread.lock().take() else {
            return;
        };
        let Some(thread) = thread.into_inner() else { return };
        stop.store(true, SeqCst);
        if !storing && thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn on_command(self: &Arc<Self>, words: [u64; 2]) {
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        let over = state.on_device_report(DeviceReport::decode(words, self.rank), &mut actions);
        // `AllToAll::descriptor` waits until rows are handed out, or the device has failed.
        self.changed.notify_all();
        self.apply(state, actions);
        drop(over);
    }

    /// Whether the device may be storing to peers' memory.
    fn is_storing(&self) -> bool {
        self.state.lock().device.as_ref().is_some_and(Device::is_storing)
    }

    /// Ends the exchange of a device that has been blocked by lost ranks for the timeout, as a
    /// caller's wait would end. `since` is the time when that was first seen.
    fn end_if_stuck(&self, since: &mut Option<Instant>) {
        let mut state = self.state.lock();
        if !state.device_blocked() {
            *since = None;
            return;
        }
        if since.get_or_insert_with(Instant::now).elapsed() >= self.timeout() {
            state.device_is_stuck(self.timeout(), "the device waits for it");
            self.changed.notify_all();
        }
    }
}

/// A thread that counts among the polling ones while it polls.
struct Poller<'a> {
    all: &'a AtomicUsize,
    ranks: usize,
    counted: bool,
}

impl<'a> Poller<'a> {
    fn new(all: &'a AtomicUsize, ranks: u32) -> Self {
        Self { all, ranks: ranks.min(RANKS_PER_HOST) as usize, counted: false }
    }

    fn set(&mut self, polls: bool) {
        match (self.counted, polls) {
            (false, true) => self.all.fetch_add(self.ranks, SeqCst),
            (true, false) => self.all.fetch_sub(self.ranks, SeqCst),
            _ => return,
        };
        self.counted = polls;
    }
}

impl Drop for Poller<'_> {
    fn drop(&mut self) {
        self.set(false);
    }
}

fn work(inner: &Arc<Inner>, mut popper: Popper, stop: &AtomicBool) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // The default slack makes each sleep 50 microseconds longer. An error is harmless.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1_000));
    let polling = POLLING.get_or_default();
    let mut poller = Poller::new(polling, inner.shape.ranks);
    let mut quiet_since = Instant::now();
    let (mut checked, mut blocked_since) = (quiet_since, None);
    while !stop.load(SeqCst) || inner.is_storing() {
        if checked.elapsed() >= STUCK_CHECK {
            inner.end_if_stuck(&mut blocked_since);
            checked = Instant::now();
        }
        if let Some(words) = popper.poll(0) {
            inner.on_command(words);
            // A command is complete when its effects are posted.
            popper.pop(1);
            quiet_since = Instant::now();
            continue;
        }
        let quiet = quiet_since.elapsed();
        poller.set(quiet < IDLE);
        match sleep_time(quiet, cores, polling.load(SeqCst)) {
            None => std::thread::yield_now(),
            Some(nap) => std::thread::sleep(nap),
        }
    }
}

/// The sleep of a thread that got no command for `quiet`, while `polling` ranks poll; `None`: poll
/// again.
fn sleep_time(quiet: Duration, cores: usize, polling: usize) -> Option<Duration> {
    match quiet {
        _ if quiet >= IDLE => Some(LONG_SLEEP),
        _ if quiet < SPIN || polling * CORES <= cores => None,
        _ if cores >= CORES => Some(SHORT_SLEEP),
        _ => Some(SLEEP),
    }
}

#[cfg(test)]
mod tests {
    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig};

    use super::*;
    use crate::{
        device::{Add, AtomicWords, Command, DeviceEvent, Layout},
        shape::Shape,
    };

    /// A device that has begun, while a lost rank may still write to memory.
    fn hanging() -> (SimNet, AllToAll) {
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        let shape = Shape::small(2);
        let all = AllToAll::new(engine, shape, 0).unwrap();
        let layout = Layout::new(&shape);
        let words = AtomicWords::allocate(layout.words);
        // No fault.
        words[layout.routes.0].store(u64::MAX, SeqCst);
        all.attach(SharedWords::new(words, &shape).unwrap(), false).unwrap();
        all.inner.state.lock().revoking.push(1);
        let add = Add { slot: DeviceEvent::Begun as u16, value: 1, ordered: true };
        all.on_command(Command::Atomic { rank: 0, channel: 0, add }.encode().unwrap());
        assert!(all.begins());
        (net, all)
    }

    #[test]
    fn a_thread_polls_only_with_enough_cores_and_for_a_limited_time() {
        let soon = Duration::from_millis(1);
        assert_eq!(sleep_time(Duration::ZERO, 1, 8), None);
        assert_eq!(sleep_time(soon, CORES - 1, 1), Some(SLEEP));
        assert_eq!(sleep_time(soon, CORES, 1), None);
        assert_eq!(sleep_time(soon, CORES, 2), Some(SHORT_SLEEP));
        assert_eq!(sleep_time(soon, 3 * CORES, 3), None);
        assert_eq!(sleep_time(soon, 3 * CORES, 4), Some(SHORT_SLEEP));
        for cores in [1, CORES, 1000] {
            assert_eq!(sleep_time(IDLE, cores, 1), Some(LONG_SLEEP));
        }
    }

    #[test]
    fn a_polling_rank_counts_for_all_ranks_of_its_host_while_it_polls() {
        let all = AtomicUsize::new(0);
        let (mut few, mut many) = (Poller::new(&all, 2), Poller::new(&all, 64));
        let mut counts = |near: [bool; 2]| {
            few.set(near[0]);
            many.set(near[1]);
            all.load(SeqCst)
        };
        assert_eq!(counts([false, false]), 0);
        // A host has at most 8 ranks.
        assert_eq!(
            [counts([true, true]), counts([true, true]), counts([false, true])],
            [10, 10, 8]
        );
        drop(many);
        assert_eq!(all.load(SeqCst), 0);
    }

    #[test]
    fn rs_4_a_device_that_is_blocked_by_a_lost_rank_ends_after_the_timeout() {
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
    fn a_device_continues_when_the_memory_of_a_lost_rank_is_quiesced() {
        let (_net, all) = hanging();
        let mut since = Some(Instant::now());
        all.inner.on_revoked(1, Ok(()));
        all.set_timeout(Duration::ZERO);
        all.inner.end_if_stuck(&mut since);
        assert!(since.is_none() && all.check().is_ok() && !all.begins());
    }

    #[test]
    fn rs_4_a_device_does_not_wait_for_memory_that_is_never_quiesced() {
        let (_net, all) = hanging();
        all.inner.on_revoked(1, Err(EngineError::Closed));
        assert!(matches!(all.check(), Err(EngineError::NotQuiesced { .. })));
    }
}
