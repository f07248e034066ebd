//! What a group says of itself, and the limits that it is told.

use super::{route::Verdict, Group, PeerKey, Rails};
use crate::{api::TransportKind, time::Time, topology::Tier};

impl Group {
    pub fn next_deadline(&self) -> Time {
        let first = self.deadlines.first().map_or(Time::NEVER, |(t, _)| *t);
        let returns = self.returns.first().map_or(Time::NEVER, |(t, _)| *t);
        let verdicts = self.verdicts.first().map_or(Time::NEVER, |(t, _)| *t);
        let patience = self.patience.first().map_or(Time::NEVER, |(t, _)| *t);
        first
            .min(returns)
            .min(verdicts)
            .min(patience)
            .min(self.look_at)
            .min(self.move_at)
            .min(self.credits.next())
    }

    /// How much of its window a rail may use: others of this host share the NIC.
    pub fn limit(&mut self, rail: usize, bytes: u64) {
        self.ledger.set_window(rail, bytes);
    }

    /// What may be under way over a rail, and what is; bytes.
    pub fn use_of(&self, rail: usize) -> (u64, u64) {
        (self.ledger.window(rail), self.ledger.under_way(rail).total())
    }

    /// How far a rail is from the memory that the engine serves.
    pub fn place(&mut self, rail: usize, tier: Tier) {
        self.ledger.set_tier(rail, tier);
    }

    /// Whether no request is under way or waits.
    pub fn is_idle(&self) -> bool {
        self.transfers.is_empty()
    }

    pub fn explain(&self, peer: PeerKey, rails: &Rails) -> (Option<String>, Vec<Verdict>) {
        self.peers[peer as usize].explain(rails)
    }

    pub fn kind(&self, peer: PeerKey, rails: &Rails) -> Option<TransportKind> {
        let route = self.peers.get(peer as usize)?;
        route.active().first().map(|l| rails[l.pair.rail].kind())
    }
}
