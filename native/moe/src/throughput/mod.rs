//! The high-throughput mode (uccl-ep §3 to §5): many tokens at a time, over nodes.
//!
//! A token goes once to each node that has experts of it, over the *rail*: to its *gateway*, the
//! rank there with its source's place. The gateway forwards it to the ranks of its node that need
//! it. Their answers come back to the gateway, which sums them in the order of the ranks; one sum
//! for each token and node goes back, and the source sums those in the order of the nodes.
//!
//! Each hop is a ring of slots with a tail and a head, filled and given back in chunks ([`ring`]).
//! Whatever is sent is a command to the rank's proxy: writes, the last of a batch with an atomic
//! that moves the tail, in order.
//!
//! While a rank is missing, no rank forwards: every rank is a node of its own ([`membership`],
//! [`grid`]).
//!
//! From pure to stateful: [`Spec`], [`grid`], [`layout`], [`slots`], [`membership`]; [`ring`] and
//! the lanes ([`rail_sender`], [`gateway`], [`node_receiver`]); [`Machine`], which needs neither
//! thread nor clock; and [`Throughput`], which has both.

mod admission;
mod channel;
mod commands;
mod context;
mod gateway;
mod grid;
mod jobs;
mod kernel_calls;
mod layout;
mod machine;
mod membership;
mod node_receiver;
mod rail_sender;
pub(crate) mod rank_descriptor;
mod reader;
mod received;
mod ring;
mod ring_pool;
mod signals;
mod slots;
mod spec;
mod workers;

use std::{
    fmt,
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        Arc,
    },
    time::{Duration, Instant},
};

use fabric_engine::{
    api::{EngineConfig, EngineId},
    locks::{Mutex, MutexGuard},
    EngineError, Result, Time,
};
use fabric_proxy::{Config, DeviceMemory, Engines, Event, Proxy, ProxyError};

pub use self::{
    context::{Io, KernelIo},
    jobs::{Job, JobError, JobId, JobResult, Sum, SumTarget, SumTerm, Worker},
    kernel_calls::KernelMemory,
    layout::Layout,
    machine::{Losses, LostRank, Machine, Traffic},
    membership::Member,
    rank_descriptor::RankDescriptor,
    spec::Spec,
    workers::{device, CpuWorker},
};
use crate::{
    checks::{enter, nanos},
    exchange::Dispatched,
    kernels::{Float, Part, PartMut},
    routes::Order,
};

/// Commands in the FIFO of a channel.
const IN_FLIGHT: u32 = 1024;
/// Longest wait of a leaving rank until its signals are sent.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// The number of command channels: slots and credits of each family have their own.
fn command_channels(channels: u32) -> u32 {
    2 * grid::Family::ALL.len() as u32 * channels
}

/// The configuration of the proxy of a rank.
pub fn proxy_config(spec: &Spec, member: Member, deadline: Duration) -> Config {
    Config {
        rank: member.rank as usize,
        incarnation: member.incarnation + 1,
        ranks: spec.shape.ranks as usize,
        per_node: spec.ranks_per_node as usize,
        threads: spec.threads as usize,
        // The last one of the first thread is for signals.
        fifos: spec.channels.div_ceil(spec.threads) as usize + 1,
        capacity: IN_FLIGHT,
        words: spec.words() as usize,
        deadline,
        ..Config::default()
    }
}

/// One rank of a high-throughput exchange.
///
/// Calls come in this order: `dispatch_send`, `dispatch_recv`, `combine_send`, `combine_recv`, from
/// one thread at a time; combine may be left out if all ranks do. A rank forwards for others while
/// it is in a call. Between calls only the rings' contents move. Other threads may query it or mask
/// a rank meanwhile.
pub struct Throughput {
    proxy: Proxy,
    spec: Spec,
    layout: Layout,
    /// Held during a call; other callers are refused.
    caller: Mutex<()>,
    /// Locked for a whole call.
    machine: Mutex<Machine>,
    losses: Arc<Losses>,
    /// Ranks to give up, with causes, until a call does so.
    masked: Mutex<Vec<(Member, String)>>,
    traffic: Mutex<Traffic>,
    closed: AtomicBool,
    events: Arc<Mutex<Vec<Event>>>,
    /// The present ranks, and the ranks whose answers are missing in the last sums, as of the last
    /// call.
    here: Mutex<Vec<bool>>,
    /// The latest incarnation of each rank, as of the last call.
    incarnations: Mutex<Vec<u32>>,
    left_out: Mutex<Vec<u32>>,
    member: Member,
    /// The engine with which this rank makes its exchanges.
    engine: EngineId,
    /// Nanoseconds.
    timeout: AtomicU64,
    /// The lifecycle of workers, if kernels execute the exchange.
    lifecycle: Option<device::WorkerLifecycle>,
}

impl fmt::Debug for Throughput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Throughput(rank {} of {})", self.member.rank, self.spec.shape.ranks)
    }
}

impl Throughput {
    /// Opens engines like `engine`, one for each proxy thread, and allocates this rank's part of
    /// the memory.
    ///
    /// `timeout` is the longest time that an awaited rank may be in no call; give all ranks the
    /// same. A rank that replaces a lost one has a further incarnation.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for a spec that can't be, or a rank that isn't one; what an engine
    /// says.
    pub fn open(
        engine: &EngineConfig,
        spec: Spec,
        member: Member,
        timeout: Duration,
    ) -> Result<Self> {
        let nbytes = Layout::new(spec)?.nbytes();
        let engines = Engines::open(engine, spec.threads as usize, nbytes).map_err(engine_error)?;
        let region = engines.0[0].1.clone();
        Self::over(engines, spec, member, timeout, Box::new(CpuWorker::new(spec, region)))
    }

    /// Over engines that have this rank's part of the memory, and with a worker that reaches it.
    fn over(
        engines: Engines,
        spec: Spec,
        member: Member,
        timeout: Duration,
        worker: Box<dyn Worker>,
    ) -> Result<Self> {
        let layout = Layout::new(spec)?;
        if member.rank >= spec.shape.ranks || member.incarnation >= 1 << 12 {
            return Err(EngineError::Invalid(format!(
                "rank {} of {} in incarnation {}: both count from 0, incarnations to 4095",
                member.rank, spec.shape.ranks, member.incarnation
            )));
        }
        let engine = engines.0.first().map(|(engine, _)| engine.id()).ok_or(EngineError::Closed)?;
        let config = proxy_config(&spec, member, timeout.saturating_mul(4));
        let device = DeviceMemory::host(&config).map_err(engine_error)?;
        let events = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&events);
        let on_event = Arc::new(move |event| told.lock().push(event));
        let proxy = Proxy::open(&config, engines, device, on_event).map_err(engine_error)?;
        let pusher =
            |c: u32| proxy.pusher((c % spec.threads) as usize, (c / spec.threads) as usize);
        let signals = proxy.pusher(0, config.fifos - 1);
        let pushers = (0..spec.channels).map(pusher).chain([signals]);
        let pushers = pushers.collect::<Result<_, _>>().map_err(engine_error)?;
        let (memory, words) = (proxy.memory().clone(), proxy.words().clone());
        let machine = Machine::with_worker(spec, member, &memory, words, pushers, worker)?;
        let timeout = AtomicU64::new(nanos(timeout));
        Ok(Self {
            proxy,
            spec,
            layout,
            caller: Mutex::new(()),
            losses: machine.losses(),
            here: Mutex::new(machine.here()),
            incarnations: Mutex::new(machine.incarnations()),
            left_out: Mutex::default(),
            machine: Mutex::new(machine),
            masked: Mutex::default(),
            traffic: Mutex::default(),
            closed: AtomicBool::new(false),
            events,
            member,
            engine,
            timeout,
            lifecycle: None,
        })
    }

    pub fn spec(&self) -> Spec {
        self.spec
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Relaxed))
    }

    /// Traffic of this rank up to the end of its last call, or up to the last wait of the current
    /// call.
    pub fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }

    /// Sends tokens to the ranks of their experts. `parts` make up a row; `indices` are the experts
    /// of each token; `weights` 32-bit floats, one for each expert, or all one.
    ///
    /// Returns when all others have admitted this rank, and the tokens have been copied.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for tokens that don't fit the shape, before anything is sent, or
    /// out of turn; [`EngineError::PeerLost`] when a rank is lost.
    pub fn dispatch_send(
        &self,
        parts: &[Part<'_>],
        indices: &[i64],
        weights: Option<Part<'_>>,
    ) -> Result<()> {
        let (_caller, mut machine) = self.enter_near()?;
        admission::check_all_here(&machine)?;
        machine.check_may_dispatch("dispatch_send")?;
        machine.check_tokens(parts, indices, weights)?;
        self.drive(&mut machine, &mut Io::Nothing, |machine| machine.may_begin())?;
        machine.begin(parts, indices, weights)?;
        self.drive(&mut machine, &mut Io::Tokens(parts), |machine| machine.is_packed())
    }

    /// Number and placement of the arriving rows, once all lanes have announced them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] out of turn, or if an expert gets more rows than `order` has room
    /// for; [`EngineError::PeerLost`] when a rank is lost.
    pub fn wait_arriving(&self, order: Order) -> Result<Dispatched> {
        let (_caller, mut machine) = self.enter()?;
        let mut found = Ok(None);
        self.drive(&mut machine, &mut Io::Nothing, |machine| {
            found = machine.arriving(order);
            !matches!(found, Ok(None))
        })?;
        found?.ok_or(EngineError::Closed)
    }

    /// Waits until all rows are handed out, and what passes through this rank has gone on. `out`
    /// has the parts of a row, as `dispatch_send` was given them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't suffice, or out of turn;
    /// [`EngineError::PeerLost`] when a rank is lost.
    pub fn dispatch_recv(&self, out: &mut [PartMut<'_>]) -> Result<Dispatched> {
        let (_caller, mut machine) = self.enter_near()?;
        let placing = machine.check_room(out)?;
        self.drive(&mut machine, &mut Io::Rows(out), Machine::is_collected)?;
        Ok(placing)
    }

    /// Sends the answers to all rows, which lie where `dispatch_recv` put the rows. Returns when no
    /// rank needs the rows any more: those of this node are summed.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for answers that don't fit the shape, or out of turn;
    /// [`EngineError::PeerLost`] when a rank is lost.
    pub fn combine_send(&self, answers: Part<'_>) -> Result<()> {
        let (_caller, mut machine) = self.enter_near()?;
        machine.begin_answers(&answers)?;
        self.drive(&mut machine, &mut Io::Answers(answers), Machine::is_answered)
    }

    /// For each of this rank's tokens the sum of its experts' answers, each times its weight.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't fit, or out of turn;
    /// [`EngineError::PeerLost`] when a rank is lost.
    pub fn combine_recv(&self, out: &mut PartMut<'_>, float: Float) -> Result<()> {
        let (_caller, mut machine) = self.enter_near()?;
        machine.check_sums(out, float)?;
        self.drive(&mut machine, &mut Io::Nothing, |machine| machine.is_summed())?;
        *self.left_out.lock() = machine.left_out().to_vec();
        machine.take_sums(out, float)
    }

    /// As [`Throughput::enter`], for a call whose rows the host moves.
    fn enter_near(&self) -> Result<(MutexGuard<'_, ()>, MutexGuard<'_, Machine>)> {
        if self.lifecycle.is_some() {
            let text = "kernels move the rows of this exchange; use the kernel calls";
            return Err(EngineError::Invalid(text.into()));
        }
        self.enter()
    }

    fn enter(&self) -> Result<(MutexGuard<'_, ()>, MutexGuard<'_, Machine>)> {
        let caller = enter(&self.caller)?;
        Ok((caller, self.machine.lock()))
    }

    /// Steps until a condition holds and no memory of the caller is in use, or until the exchange
    /// has ended.
    fn drive(
        &self,
        machine: &mut Machine,
        io: &mut Io<'_, '_>,
        done: impl FnMut(&mut Machine) -> bool,
    ) -> Result<()> {
        let there = self.step_until(machine, io, done);
        if there.is_ok() && machine.is_at_work() {
            machine.set_resting(true);
            if self.step_until(machine, io, |machine| !machine.is_at_work()).is_err() {
                // Losses meanwhile are reported by the next call.
                machine.report_again();
                self.release_memory(machine, io);
            }
            machine.set_resting(false);
        }
        if there.is_err() {
            self.release_memory(machine, io);
        }
        self.publish_membership(machine);
        there
    }

    /// Waits until no memory of the caller is in use.
    fn release_memory(&self, machine: &mut Machine, io: &mut Io<'_, '_>) {
        let end = Instant::now() + machine::own_job_timeout(self.timeout());
        while machine.is_abandoned() && !machine.finish_jobs(io) {
            std::thread::sleep(Duration::from_micros(50));
            if Instant::now() > end {
                machine.fail(self.member.rank, "its device did nothing".into());
                return;
            }
        }
        if !machine.is_abandoned() {
            machine.abort();
        }
    }

    /// Updates the state that other threads read between calls.
    fn publish_membership(&self, machine: &Machine) {
        *self.here.lock() = machine.here();
        *self.incarnations.lock() = machine.incarnations();
    }

    fn step_until(
        &self,
        machine: &mut Machine,
        io: &mut Io<'_, '_>,
        mut done: impl FnMut(&mut Machine) -> bool,
    ) -> Result<()> {
        machine.resume();
        let mut idle = 0u32;
        loop {
            let moved = self.step(machine, io).inspect_err(|_| self.announce_losses(machine))?;
            let over = done(machine);
            idle = if moved { 0 } else { idle + 1 };
            if over || idle == 32 {
                *self.traffic.lock() = machine.traffic();
            }
            if over {
                return Ok(());
            }
            match idle {
                0..32 => std::hint::spin_loop(),
                32..256 => std::thread::yield_now(),
                // The awaited rank may need this core.
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    fn step(&self, machine: &mut Machine, io: &mut Io<'_, '_>) -> Result<bool> {
        self.take_events(machine);
        self.follow_masks(machine);
        machine.process_signals()?;
        self.mask_lost(machine);
        machine.step(Time::now(), self.timeout(), io)
    }

    fn take_events(&self, machine: &mut Machine) {
        for event in self.events.lock().drain(..) {
            match event {
                Event::Lost { rank, error, .. } => machine.lose(rank as u32, error.to_string()),
                Event::Joined { rank, incarnation } => {
                    machine.joined_by(Member { rank: rank as u32, incarnation: incarnation - 1 });
                }
                Event::Masked { rank, incarnation } => {
                    machine.masked_by(Member { rank: rank as u32, incarnation: incarnation - 1 });
                }
                Event::Gone { rank, incarnation } => {
                    machine.end(Member { rank: rank as u32, incarnation: incarnation - 1 });
                }
                other => {
                    machine
                        .fail(self.member.rank, format!("its proxy refused a command: {other:?}"));
                }
            }
        }
    }

    fn follow_masks(&self, machine: &mut Machine) {
        let incarnations = machine.incarnations();
        for (Member { rank, incarnation }, cause) in self.masked.lock().drain(..) {
            // Its next incarnation may have been admitted meanwhile.
            if incarnation >= incarnations[rank as usize] || !machine.here()[rank as usize] {
                machine.fail(rank, cause);
            }
        }
    }

    /// Has the proxy drop ranks of whose loss all others have been told.
    fn mask_lost(&self, machine: &mut Machine) {
        for rank in machine.take_masked(Time::now(), self.timeout()) {
            // A rank that there is, and another one.
            let _ = self.proxy.mask(rank as usize);
        }
    }

    /// Records that this rank makes no further call. Ranks that leave from now on are not logged as
    /// lost.
    pub fn expect_departures(&self) {
        self.proxy.alive().expect_departures();
    }

    /// Leaves for good, after pending signals are sent or the wait for them ends. Later calls fail.
    pub fn close(&self) {
        if self.closed.swap(true, Relaxed) {
            return;
        }
        let mut machine = self.machine.lock();
        if self.losses.ended().is_none() {
            wait_for(self.goodbye_timeout(), || {
                self.take_events(&mut machine);
                machine.has_told() & machine.has_left()
            });
        }
        drop(machine);
        self.proxy.close();
    }

    /// Waits, for a bounded time, until all others have been told of the losses.
    fn announce_losses(&self, machine: &mut Machine) {
        wait_for(self.goodbye_timeout(), || {
            self.take_events(machine);
            machine.has_told()
        });
        self.mask_lost(machine);
    }

    fn goodbye_timeout(&self) -> Duration {
        GOODBYE_TIMEOUT.min(self.timeout())
    }
}

fn wait_for(most: Duration, mut there: impl FnMut() -> bool) {
    let end = Instant::now() + most;
    while !there() && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(50));
    }
}

impl Drop for Throughput {
    fn drop(&mut self) {
        self.close();
    }
}

fn engine_error(error: ProxyError) -> EngineError {
    match error {
        ProxyError::Engine(error) => error,
        other => EngineError::Invalid(other.to_string()),
    }
}
