use std::{net::IpAddr, time::Duration};

use super::{Ports, TransportKind};

/// Time that a thread polls before it sleeps.
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

/// Distribution of large writes over the rails of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spray {
    /// By load, speed and distance, as they are at the moment.
    #[default]
    Adaptive,
    /// Each rail in its turn, waiting for it if it is full: for comparison.
    RoundRobin,
    /// Any rail, by this seed: for comparison.
    Random(u64),
}

/// Configuration of an engine. Every default suits a laptop and a cluster.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// For people and logs.
    pub name: String,
    /// Allowed transports, the preferred first. Empty: whatever the machine offers, and tcp only
    /// towards peers that share no NIC transport for want of NICs (RS-2).
    pub transports: Vec<TransportKind>,
    pub require: Option<Requirement>,
    /// Shared secret of the handshake. Without one, tcp listens on loopback only.
    pub token: Option<Vec<u8>>,
    /// Local addresses that tcp listens on. When empty and a token is set: loopback and those that
    /// peers are told.
    pub bind: Vec<IpAddr>,
    /// Ports for the listeners of tcp and of the side channels of verbs; `None`: the kernel
    /// chooses.
    pub ports: Option<Ports>,
    pub tcp_streams: usize,
    pub spin: Spin,
    /// Threads that may copy at once for one engine (shm), the waiting caller included.
    pub copy_threads: usize,
    /// A submit call copies at most this many bytes itself before it returns.
    pub inline_bytes: u64,
    /// Memory that the engine didn't allocate is reached through windows that its owner copies
    /// from, not by the kernel (process_vm_writev): for processes that may not trace each other,
    /// such as those of two containers.
    pub stage_foreign: bool,
    /// A silent peer over tcp or a NIC is lost after this long. Time in which this process did not
    /// run does not count.
    pub peer_timeout: Duration,
    /// Deadline of transfers that name none.
    pub op_timeout: Duration,
    /// Lost links are replaced, and what they carried is sent again; without it, it fails at once.
    pub heal: bool,
    /// Bytes that may be under way on one rail (of large slices, five at least): what is urgent
    /// waits behind no more than that.
    pub rail_window: u64,
    /// Bytes that may be on their way to this engine, divided among the peers that send it much
    /// (incast).
    pub receive_window: u64,
    /// Number of transfers, and of arrivals, that the flight recorder keeps; 0 disables it.
    pub records: usize,
    pub nics: NicConfig,
}

/// Selection and parameters of the NICs of an engine.
#[derive(Clone, Debug)]
pub struct NicConfig {
    /// Names or globs (`mlx5_*`), in the order of the rails; empty: chosen by topology.
    pub names: Vec<String>,
    /// At most this many rails, 1 to 4.
    pub max_rails: usize,
    pub spray: Spray,
    /// The GPU that this engine serves, as a PCI address; the host's own memory if `None`.
    pub gpu: Option<String>,
    /// Pairing rules that override the topology, as in [`crate::topology`].
    pub rules: Option<String>,
    pub gid_index: Option<u8>,
    pub pkey_index: u16,
    /// InfiniBand service level, 0 to 15.
    pub service_level: u8,
    /// RoCE traffic class (DSCP in its upper six bits).
    pub traffic_class: u8,
    /// libfabric provider (`efa`, `tcp`, `shm`, `verbs;ofi_rxm`); `None`: efa only.
    pub provider: Option<String>,
    /// Deliver completions of libfabric in a random order, as SRD may, and lose some messages, as
    /// connections that break do: for tests.
    pub shuffle: Option<u64>,
}

/// Rails of one engine.
pub const MAX_RAILS: usize = 4;

impl Default for NicConfig {
    fn default() -> Self {
        Self {
            names: Vec::new(),
            max_rails: MAX_RAILS,
            spray: Spray::default(),
            gpu: None,
            rules: None,
            gid_index: None,
            pkey_index: 0,
            service_level: 0,
            traffic_class: 0,
            provider: None,
            shuffle: None,
        }
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            name: "engine".into(),
            transports: Vec::new(),
            require: None,
            token: None,
            bind: Vec::new(),
            ports: None,
            tcp_streams: 2,
            spin: Spin::For(Duration::from_micros(50)),
            copy_threads: cores.clamp(1, 4),
            inline_bytes: 1 << 20,
            stage_foreign: false,
            peer_timeout: Duration::from_secs(2),
            op_timeout: Duration::from_secs(60),
            heal: true,
            rail_window: 16 << 20,
            receive_window: 64 << 20,
            records: 4096,
            nics: NicConfig::default(),
        }
    }
}
