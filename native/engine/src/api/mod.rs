//! The engine's vocabulary: plain values that a user holds, sends to peers, or asks for.

mod address;
mod config;
mod descriptor;
mod envelope;
pub(crate) use envelope::{Envelope, Versions, WIRE};
mod imm;
mod pages;
mod priority;
mod segment;
mod span;

pub use address::{Endpoint, EngineAddress, EngineId};
pub use config::{EngineConfig, NicConfig, Requirement, Spin, Spray, MAX_RAILS};
pub(crate) use descriptor::check_range;
pub use descriptor::{CounterRef, RailKey, RailKeys, RegionDescriptor, RegionKey};
pub(crate) use imm::SLOTS;
pub use imm::{Imm, FIRST_ALLOCATED_SLOT, TAG_BITS};
pub use pages::{IndexList, PageIndices, Pages};
pub use priority::Priority;
pub(crate) use segment::{check_parts, cut, Cut};
pub use segment::{Place, SegmentDescriptor, SegmentPart, MOST_PARTS};
pub use span::Span;

use serde::{Deserialize, Serialize};

/// The kinds of link that an engine can use. New kinds go at the end: the number is on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TransportKind {
    Shm,
    Tcp,
    Sim,
    Null,
    Verbs,
    Libfabric,
    CudaIpc,
    /// From an engine to itself: between its memory and its files.
    File,
}

impl TransportKind {
    const ALL: [Self; 8] = [
        Self::Shm,
        Self::Tcp,
        Self::Sim,
        Self::Null,
        Self::Verbs,
        Self::Libfabric,
        Self::CudaIpc,
        Self::File,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Sim => "sim",
            Self::Null => "null",
            Self::Verbs => "verbs",
            Self::Libfabric => "libfabric",
            Self::CudaIpc => "cuda_ipc",
            Self::File => "file",
        }
    }

    /// Whether it drives NICs that place bytes by themselves, several of them side by side.
    pub fn has_nics(self) -> bool {
        matches!(self, Self::Verbs | Self::Libfabric)
    }
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for TransportKind {
    type Err = crate::EngineError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|k| k.name() == s).ok_or_else(|| {
            crate::EngineError::Invalid(format!(
                "unknown transport {s:?}: use shm, tcp, verbs, libfabric, cuda_ipc or file"
            ))
        })
    }
}
