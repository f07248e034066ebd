//! The format of the table: a header, and a record for each engine.
//!
//! Readers and writers never wait for each other, so a record may be read in the middle of a write.
//! A checksum detects that, and bytes that were never a record.

use std::ops::Range;

use crate::group::policy::{classes::ByClass, divide::NicSharer};

/// Bytes of a slot, and of the header.
pub(super) const SLOT: usize = 64;
pub(super) const SLOTS: usize = 127;
pub(super) const SIZE: usize = SLOT * (SLOTS + 1);
const VERSION: u32 = 1;

/// The byte range of a slot; its lock covers the same bytes.
pub(super) fn slot_range(slot: usize) -> Range<u64> {
    let start = (slot + 1) * SLOT;
    start as u64..(start + SLOT) as u64
}

/// The byte range of all slots.
pub(super) fn all() -> Range<u64> {
    SLOT as u64..SIZE as u64
}

/// The header. Sizes follow from the version, and are never read from the table.
pub(super) fn header() -> [u8; SLOT] {
    let mut bytes = [0; SLOT];
    bytes[..8].copy_from_slice(b"fabquota");
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Random; each engine that takes the slot draws a new one.
    pub id: u64,
    /// Incremented by each write, so that silence shows.
    pub beat: u64,
    pub sharer: NicSharer,
}

/// The content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotContent {
    Empty,
    /// In the middle of a write, or damaged.
    Torn,
    Record(Record),
}

impl Record {
    pub fn encode(&self) -> [u8; SLOT] {
        let ByClass { latency, bulk, background } = self.sharer.demand;
        let mut bytes = [0; SLOT];
        let words = [self.id, self.beat, u64::from(self.sharer.weight), latency, bulk, background];
        for (at, word) in bytes.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        let sum = crc32fast::hash(&bytes[..SLOT - 4]);
        bytes[SLOT - 4..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }
}

impl SlotContent {
    pub fn decode(bytes: &[u8; SLOT]) -> Self {
        if *bytes == [0; SLOT] {
            return Self::Empty;
        }
        let (body, sum) = bytes.split_at(SLOT - 4);
        if crc32fast::hash(body).to_le_bytes() != sum {
            return Self::Torn;
        }
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| bytes[8 * i + k]));
        let demand = ByClass { latency: word(3), bulk: word(4), background: word(5) };
        let sharer = NicSharer { weight: u32::try_from(word(2)).unwrap_or(u32::MAX), demand };
        Self::Record(Record { id: word(0), beat: word(1), sharer })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(n: u64) -> Record {
        let demand = ByClass { latency: n, bulk: n.rotate_left(20), background: !n };
        Record { id: n ^ 77, beat: n, sharer: NicSharer { weight: n as u32, demand } }
    }

    #[test]
    fn the_bytes_of_version_1() {
        let demand = ByClass { latency: 4, bulk: 5, background: 6 };
        let bytes = Record { id: 1, beat: 2, sharer: NicSharer { weight: 3, demand } }.encode();
        assert_eq!(bytes[..48].iter().step_by(8).copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(&header()[..12], b"fabquota\x01\0\0\0");
        assert_eq!((slot_range(0), slot_range(SLOTS - 1).end), (64..128, SIZE as u64));
        assert_eq!(SlotContent::decode(&[0; SLOT]), SlotContent::Empty);
    }

    proptest! {
        #[test]
        fn a_record_survives_whole_or_not_at_all(
            n in any::<u64>(), m in any::<u64>(), cut in 0usize..=SLOT,
        ) {
            let (a, b) = (record(n), record(m));
            prop_assert_eq!(SlotContent::decode(&a.encode()), SlotContent::Record(a));
            let mut mixed = a.encode();
            mixed[..cut].copy_from_slice(&b.encode()[..cut]);
            let found = SlotContent::decode(&mixed);
            let whole = [SlotContent::Torn, SlotContent::Record(a), SlotContent::Record(b)];
            prop_assert!(whole.contains(&found), "{found:?}");
        }
    }
}
