//! A rank's descriptor, sent before the first exchange.

use fabric_engine::{api::EngineId, Result};
use serde::{Deserialize, Serialize};

use super::spec::Spec;
use crate::rank_descriptor::Format;

/// The version is incremented when the meaning of a descriptor, of a slot, of an atomic word or of
/// a notice changes.
pub(crate) const FORMAT: Format = Format { mark: *b"FET", version: 4 };

/// A rank of a high-throughput exchange, as other ranks see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankDescriptor {
    pub spec: Spec,
    #[serde(rename = "life")]
    pub incarnation: u32,
    /// The state of each rank as this rank knows it: twice its incarnation, plus one if that has
    /// ended.
    pub events: Vec<u32>,
    /// The engine with which the rank makes its exchanges. Those of the proxy are others.
    pub engine: EngineId,
    /// A [`RankDescriptor`](fabric_proxy::RankDescriptor).
    pub proxy: Vec<u8>,
}

impl RankDescriptor {
    pub fn to_bytes(&self) -> Vec<u8> {
        FORMAT.encode(self)
    }

    /// # Errors
    /// [`EngineError::Decode`](fabric_engine::EngineError::Decode) for invalid bytes, or for another
    /// version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        FORMAT.decode(bytes)
    }
}
