//! The group's metrics and explanations, and the limits that others set.

use std::sync::Arc;

use super::{
    route::{PeerState, Route, TransportVerdict},
    Group, PeerKey, Rails,
};
use crate::{
    api::{RegionKey, TransportKind},
    domain::PeerMapping,
    flight::{Cursor, Metrics, PeerMetrics, RailMetrics, Records},
    time::Time,
    topology::Tier,
};

impl Group {
    pub fn next_deadline(&self) -> Time {
        self.timers.next().min(self.move_at)
    }

    /// Sets the window of a rail, because other processes of this host share the NIC.
    pub fn limit(&mut self, rail: usize, bytes: u64) {
        self.ledger.set_window(rail, bytes);
    }

    /// The window of a rail, and bytes under way over it.
    pub fn use_of(&self, rail: usize) -> (u64, u64) {
        (self.ledger.window(rail), self.ledger.under_way(rail).total())
    }

    /// Sets the distance of a rail from the engine's memory.
    pub fn set_tier(&mut self, rail: usize, tier: Tier) {
        self.ledger.set_tier(rail, tier);
    }

    /// Whether no request is under way or waits.
    pub fn is_idle(&self) -> bool {
        self.transfers.is_empty()
    }

    pub fn explain(&self, peer: PeerKey, rails: &Rails) -> (Option<String>, Vec<TransportVerdict>) {
        self.peers[peer as usize].explain(rails)
    }

    pub fn kind(&self, peer: PeerKey, rails: &Rails) -> Option<TransportKind> {
        let route = self.peers.get(peer as usize)?;
        route.active().first().map(|l| rails[l.pair.rail].kind())
    }

    /// Maps a peer's region for direct stores, over the first link that can.
    ///
    /// # Errors
    /// The reason of the last link that can't.
    pub fn map_peer_region(
        &self,
        peer: PeerKey,
        (key, by): (RegionKey, Option<i32>),
        rails: &mut Rails,
    ) -> Result<Arc<PeerMapping>, String> {
        let links = self.peers.get(peer as usize).map_or(&[][..], Route::active);
        let none = Err("the peer is not connected".to_owned());
        links.iter().fold(none, |found, l| {
            found.or_else(|_| rails[l.pair.rail].map_peer_region(l.id, key, by))
        })
    }

    /// Reads the records since a cursor and the operations in flight. Records name peers by index
    /// in `peers`.
    pub fn records(&self, since: Cursor, rails: &Rails, out: &mut Records) {
        out.peers = self.peers.names();
        out.rails = rails.iter().map(|r| (r.kind(), r.device().to_owned())).collect();
        self.recorder.read(since, self.transfers.iter().map(|(_, t)| t), out);
    }

    /// Reads the metrics of rails and peers.
    pub fn metrics(&self, rails: &Rails, out: &mut Metrics) {
        out.going_on = self.transfers.len();
        let numbered = rails.iter().enumerate();
        out.rails = numbered
            .map(|(number, rail)| self.rail_metrics(number, rail.kind(), rail.device()))
            .collect();
        out.peers = self.peers.iter().map(|(_, route)| peer_metrics(route, rails)).collect();
    }

    fn rail_metrics(&self, rail: usize, transport: TransportKind, device: &str) -> RailMetrics {
        let (window, under_way) = self.use_of(rail);
        let stages = self.recorder.stages.get(rail).copied().unwrap_or_default();
        RailMetrics { transport, device: device.to_owned(), window, under_way, stages }
    }
}

fn peer_metrics(route: &Route, rails: &Rails) -> PeerMetrics {
    let up = route.state == PeerState::Up;
    let links = route.active();
    PeerMetrics {
        id: route.address.id,
        name: route.address.name.clone(),
        state: match route.state {
            PeerState::Idle => "idle",
            PeerState::Connecting => "connecting",
            PeerState::Up => "up",
            PeerState::Lost => "lost",
        },
        transport: links.first().filter(|_| up).map(|l| rails[l.pair.rail].kind()),
        links: if up { links.len() } else { 0 },
        waiting: route.backlog.len(),
        under_way: route.under_way.total(),
        tally: route.tally.clone(),
    }
}
