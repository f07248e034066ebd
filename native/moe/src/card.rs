//! A rank's descriptor, sent before the first exchange: msgpack behind a mark and a version.
//!
//! Descriptors come from peers: the message bounds decoding, and values are checked where they are
//! used.

use fabric_engine::{
    api::{CounterRef, EngineAddress, RegionDescriptor},
    EngineError, Result,
};
use serde::{Deserialize, Serialize};

use crate::{exchange::STAGES, shape::Shape};

const MARK: [u8; 3] = *b"FEP";
/// Incremented when the meaning of a descriptor, of a block in memory, or of a count changes.
pub const VERSION: u8 = 3;

/// A rank, as other ranks see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    pub rank: u32,
    pub shape: Shape,
    pub address: EngineAddress,
    /// The memory that each rank may use; `None` for ranks that the descriptor was not made for.
    pub grants: Vec<Option<Grant>>,
}

/// The memory of a rank that one other rank may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub control: RegionDescriptor,
    pub rows: RegionDescriptor,
    pub counters: [CounterRef; STAGES],
}

impl Card {
    pub fn to_bytes(&self) -> Vec<u8> {
        // Plain fields in memory always serialise.
        Self::sealed(&rmp_serde::to_vec_named(self).unwrap_or_default())
    }

    /// A body behind the mark and this build's version.
    pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
        [&MARK[..], &[VERSION], body].concat()
    }

    /// # Errors
    /// [`EngineError::Decode`] for invalid bytes, or for another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let fail = |cause: String| EngineError::Decode { what: "a rank's card", cause };
        let (head, body) =
            bytes.split_at_checked(4).ok_or_else(|| fail("it is too short".into()))?;
        if head[..3] != MARK {
            return Err(fail("it doesn't begin like one".into()));
        }
        if head[3] != VERSION {
            return Err(fail(format!(
                "it has version {}, this build knows {VERSION}; run the same version on all ranks",
                head[3]
            )));
        }
        rmp_serde::from_slice(body).map_err(|e| fail(e.to_string()))
    }
}
