use fabric_engine::EngineError;

use crate::{command::CommandError, fifo::FifoError, order::OrderError};

/// What failed between a device and a peer's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    #[error("rank {rank}: there are {ranks} ranks, from 0")]
    Rank { rank: usize, ranks: usize },

    #[error("rank {rank} is not connected; give its descriptor to join()")]
    NotThere { rank: usize },

    #[error("rank {rank}: bytes {offset}..{end} lie outside its {limit} bytes of symmetric memory", end = .offset.saturating_add(*.len))]
    OutOfBounds { rank: usize, offset: u64, len: u64, limit: u64 },

    #[error("rank {rank} has {len} bytes of symmetric memory, this rank has {ours}; allocate the same everywhere")]
    Unequal { rank: usize, len: u64, ours: u64 },

    #[error("slot {slot}: there are {slots} atomic words; open the proxy with more")]
    Slot { slot: u16, slots: usize },

    /// The rank gave up a rule of the protocol, and is treated as lost.
    #[error("rank {rank} broke the protocol: {cause}; run the same version everywhere")]
    Protocol { rank: usize, cause: OrderError },

    #[error("rank {rank} did not {what} within {after:?}; it is taken for lost, mask it everywhere or let it join anew")]
    Silent { rank: usize, what: &'static str, after: std::time::Duration },

    #[error("rank {rank}: what was sent to it may still land; it is taken for lost, let it join anew with fresh memory")]
    NotQuiet { rank: usize },

    #[error("rank {rank} joins with incarnation {given}, and had {had} already; open it anew")]
    OldLife { rank: usize, given: u32, had: u32 },

    #[error("{0}")]
    Invalid(String),

    #[error(transparent)]
    Command(#[from] CommandError),

    #[error(transparent)]
    Fifo(#[from] FifoError),

    #[error(transparent)]
    Engine(#[from] EngineError),
}

pub type Result<T, E = ProxyError> = std::result::Result<T, E>;
