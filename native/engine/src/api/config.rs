use std::{net::IpAddr, time::Duration};

use super::TransportKind;

/// How long a thread looks for work before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    /// Spin this long after the last progress, then park.
    For(Duration),
    /// Never park: for latency-bound deployments with cores to spare.
    Always,
}

/// A transport that must be usable, or the engine doesn't open (RS-2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    Transport(TransportKind),
    /// Any RDMA transport.
    Rdma,
}

/// How an engine is opened. Every field has a default that suits a laptop and a cluster alike.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// For people and logs.
    pub name: String,
    /// Allowed transports, the preferred first.
    pub transports: Vec<TransportKind>,
    pub require: Option<Requirement>,
    /// Shared secret of the handshake. Without one, tcp listens on loopback only.
    pub token: Option<Vec<u8>>,
    /// Local addresses that tcp listens on; all when empty and a token is set.
    pub bind: Vec<IpAddr>,
    pub tcp_streams: usize,
    pub spin: Spin,
    /// Threads that may copy at once for one engine (shm), the waiting caller included.
    pub copy_threads: usize,
    /// A submit call copies at most this many bytes itself before it returns.
    pub inline_bytes: u64,
    /// A silent tcp peer is lost after this long.
    pub peer_timeout: Duration,
    /// Deadline of transfers that name none.
    pub op_timeout: Duration,
}

impl Default for EngineConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            name: "engine".into(),
            transports: vec![TransportKind::Shm, TransportKind::Tcp],
            require: None,
            token: None,
            bind: Vec::new(),
            tcp_streams: 2,
            spin: Spin::For(Duration::from_micros(50)),
            copy_threads: cores.clamp(1, 4),
            inline_bytes: 1 << 20,
            peer_timeout: Duration::from_secs(2),
            op_timeout: Duration::from_secs(60),
        }
    }
}
