use serde::{Deserialize, Serialize};

use super::{envelope::Envelope, EngineAddress, EngineId, Imm};
use crate::{EngineError, Result};

const REGION: Envelope = Envelope { magic: *b"FRmr", what: "a region descriptor", limit: 8192 };
const COUNTER: Envelope = Envelope { magic: *b"FRct", what: "a counter reference", limit: 64 };

/// Names a registered region to its owner. The key is random: without a descriptor it can't be
/// guessed, and it dies with the registration (MR-2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RegionKey {
    pub index: u32,
    pub rkey: u64,
}

/// What one NIC of the owner needs to be shown to accept a write; empty on software transports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RailKey {
    pub rail: u8,
    pub data: Vec<u8>,
}

/// A memory region, or a part of one, as peers see it. Serialisable; holds no pointer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionDescriptor {
    pub owner: EngineAddress,
    pub key: RegionKey,
    /// Where this part begins in the registration, bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    pub rail_keys: Vec<RailKey>,
}

impl RegionDescriptor {
    pub fn to_bytes(&self) -> Vec<u8> {
        REGION.encode(self)
    }

    /// Bounded and checked; see [`EngineError::Decode`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let d: Self = REGION.decode(bytes)?;
        if d.offset.checked_add(d.len).is_none() {
            return Err(EngineError::Decode {
                what: REGION.what,
                cause: format!("offset {} plus length {} overflows", d.offset, d.len),
            });
        }
        Ok(d)
    }

    /// A part of this region: `len` bytes from `offset`.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self> {
        check_range("region descriptor", offset, len, self.len)?;
        Ok(Self { offset: self.offset + offset, len, ..self.clone() })
    }
}

/// A counter of some engine, to be named by those who write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CounterRef {
    pub owner: EngineId,
    pub(crate) raw: u32,
}

impl CounterRef {
    pub fn new(owner: EngineId, imm: Imm) -> Self {
        Self { owner, raw: imm.to_wire() }
    }

    pub fn imm(&self) -> Imm {
        Imm::from_wire(self.raw)
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        COUNTER.encode(self)
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        COUNTER.decode(bytes)
    }
}

/// The one bounds check: no sum of untrusted numbers is formed before it (2^63 must not wrap).
pub(crate) fn check_range(what: &str, offset: u64, len: u64, limit: u64) -> Result<()> {
    if offset.checked_add(len).is_some_and(|end| end <= limit) {
        return Ok(());
    }
    Err(EngineError::OutOfBounds { what: what.to_owned(), offset, len, limit })
}
