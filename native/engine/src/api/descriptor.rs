use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{envelope::Envelope, EngineAddress, EngineId, Imm};
use crate::{EngineError, Result};

const REGION: Envelope = Envelope::new(*b"FRmr", "a region descriptor", 8192);
const COUNTER: Envelope = Envelope::new(*b"FRct", "a counter reference", 64);

/// Identifies a registered region at its owner. The key is random, so peers can't guess it, and it
/// ends with the registration (MR-2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RegionKey {
    pub index: u32,
    pub rkey: u64,
}

/// The key with which one NIC of the owner accepts a write. A registration above the NIC's limit
/// has several keys, each for the bytes from its `offset` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RailKey {
    /// The NIC: its place among the endpoints of the owner's address.
    pub rail: u8,
    /// Start of the region's part of the registration, bytes.
    pub offset: u64,
    /// Address of that offset for the NIC: a virtual address, or 0 for NICs that count from the
    /// start.
    pub base: u64,
    pub key: u64,
}

/// The NICs' keys of one registration, by rail and offset; none on software transports. Cheap to
/// clone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<RailKey>", into = "Vec<RailKey>")]
pub struct RailKeys(Option<Arc<[RailKey]>>);

impl RailKeys {
    pub fn as_slice(&self) -> &[RailKey] {
        self.0.as_deref().unwrap_or_default()
    }

    /// The key for byte `offset` of the registration on a rail, and where the next key takes over.
    #[inline]
    pub fn find(&self, rail: u8, offset: u64) -> Option<(&RailKey, u64)> {
        let keys = self.as_slice();
        let after = keys.partition_point(|k| (k.rail, k.offset) <= (rail, offset));
        let key = keys[..after].last().filter(|k| k.rail == rail)?;
        let end = keys.get(after).filter(|k| k.rail == rail).map_or(u64::MAX, |k| k.offset);
        Some((key, end))
    }
}

impl From<Vec<RailKey>> for RailKeys {
    fn from(mut keys: Vec<RailKey>) -> Self {
        keys.sort_by_key(|k| (k.rail, k.offset));
        Self((!keys.is_empty()).then(|| keys.into()))
    }
}

impl From<RailKeys> for Vec<RailKey> {
    fn from(keys: RailKeys) -> Self {
        keys.as_slice().to_vec()
    }
}

/// A memory region, or a part of one, as peers see it. Serialisable; holds no pointer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionDescriptor {
    pub owner: EngineAddress,
    pub key: RegionKey,
    /// Start of this part in the registration, bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    pub rail_keys: RailKeys,
}

impl RegionDescriptor {
    /// As peers decode it if [`RegionDescriptor::check_size`] holds.
    pub fn to_bytes(&self) -> Vec<u8> {
        REGION.encode(self)
    }

    /// Checks before the encoding is sent that a peer accepts it.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: it is too long, since the registration has too many keys of NICs.
    pub fn check_size(&self) -> Result<()> {
        let keys = self.rail_keys.as_slice().len();
        REGION.check_size(self).map_err(|e| {
            EngineError::Invalid(format!(
                "{e}; it has {keys} keys of NICs: register fewer bytes at a time, or use fewer NICs"
            ))
        })
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

/// A reference to a counter of an engine, for its writers.
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

    /// # Errors
    /// None: references have one size. For callers that treat all values alike.
    pub fn check_size(&self) -> Result<()> {
        Ok(())
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        COUNTER.decode(bytes)
    }
}

/// Checks a range against a limit: the sender's half of MR-3. No sum of untrusted numbers is formed
/// before it, so nothing wraps.
#[inline]
pub(crate) fn check_range(what: &str, offset: u64, len: u64, limit: u64) -> Result<()> {
    match offset.checked_add(len).is_some_and(|end| end <= limit) {
        true => Ok(()),
        false => Err(out_of_bounds(what, (offset, len), limit)),
    }
}

#[cold]
fn out_of_bounds(what: &str, (offset, len): (u64, u64), limit: u64) -> EngineError {
    EngineError::OutOfBounds { what: what.to_owned(), offset, len, limit }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn descriptor(keys: u64) -> RegionDescriptor {
        let key = |i| RailKey { rail: 31, offset: i << 32, base: u64::MAX, key: u64::MAX };
        RegionDescriptor {
            owner: EngineAddress { id: EngineId([7; 16]), name: "a".into(), endpoints: vec![] },
            key: RegionKey { index: 1, rkey: 2 },
            offset: 0,
            len: keys << 32,
            rail_keys: (0..keys).map(key).collect::<Vec<_>>().into(),
        }
    }

    #[test]
    fn the_size_is_accepted_of_what_decodes_and_of_nothing_else() {
        let mut accepted = 0;
        for keys in 1..500 {
            let descriptor = descriptor(keys);
            let decoded = RegionDescriptor::from_bytes(&descriptor.to_bytes());
            match descriptor.check_size() {
                Ok(()) => {
                    assert_eq!(decoded.unwrap(), descriptor);
                    accepted = keys;
                }
                Err(EngineError::Invalid(text)) => {
                    assert!(decoded.is_err());
                    assert!(text.contains(&format!("it has {keys} keys")), "{text}");
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!((100..499).contains(&accepted), "{accepted}");
    }
}
