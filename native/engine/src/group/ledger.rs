//! The ledger of slices under way over links that may be lost while the peer lives. It keeps what
//! is needed to send them again.

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

/// Marks tokens that name a slice. Tokens of transports without receipts name a transfer.
const SLICE: u32 = 1 << 31;

/// A posted work request.
#[derive(Debug)]
pub(super) struct Slice {
    pub owner: TransferKey,
    pub peer: PeerKey,
    /// The rail and link that carry it.
    pub link: (usize, LinkId),
    pub wr: WorkRequest,
    /// The confirm of its write, if that is cut.
    pub confirm: Option<u32>,
    /// Number of earlier attempts for these bytes.
    pub tries: u8,
    pub posted: Time,
    pub priority: Priority,
    pub bytes: u64,
    /// Bytes that its link had under way before it.
    pub queued: u64,
    /// Number of the work request on the link, known once the link is lost.
    pub number: Option<u64>,
    /// Posting order of the slices of one link.
    pub order: u64,
}

impl Slice {
    /// The count that the slice adds at the peer.
    pub fn count(&self) -> Option<Count> {
        self.wr.count()
    }

    /// Whether it can be sent again. Messages can't, because it is unknown whether the peer took
    /// them (RS-1).
    pub fn may_return(&self) -> bool {
        !matches!(self.wr, WorkRequest::Send(_) | WorkRequest::Prepare { .. })
    }
}

/// The slices under way, and the windows of rails.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    slices: Slab<Slice>,
    order: u64,
    rails: Vec<Rail>,
    /// The window of a rail without its own, bytes.
    window: u64,
}

/// Bytes under way on one rail, and its window.
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

    /// A rail's window for slices of `bytes`. At least [`SLICES`] of them fit.
    #[inline]
    pub fn rail_window(&self, rail: usize, bytes: u64) -> Window {
        let window = self.window(rail).max(SLICES * bytes);
        Window { bytes: window, under_way: self.under_way(rail) }
    }

    /// Sets the window of a rail.
    pub fn set_window(&mut self, rail: usize, bytes: u64) {
        self.rail(rail).window = Some(bytes);
    }

    /// The distance of a rail from the engine's memory; `Switch` if unknown.
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

    /// The token that [`Self::enter`] returns next.
    #[inline]
    pub fn next_token(&self) -> Token {
        let slot = self.slices.vacant_key() as u32;
        Token { slot, serial: (self.order + 1) as u32, part: SLICE }
    }

    /// Enters a slice; returns the token of its completion.
    #[inline]
    pub fn enter(&mut self, slice: Slice) -> Token {
        self.order += 1;
        let order = self.order;
        *self.rail(slice.link.0).under_way.of_mut(slice.priority) += slice.bytes;
        let slot = self.slices.insert(Slice { order, ..slice }) as u32;
        Token { slot, serial: order as u32, part: SLICE }
    }

    /// Removes a slice that is over or was not posted.
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

    /// The peers of all slices.
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
