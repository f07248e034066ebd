//! Work requests that are on their way over links which may be lost while the peer lives: what is
//! needed to send them again.

use slab::Slab;

use super::{
    eligible_links::SLICES,
    policy::{admit::Window, classes::ByClass},
    PeerKey, TransferKey,
};
use crate::{
    api::Priority,
    domain::{Count, LinkId, Token, WorkRequest},
    time::Time,
    topology::Tier,
};

/// Marks tokens that name a slice; those of transports without receipts name a transfer directly.
const SLICE: u32 = 1 << 31;

/// One work request that was posted.
#[derive(Debug)]
pub(super) struct Slice {
    pub owner: TransferKey,
    pub peer: PeerKey,
    /// The rail and link that carry it.
    pub link: (usize, LinkId),
    pub wr: WorkRequest,
    /// The confirmation that it is a piece for.
    pub confirm: Option<u32>,
    /// How often its bytes have been sent before.
    pub tries: u8,
    pub posted: Time,
    pub priority: Priority,
    /// Its bytes, and those that its link had under way before it.
    pub bytes: u64,
    pub queued: u64,
    /// What its link called it, once that is lost, if it numbers work.
    pub number: Option<u64>,
    /// Grows with every slice: the order in which those of one link were posted.
    pub order: u64,
}

impl Slice {
    /// What it counts at the peer.
    pub fn count(&self) -> Option<Count> {
        match self.wr {
            WorkRequest::Write { count, .. } => count,
            WorkRequest::Count(count) => Some(count),
            _ => None,
        }
    }

    /// Whether it can be sent again. Messages can't: it is unknown whether they were taken (RS-1).
    pub fn may_return(&self) -> bool {
        !matches!(self.wr, WorkRequest::Send(_) | WorkRequest::Prepare { .. })
    }
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    slices: Slab<Slice>,
    order: u64,
    rails: Vec<Rail>,
    /// What may be under way on a rail of which nothing else was said, bytes.
    window: u64,
}

/// What is under way on one rail, and how much may be.
#[derive(Debug, Default)]
struct Rail {
    under_way: ByClass,
    window: Option<u64>,
    tier: Option<Tier>,
}

impl Ledger {
    pub fn new(window: u64) -> Self {
        Self { window, ..Self::default() }
    }

    #[inline]
    pub fn window(&self, rail: usize) -> u64 {
        self.rails.get(rail).and_then(|r| r.window).unwrap_or(self.window)
    }

    /// Bytes under way over one local rail, to all peers.
    #[inline]
    pub fn under_way(&self, rail: usize) -> ByClass {
        self.rails.get(rail).map(|r| r.under_way).unwrap_or_default()
    }

    /// A rail's window for slices of so many bytes: of the largest, a few are under way at once.
    #[inline]
    pub fn rail_window(&self, rail: usize, bytes: u64) -> Window {
        let window = self.window(rail).max(SLICES * bytes);
        Window { bytes: window, under_way: self.under_way(rail) }
    }

    /// What may be under way on a rail from now on.
    pub fn set_window(&mut self, rail: usize, bytes: u64) {
        self.rail(rail).window = Some(bytes);
    }

    /// How far a rail is from the memory that the engine serves; near where nothing was said.
    #[inline]
    pub fn tier(&self, rail: usize) -> Tier {
        self.rails.get(rail).and_then(|r| r.tier).unwrap_or(Tier::Switch)
    }

    pub fn set_tier(&mut self, rail: usize, tier: Tier) {
        self.rail(rail).tier = Some(tier);
    }

    fn rail(&mut self, rail: usize) -> &mut Rail {
        if self.rails.len() <= rail {
            self.rails.resize_with(rail + 1, Rail::default);
        }
        &mut self.rails[rail]
    }

    /// Enters a slice; the token that its completion will bring.
    #[inline]
    pub fn enter(&mut self, slice: Slice) -> Token {
        self.order += 1;
        let order = self.order;
        *self.rail(slice.link.0).under_way.of_mut(slice.priority) += slice.bytes;
        let slot = self.slices.insert(Slice { order, ..slice }) as u32;
        Token { slot, serial: order as u32, part: SLICE }
    }

    /// Takes a slice out: it is over, or wasn't posted after all.
    #[inline]
    pub fn take(&mut self, token: Token) -> Option<Slice> {
        let slot = token.slot as usize;
        let known = token.part == SLICE
            && self.slices.get(slot).is_some_and(|s| s.order as u32 == token.serial);
        known.then(|| {
            let slice = self.slices.remove(slot);
            *self.rail(slice.link.0).under_way.of_mut(slice.priority) -= slice.bytes;
            slice
        })
    }

    /// Whom slices are on their way to.
    pub fn peers(&self) -> impl Iterator<Item = PeerKey> + '_ {
        self.slices.iter().map(|(_, s)| s.peer)
    }

    pub fn is_slice(token: Token) -> bool {
        token.part == SLICE
    }

    pub fn clear(&mut self) {
        self.slices.clear();
        self.rails.clear();
    }
}
