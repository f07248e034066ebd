//! Connects to peers, probes lost rails, and handles lost links and peers.

use super::{
    route::{PeerKey, PeerState},
    timers::Timer,
    Group, GroupEvents, Rails,
};
use crate::{
    domain::{DomainError, LinkId, Receipt, Receipts, Token},
    flight::EventKind,
    time::Time,
    EngineError,
};

impl Group {
    /// Tries the next transport that may reach a peer. If none is left, the peer is lost.
    pub(super) fn connect(
        &mut self,
        now: Time,
        peer: PeerKey,
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        let route = &mut self.peers[peer as usize];
        if route.state != PeerState::Connecting {
            route.begin(rails);
        }
        loop {
            while let Some(pairs) = route.attempts.next_pairs(&route.address, rails) {
                for pair in pairs {
                    match rails[pair.rail].connect(now, &route.address, pair.endpoint) {
                        Ok(link) => route.attempts.try_pair(pair, link),
                        Err(e) => route.attempts.failed(rails, pair, e),
                    }
                }
                if route.attempts.is_trying() {
                    return;
                }
            }
            if !route.attempts.try_again(&route.address, route.policy, rails) {
                break;
            }
        }
        let error = route.unreachable(rails);
        self.lose(peer, error, events);
    }

    /// Probes lost rails of a peer that other rails reach.
    pub(super) fn probe_lost_rails(&mut self, now: Time, peer: PeerKey, rails: &mut Rails) {
        let route = &mut self.peers[peer as usize];
        if route.state != PeerState::Up {
            return;
        }
        for pair in route.rail_probes.due(now) {
            match rails[pair.rail].connect(now, &route.address, pair.endpoint) {
                Ok(link) => route.attempts.try_pair(pair, link),
                Err(e) => {
                    tracing::debug!(peer = %route.address.label(), error = %e, "rail still down");
                    self.timers.set(route.rail_probes.on_lost(now, pair), Timer::Probe(peer));
                }
            }
        }
    }

    pub(super) fn on_link_down(
        &mut self,
        now: Time,
        (rail, link): (usize, LinkId),
        (cause, receipt, unfinished): (DomainError, Receipt, Vec<(Token, u64)>),
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        if let Some(peer) = self.links.remove(&(rail, link)) {
            let route = &mut self.peers[peer as usize];
            let Some(down) = route.down(rail, link, rails) else { return };
            route.tally.excluded(rail);
            self.recorder.event(EventKind::LinkDown, peer, Some(rail), || cause.to_string());
            if route.state == PeerState::Up {
                if route.active().is_empty() {
                    self.last_link_down(now, peer, rail, &cause, rails, events);
                } else if down.ours && route.would_use(down.pair, rails) {
                    let device = rails[rail].device();
                    tracing::warn!(peer = %route.address.label(), %device, %cause, "rail lost");
                    self.timers.set(route.rail_probes.on_lost(now, down.pair), Timer::Probe(peer));
                }
            }
            self.on_link_lost(now, peer, (&down, &cause), (receipt, &unfinished), rails);
            return;
        }
        let found =
            self.peers.iter_mut().find_map(|(p, r)| Some((p, r.attempts.tried(rail, link)?)));
        let Some((peer, pair)) = found else { return };
        let (route, peer) = (&mut self.peers[peer], peer as PeerKey);
        match route.state {
            PeerState::Connecting => {
                route.attempts.failed(rails, pair, cause);
                if !route.attempts.is_trying() {
                    self.connect(now, peer, rails, events);
                }
            }
            PeerState::Up => {
                route.attempts.refused(rails, rail, cause);
                if route.would_use(pair, rails) {
                    // Other rails reach the peer; this rail is probed in the background.
                    self.timers.set(route.rail_probes.on_lost(now, pair), Timer::Probe(peer));
                }
            }
            PeerState::Idle | PeerState::Lost => {}
        }
    }

    /// Handles the loss of the last link to a peer, which may live and accept another link.
    fn last_link_down(
        &mut self,
        now: Time,
        peer: PeerKey,
        rail: usize,
        cause: &DomainError,
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        let route = &mut self.peers[peer as usize];
        let blamed = DomainError::Gone(cause.to_string());
        let error = route.blame(rails, rail, "link", blamed);
        let heals = self.policy.receipts(&*rails[rail]) != Receipts::None;
        let lost = matches!(cause, DomainError::LinkDown(_) | DomainError::Io { .. });
        if !heals || !lost || !route.may_revive(now) {
            return self.lose(peer, error, events);
        }
        tracing::debug!(peer = %route.address.label(), %cause, "the last link is lost; connecting anew");
        // The next transport may carry no group frames.
        route.credit = u64::MAX;
        // A loss must be reported within `peer_timeout`, and the link has used a part of it.
        let until = now.after(self.policy.peer_timeout * 2 / 5);
        (route.reviving, route.reviving_until) = (Some(error), until);
        self.timers.set(until, Timer::Receipts(peer));
        self.connect(now, peer, rails, events);
    }

    /// Gives up a peer that was not reached again in time (RS-4).
    pub(super) fn end_revival(
        &mut self,
        now: Time,
        peer: PeerKey,
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        let route = &mut self.peers[peer as usize];
        if route.state != PeerState::Connecting || route.reviving_until > now {
            return;
        }
        let Some(error) = route.reviving.take() else { return };
        for (pair, link) in route.attempts.take_trying() {
            rails[pair.rail].disconnect(link, "its peer was not reached in time");
        }
        self.lose(peer, error, events);
    }

    fn lose(&mut self, peer: PeerKey, error: EngineError, events: &dyn GroupEvents) {
        let route = &mut self.peers[peer as usize];
        (route.state, route.since) = (PeerState::Lost, self.recorder.now);
        self.timers.stop(route.ask_at, Timer::Credit(peer));
        (route.ask_at, route.credit) = (Time::NEVER, u64::MAX);
        self.credits.forget(peer);
        route.lost = Some(error.clone());
        let id = route.address.id;
        let slices = route.healing.take_all();
        let mut keys: Vec<_> = route.backlog.take().collect();
        self.backlogged -= keys.len();
        for key in &keys {
            let transfer = &mut self.transfers[key.slot as usize];
            transfer.waiting -= 1;
            transfer.fail(error.clone());
        }
        keys.extend(self.timers.verdicts().filter(|key| {
            let transfer = self.transfers.get_mut(key.slot as usize);
            let transfer = transfer.filter(|t| t.serial == key.serial);
            transfer.is_some_and(|t| t.peer_was_lost(peer, &error))
        }));
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            if self.transfers.get(key.slot as usize).is_some_and(|t| t.serial == key.serial) {
                self.settle(key);
            }
        }
        for slice in slices {
            self.slice_lost(&slice, error.clone());
        }
        self.recorder.event(EventKind::PeerLost, peer, None, || error.to_string());
        events.peer_lost(self.recorder.now, id, &error);
    }
}
