//! Credits against incast: a receiver divides its window among the peers that send much.
//!
//! A sender with more than [`CREDIT_THRESHOLD`] bytes in flight requests credit every [`REQUEST_INTERVAL`], and the
//! receiver answers with the sender's credit. The next request replaces a lost one. Senders of less
//! neither request nor wait. Transports without group frames have no credits.

use std::{collections::HashMap, time::Duration};

use super::{
    messages::GroupMessage,
    policy::admit::credit,
    route::{PeerKey, PeerState},
    timers::Timer,
    Group, Rails,
};
use crate::{domain::Receipts, time::Time};

/// Bytes in flight from which on a sender requests credit.
const CREDIT_THRESHOLD: u64 = 1 << 20;
/// Interval of a sender's requests.
const REQUEST_INTERVAL: Duration = Duration::from_millis(100);
/// A sender that has not asked for this long no longer has a share.
const SENDER_EXPIRY: Duration = Duration::from_millis(350);

/// The credit requests of this group and of its peers.
#[derive(Debug, Default)]
pub(super) struct Credits {
    /// Peers that send much to this engine, and when they last asked.
    senders: HashMap<PeerKey, Time>,
}

impl Credits {
    /// Forgets a lost peer.
    pub fn forget(&mut self, peer: PeerKey) {
        self.senders.remove(&peer);
    }
}

impl Group {
    /// Asks a peer for credit if much is under way to it. Called after each post.
    #[inline]
    pub(super) fn seek_credit(&mut self, now: Time, peer: PeerKey, rails: &mut Rails) {
        let route = &mut self.peers[peer as usize];
        if route.ask_at == Time::NEVER && route.under_way.total() >= CREDIT_THRESHOLD {
            route.ask_at = now.after(REQUEST_INTERVAL);
            self.timers.set(route.ask_at, Timer::Credit(peer));
            self.send_message(peer, &GroupMessage::Want(true), rails);
        }
    }

    /// Repeats a request for credit, or reports that no more is needed.
    pub(super) fn ask_again(&mut self, now: Time, peer: PeerKey, rails: &mut Rails) {
        let route = &mut self.peers[peer as usize];
        let wants = route.under_way.total() > 0 || !route.backlog.is_empty();
        if wants {
            route.ask_at = now.after(REQUEST_INTERVAL);
            self.timers.set(route.ask_at, Timer::Credit(peer));
        } else {
            (route.ask_at, route.credit) = (Time::NEVER, u64::MAX);
            route.backlog.try_again();
        }
        self.send_message(peer, &GroupMessage::Want(wants), rails);
    }

    /// Handles a peer's request for credit, or its end.
    pub(super) fn on_want(&mut self, now: Time, peer: PeerKey, wants: bool, rails: &mut Rails) {
        let senders = &mut self.credits.senders;
        match wants {
            true => _ = senders.insert(peer, now),
            false => _ = senders.remove(&peer),
        }
        senders.retain(|_, reported_at| now.since(*reported_at) < SENDER_EXPIRY);
        if wants {
            // Other senders get their new share when they ask again.
            let share = credit(self.policy.receive_window, senders.len());
            self.send_message(peer, &GroupMessage::Credit(share), rails);
        }
    }

    pub(super) fn on_credit(&mut self, peer: PeerKey, bytes: u64) {
        let route = &mut self.peers[peer as usize];
        if route.ask_at != Time::NEVER {
            // One slice may always be under way, so no sender stops altogether.
            route.credit = bytes;
            route.backlog.try_again();
        }
    }

    /// Sends a message over any link that carries group frames.
    fn send_message(&mut self, peer: PeerKey, message: &GroupMessage, rails: &mut Rails) {
        let route = &self.peers[peer as usize];
        if route.state != PeerState::Up {
            return;
        }
        let able = |rail: usize| self.policy.receipts(&*rails[rail]) != Receipts::None;
        let Some(link) = route.active().iter().find(|l| able(l.pair.rail)) else { return };
        rails[link.pair.rail].send_group_frame(link.id, message.encode());
    }
}
