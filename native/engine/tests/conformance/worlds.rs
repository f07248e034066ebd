//! Environments of a test: engines on threads with real links, or in the simulator.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use fabric_engine::{
    api::{EngineConfig, NicConfig, TransportKind},
    simulation::SimNet,
    transport::sim::SimConfig,
    EngineError, Handle, Result, Time, TransferEngine,
};

pub trait World {
    fn engine(&mut self, name: &str) -> Arc<TransferEngine>;

    /// Runs until `done`; panics if that takes too long.
    fn until(&mut self, what: &str, done: &mut dyn FnMut() -> bool);

    /// Runs for a while.
    fn idle(&mut self);

    fn wait(&mut self, handle: &Handle) -> Result<()> {
        self.until(handle.op(), &mut || handle.drive().is_some());
        handle.poll().expect("done")
    }

    /// A large number of writes for this world.
    fn many(&self) -> u64 {
        50_000
    }

    /// A number of bytes whose transfer takes a while in this world.
    fn large(&self) -> u64 {
        64 << 20
    }

    /// Whether the owner's software checks the writing peer: a NIC checks keys only.
    fn sees_writers(&self) -> bool {
        true
    }

    /// Whether large writes are cut on this transport.
    fn cuts(&self) -> bool {
        false
    }
}

fn config(name: &str) -> EngineConfig {
    EngineConfig { name: name.into(), op_timeout: Duration::from_secs(60), ..Default::default() }
}

pub struct Threads {
    transport: TransportKind,
    /// NICs of the first engine, and of all others.
    nics: [NicConfig; 2],
    engines: usize,
}

impl Threads {
    pub fn new(transport: &'static str) -> Self {
        Self::over(transport.parse().unwrap(), Default::default())
    }

    pub fn over(transport: TransportKind, nics: [NicConfig; 2]) -> Self {
        Self { transport, nics, engines: 0 }
    }

    /// Longer for NICs, which run on emulated processors in some tests.
    fn timeout(&self) -> Duration {
        Duration::from_secs(if self.transport.has_nics() { 60 } else { 20 })
    }
}

impl World for Threads {
    fn engine(&mut self, name: &str) -> Arc<TransferEngine> {
        let nics = self.nics[self.engines.min(1)].clone();
        self.engines += 1;
        let transports = vec![self.transport];
        let config = EngineConfig { transports, token: Some(b"t".to_vec()), nics, ..config(name) };
        Arc::new(TransferEngine::open(config).unwrap())
    }

    fn until(&mut self, what: &str, done: &mut dyn FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < self.timeout(), "{what} does not end");
            std::thread::yield_now();
        }
    }

    fn idle(&mut self) {
        std::thread::sleep(Duration::from_millis(20));
    }

    fn many(&self) -> u64 {
        if self.transport.has_nics() {
            5_000
        } else {
            50_000
        }
    }

    fn sees_writers(&self) -> bool {
        !self.transport.has_nics()
    }

    fn large(&self) -> u64 {
        if self.transport.has_nics() {
            8 << 20
        } else {
            64 << 20
        }
    }

    fn wait(&mut self, handle: &Handle) -> Result<()> {
        handle
            .wait(self.timeout())
            .unwrap_or_else(|| Err(EngineError::Invalid(format!("{} does not end", handle.op()))))
    }
}

pub struct Sim {
    pub net: SimNet,
    seed: u64,
    /// NICs of the first engine, and of all others.
    rails: [u8; 2],
    engines: usize,
}

impl Sim {
    pub fn new(seed: u64) -> Self {
        let max_bytes = [64, 1000, 4096][seed as usize % 3];
        let config = SimConfig { seed, max_bytes, ..Default::default() };
        Self { net: SimNet::new(config), seed, rails: [1, 1], engines: 0 }
    }

    /// Several NICs on each side, not always equally many.
    pub fn with_rails(seed: u64) -> Self {
        let rails = [[2, 2], [4, 4], [1, 4], [3, 2], [4, 1]][seed as usize % 5];
        Self { rails, ..Self::new(seed) }
    }
}

impl World for Sim {
    fn engine(&mut self, name: &str) -> Arc<TransferEngine> {
        let rails = self.rails[self.engines.min(1)];
        self.engines += 1;
        self.net.engine_with_rails(config(name), rails).unwrap()
    }

    fn until(&mut self, what: &str, done: &mut dyn FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            self.net.step();
            let long = start.elapsed() > Duration::from_secs(20);
            assert!(!long, "{what} does not end under seed {}", self.seed);
        }
    }

    fn idle(&mut self) {
        let limit = Time(self.net.now().0 + 1_000_000);
        while self.net.step_until(limit) {}
    }

    fn many(&self) -> u64 {
        1000
    }

    fn large(&self) -> u64 {
        50_000
    }

    fn cuts(&self) -> bool {
        true
    }
}
