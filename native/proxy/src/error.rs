use fabric_engine::EngineError;

use crate::{command::CommandError, fifo::FifoError, order::OrderError};

/// An error between a device and a peer's device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyError {
    #[error("rank {rank} is out of range [0, {ranks})")]
    Rank { rank: usize, ranks: usize },

    #[error("rank {rank} is not connected; give its descriptor to join()")]
    NotConnected { rank: usize },

    #[error("rank {rank}: bytes {offset}..{end} exceed its {limit} bytes of symmetric memory", end = .offset.saturating_add(*.len))]
    OutOfBounds { rank: usize, offset: u64, len: u64, limit: u64 },

    #[error("rank {rank} has {len} bytes of symmetric memory, this rank has {local}; allocate the same on all ranks")]
    UnequalMemory { rank: usize, len: u64, local: u64 },

    #[error("slot {slot} is out of range [0, {slots}); open the proxy with more atomic words")]
    Slot { slot: u16, slots: usize },

    /// The rank violated a rule of the protocol, and is treated as lost.
    #[error("rank {rank} violated the protocol: {cause}; run the same version on all ranks")]
    Protocol { rank: usize, cause: OrderError },

    #[error("rank {rank} did not {what} within {after:?}; it is lost; mask it on all ranks or let it join again")]
    Silent { rank: usize, what: &'static str, after: std::time::Duration },

    #[error(
        "rank {rank}: requests to it may still land; it is lost, let it join again with new memory"
    )]
    NotQuiesced { rank: usize },

    #[error("rank {rank} joins with incarnation {given}, but its latest is {had}; open it with a larger one")]
    StaleIncarnation { rank: usize, given: u32, had: u32 },

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
