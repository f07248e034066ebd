use fabric_engine::{api::RegionDescriptor, EngineError};
use serde::{Deserialize, Serialize};

use crate::Result;

/// Memory that peers use to reach one thread of a rank's proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadDescriptor {
    /// The rank's part of symmetric memory.
    pub memory: RegionDescriptor,
    /// The region that receives the thread's atomics.
    pub control: RegionDescriptor,
}

/// Memory that peers use to reach one incarnation of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankDescriptor {
    pub rank: u16,
    pub incarnation: u32,
    pub threads: Vec<ThreadDescriptor>,
}

const WHAT: &str = "a rank's descriptor";
/// Maximum length in bytes; 64 threads need about as many.
const LIMIT: usize = 1 << 20;

impl RankDescriptor {
    pub fn to_bytes(&self) -> Vec<u8> {
        // Serialising plain values into memory cannot fail.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// # Errors
    /// [`EngineError::Decode`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let fail = |cause: String| EngineError::Decode { what: WHAT, cause };
        if bytes.len() > LIMIT {
            return Err(fail(format!("got {} bytes, expected at most {LIMIT}", bytes.len())).into());
        }
        let (this, rest) =
            postcard::take_from_bytes::<Self>(bytes).map_err(|e| fail(e.to_string()))?;
        if !rest.is_empty() {
            return Err(fail(format!("{} bytes are left over", rest.len())).into());
        }
        let regions = this.threads.iter().flat_map(|t| [&t.memory, &t.control]);
        for region in regions {
            if region.offset.checked_add(region.len).is_none() {
                return Err(fail("a region exceeds the address space".into()).into());
            }
        }
        Ok(this)
    }
}
