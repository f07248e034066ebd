//! State that the lanes of all channels share.

use std::sync::Arc;

use fabric_engine::EngineError;
use fabric_proxy::raw::AtomicWords;

use super::{
    grid::{Family, Grid},
    layout::Layout,
    ring::RingLayout,
    spec::Spec,
};
use crate::{
    kernels::{Part, PartMut},
    routes::{Order, RowPlacement},
};

/// Why an exchange can't continue.
#[derive(Debug)]
pub enum StopCause {
    /// A rank violated the protocol.
    Peer {
        rank: u32,
        cause: String,
    },
    /// A rank has continued without a rank whose loss this rank has not heard of yet.
    Ahead {
        rank: u32,
    },
    Engine(EngineError),
}

impl From<EngineError> for StopCause {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

/// A protocol violation of a rank.
pub fn by(rank: u32) -> impl Fn(String) -> StopCause {
    move |cause| StopCause::Peer { rank, cause }
}

/// The caller's rows in the current call.
#[derive(Debug)]
pub enum Io<'a, 'b> {
    Nothing,
    /// The caller's tokens.
    Tokens(&'a [Part<'a>]),
    /// Room for arriving rows.
    Rows(&'a mut [PartMut<'b>]),
    /// The answers to the rows.
    Answers(Part<'a>),
    /// One of these, which kernels reach and the host does not.
    Kernels(KernelIo),
}

/// The rows that kernels have in the current call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelIo {
    Tokens,
    Rows,
    Answers,
}

impl Io<'_, '_> {
    pub fn has_tokens(&self) -> bool {
        matches!(self, Self::Tokens(_) | Self::Kernels(KernelIo::Tokens))
    }

    pub fn takes_rows(&self) -> bool {
        matches!(self, Self::Rows(_) | Self::Kernels(KernelIo::Rows))
    }

    pub fn has_answers(&self) -> bool {
        matches!(self, Self::Answers(_) | Self::Kernels(KernelIo::Answers))
    }
}

/// The parameters of an exchange; they don't change.
#[derive(Debug)]
pub struct Context {
    /// Of the ranks that are here: of all, or flat.
    pub spec: Spec,
    pub grid: Grid,
    /// Per rank, whether it is present.
    pub here: Vec<bool>,
    /// Per rank, whether it is present and has admitted this one.
    pub has_joined: Vec<bool>,
    pub layout: Layout,
    pub words: AtomicWords,
    /// The number of the exchange.
    pub exchange: u32,
    /// The number of the membership, see [`Membership`](super::membership::Membership).
    pub era: u32,
    /// The meta before each of this rank's tokens: head, experts and weights.
    pub metas: Vec<u8>,
}

impl Context {
    /// A ring that begins here.
    pub fn outbound(&self, channel: u32, family: Family, source: u32, partner: u32) -> RingLayout {
        let (here, there) = self.numbers(channel, family, source, partner);
        let ring = self.grid.ring_at(partner, family, source);
        RingLayout {
            word: self.layout.head(here),
            partners_word: self.layout.tail(there),
            ..self.ring_layout(channel, family, ring, partner)
        }
    }

    /// A ring that ends here.
    pub fn inbound(&self, channel: u32, family: Family, source: u32, partner: u32) -> RingLayout {
        let (here, there) = self.numbers(channel, family, source, partner);
        let ring = self.grid.ring(family, source, partner);
        RingLayout {
            word: self.layout.tail(here),
            partners_word: self.layout.head(there),
            ..self.ring_layout(channel, family, ring, partner)
        }
    }

    /// The outbox of a ring for answers: rows lie there as in the ring until they are sent.
    pub fn outbox(&self, channel: u32, family: Family, source: u32, partner: u32) -> u64 {
        self.layout.outbox(channel, self.grid.ring(family, source, partner))
    }

    fn numbers(&self, channel: u32, family: Family, source: u32, partner: u32) -> (u64, u64) {
        let number = |ring| self.layout.number(channel, family.is_back(), ring);
        let (grid, back) = (self.grid, number);
        (back(grid.ring(family, source, partner)), back(grid.ring_at(partner, family, source)))
    }

    fn ring_layout(&self, channel: u32, family: Family, ring: u64, partner: u32) -> RingLayout {
        let base = match family.is_back() {
            true => self.layout.ring_back(channel, ring),
            false => self.layout.ring_out(channel, ring),
        };
        let stride = self.layout.stride(family.is_back());
        let data = (super::command_channels(channel) + family as u32) as u8;
        let credits = data + Family::ALL.len() as u8;
        let slots = self.layout.slots(ring);
        let is_back = family.is_back();
        RingLayout {
            partner,
            is_back,
            base,
            slots,
            stride,
            word: 0,
            partners_word: 0,
            data,
            credits,
        }
    }

    /// Offset of an own token, and its metadata.
    pub fn own(&self, token: u32) -> (u64, &[u8]) {
        (self.layout.own(token), self.metas(token..token + 1))
    }

    /// The metas of tokens of this rank's, behind one another.
    pub fn metas(&self, tokens: std::ops::Range<u32>) -> &[u8] {
        let each = self.spec.meta() as usize;
        &self.metas[tokens.start as usize * each..tokens.end as usize * each]
    }

    /// Whether a rank is on this rank's node.
    pub fn is_near(&self, rank: u32) -> bool {
        let grid = self.grid.whole();
        grid.node_of(rank) == grid.node()
    }

    /// Whether all ranks have been here since the start.
    pub fn is_first_era(&self) -> bool {
        self.era == 0
    }

    /// The nodes of which a rank is here.
    pub fn nodes(&self) -> impl Iterator<Item = u32> + '_ {
        let grid = self.grid;
        (0..grid.nodes()).filter(move |node| {
            (0..grid.per_node).any(|local| self.here[grid.at(*node, local) as usize])
        })
    }

    /// The ranks of this node that a token goes to, a bit for each.
    pub fn targets(&self, slot: &[u8]) -> u64 {
        let (grid, shape) = (self.grid, self.spec.shape);
        super::slots::experts(&self.spec, slot)
            .filter(|(expert, _)| *expert < shape.experts)
            .map(|(expert, _)| shape.rank_of(expert))
            .filter(|rank| grid.node_of(*rank) == grid.node())
            .fold(0, |mask, rank| mask | 1 << grid.local_of(rank))
    }
}

/// The ranks of a mask, in their order.
pub fn bits(mask: u64) -> impl Iterator<Item = u32> {
    (0..64).filter(move |i| mask >> i & 1 == 1)
}

/// The arriving rows of all lanes, and their placement.
#[derive(Debug, Default)]
pub struct Arrivals {
    ranks: usize,
    /// By channel and source: rows for each of this rank's experts, once known.
    counts: Vec<Option<Vec<u32>>>,
    placing: Option<Arc<RowPlacement>>,
    /// By channel, source and expert: where the next row goes, and how many more there are.
    next: Vec<Vec<(u32, u32)>>,
}

impl Arrivals {
    /// Of which nothing comes from ranks that aren't here.
    pub fn new(ctx: &Context) -> Self {
        let nothing = || vec![0; ctx.spec.shape.local_experts() as usize];
        let of_source = |here: &bool| (!here).then(nothing);
        let of_channel: Vec<_> = ctx.here.iter().map(of_source).collect();
        let counts = vec![of_channel; ctx.spec.channels as usize].concat();
        Self { ranks: ctx.here.len(), counts, ..Self::default() }
    }

    fn lane(&self, channel: u32, source: u32) -> usize {
        channel as usize * self.ranks + source as usize
    }

    pub fn announce(&mut self, channel: u32, source: u32, counts: &[u32]) {
        let lane = self.lane(channel, source);
        self.counts[lane] = Some(counts.to_vec());
    }

    pub fn are_known(&self) -> bool {
        self.counts.iter().all(Option::is_some)
    }

    /// The placing in this order, made anew unless rows were handed out by another.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if an expert gets more rows than a stride has.
    pub fn place(
        &mut self,
        experts: u32,
        order: Order,
        begun: bool,
    ) -> Result<Arc<RowPlacement>, EngineError> {
        if let Some(placing) = self.placing.as_ref().filter(|p| p.order == order || begun) {
            if placing.order != order {
                let text = "rows are being handed out in another order; go on with that";
                return Err(EngineError::Invalid(text.into()));
            }
            return Ok(Arc::clone(placing));
        }
        let of_source = |source: usize| {
            let mut sum = vec![0; experts as usize];
            for counts in self.counts.iter().skip(source).step_by(self.ranks).flatten() {
                sum.iter_mut().zip(counts).for_each(|(s, n)| *s += n);
            }
            sum
        };
        let incoming = (0..self.ranks).map(of_source).collect();
        let placing = Arc::new(RowPlacement::new(experts, incoming, order)?);
        let mut firsts: Vec<Vec<u32>> =
            (0..self.ranks).map(|s| placing.firsts(s as u32).to_vec()).collect();
        let place = |(lane, counts): (usize, &Option<Vec<u32>>)| {
            let counts = counts.as_deref().unwrap_or(&[]);
            let firsts = &mut firsts[lane % self.ranks];
            let each = firsts.iter_mut().zip(counts);
            each.map(|(first, n)| (std::mem::replace(first, *first + n), *n)).collect()
        };
        self.next = self.counts.iter().enumerate().map(place).collect();
        self.placing = Some(Arc::clone(&placing));
        Ok(placing)
    }

    pub fn placing(&self) -> Option<&Arc<RowPlacement>> {
        self.placing.as_ref()
    }

    /// Takes the position of a lane's next row for a local expert; `None` after the last row.
    pub fn take(&mut self, channel: u32, source: u32, expert: u32) -> Option<u32> {
        let lane = self.lane(channel, source);
        let (next, left) = self.next.get_mut(lane)?.get_mut(expert as usize)?;
        *left = left.checked_sub(1)?;
        *next += 1;
        Some(*next - 1)
    }

    /// Checks that all rows of an ended lane have arrived.
    ///
    /// # Errors
    /// The missing rows, as text.
    pub fn check_complete(&self, channel: u32, source: u32) -> Result<(), String> {
        let lane = self.next.get(self.lane(channel, source)).into_iter().flatten();
        match lane.enumerate().find(|(_, (_, left))| *left > 0) {
            None => Ok(()),
            Some((expert, (_, left))) => Err(format!(
                "{left} of the rows that it announced for local expert {expert} never came"
            )),
        }
    }
}
