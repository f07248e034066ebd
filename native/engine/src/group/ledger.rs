//! Work requests that are on their way over links which may be lost while the peer lives: what is
//! needed to send them again.

use slab::Slab;

use super::{PeerKey, TransferKey};
use crate::{
    domain::{Count, LinkId, Token, WorkRequest},
    time::Time,
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

    /// Whether it can be sent again. Messages can't: nobody knows whether they were taken.
    pub fn may_return(&self) -> bool {
        !matches!(self.wr, WorkRequest::Send(_) | WorkRequest::Prepare { .. })
    }
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    slices: Slab<Slice>,
    order: u64,
}

impl Ledger {
    /// Enters a slice; the token that its completion will bring.
    #[inline]
    pub fn enter(&mut self, slice: Slice) -> Token {
        self.order += 1;
        let order = self.order;
        let slot = self.slices.insert(Slice { order, ..slice }) as u32;
        Token { slot, serial: order as u32, part: SLICE }
    }

    /// Takes a slice out: it is over, or wasn't posted after all.
    #[inline]
    pub fn take(&mut self, token: Token) -> Option<Slice> {
        let slot = token.slot as usize;
        let known = token.part == SLICE
            && self.slices.get(slot).is_some_and(|s| s.order as u32 == token.serial);
        known.then(|| self.slices.remove(slot))
    }

    pub fn is_slice(token: Token) -> bool {
        token.part == SLICE
    }

    pub fn clear(&mut self) {
        self.slices.clear();
    }
}
