//! Engines on the two devices, and the guest's network between them.

use std::{
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use fabric_engine::{
    api::{EngineConfig, Imm, NicConfig, RegionDescriptor, TransportKind},
    EngineError, Handle, Local, Op, Region, Remote, RemoteRegion, Result, Submit, TransferEngine,
};

/// Timeout of operations that should succeed: the guest's processors may be emulated.
pub const LONG: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    A,
    B,
}

/// The devices of a side.
pub fn nics(side: Side) -> Vec<String> {
    let variable = match side {
        Side::A => "FABRIC_TEST_NICS_A",
        Side::B => "FABRIC_TEST_NICS_B",
    };
    let names = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} names a device"));
    names.split(',').map(str::to_owned).collect()
}

/// The first device of a side; most tests use only this one.
pub fn nic(side: Side) -> String {
    nics(side).swap_remove(0)
}

/// The network interface of a device of the guest's: `rxe_h0r0` is `h0r0`.
pub fn interface(side: Side) -> String {
    nic(side).trim_start_matches("rxe_").to_owned()
}

pub fn config(side: Side) -> EngineConfig {
    let name = if side == Side::A { "a" } else { "b" };
    EngineConfig {
        name: name.into(),
        transports: vec![TransportKind::Verbs],
        token: Some(b"t".to_vec()),
        nics: NicConfig { names: vec![nic(side)], ..Default::default() },
        op_timeout: LONG,
        ..Default::default()
    }
}

pub fn engine(side: Side) -> Arc<TransferEngine> {
    Arc::new(TransferEngine::open(config(side)).unwrap())
}

pub fn pattern(n: usize, salt: u8) -> Vec<u8> {
    (0..n).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ salt).collect()
}

/// A region filled with a pattern.
pub fn filled(engine: &TransferEngine, n: usize, salt: u8) -> Region {
    let region = engine.alloc(n as u64).unwrap();
    region.put(0, &pattern(n, salt)).unwrap();
    region
}

pub fn import(at: &TransferEngine, descriptor: &[u8]) -> RemoteRegion {
    at.import(&RegionDescriptor::from_bytes(descriptor).unwrap()).unwrap()
}

pub fn write(
    at: &TransferEngine,
    src: &Region,
    dst: &RemoteRegion,
    len: u64,
    imm: Option<Imm>,
) -> Handle {
    let (src, dst) = (Local { region: src, offset: 0 }, Remote { region: dst, offset: 0 });
    at.submit(&[Op::Write { src, dst, len, imm }], Submit::default()).unwrap()
}

pub fn wait(handle: &Handle) -> Result<()> {
    handle.wait(LONG).unwrap_or_else(|| panic!("{} does not end", handle.op()))
}

/// The error with which a handle ends, and how long that takes.
pub fn ends(handle: &Handle) -> (EngineError, Duration) {
    let start = Instant::now();
    (wait(handle).unwrap_err(), start.elapsed())
}

/// Runs a command in the guest.
pub fn run(line: &str) {
    let mut words = line.split_whitespace();
    let done = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Runs a command when dropped, to undo a change of the network.
pub struct Undo(String);

impl Undo {
    pub fn with(line: &str) -> Self {
        Self(line.to_owned())
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let mut words = self.0.split_whitespace();
        let _ = Command::new(words.next().unwrap_or_default()).args(words).output();
    }
}
