//! The metrics of an engine.

use super::{Histogram, PeerTally, StageTimes};
use crate::api::{EngineId, TransportKind};

/// One rail: the times of the stages of its transfers, by class.
#[derive(Clone, Debug)]
pub struct RailMetrics {
    pub transport: TransportKind,
    /// The NIC's name; empty where there is none.
    pub device: String,
    /// Limit of bytes in flight over the rail. `under_way`: bytes in flight.
    pub window: u64,
    pub under_way: u64,
    pub stages: [StageTimes; 3],
}

/// One peer.
#[derive(Clone, Debug)]
pub struct PeerMetrics {
    pub id: EngineId,
    pub name: String,
    /// `idle`, `connecting`, `up` or `lost`.
    pub state: &'static str,
    /// The transport in use, if the peer is up. `links`: number of its links.
    pub transport: Option<TransportKind>,
    pub links: usize,
    /// Operations that wait for room. `under_way`: bytes in flight that count in windows.
    pub waiting: usize,
    pub under_way: u64,
    pub tally: PeerTally,
}

/// The metrics of an engine since it was opened.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Writes counted here, and immediates of an earlier use of their counter.
    pub counted: u64,
    pub ghosts: u64,
    /// Registered regions, and those whose deregistration isn't over.
    pub regions: usize,
    pub retiring: usize,
    /// Requests that are not over.
    pub going_on: usize,
    /// Wait times of expectations that were met.
    pub expected: Histogram,
    pub rails: Vec<RailMetrics>,
    pub peers: Vec<PeerMetrics>,
}
