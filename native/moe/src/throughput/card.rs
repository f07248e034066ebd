//! What a rank tells the others before the first exchange: msgpack behind a mark and a version.
//!
//! Cards come from peers: decoding is bounded by the message, and what they say is checked where it is used.

use fabric_engine::{EngineError, Result};
use serde::{Deserialize, Serialize};

use super::spec::Spec;

const MARK: [u8; 3] = *b"FET";
/// Bumped when the meaning of a card, of a slot or of an atomic word changes.
pub const VERSION: u8 = 2;

/// A rank, as others see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    pub spec: Spec,
    /// Which life of the rank it is.
    pub life: u32,
    /// What the rank knows to have happened to each: twice the number of its life, and one more if that is over.
    pub events: Vec<u32>,
    /// A [`RankDescriptor`](fabric_proxy::RankDescriptor).
    pub proxy: Vec<u8>,
}

impl Card {
    pub fn to_bytes(&self) -> Vec<u8> {
        // Plain fields in memory can't fail to be written down.
        Self::sealed(&rmp_serde::to_vec_named(self).unwrap_or_default())
    }

    /// A body behind the mark and this build's version.
    pub(crate) fn sealed(body: &[u8]) -> Vec<u8> {
        [&MARK[..], &[VERSION], body].concat()
    }

    /// # Errors
    /// [`EngineError::Decode`] for what is no card, or one of another version.
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
