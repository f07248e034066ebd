//! Credits against incast: a receiver divides what may be under way to it among those who send much.
//!
//! A sender with much under way says so, again and again while that lasts; the receiver answers with the
//! sender's credit. Nothing depends on the arrival of a message: one that is lost is followed by the next. Small
//! work neither asks nor waits, and over transports that carry no group frames there are no credits.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use super::{
    messages::GroupMessage,
    policy::admit::credit,
    route::{PeerKey, PeerState},
    Group, Rails,
};
use crate::{domain::Receipts, time::Time};

/// A sender asks from so many bytes under way on.
const MUCH: u64 = 1 << 20;
/// How often it asks again.
const AGAIN: Duration = Duration::from_millis(100);
/// Who hasn't asked for so long doesn't count any more.
const FORGOTTEN: Duration = Duration::from_millis(350);

#[derive(Debug, Default)]
pub(super) struct Credits {
    /// Peers that want to send much to us, and when they said so last.
    senders: HashMap<PeerKey, Time>,
    /// When we ask again those to whom we send much.
    asking: BTreeSet<(Time, PeerKey)>,
}

impl Credits {
    pub fn next(&self) -> Time {
        self.asking.first().map_or(Time::NEVER, |(at, _)| *at)
    }

    /// A peer is lost: it sends nothing, and gets nothing.
    pub fn forget(&mut self, peer: PeerKey) {
        self.senders.remove(&peer);
        self.asking.retain(|(_, p)| *p != peer);
    }
}

impl Group {
    /// Something was posted to a peer.
    #[inline]
    pub(super) fn seek_credit(&mut self, now: Time, peer: PeerKey, rails: &mut Rails) {
        let route = &mut self.peers[peer as usize];
        if !route.asking && route.under_way.total() >= MUCH {
            route.asking = true;
            self.credits.asking.insert((now.after(AGAIN), peer));
            self.send_message(peer, &GroupMessage::Want(true), rails);
        }
    }

    /// Those who asked some time ago ask again, or say that they have done.
    pub(super) fn ask_again(&mut self, now: Time, rails: &mut Rails) {
        while let Some((at, peer)) = self.credits.asking.first().copied().filter(|(t, _)| *t <= now)
        {
            self.credits.asking.remove(&(at, peer));
            let route = &mut self.peers[peer as usize];
            route.asking = route.under_way.total() > 0 || !route.backlog.is_empty();
            let wants = route.asking;
            match wants {
                true => _ = self.credits.asking.insert((now.after(AGAIN), peer)),
                false => {
                    route.credit = u64::MAX;
                    route.backlog.try_again();
                }
            }
            self.send_message(peer, &GroupMessage::Want(wants), rails);
        }
    }

    /// A peer wants to send much, or has done.
    pub(super) fn on_want(&mut self, now: Time, peer: PeerKey, wants: bool, rails: &mut Rails) {
        let senders = &mut self.credits.senders;
        match wants {
            true => _ = senders.insert(peer, now),
            false => _ = senders.remove(&peer),
        }
        senders.retain(|_, said| now.since(*said) < FORGOTTEN);
        if wants {
            // The others are told when they ask again. Who is told more than once wouldn't pay for it.
            let share = credit(self.policy.receive_window, senders.len());
            self.send_message(peer, &GroupMessage::Credit(share), rails);
        }
    }

    pub(super) fn on_credit(&mut self, peer: PeerKey, bytes: u64) {
        let route = &mut self.peers[peer as usize];
        if route.asking {
            // No sender can be stopped altogether: one slice always goes.
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
