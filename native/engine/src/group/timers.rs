//! What is due at which time: one queue for all that the group waits for.

use std::collections::{BTreeSet, HashSet, VecDeque};

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
pub(super) struct Timers {
    /// Deadlines that were set in order: most requests have the same timeout, and end in the order
    /// in which they began. The first is not stopped.
    deadlines: VecDeque<DeadlineEntry>,
    /// Entries of `deadlines` that are stopped.
    stopped: usize,
    others: BTreeSet<(Time, Timer)>,
}

#[derive(Debug)]
struct DeadlineEntry {
    at: Time,
    key: TransferKey,
    stopped: bool,
}

/// Stopped deadlines that are kept, beside as many as there are others.
const MAX_STOPPED: usize = 64;

impl Timers {
    pub fn set(&mut self, at: Time, timer: Timer) {
        let last = self.deadlines.back().map(|last| (last.at, last.key));
        match timer {
            Timer::Deadline(key) if last.is_none_or(|last| last < (at, key)) => {
                self.deadlines.push_back(DeadlineEntry { at, key, stopped: false });
            }
            _ => _ = self.others.insert((at, timer)),
        }
    }

    pub fn stop(&mut self, at: Time, timer: Timer) {
        let Timer::Deadline(key) = timer else {
            self.others.remove(&(at, timer));
            return;
        };
        if self.deadlines.front().is_some_and(|first| (first.at, first.key) == (at, key)) {
            self.deadlines.pop_front();
            while self.deadlines.front().is_some_and(|first| first.stopped) {
                self.deadlines.pop_front();
                self.stopped -= 1;
            }
            return;
        }
        let found = self.deadlines.binary_search_by(|e| (e.at, e.key).cmp(&(at, key)));
        let entry = found.ok().and_then(|i| self.deadlines.get_mut(i)).filter(|e| !e.stopped);
        let Some(entry) = entry else {
            self.others.remove(&(at, timer));
            return;
        };
        entry.stopped = true;
        self.stopped += 1;
        if self.stopped > MAX_STOPPED + self.deadlines.len() / 2 {
            self.deadlines.retain(|e| !e.stopped);
            self.stopped = 0;
        }
    }

    fn first(&self) -> Option<(Time, Timer)> {
        let deadline = self.deadlines.front().map(|e| (e.at, Timer::Deadline(e.key)));
        deadline.into_iter().chain(self.others.first().copied()).min()
    }

    pub fn next(&self) -> Time {
        self.first().map_or(Time::NEVER, |(at, _)| at)
    }

    /// Takes the first timer that is due.
    pub fn due(&mut self, now: Time) -> Option<Timer> {
        let (at, timer) = self.first().filter(|(at, _)| *at <= now)?;
        self.stop(at, timer);
        Some(timer)
    }

    /// Transfers whose verdict is awaited.
    pub fn verdicts(&self) -> impl Iterator<Item = TransferKey> + '_ {
        self.others.iter().filter_map(|(_, timer)| match timer {
            Timer::Verdict(key) => Some(*key),
            _ => None,
        })
    }

    /// Stops what is set for peers that are forgotten.
    pub fn forget(&mut self, gone: &HashSet<PeerKey>) {
        self.others.retain(|(_, timer)| timer.peer().is_none_or(|peer| !gone.contains(&peer)));
    }

    pub fn clear(&mut self) {
        self.deadlines.clear();
        self.stopped = 0;
        self.others.clear();
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

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn timer(kind: bool, n: u32) -> Timer {
        match kind {
            true => Timer::Deadline(TransferKey { slot: n, serial: n }),
            false => Timer::Verdict(TransferKey { slot: n, serial: n }),
        }
    }

    #[test]
    fn stopped_deadlines_are_forgotten_and_the_others_fire_in_order() {
        let mut timers = Timers::default();
        for n in 0..1000 {
            timers.set(Time(n.into()), timer(true, n));
        }
        for n in (1..1000).filter(|n| n % 100 != 0) {
            timers.stop(Time(n.into()), timer(true, n));
        }
        let kept = timers.deadlines.len();
        assert!(kept <= 2 * (10 + MAX_STOPPED), "{kept} entries for 10 deadlines");
        let fired: Vec<_> = std::iter::from_fn(|| timers.due(Time(1000))).collect();
        assert_eq!(fired, (0..10).map(|n| timer(true, n * 100)).collect::<Vec<_>>());
        assert_eq!((timers.next(), timers.deadlines.len(), timers.stopped), (Time::NEVER, 0, 0));
    }

    proptest! {
        #[test]
        fn timers_fire_as_those_of_one_tree(
            steps in proptest::collection::vec((0u8..4, 0u64..12, any::<bool>(), 0u32..6), 0..60),
        ) {
            let (mut timers, mut tree) = (Timers::default(), BTreeSet::new());
            for (step, at, kind, n) in steps {
                let (at, timer) = (Time(at), timer(kind, n));
                match step {
                    // Each request sets one deadline.
                    0 | 1 if tree.iter().all(|(_, t)| *t != timer) => {
                        timers.set(at, timer);
                        tree.insert((at, timer));
                    }
                    2 => {
                        timers.stop(at, timer);
                        tree.remove(&(at, timer));
                    }
                    3 => {
                        let due = tree.first().copied().filter(|(first, _)| *first <= at);
                        prop_assert_eq!(timers.due(at), due.map(|(_, timer)| timer));
                        due.map(|first| tree.remove(&first));
                    }
                    _ => {}
                }
                let first = tree.first().map_or(Time::NEVER, |(at, _)| *at);
                prop_assert_eq!(timers.next(), first);
            }
        }
    }
}
