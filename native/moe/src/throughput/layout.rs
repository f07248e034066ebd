//! What lies where in each rank's part of the symmetric memory.
//!
//! | area | slots | written by |
//! |---|---|---|
//! | own | a rank's tokens | this rank, at dispatch |
//! | preambles | one for each node and channel | this rank, at dispatch |
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
        let rings = spec.rings() / 2 * spec.slots();
        let preambles = u64::from(spec.nodes() * spec.channels);
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
        let i = u64::from(channel * self.spec.nodes() + node);
        self.preambles + i * self.spec.out_stride()
    }

    /// The number of a ring among all of a rank, which names its words.
    pub fn number(&self, channel: u32, back: bool, ring: u64) -> u64 {
        let each = u64::from(self.spec.shape.ranks - 1);
        (2 * u64::from(channel) + u64::from(back)) * each + ring
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
        (u64::from(channel) * each + ring) * self.spec.slots()
    }

    /// The word with the tail of a ring that ends here.
    pub fn tail(&self, number: u64) -> u64 {
        number
    }

    /// The word with the head of a ring that begins here.
    pub fn head(&self, number: u64) -> u64 {
        self.spec.rings() + number
    }

    /// The word that says that others have given up a rank.
    pub fn given_up(&self, rank: u32) -> u64 {
        2 * self.spec.rings() + u64::from(rank)
    }

    /// The word that a rank moves while it is in a call.
    pub fn beat(&self, rank: u32) -> u64 {
        2 * self.spec.rings() + u64::from(self.spec.shape.ranks + rank)
    }

    /// What each area is for, and its bytes.
    pub fn explain(&self) -> Vec<(&'static str, String, u64)> {
        let s = &self.spec;
        let ring = format!("{} slots: {} chunks of {} tokens", s.slots(), s.ring_chunks, s.chunk);
        let rings = s.rings() / 2;
        vec![
            ("own", format!("{} tokens", s.shape.max_tokens), self.preambles),
            (
                "preambles",
                format!("{} nodes x {} channels", s.nodes(), s.channels),
                self.rings_out - self.preambles,
            ),
            ("rings out", format!("{rings} rings of {ring}"), self.rings_back - self.rings_out),
            ("rings back", format!("{rings} rings of {ring}"), self.outbox - self.rings_back),
            ("outbox", format!("{rings} rings of {ring}"), self.end - self.outbox),
        ]
    }
}
