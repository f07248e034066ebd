//! Scenarios: rails, their changes, and the writes over them.

use serde::{Deserialize, Serialize};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub name: String,
    /// What it shows, in a line
    pub shows: String,
    /// Gb/s of each rail, the same at both ends
    pub rails: Vec<f64>,
    /// Least and most that a delivery takes beyond its bytes, one way
    pub latency_us: (f64, f64),
    pub run_ms: f64,
    #[serde(default)]
    pub changes: Vec<Change>,
    pub load: Load,
    #[serde(default = "one")]
    pub seed: u64,
}

fn one() -> u64 {
    1
}

/// A change of a rail at the sender's end.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    pub at_ms: f64,
    pub rail: u8,
    pub what: RailChange,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RailChange {
    /// It carries so many Gb/s from now on
    Rate(f64),
    /// Its cable is out; both ends are told after so many ms
    Lost(f64),
    /// Its cable is out, and the sender is not told
    Silent,
    /// Its cable is in again
    Back,
}

/// Transfers, each begun when one of the same thread's is over.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    pub threads: u32,
    /// Of each thread
    pub in_flight: u32,
    pub transfer: Transfer,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Transfer {
    /// One counted write of so many bytes
    Write { bytes: u64 },
    /// The KV cache of one prompt: for each layer, counted blocks of so many bytes
    Kv { layers: u32, blocks: u32, bytes: u64 },
}

impl Transfer {
    pub fn bytes(self) -> u64 {
        match self {
            Self::Write { bytes } => bytes,
            Self::Kv { layers, blocks, bytes } => u64::from(layers) * u64::from(blocks) * bytes,
        }
    }
}

impl Load {
    const fn writes(bytes: u64, threads: u32, in_flight: u32) -> Self {
        Self { threads, in_flight, transfer: Transfer::Write { bytes } }
    }

    pub fn slots(&self) -> u32 {
        self.threads * self.in_flight
    }
}

const EQUAL: [f64; 4] = [400.0; 4];
const UNEQUAL: [f64; 4] = [400.0, 400.0, 400.0, 100.0];

impl Scenario {
    fn new(name: &str, shows: &str, rails: &[f64], run_ms: f64, load: Load) -> Self {
        Self {
            name: name.into(),
            shows: shows.into(),
            rails: rails.to_vec(),
            latency_us: (1.5, 2.0),
            run_ms,
            changes: Vec::new(),
            load,
            seed: 1,
        }
    }

    fn then(mut self, at_ms: f64, rail: u8, what: RailChange) -> Self {
        self.changes.push(Change { at_ms, rail, what });
        self
    }

    /// The same with rails and their changes so many times as slow, and everything so many times as
    /// long as the rails make it: less to compute, for tests.
    #[cfg(test)]
    pub fn slower(mut self, times: f64) -> Self {
        self.rails.iter_mut().for_each(|r| *r /= times);
        for change in &mut self.changes {
            if let RailChange::Rate(rate) = &mut change.what {
                *rate /= times;
            }
        }
        self
    }

    /// With so many transfers in flight.
    #[cfg(test)]
    pub fn in_flight(mut self, n: u32) -> Self {
        self.load.in_flight = n;
        self
    }
}

/// All named scenarios.
pub fn named() -> Vec<Scenario> {
    let four = || Load::writes(4 * MIB, 1, 16);
    let mut all = vec![
        Scenario::new("equal", "four equal rails", &EQUAL, 40.0, four()),
        Scenario::new("unequal", "three rails of 400 Gb/s and one of 100", &UNEQUAL, 40.0, four()),
        Scenario::new("slows", "one of unequal rails slows down to a tenth in mid-run, and recovers", &UNEQUAL, 300.0, four())
            .then(100.0, 1, RailChange::Rate(40.0))
            .then(200.0, 1, RailChange::Rate(400.0)),
        Scenario::new("dies", "one of unequal rails dies, both ends are told, and returns", &UNEQUAL, 400.0, four())
            .then(60.0, 1, RailChange::Lost(1.0))
            .then(170.0, 1, RailChange::Back),
        Scenario::new("silent", "one of unequal rails dies without notice and returns", &UNEQUAL, 500.0, four())
            .then(60.0, 1, RailChange::Silent)
            .then(200.0, 1, RailChange::Back),
        Scenario::new(
            "story",
            "unequal rails; one slows down to a quarter, another dies and returns, the slow one recovers",
            &UNEQUAL,
            500.0,
            four(),
        )
        .then(80.0, 2, RailChange::Rate(100.0))
        .then(160.0, 1, RailChange::Lost(1.0))
        .then(270.0, 1, RailChange::Back)
        .then(420.0, 2, RailChange::Rate(400.0)),
        Scenario::new(
            "watch",
            "slow enough to see single slices: a rail dies, both ends are told after 1 ms, and it returns",
            &[40.0, 40.0, 40.0, 10.0],
            300.0,
            Load::writes(4 * MIB, 1, 4),
        )
        .then(50.0, 1, RailChange::Lost(1.0))
        .then(160.0, 1, RailChange::Back),
    ];
    all.extend(tent());
    all
}

/// The workloads of TENT's evaluation over unequal rails, after one of them has slowed down.
fn tent() -> Vec<Scenario> {
    let mut all = Vec::new();
    for bytes in [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB] {
        let name = match bytes {
            MIB.. => format!("tent-{}MiB", bytes / MIB),
            _ => format!("tent-{}KiB", bytes / KIB),
        };
        let run_ms = if bytes >= 16 * MIB { 80.0 } else { 20.0 };
        let load = Load::writes(bytes, 2, 4);
        all.push(Scenario::new(
            &name,
            "two threads, four blocks in flight each",
            &UNEQUAL,
            run_ms,
            load,
        ));
    }
    let transfer = Transfer::Kv { layers: 61, blocks: 32, bytes: 144 * KIB };
    let load = Load { threads: 1, in_flight: 1, transfer };
    let shows = "the KV cache of 4096 tokens of DeepSeek-R1: 61 layers of 32 blocks of 144 KiB";
    all.push(Scenario::new("tent-kv", shows, &UNEQUAL, 60.0, load));
    all
}
