//! A rank's descriptor, sent before the first exchange: msgpack behind a mark and a version.
//!
//! Descriptors come from peers: the message bounds decoding, and values are checked where they are
//! used.

use fabric_engine::{EngineError, Result};
use serde::{Deserialize, Serialize};

use super::spec::Spec;

const MARK: [u8; 3] = *b"FET";
/// Incremented when the meaning of a descriptor, of a slot or of an atomic word changes.
pub const VERSION: u8 = 2;

/// A rank, as other ranks see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    pub spec: Spec,
    /// The incarnation of the rank.
    pub life: u32,
    /// The state of each rank as this rank knows it: twice its incarnation, plus one if that has
    /// ended.
    pub events: Vec<u32>,
    /// A [`RankDescriptor`](fabric_proxy::RankDescriptor).
    pub proxy: Vec<u8>,
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
            return Err(fail("it doesn't begin like one of a high-throughput exchange".into()));
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
