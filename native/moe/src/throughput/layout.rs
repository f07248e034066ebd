//! The layout of each rank's part of the symmetric memory.
//!
//! | area | slots | written by |
//! |---|---|---|
//! | own | a rank's tokens | this rank, at dispatch |
//! | preambles | one for each rank and channel | this rank, at dispatch |
//! | rings out | tokens from sources and gateways | peers |
//! | rings back | answers and sums from ranks and gateways | peers |
//! | outbox | answers and sums to gateways and sources, as they lie in the rings there | this rank, at combine |

use fabric_engine::{EngineError, Result};

use super::spec::Spec;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    spec: Spec,
    preambles: u64,
    rings_out: u64,
    rings_back: u64,
    outbox: u64,
    end: u64,
}

impl Layout {
    /// # Errors
    /// [`EngineError::Invalid`] for a spec that can't be.
    pub fn new(spec: Spec) -> Result<Self> {
        spec.check()?;
        let rings =
            Self::first_spare(&spec) * spec.slots() + spec.spare() * Self::spare_slots(&spec);
        let preambles = u64::from(spec.shape.ranks) * u64::from(spec.channels);
        let mut end = 0u64;
        let mut area = |slots: u64, stride: u64| {
            let begin = end;
            end = slots
                .checked_mul(stride)
                .and_then(|n| begin.checked_add(n))
                .and_then(|n| n.checked_next_multiple_of(4096))
                // Commands count 16 bytes in 32 bits.
                .filter(|end| *end <= 1 << 36)
                .ok_or_else(|| {
                    let text = "the rings would take over 64 GiB; use fewer or smaller chunks";
                    EngineError::Invalid(text.into())
                })?;
            Ok::<u64, EngineError>(begin)
        };
        area(u64::from(spec.shape.max_tokens), spec.out_stride())?;
        let preambles = area(preambles, spec.out_stride())?;
        let rings_out = area(rings, spec.out_stride())?;
        let rings_back = area(rings, spec.back_stride())?;
        let outbox = area(rings, spec.back_stride())?;
        Ok(Self { spec, preambles, rings_out, rings_back, outbox, end })
    }

    /// Bytes of a rank's part.
    pub fn nbytes(&self) -> u64 {
        self.end
    }

    pub fn own(&self, token: u32) -> u64 {
        u64::from(token) * self.spec.out_stride()
    }

    pub fn preamble(&self, channel: u32, node: u32) -> u64 {
        let i = u64::from(channel) * u64::from(self.spec.shape.ranks) + u64::from(node);
        self.preambles + i * self.spec.out_stride()
    }

    /// The number of a ring among all of a rank, which names its words.
    pub fn number(&self, channel: u32, back: bool, ring: u64) -> u64 {
        let each = u64::from(self.spec.shape.ranks - 1);
        match ring.checked_sub(each) {
            None => (2 * u64::from(channel) + u64::from(back)) * each + ring,
            Some(spare) => {
                2 * Self::first_spare(&self.spec) + u64::from(back) * self.spec.spare() + spare
            }
        }
    }

    /// Rings in each direction, without those that are used only while a rank is missing.
    fn first_spare(spec: &Spec) -> u64 {
        u64::from(spec.channels) * u64::from(spec.shape.ranks - 1)
    }

    /// Slots of such a ring: as few as it can have.
    fn spare_slots(spec: &Spec) -> u64 {
        2 * u64::from(spec.chunk)
    }

    /// Slots of a ring.
    pub fn slots(&self, ring: u64) -> u64 {
        match ring < u64::from(self.spec.shape.ranks - 1) {
            true => self.spec.slots(),
            false => Self::spare_slots(&self.spec),
        }
    }

    /// Bytes from one slot to the next, on the way to experts or on the way back.
    pub fn stride(&self, back: bool) -> u64 {
        match back {
            false => self.spec.out_stride(),
            true => self.spec.back_stride(),
        }
    }

    pub fn ring_out(&self, channel: u32, ring: u64) -> u64 {
        self.rings_out + self.ring(channel, ring) * self.spec.out_stride()
    }

    pub fn ring_back(&self, channel: u32, ring: u64) -> u64 {
        self.rings_back + self.ring(channel, ring) * self.spec.back_stride()
    }

    pub fn outbox(&self, channel: u32, ring: u64) -> u64 {
        self.outbox + self.ring(channel, ring) * self.spec.back_stride()
    }

    fn ring(&self, channel: u32, ring: u64) -> u64 {
        let each = u64::from(self.spec.shape.ranks - 1);
        match ring.checked_sub(each) {
            None => (u64::from(channel) * each + ring) * self.spec.slots(),
            Some(spare) => {
                let first = Self::first_spare(&self.spec) * self.spec.slots();
                first + spare * Self::spare_slots(&self.spec)
            }
        }
    }

    /// The word with the tail of a ring that ends here.
    pub fn tail(&self, number: u64) -> u64 {
        number
    }

    /// The word with the head of a ring that begins here.
    pub fn head(&self, number: u64) -> u64 {
        self.spec.rings() + number
    }

    /// The word in which other ranks report that they have given up a rank.
    pub fn given_up(&self, rank: u32) -> u64 {
        2 * self.spec.rings() + u64::from(rank)
    }

    /// The word that a rank increments while it is in a call.
    pub fn beat(&self, rank: u32) -> u64 {
        2 * self.spec.rings() + u64::from(self.spec.shape.ranks + rank)
    }

    /// Name, purpose and bytes of each area.
    pub fn explain(&self) -> Vec<(&'static str, String, u64)> {
        let s = &self.spec;
        let ring = format!("{} slots: {} chunks of {} tokens", s.slots(), s.ring_chunks, s.chunk);
        let rings = match s.spare() {
            0 => format!("{} rings of {ring}", Self::first_spare(s)),
            spare => format!(
                "{} rings of {ring}, and {spare} of {} for when a rank is missing",
                Self::first_spare(s),
                Self::spare_slots(s)
            ),
        };
        vec![
            ("own", format!("{} tokens", s.shape.max_tokens), self.preambles),
            (
                "preambles",
                format!("{} ranks x {} channels", s.shape.ranks, s.channels),
                self.rings_out - self.preambles,
            ),
            ("rings out", rings.clone(), self.rings_back - self.rings_out),
            ("rings back", rings.clone(), self.outbox - self.rings_back),
            ("outbox", rings, self.end - self.outbox),
        ]
    }
}
