//! A rank's descriptor, sent before the first exchange: msgpack behind a mark and a version.
//!
//! Descriptors come from peers: the message bounds decoding, and values are checked where they are
//! used.

use fabric_engine::{
    api::{CounterRef, EngineAddress, RegionDescriptor},
    EngineError, Result,
};
use serde::{de::DeserializeOwned, Deserialize, Serialize};

use crate::{exchange::MESSAGE_KINDS, shape::Shape};

/// The first bytes of a kind of descriptor, and its version.
pub(crate) struct Format {
    pub mark: [u8; 3],
    pub version: u8,
}

impl Format {
    /// A body behind the mark and this build's version.
    pub fn seal(&self, body: &[u8]) -> Vec<u8> {
        [&self.mark[..], &[self.version], body].concat()
    }

    pub fn encode(&self, descriptor: &impl Serialize) -> Vec<u8> {
        // Serialising plain values into memory cannot fail.
        self.seal(&rmp_serde::to_vec_named(descriptor).unwrap_or_default())
    }

    /// # Errors
    /// [`EngineError::Decode`] for invalid bytes, or for another version.
    pub fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T> {
        let fail = |cause: String| EngineError::Decode { what: "a rank's descriptor", cause };
        let (head, body) = bytes
            .split_at_checked(4)
            .ok_or_else(|| fail(format!("got {} bytes, expected at least 4", bytes.len())))?;
        if head[..3] != self.mark {
            return Err(fail(format!(
                "it begins with {:?}, expected {:?}; use one kind of exchange on all ranks",
                head[..3].escape_ascii().to_string(),
                self.mark.escape_ascii().to_string()
            )));
        }
        if head[3] != self.version {
            return Err(fail(format!(
                "got version {}, expected {}; run the same version on all ranks",
                head[3], self.version
            )));
        }
        rmp_serde::from_slice(body).map_err(|e| fail(e.to_string()))
    }
}

/// The version is incremented when the meaning of a descriptor, of a block in memory, or of a count
/// changes.
pub(crate) const FORMAT: Format = Format { mark: *b"FEP", version: 4 };

/// A rank of a low-latency exchange, as other ranks see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankDescriptor {
    pub rank: u32,
    pub shape: Shape,
    pub address: EngineAddress,
    /// The memory that each rank may use; `None` for ranks that the descriptor was not made for.
    #[serde(rename = "grants")]
    pub exports: Vec<Option<PeerExport>>,
}

/// Descriptors of the memory of a rank that one peer may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerExport {
    pub control: RegionDescriptor,
    pub rows: RegionDescriptor,
    pub counters: [CounterRef; MESSAGE_KINDS],
}

impl RankDescriptor {
    pub fn to_bytes(&self) -> Vec<u8> {
        FORMAT.encode(self)
    }

    /// # Errors
    /// [`EngineError::Decode`] for invalid bytes, or for another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        FORMAT.decode(bytes)
    }
}
