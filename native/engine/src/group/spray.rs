//! Measures a peer's links, selects the link of each slice, and finds stalled links (TENT §3.3,
//! §3.4).

use std::time::Duration;

use smallvec::SmallVec;

use super::{
    ledger::{Ledger, Slice},
    policy::{
        estimate::Estimate,
        score::{RailSelector, RailView},
        stall,
    },
    route::{ActiveLink, PeerKey, PeerState},
    timers::Timer,
    Group, Rails,
};
use crate::{
    api::{Spray, MAX_RAILS},
    domain::Receipts,
    flight::EventKind,
    time::Time,
};

/// The assumed speed of an unused rail: 400 Gb/s, in bytes per ns.
const NOMINAL: f64 = 50.0;
/// Bytes that a link may have under way, or [`WINDOW_SLICES`] slices if those are large. A posted
/// slice can't change its rail.
const WINDOW: u64 = 8 << 20;
const WINDOW_SLICES: u64 = 4;
/// A link has no more under way than it carries in this time. For a slow link the window would be
/// seconds.
const HORIZON: Duration = Duration::from_millis(20);
/// A link may always have this many bytes, or [`LEAST_SLICES`] slices, under way, so that it does
/// not wait for completions to be polled.
const MIN_WINDOW: u64 = 512 << 10;
const LEAST_SLICES: u64 = 2;
/// Most links of one peer and transport: two for each pair of NICs if both sides connected at once.
pub(super) const MAX_LINKS: usize = 2 * MAX_RAILS;
/// Interval of the checks for stalled links.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A link that has done fewer slices does not count as stalled, nor one whose slowest slice took
/// 1/[`SLOWEST`] of the time before.
const SAMPLES: u32 = 8;
const SLOWEST: u32 = 4;

/// The weight of a slice: its bytes, at least 1, because work without bytes can stall as well.
fn weight(bytes: u64) -> u64 {
    bytes.max(1)
}

/// Measurements of one link.
#[derive(Debug)]
pub(super) struct Gauge {
    estimate: Estimate,
    /// Bytes under way.
    pub queued: u64,
    /// Since when it has had work and finished none.
    waiting_since: Time,
    finished: Time,
    /// Slices that it has done.
    samples: u32,
    /// The time of the slowest recent slice.
    slowest: Duration,
}

impl Gauge {
    pub fn new(now: Time) -> Self {
        Self {
            estimate: Estimate::new(NOMINAL),
            queued: 0,
            waiting_since: now,
            finished: Time(0),
            samples: 0,
            slowest: Duration::ZERO,
        }
    }

    #[inline]
    pub fn posted(&mut self, now: Time, bytes: u64) {
        if self.queued == 0 {
            self.waiting_since = now;
        }
        self.queued += weight(bytes);
    }

    /// Records the end of a slice, whatever its result.
    #[inline]
    pub fn left(&mut self, now: Time, bytes: u64) {
        self.queued = self.queued.saturating_sub(weight(bytes));
        (self.waiting_since, self.finished) = (now, now);
    }

    #[inline]
    pub fn done(&mut self, now: Time, slice: &Slice) {
        self.samples = self.samples.saturating_add(1);
        self.slowest = now.since(slice.posted).max(self.slowest / 64 * 63);
        self.estimate.completed(now, slice.posted, slice.bytes, slice.queued);
    }

    /// The predicted time for `bytes`, after what is under way.
    pub fn expects(&self, now: Time, bytes: u64) -> Duration {
        let speed = self.estimate.speed(now, self.queued, bytes);
        Duration::from_nanos(speed.takes(bytes + self.queued) as u64)
    }

    fn has_room(&self, length: u64) -> bool {
        let least = MIN_WINDOW.max(LEAST_SLICES * length);
        let known = self.estimate.carries(HORIZON).max(least);
        self.queued == 0 || self.queued + length <= known.min(WINDOW.max(WINDOW_SLICES * length))
    }

    fn seen(&self) -> stall::RailProgress {
        stall::RailProgress { finished: self.finished, idle: self.queued == 0 }
    }

    /// Whether its work is overdue.
    fn is_late(&self, now: Time) -> bool {
        let expected = self.estimate.speed(now, self.queued, 0).takes(self.queued);
        let expected = Duration::from_nanos(expected as u64);
        let limit = stall::stall_timeout(expected).max(self.slowest * SLOWEST);
        self.queued > 0 && self.samples >= SAMPLES && now.since(self.waiting_since) > limit
    }
}

/// The links as the policy sees them. Links in `full` have no room, whatever their gauge says.
pub(super) fn views(
    now: Time,
    links: &[ActiveLink],
    ledger: &Ledger,
    full: &[bool],
    length: u64,
) -> SmallVec<[RailView; MAX_LINKS]> {
    let view = |(link, full): (&ActiveLink, &bool)| RailView {
        queued: link.gauge.queued,
        speed: link.gauge.estimate.speed(now, link.gauge.queued, length),
        tier: ledger.tier(link.pair.rail),
        room: !full && link.gauge.has_room(length),
    };
    links.iter().zip(full).map(view).collect()
}

impl Spray {
    pub(super) fn selector(self) -> RailSelector {
        match self {
            Spray::Adaptive => RailSelector::adaptive(),
            Spray::RoundRobin => RailSelector::round_robin(),
            Spray::Random(seed) => RailSelector::random(seed),
        }
    }
}

impl Group {
    /// Handles a post to a peer: schedules stall checks if it has several links, and asks for
    /// credit.
    #[inline]
    pub(super) fn posted(&mut self, now: Time, peer: PeerKey, rails: &mut Rails) {
        if !self.checks_stalls && self.peers[peer as usize].active().len() > 1 {
            self.checks_stalls = true;
            self.timers.set(now.after(STALL_CHECK_INTERVAL), Timer::Stalls);
        }
        self.seek_credit(now, peer, rails);
    }

    /// Drops links that have stalled while others of the same peer progress. Their slices are sent
    /// over other links, and their breakers open.
    pub(super) fn look(&mut self, now: Time, rails: &mut Rails) {
        let mut busy = false;
        for (key, route) in self.peers.iter_mut() {
            let links = route.active();
            if route.state != PeerState::Up || links.len() < 2 {
                continue;
            }
            busy |= links.iter().any(|l| l.gauge.queued > 0);
            let seen: SmallVec<[stall::RailProgress; MAX_LINKS]> =
                links.iter().map(|l| l.gauge.seen()).collect();
            for (i, link) in links.iter().enumerate() {
                let since = link.gauge.waiting_since;
                if link.gauge.is_late(now)
                    && self.policy.receipts(&*rails[link.pair.rail]) != Receipts::None
                    && stall::is_at_fault(i, since, now, &seen)
                    && !rails[link.pair.rail].is_staging(link.id)
                {
                    let waited = now.since(since);
                    tracing::warn!(peer = %route.address.label(), device = rails[link.pair.rail].device(), ?waited, "a rail has stalled");
                    let why =
                        format!("nothing was finished for {waited:?} while other rails went on");
                    let (rail, peer) = (link.pair.rail, key as PeerKey);
                    rails[rail].disconnect(link.id, &why);
                    self.recorder.event(EventKind::Stalled, peer, Some(rail), || why);
                }
            }
        }
        self.checks_stalls = busy;
        if busy {
            self.timers.set(now.after(STALL_CHECK_INTERVAL), Timer::Stalls);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_bytes_can_stall_as_well() {
        let mut gauge = Gauge { samples: SAMPLES, ..Gauge::new(Time(0)) };
        let second = Time(1_000_000_000);
        assert!(!gauge.is_late(second), "nothing is under way");
        gauge.posted(Time(0), 0);
        assert!(gauge.is_late(second) && !gauge.seen().idle);
        gauge.left(second, 0);
        assert!(!gauge.is_late(Time(2 * second.0)) && gauge.seen().idle);
    }
}
