use fabric_engine::{api::RegionDescriptor, EngineError};
use serde::{Deserialize, Serialize};

use crate::Result;

/// What peers need to reach one thread of a rank's proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadDescriptor {
    /// The rank's part of symmetric memory.
    pub memory: RegionDescriptor,
    /// Where its atomics are put.
    pub control: RegionDescriptor,
}

/// What peers need to reach a rank, in one of its lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankDescriptor {
    pub rank: u16,
    pub incarnation: u32,
    pub threads: Vec<ThreadDescriptor>,
}

const WHAT: &str = "a rank's descriptor";
/// Bytes; 64 threads have about as many.
const LIMIT: usize = 1 << 20;

impl RankDescriptor {
    pub fn to_bytes(&self) -> Vec<u8> {
        // Serialising our own plain values into memory has no way to fail.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// # Errors
    /// [`EngineError::Decode`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let fail = |cause: String| EngineError::Decode { what: WHAT, cause };
        if bytes.len() > LIMIT {
            return Err(fail(format!("{} bytes, at most {LIMIT} are allowed", bytes.len())).into());
        }
        let (this, rest) =
            postcard::take_from_bytes::<Self>(bytes).map_err(|e| fail(e.to_string()))?;
        if !rest.is_empty() {
            return Err(fail(format!("{} bytes too many", rest.len())).into());
        }
        let regions = this.threads.iter().flat_map(|t| [&t.memory, &t.control]);
        for region in regions {
            if region.offset.checked_add(region.len).is_none() {
                return Err(fail("a region passes the end of memory".into()).into());
            }
        }
        Ok(this)
    }
}
