//! What is due at which time: one queue for all that the group waits for.

use std::collections::{BTreeSet, HashSet};

use super::{Group, GroupEvents, PeerKey, Rails, TransferKey};
use crate::time::Time;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// The deadline of a transfer.
    Deadline(TransferKey),
    /// A lost rail of a transfer counts as lost alone, not with its peer.
    Verdict(TransferKey),
    /// Lost rails of a peer are probed.
    Probe(PeerKey),
    /// The request for a peer's credit is repeated.
    Credit(PeerKey),
    /// Links are checked for stalls.
    Stalls,
    /// The receipts of lost links, and a lost peer's return, are no longer waited for.
    Receipts(PeerKey),
}

impl Timer {
    fn peer(self) -> Option<PeerKey> {
        match self {
            Self::Probe(peer) | Self::Credit(peer) | Self::Receipts(peer) => Some(peer),
            Self::Deadline(_) | Self::Verdict(_) | Self::Stalls => None,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Timers(BTreeSet<(Time, Timer)>);

impl Timers {
    pub fn set(&mut self, at: Time, timer: Timer) {
        self.0.insert((at, timer));
    }

    pub fn stop(&mut self, at: Time, timer: Timer) {
        self.0.remove(&(at, timer));
    }

    pub fn next(&self) -> Time {
        self.0.first().map_or(Time::NEVER, |(at, _)| *at)
    }

    /// Takes the first timer that is due.
    pub fn due(&mut self, now: Time) -> Option<Timer> {
        self.0.first().filter(|(at, _)| *at <= now)?;
        self.0.pop_first().map(|(_, timer)| timer)
    }

    /// Transfers whose verdict is awaited.
    pub fn verdicts(&self) -> impl Iterator<Item = TransferKey> + '_ {
        self.0.iter().filter_map(|(_, timer)| match timer {
            Timer::Verdict(key) => Some(*key),
            _ => None,
        })
    }

    /// Stops what is set for peers that are forgotten.
    pub fn forget(&mut self, gone: &HashSet<PeerKey>) {
        self.0.retain(|(_, timer)| timer.peer().is_none_or(|peer| !gone.contains(&peer)));
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl Group {
    /// Handles the timers that were due at `began`, before the last poll; true if there were any.
    /// What is given up for nothing having come is judged by `began`: `now` would count time in
    /// which it may have come unseen.
    pub(super) fn handle_timers(
        &mut self,
        (began, now): (Time, Time),
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) -> bool {
        let mut any = false;
        while let Some(timer) = self.timers.due(began) {
            any = true;
            match timer {
                Timer::Deadline(key) => self.expire(now, key),
                Timer::Verdict(key) => self.decide(key),
                Timer::Probe(peer) => self.probe_lost_rails(now, peer, rails),
                Timer::Credit(peer) => self.ask_again(now, peer, rails),
                Timer::Stalls => self.look(began, rails),
                Timer::Receipts(peer) => {
                    self.expire_unresolved((began, now), peer, rails);
                    self.end_revival(began, peer, rails, events);
                }
            }
        }
        any
    }
}
