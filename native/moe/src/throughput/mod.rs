//! The high-throughput mode (uccl-ep §3 to §5): many tokens at a time, over nodes.
//!
//! A token goes once to each node that has experts of it, over the *rail*: to its *gateway*, the rank there with its
//! source's place. The gateway forwards it to the ranks of its node that need it. Their answers come back to the gateway,
//! which sums them in the order of the ranks; one sum for each token and node goes back, and the source sums those in
//! the order of the nodes.
//!
//! Each hop is a ring of slots with a tail and a head, filled and given back in chunks ([`ring`]). Whatever is sent is a
//! command to the rank's proxy: writes, the last of a batch with an atomic that moves the tail, in order.
//!
//! From pure to stateful: [`Spec`], [`grid`], [`layout`], [`slots`]; [`ring`] and the lanes ([`feed`], [`gateway`],
//! [`take`]); [`Machine`], which needs neither thread nor clock; and [`Throughput`], which has both.

mod card;
mod channel;
mod commands;
mod context;
mod far;
mod feed;
mod gateway;
mod grid;
mod jobs;
mod layout;
mod machine;
mod reader;
mod received;
mod ring;
mod signals;
mod slots;
mod spec;
mod take;
mod workers;

use std::{
    fmt,
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        Arc, OnceLock,
    },
    time::{Duration, Instant},
};

use fabric_engine::{api::EngineConfig, EngineError, Result, Time};
use fabric_proxy::{Config, DeviceMemory, Engines, Event, Proxy, ProxyError, RankDescriptor};
use parking_lot::{Mutex, MutexGuard};

pub use self::{
    card::Card,
    context::{Given, Io},
    far::Far,
    jobs::{Fault, Job, Outcome, Sum, Term, Ticket, To, Worker},
    layout::Layout,
    machine::{Broken, Machine, Traffic},
    spec::Spec,
    workers::{device, Prompt},
};
use crate::{
    exchange::Dispatched,
    kernels::{Float, Part, PartMut},
    routes::Order,
};

/// Commands that a FIFO of a channel holds.
const IN_FLIGHT: u32 = 1024;
/// How long a rank that ends the exchange, or leaves, waits until what it has to say has left.
const FAREWELL: Duration = Duration::from_secs(2);

/// Command channels of so many channels: slots and credits of each family have one of their own.
fn command_channels(channels: u32) -> u32 {
    2 * grid::Family::ALL.len() as u32 * channels
}

/// What the proxy of a rank of this exchange is like.
pub fn proxy_config(spec: &Spec, rank: u32, deadline: Duration) -> Config {
    Config {
        rank: rank as usize,
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
/// Calls come in turns: `dispatch_send`, `dispatch_recv`, `combine_send`, `combine_recv`, from one thread at a time;
/// combine may be left out if all ranks do. A rank forwards for others while it is in a call: between calls, as much moves as
/// rings hold. Other threads may ask, or mask a rank, meanwhile.
pub struct Throughput {
    proxy: Proxy,
    spec: Spec,
    layout: Layout,
    /// Held by whoever is in a call, which others are refused.
    turn: Mutex<()>,
    /// Locked for a whole call.
    machine: Mutex<Machine>,
    broken: Arc<OnceLock<Broken>>,
    /// Whom a caller wants given up, and why, until a call or the caller has done so.
    masked: Mutex<Option<(u32, String)>>,
    traffic: Mutex<Traffic>,
    closed: AtomicBool,
    events: Arc<Mutex<Vec<Event>>>,
    /// Which ranks have been admitted.
    here: Mutex<Vec<bool>>,
    rank: u32,
    /// Nanoseconds.
    timeout: AtomicU64,
    /// When kernels are at work, if they carry the exchange out.
    shifts: Option<device::Shifts>,
}

impl fmt::Debug for Throughput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Throughput(rank {} of {})", self.rank, self.here.lock().len())
    }
}

impl Throughput {
    /// Opens engines like `engine`, one for each proxy thread, and allocates this rank's part of the memory.
    ///
    /// `timeout` is how long a rank may be in no call while it is waited for; give all ranks the same.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for a spec that can't be, or a rank that isn't one; what an engine says.
    pub fn open(engine: &EngineConfig, spec: Spec, rank: u32, timeout: Duration) -> Result<Self> {
        let nbytes = Layout::new(spec)?.nbytes();
        let engines = Engines::open(engine, spec.threads as usize, nbytes).map_err(engine_error)?;
        let region = engines.0[0].1.clone();
        Self::over(engines, spec, rank, timeout, Box::new(Prompt::new(spec, region)))
    }

    /// Over engines that have this rank's part of the memory, and with a worker that reaches it.
    fn over(
        engines: Engines,
        spec: Spec,
        rank: u32,
        timeout: Duration,
        worker: Box<dyn Worker>,
    ) -> Result<Self> {
        let layout = Layout::new(spec)?;
        if rank >= spec.shape.ranks {
            return Err(EngineError::Invalid(format!(
                "rank {rank} is none of {}",
                spec.shape.ranks
            )));
        }
        let config = proxy_config(&spec, rank, timeout.saturating_mul(4));
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
        let machine = Machine::with_worker(spec, rank, &memory, words, pushers, worker)?;
        let mut here = vec![false; spec.shape.ranks as usize];
        here[rank as usize] = true;
        let timeout = AtomicU64::new(timeout.as_nanos() as u64);
        Ok(Self {
            proxy,
            spec,
            layout,
            turn: Mutex::new(()),
            broken: machine.verdict(),
            machine: Mutex::new(machine),
            masked: Mutex::default(),
            traffic: Mutex::default(),
            closed: AtomicBool::new(false),
            events,
            here: Mutex::new(here),
            rank,
            timeout,
            shifts: None,
        })
    }

    pub fn spec(&self) -> Spec {
        self.spec
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// What others need to know of this rank.
    pub fn card(&self) -> Vec<u8> {
        Card { spec: self.spec, proxy: self.proxy.descriptor().to_bytes() }.to_bytes()
    }

    /// Takes a rank in by its card; returns its number. All are there before the first dispatch.
    ///
    /// # Errors
    /// [`EngineError::Handshake`] if it is of another shape; [`EngineError::Invalid`] if it is here already.
    pub fn admit(&self, card: &[u8]) -> Result<u32> {
        let card = Card::from_bytes(card)?;
        let proxy = RankDescriptor::from_bytes(&card.proxy).map_err(engine_error)?;
        let (spec, rank) = (self.spec, u32::from(proxy.rank));
        let unlike = |cause: String| EngineError::Handshake { peer: format!("rank {rank}"), cause };
        if card.spec != spec {
            return Err(unlike(format!(
                "it is of another shape: {:?}, and this one's is {spec:?}; give all ranks the same",
                card.spec
            )));
        }
        let mut here = self.here.lock();
        match here.get(rank as usize) {
            None => return Err(unlike(format!("it is none of {} ranks", here.len()))),
            Some(true) => {
                return Err(EngineError::Invalid(format!("rank {rank} is here already")));
            }
            Some(false) => {}
        }
        self.proxy.join(&proxy).map_err(engine_error)?;
        here[rank as usize] = true;
        Ok(rank)
    }

    /// How long a rank may be in no call while it is waited for. Give all ranks the same: who waits a few hundred
    /// milliseconds only hears too rarely of those that wait longer.
    pub fn set_timeout(&self, timeout: Duration) {
        let nanos = timeout.as_nanos().min(u128::from(u64::MAX)) as u64;
        self.timeout.store(nanos, Relaxed);
    }

    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.timeout.load(Relaxed))
    }

    /// What this rank has sent up to the end of its last call, or until nothing moved in the one that it is in.
    pub fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }

    /// Who has ended the exchange, if anybody.
    pub fn broken(&self) -> Option<Broken> {
        self.broken.get().cloned()
    }

    /// Gives a rank up, which ends the exchange for all; also the call that this rank is in.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: it is this rank, or none.
    pub fn mask(&self, rank: u32, cause: &str) -> Result<()> {
        if rank == self.rank || rank as usize >= self.here.lock().len() {
            return Err(EngineError::Invalid(format!("rank {rank} is no other rank")));
        }
        self.masked.lock().get_or_insert_with(|| (rank, cause.to_owned()));
        // A call that is under way finds it there, and ends.
        let mut machine = self.machine.lock();
        self.follow_mask(&mut machine);
        self.take_leave(&mut machine);
        Ok(())
    }

    /// Sends tokens to the ranks of their experts. `parts` make up a row; `indices` are the experts of each token; `weights`
    /// 32-bit floats, one for each expert, or all one.
    ///
    /// Returns when the tokens have been copied.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for tokens that don't fit the shape, before anything is sent, or out of turn;
    /// [`EngineError::PeerLost`] once the exchange has ended for good.
    pub fn dispatch_send(
        &self,
        parts: &[Part<'_>],
        indices: &[i64],
        weights: Option<Part<'_>>,
    ) -> Result<()> {
        let (_turn, mut machine) = self.enter_near()?;
        self.check_all_here()?;
        machine.check_turn("dispatch_send")?;
        machine.check_tokens(parts, indices, weights)?;
        self.drive(&mut machine, &mut Io::Nothing, |machine| machine.may_begin())?;
        machine.begin(parts, indices, weights)?;
        self.drive(&mut machine, &mut Io::Tokens(parts), |machine| machine.is_packed())
    }

    /// How many rows come, and where they will be, when all lanes have said so.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] out of turn, or if an expert gets more rows than `order` has room for;
    /// [`EngineError::PeerLost`] once the exchange has ended for good.
    pub fn wait_arriving(&self, order: Order) -> Result<Dispatched> {
        let (_turn, mut machine) = self.enter()?;
        let mut found = Ok(None);
        self.drive(&mut machine, &mut Io::Nothing, |machine| {
            found = machine.arriving(order);
            !matches!(found, Ok(None))
        })?;
        found?.ok_or(EngineError::Closed)
    }

    /// Waits until all rows are handed out, and what passes through this rank has gone on. `out` has the parts of a row, as
    /// `dispatch_send` was given them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't suffice, or out of turn; [`EngineError::PeerLost`] once the
    /// exchange has ended for good.
    pub fn dispatch_recv(&self, out: &mut [PartMut<'_>]) -> Result<Dispatched> {
        let (_turn, mut machine) = self.enter_near()?;
        let placing = machine.check_room(out)?;
        self.drive(&mut machine, &mut Io::Rows(out), Machine::is_collected)?;
        Ok(placing)
    }

    /// Sends the answers to all rows, which lie where `dispatch_recv` put the rows. Returns when nobody needs them any
    /// more: those of this node are summed.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for answers that don't fit the shape, or out of turn; [`EngineError::PeerLost`] once the
    /// exchange has ended for good.
    pub fn combine_send(&self, answers: Part<'_>) -> Result<()> {
        let (_turn, mut machine) = self.enter_near()?;
        machine.begin_answers(&answers)?;
        self.drive(&mut machine, &mut Io::Answers(answers), Machine::is_answered)
    }

    /// For each of this rank's tokens the sum of its experts' answers, each times its weight.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't fit, or out of turn; [`EngineError::PeerLost`] once the exchange has
    /// ended for good.
    pub fn combine_recv(&self, out: &mut PartMut<'_>, float: Float) -> Result<()> {
        let (_turn, mut machine) = self.enter_near()?;
        machine.check_sums(out, float)?;
        self.drive(&mut machine, &mut Io::Nothing, |machine| machine.is_summed())?;
        machine.take_sums(out, float)
    }

    fn check_all_here(&self) -> Result<()> {
        match self.here.lock().iter().position(|here| !here) {
            None => Ok(()),
            Some(rank) => {
                let text = format!("rank {rank} is not connected; admit its card first");
                Err(EngineError::Invalid(text))
            }
        }
    }

    /// As [`Throughput::enter`], for a call whose rows the host moves.
    fn enter_near(&self) -> Result<(MutexGuard<'_, ()>, MutexGuard<'_, Machine>)> {
        if self.shifts.is_some() {
            let text = "kernels move the rows of this exchange; use the far calls";
            return Err(EngineError::Invalid(text.into()));
        }
        self.enter()
    }

    fn enter(&self) -> Result<(MutexGuard<'_, ()>, MutexGuard<'_, Machine>)> {
        let turn = self.turn.try_lock().ok_or_else(|| {
            EngineError::Invalid(
                "another thread is in a call of this exchange; make one exchange for each".into(),
            )
        })?;
        Ok((turn, self.machine.lock()))
    }

    /// Steps on until something is there and nothing that the caller gave is in use, or the exchange has ended.
    fn drive(
        &self,
        machine: &mut Machine,
        io: &mut Io<'_, '_>,
        done: impl FnMut(&mut Machine) -> bool,
    ) -> Result<()> {
        let there = self.step_until(machine, io, done);
        let mut ended = there.is_err();
        if !ended && machine.is_at_work() {
            machine.rest(true);
            // What ends the exchange meanwhile is for the next call to say.
            ended = self.step_until(machine, io, |machine| !machine.is_at_work()).is_err();
            machine.rest(false);
        }
        if ended {
            machine.abort();
        }
        there
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
            let moved = self.step(machine, io).inspect_err(|_| self.take_leave(machine))?;
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
                // Whoever is waited for may need this core.
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    fn step(&self, machine: &mut Machine, io: &mut Io<'_, '_>) -> Result<bool> {
        self.follow_mask(machine);
        // What others say of whom they gave up came before they left themselves.
        machine.hear()?;
        for event in self.events.lock().drain(..) {
            match event {
                Event::Lost { rank, error, .. } => machine.lose(rank as u32, error.to_string()),
                other => {
                    machine.fail(self.rank, format!("its proxy refused a command: {other:?}"));
                }
            }
        }
        machine.step(Time::now(), self.timeout(), io)
    }

    fn follow_mask(&self, machine: &mut Machine) {
        if let Some((rank, cause)) = self.masked.lock().take() {
            machine.fail(rank, cause);
        }
    }

    /// Leaves for good: what was said is heard by the others, or not awaited for ever. Calls fail from now on.
    pub fn close(&self) {
        if self.closed.swap(true, Relaxed) {
            return;
        }
        let mut machine = self.machine.lock();
        if machine.broken().is_none() {
            self.take_leave(&mut machine);
        }
        drop(machine);
        self.proxy.close();
    }

    /// Waits until what others are told has left, but not for ever.
    fn take_leave(&self, machine: &mut Machine) {
        let end = Instant::now() + FAREWELL.min(self.timeout());
        while !machine.has_left() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(50));
        }
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
