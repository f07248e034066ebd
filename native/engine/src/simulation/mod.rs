//! The simulator: engines on a simulated network and a virtual clock, driven one step at a time.

mod free;
mod running;

pub use running::Running;

use std::sync::{
    atomic::{AtomicU64, Ordering::SeqCst},
    Arc, Weak,
};

use crate::{
    api::{EngineConfig, EngineId},
    domain::Domain,
    engine::{Region, TransferEngine, Transports},
    locks::Mutex,
    time::Time,
    transport::sim::{Clock, Fault, Node, Port, SimConfig, SimDomain, Trace, TracedWork, World},
    Result,
};

/// A simulated network, its clock and the engines on it. It is single-threaded: everything happens
/// inside [`SimNet::step`].
pub struct SimNet {
    world: Arc<Mutex<World>>,
    clock: Arc<AtomicU64>,
    engines: Vec<Member>,
    /// The latest incarnation of each node, in opening order.
    incarnations: Vec<EngineId>,
    ids: fastrand::Rng,
}

/// An engine on the network.
struct Member {
    id: EngineId,
    engine: Weak<TransferEngine>,
    clock: Clock,
}

impl std::fmt::Debug for SimNet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimNet(at {} ns)", self.clock.load(SeqCst))
    }
}

impl SimNet {
    pub fn new(config: SimConfig) -> Self {
        let clock = Arc::new(AtomicU64::new(0));
        let ids = fastrand::Rng::with_seed(!config.seed);
        let world = Arc::new(Mutex::new(World::new(config, Arc::clone(&clock))));
        Self { world, clock, engines: Vec::new(), incarnations: Vec::new(), ids }
    }

    /// An engine whose only transport is this network, over one NIC.
    pub fn engine(&mut self, config: EngineConfig) -> Result<Arc<TransferEngine>> {
        self.engine_with_rails(config, 1)
    }

    /// As `engine`, over several NICs.
    pub fn engine_with_rails(
        &mut self,
        config: EngineConfig,
        rails: u8,
    ) -> Result<Arc<TransferEngine>> {
        let engine = self.open(config, rails)?;
        self.incarnations.push(engine.id());
        Ok(engine)
    }

    /// Opens the next incarnation of a node, named by its index; kills a running one.
    pub fn restart(
        &mut self,
        node: usize,
        config: EngineConfig,
        rails: u8,
    ) -> Result<Arc<TransferEngine>> {
        let engine = self.open(config, rails)?;
        if let Some(incarnation) = self.incarnations.get_mut(node) {
            let before = std::mem::replace(incarnation, engine.id());
            self.kill(before);
        }
        Ok(engine)
    }

    fn open(&mut self, config: EngineConfig, rails: u8) -> Result<Arc<TransferEngine>> {
        let id = EngineId(self.ids.u128(..).to_le_bytes());
        let mut domains: Vec<Box<dyn Domain>> = Vec::new();
        for rail in 0..rails {
            let port = Port { engine: id, rail };
            let mut world = self.world.lock();
            let node = Node::new(world.config.port_rate);
            world.nodes.insert(port, node);
            domains.push(Box::new(SimDomain::new(port, Arc::clone(&self.world))));
        }
        let clock = Clock::random(self.world.lock().config.skew, &mut self.ids);
        clock.set(self.now());
        let transports = Transports { id, domains, clock: clock.shown() };
        let engine = Arc::new(TransferEngine::open_manual(config, transports)?);
        self.engines.push(Member { id, engine: Arc::downgrade(&engine), clock });
        Ok(engine)
    }

    /// Has something go wrong now.
    pub fn inject(&mut self, fault: &Fault) {
        self.world.lock().inject(fault, &self.incarnations);
    }

    /// Kills a node as `kill -9` would: it sends nothing, peers notice.
    pub fn kill(&mut self, engine: EngineId) {
        self.world.lock().kill(engine, 0);
    }

    /// Pulls the cable of one NIC, or plugs it in again. Its node knows at once, peers some time
    /// later.
    pub fn plug(&mut self, engine: EngineId, rail: u8, plugged: bool) {
        let port = Port { engine, rail };
        let mut world = self.world.lock();
        if plugged {
            return world.unpark(port);
        }
        let there = world.delay();
        world.unplug(port, (0, there), "its cable is out");
    }

    /// Plugs in every NIC.
    pub fn plug_all(&mut self) {
        self.world.lock().plug_all();
    }

    /// Sets the rate of a NIC, bytes per nanosecond; no limit if `None`.
    pub fn set_rate(&mut self, engine: EngineId, rail: u8, rate: Option<f64>) {
        if let Some(node) = self.world.lock().nodes.get_mut(&Port { engine, rail }) {
            node.rate = rate;
        }
    }

    /// Work requests that a NIC has been given so far.
    pub fn posted(&self, engine: EngineId, rail: u8) -> u64 {
        self.world.lock().nodes.get(&Port { engine, rail }).map_or(0, |n| n.posts)
    }

    /// A number that two runs share only if the same things happened at the same times.
    pub fn digest(&self) -> u64 {
        self.world.lock().digest()
    }

    /// Frames between groups that have arrived so far.
    pub fn group_frames(&self) -> u64 {
        self.world.lock().group_frames
    }

    /// From now on, what becomes of each work request is noted.
    pub fn trace(&mut self) {
        self.world.lock().trace.get_or_insert_default();
    }

    /// Work requests that have ended since the last call, in that order.
    pub fn ended(&mut self) -> Vec<TracedWork> {
        self.world.lock().trace.as_mut().map(Trace::take).unwrap_or_default()
    }

    /// The work requests in flight, in posting order.
    pub fn under_way(&self) -> Vec<TracedWork> {
        let mut all: Vec<_> = self.world.lock().trace.iter().flat_map(Trace::open).collect();
        all.sort_by_key(|t| (t.posted, t.rail, t.offset));
        all
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        Time(self.clock.load(SeqCst))
    }

    /// When so much time has passed by an engine's own clock.
    pub fn when(&self, engine: EngineId, passed: u64) -> Time {
        let Some(member) = self.engines.iter().find(|m| m.id == engine) else { return Time::NEVER };
        member.clock.when(Time(member.clock.at(self.now()).0.saturating_add(passed)))
    }

    /// Lets time pass; whatever is due by then must have happened.
    pub fn advance(&mut self, to: Time) {
        self.pass(to);
        let now = self.now();
        for member in &self.engines {
            member.clock.set(now);
        }
    }

    /// Lets the next thing happen and all engines act on it; false if nothing will ever happen.
    pub fn step(&mut self) -> bool {
        self.step_until(Time::NEVER)
    }

    /// As `step`, but only if it happens by `limit`.
    pub fn step_until(&mut self, limit: Time) -> bool {
        // What users did since the last step comes before anything that takes time.
        if self.drive_all() {
            return true;
        }
        let timer = self.next_timer();
        if !self.happen_until(timer, limit) {
            return false;
        }
        self.drive_all();
        true
    }

    /// Lets everything happen that happens by `limit`, and time pass until then. Users act in
    /// callbacks only, so that only engines are driven that have something to do: for thousands of
    /// them.
    pub fn run_until(&mut self, limit: Time) {
        self.running().until(limit, || false);
        self.advance(limit);
    }

    fn pass(&self, to: Time) {
        self.clock.fetch_max(to.0, SeqCst);
    }

    /// Memory of an engine that nothing stands behind: for networks that carry no bytes.
    pub fn blank_memory(&self, engine: &TransferEngine, len: u64) -> Result<Region> {
        debug_assert!(!self.world.lock().config.carries);
        let keep = vec![0u8; len as usize];
        let addr = keep.as_ptr() as usize;
        // SAFETY: the registration keeps the bytes, and no other code has them.
        unsafe { engine.register(addr, len, Some(Box::new(keep))) }
    }

    /// Lets the network's next event happen, or time pass until the next timer: whatever comes
    /// first, if it comes by `limit`.
    fn happen_until(&mut self, timer: Time, limit: Time) -> bool {
        let mut world = self.world.lock();
        match world.next() {
            Some(at) if at <= timer.0 && at <= limit.0 => {
                if let Some(event) = world.pop() {
                    world.apply_event(event);
                }
            }
            _ if timer == Time::NEVER || timer > limit => return false,
            _ => {
                self.clock.fetch_max(timer.0, SeqCst);
            }
        }
        true
    }

    fn next_timer(&self) -> Time {
        self.engines.iter().map(Member::next_timer).fold(Time::NEVER, Time::min)
    }

    fn drive_all(&mut self) -> bool {
        let now = self.now();
        let mut moved = false;
        let mut gone = false;
        for member in &self.engines {
            match member.engine.upgrade() {
                Some(engine) => moved |= engine.drive(member.clock.set(now)),
                None => gone = true,
            }
        }
        if gone {
            self.engines.retain(|m| m.engine.strong_count() > 0);
        }
        moved
    }
}

impl Member {
    fn next_timer(&self) -> Time {
        let engine = self.engine.upgrade();
        engine.map_or(Time::NEVER, |engine| self.clock.when(engine.next_timer()))
    }
}
