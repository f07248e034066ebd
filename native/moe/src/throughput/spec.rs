use fabric_engine::{EngineError, Result};
use fabric_proxy::command::{CHANNELS, MAX_LEN, RANKS, SLOTS};
use serde::{Deserialize, Serialize};

use super::{command_channels, grid::Grid};
use crate::shape::{Shape, ALIGN};

/// The parameters that all ranks of a high-throughput exchange agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Shape of the exchange. Private and shared rows are unused: rings replace them.
    pub shape: Shape,
    /// Ranks of a node: rank `r` is on node `r / ranks_per_node`.
    pub ranks_per_node: u32,
    /// Rings of each pair of ranks, each with a part of the tokens.
    pub channels: u32,
    /// Tokens that are sent, credited and summed together.
    pub chunk: u32,
    /// Chunks that a ring holds; two at least, or sender and receiver would wait for one another.
    pub ring_chunks: u32,
    /// Proxy threads of each rank; channel `c` is served by thread `c % threads`.
    pub threads: u32,
}

impl Spec {
    /// # Errors
    /// [`EngineError::Invalid`], naming the field.
    pub fn check(&self) -> Result<()> {
        self.shape.check()?;
        let wrong = |text: String| Err(EngineError::Invalid(text));
        let ranks = self.shape.ranks;
        // One is left over for signals.
        let channels = (CHANNELS as u32 - 1) / command_channels(1);
        let limits = [
            ("ranks", ranks, 1, RANKS as u32),
            ("ranks_per_node", self.ranks_per_node, 1, ranks.min(64)),
            ("channels", self.channels, 1, channels),
            ("chunk", self.chunk, 1, 4096),
            ("ring_chunks", self.ring_chunks, 2, 4096),
            ("threads", self.threads, 1, self.channels),
        ];
        for (what, value, low, high) in limits {
            if !(low..=high).contains(&value) {
                return wrong(format!("{what} is {value}; give {low} to {high}"));
            }
        }
        if !ranks.is_multiple_of(self.ranks_per_node) {
            return wrong(format!(
                "{ranks} ranks are no whole number of nodes of {}; give every node as many",
                self.ranks_per_node
            ));
        }
        let widest = self.out_stride().max(self.back_stride());
        if widest > MAX_LEN {
            return wrong(format!(
                "a token takes {widest} bytes on its way, and a command carries {MAX_LEN}; use fewer elements"
            ));
        }
        if self.words() > SLOTS as u64 {
            return wrong(format!(
                "{} heads and tails of rings, and there are {SLOTS} atomic words; use fewer channels",
                self.words()
            ));
        }
        Ok(())
    }

    pub fn nodes(&self) -> u32 {
        self.shape.ranks / self.ranks_per_node
    }

    pub(super) fn grid(&self, rank: u32) -> Grid {
        let (ranks, per_node) = (self.shape.ranks, self.ranks_per_node);
        Grid { rank, ranks, per_node, home: per_node }
    }

    /// Experts of the ranks of a node.
    pub fn node_experts(&self) -> u32 {
        self.shape.local_experts() * self.ranks_per_node
    }

    /// Slots of a ring.
    pub fn slots(&self) -> u64 {
        u64::from(self.chunk) * u64::from(self.ring_chunks)
    }

    /// Bytes of what goes with a token beside its row: head, experts and weights.
    pub fn meta(&self) -> u64 {
        super::slots::HEAD + 8 * u64::from(self.shape.topk)
    }

    /// Bytes of a preamble, in words of 8.
    pub(super) fn preamble(&self) -> u64 {
        let counts = u64::from(self.ranks_per_node + self.node_experts());
        (super::slots::HEAD + 4 * counts).next_multiple_of(8)
    }

    /// Bytes from one slot to the next on the way to experts. A preamble fits as well.
    pub fn out_stride(&self) -> u64 {
        let row = self.meta() + u64::from(self.shape.row_nbytes);
        row.max(self.preamble()).next_multiple_of(ALIGN)
    }

    /// Bytes from one slot to the next on the way back.
    pub fn back_stride(&self) -> u64 {
        (super::slots::HEAD + self.shape.back_nbytes()).next_multiple_of(ALIGN)
    }

    /// The parameters while a rank is missing: every rank is its own node, and one channel carries
    /// the rings of this mode.
    pub(super) fn flat(&self) -> Self {
        Self { ranks_per_node: 1, channels: 1, ..*self }
    }

    /// Pairs of ranks in each direction, for each rank, that have rings only while a rank is
    /// missing.
    pub(super) fn spare(&self) -> u64 {
        u64::from(self.nodes() - 1) * u64::from(self.ranks_per_node - 1)
    }

    /// Rings that end at a rank: as many as begin there.
    pub(super) fn rings(&self) -> u64 {
        2 * (u64::from(self.channels) * u64::from(self.shape.ranks - 1) + self.spare())
    }

    /// Atomic words of a rank: a tail for each ring that ends there, a head for each that begins
    /// there, and of each rank whether others have given it up and whether it is in a call.
    pub fn words(&self) -> u64 {
        2 * (self.rings() + u64::from(self.shape.ranks))
    }

    /// Tokens of a rank that go over one channel, at most.
    pub(super) fn channel_tokens(&self) -> u32 {
        self.shape.max_tokens.div_ceil(self.channels)
    }

    /// Range of a rank's tokens on a channel.
    pub(super) fn part(&self, channel: u32, tokens: u32) -> std::ops::Range<u32> {
        let cut = |c: u32| (u64::from(tokens) * u64::from(c) / u64::from(self.channels)) as u32;
        cut(channel)..cut(channel + 1)
    }
}
