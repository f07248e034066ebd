//! The engine's vocabulary: plain values that a user holds, sends to peers, or asks for.

mod address;
mod config;
mod descriptor;
mod envelope;
pub(crate) use envelope::Envelope;
mod imm;
mod op;

pub use address::{Endpoint, EngineAddress, EngineId};
pub use config::{EngineConfig, Requirement, Spin};
pub(crate) use descriptor::check_range;
pub use descriptor::{CounterRef, RailKey, RegionDescriptor, RegionKey};
pub(crate) use imm::SLOTS;
pub use imm::{Imm, FIRST_ALLOCATED_SLOT};
pub use op::{IndexList, Local, Op, PageIndices, Pages, Remote, ScatterDst};

use serde::{Deserialize, Serialize};

/// The kinds of link that an engine can use. New kinds go at the end: the number is on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TransportKind {
    Shm,
    Tcp,
    Sim,
    Null,
}

impl TransportKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Sim => "sim",
            Self::Null => "null",
        }
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
        [Self::Shm, Self::Tcp, Self::Sim, Self::Null]
            .into_iter()
            .find(|k| k.name() == s)
            .ok_or_else(|| {
                crate::EngineError::Invalid(format!("unknown transport {s:?}: use shm or tcp"))
            })
    }
}
