//! The 32 bits that a counted write carries: 20 bits slot, 8 bits generation, 4 bits exponent.
//!
//! An immediate on a NIC's wire counts 2^exponent writes: on links that keep order, one immediate
//! at the end of a run of pages counts them all. A value without exponent names the counter.

use crate::{EngineError, Result};

const SLOT_BITS: u32 = 20;
const GENERATION_BITS: u32 = 8;
pub(crate) const SLOTS: u32 = 1 << SLOT_BITS;
/// The largest exponent, and the bits it takes.
const WEIGHTS: u32 = (1 << (32 - SLOT_BITS - GENERATION_BITS)) - 1;

/// Slots below this are plain integers on which users agree. The receiver allocates the others,
/// with a generation (IC-6).
pub const FIRST_ALLOCATED_SLOT: u32 = SLOTS / 2;

/// The slots of tagged immediates: the upper half of the plain ones. The generation's bits are part
/// of the tag.
const FIRST_TAGGED_SLOT: u32 = FIRST_ALLOCATED_SLOT / 2;
/// Bits of a tag; see [`Imm::tagged`].
pub const TAG_BITS: u32 = FIRST_TAGGED_SLOT.trailing_zeros() + GENERATION_BITS;

/// An immediate value: which counter of the receiver a write counts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Imm(u32);

impl Imm {
    /// A pre-agreed value below [`FIRST_ALLOCATED_SLOT`].
    pub fn plain(value: u32) -> Result<Self> {
        if value >= FIRST_ALLOCATED_SLOT {
            return Err(EngineError::Invalid(format!(
                "immediate {value} is too large: plain values end at {}, or take one from \
                 TransferEngine.counter()",
                FIRST_ALLOCATED_SLOT - 1
            )));
        }
        Ok(Self(value << (32 - SLOT_BITS)))
    }

    /// A value below 2^[`TAG_BITS`] that the receiver is told as it is: for engines that take tags,
    /// by [`TransferEngine::take_tags`](crate::TransferEngine::take_tags). Elsewhere it means
    /// nothing.
    pub fn tagged(value: u32) -> Result<Self> {
        if value >> TAG_BITS != 0 {
            return Err(EngineError::Invalid(format!(
                "tag {value} is too large: it has {TAG_BITS} bits"
            )));
        }
        Ok(Self(
            (FIRST_TAGGED_SLOT << (32 - SLOT_BITS)) + (value << (32 - SLOT_BITS - GENERATION_BITS)),
        ))
    }

    /// The value of a tagged immediate.
    #[inline]
    pub(crate) fn tag(self) -> Option<u32> {
        let tagged = (FIRST_TAGGED_SLOT..FIRST_ALLOCATED_SLOT).contains(&self.slot());
        let value = self.0 >> (32 - SLOT_BITS - GENERATION_BITS) & ((1 << TAG_BITS) - 1);
        tagged.then_some(value)
    }

    pub(crate) fn allocated(slot: u32, generation: u8) -> Self {
        debug_assert!((FIRST_ALLOCATED_SLOT..SLOTS).contains(&slot));
        Self::of_slot(slot, generation)
    }

    pub(crate) fn of_slot(slot: u32, generation: u8) -> Self {
        Self(slot << (32 - SLOT_BITS) | u32::from(generation) << (32 - SLOT_BITS - GENERATION_BITS))
    }

    pub(crate) fn from_wire(raw: u32) -> Self {
        Self(raw)
    }

    pub(crate) fn to_wire(self) -> u32 {
        self.0
    }

    /// The fewest immediates that count `n` writes on the counter `raw`: powers of two.
    pub(crate) fn weighted(raw: u32, n: u32) -> impl Iterator<Item = u32> {
        let largest = 1u32 << WEIGHTS;
        let whole = std::iter::repeat_n(raw | WEIGHTS, (n / largest) as usize);
        let rest = n % largest;
        whole.chain((0..WEIGHTS).filter(move |e| rest >> e & 1 == 1).map(move |e| raw | e))
    }

    /// The counter and the number of writes that an immediate from the wire stands for.
    pub(crate) fn unweighted(wire: u32) -> (u32, u32) {
        (wire & !WEIGHTS, 1 << (wire & WEIGHTS))
    }

    pub(crate) fn slot(self) -> u32 {
        self.0 >> (32 - SLOT_BITS)
    }

    pub(crate) fn generation(self) -> u8 {
        (self.0 >> (32 - SLOT_BITS - GENERATION_BITS)) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ic_1_weights_of_immediates_add_up() {
        let raw = Imm::allocated(FIRST_ALLOCATED_SLOT, 9).to_wire();
        for n in [1, 2, 3, 16, 17, 1 << 15, (1 << 15) + 5, 300_000] {
            let imms: Vec<u32> = Imm::weighted(raw, n).collect();
            let back = imms.iter().map(|w| Imm::unweighted(*w));
            assert!(back.clone().all(|(r, _)| r == raw));
            assert_eq!(back.map(|(_, n)| n).sum::<u32>(), n);
            assert!(imms.len() <= 15 + n as usize / (1 << 15));
        }
        assert_eq!(Imm::weighted(raw, 1).collect::<Vec<_>>(), [raw]);
    }

    #[test]
    fn tags_have_a_range_of_their_own() {
        for value in [0, 1, 255, 256, (1 << TAG_BITS) - 1] {
            assert_eq!(Imm::tagged(value).unwrap().tag(), Some(value));
        }
        assert!(Imm::tagged(1 << TAG_BITS).is_err());
        assert_eq!(Imm::plain(FIRST_TAGGED_SLOT - 1).unwrap().tag(), None);
        assert_eq!(Imm::allocated(FIRST_ALLOCATED_SLOT, 255).tag(), None);
    }

    #[test]
    fn slot_and_generation_survive_the_wire() {
        for slot in [FIRST_ALLOCATED_SLOT, SLOTS - 1] {
            for generation in [0, 1, 255] {
                let imm = Imm::from_wire(Imm::allocated(slot, generation).to_wire());
                assert_eq!((imm.slot(), imm.generation()), (slot, generation));
            }
        }
        let plain = Imm::plain(7).unwrap();
        assert_eq!((plain.slot(), plain.generation()), (7, 0));
        assert!(Imm::plain(FIRST_ALLOCATED_SLOT).is_err());
    }
}
