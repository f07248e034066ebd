//! Decides whether a rail has stalled.
//!
//! A slice that is late is the first sign of a rail that is silently lost (TENT §3.4.1: "a timeout
//! mechanism to prevent stalled transfers"); a slice is late relative to its expected
//! time, with a floor for the noise of a busy host.

use std::time::Duration;

use crate::time::Time;

/// A slice is late after this many times its expected time, and `MIN_STALL_TIMEOUT` at the earliest.
const STALL_FACTOR: u32 = 16;
const MIN_STALL_TIMEOUT: Duration = Duration::from_millis(20);

/// Time in flight after which a slice counts as stalled.
pub fn stall_timeout(expected: Duration) -> Duration {
    expected.saturating_mul(STALL_FACTOR).max(MIN_STALL_TIMEOUT)
}

/// The progress of a rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailProgress {
    /// When it last finished something.
    pub finished: Time,
    /// Whether no slice is in flight.
    pub idle: bool,
}

/// Whether a stalled slice is the rail's fault, and not that of a peer that has stopped: another
/// rail to the same peer must have finished something in the second half of the wait. Or all that
/// it had, at any time of the wait: the waiter for the stalled slice may give the others nothing
/// to do meanwhile.
pub fn is_at_fault(rail: usize, posted: Time, now: Time, seen: &[RailProgress]) -> bool {
    let half = Time(posted.0.saturating_add(now.since(posted).as_nanos() as u64 / 2));
    let goes_on = |s: &RailProgress| s.finished >= half || (s.idle && s.finished > posted);
    let others = seen.iter().enumerate().filter(|(i, _)| *i != rail);
    seen.get(rail).is_none_or(|s| s.finished < half) && others.into_iter().any(|(_, s)| goes_on(s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rail_is_at_fault_only_if_another_moves() {
        let busy = |at| RailProgress { finished: Time(at), idle: false };
        let idle = |at| RailProgress { finished: Time(at), idle: true };
        #[rustfmt::skip]
        let table = [
            // posted at 100, looked at at 200
            (vec![busy(0), busy(160)],           true,  "the other goes on"),
            (vec![busy(0), busy(149)],           false, "the other has stopped as well"),
            (vec![busy(160), busy(160)],         false, "it goes on itself"),
            (vec![busy(0)],                      false, "there is no other"),
            (vec![busy(0), busy(0), busy(150)],  true,  "one of several goes on"),
            (vec![busy(0), idle(101)],           true,  "the other was done with all it had"),
            (vec![busy(0), idle(99)],            false, "the other had nothing to do"),
            (vec![busy(0), busy(101), idle(0)],  false, "no link goes on"),
        ];
        for (seen, expected, name) in table {
            assert_eq!(is_at_fault(0, Time(100), Time(200), &seen), expected, "{name}");
        }
    }

    #[test]
    fn patience_is_far_beyond_what_was_expected() {
        let us = Duration::from_micros;
        assert_eq!(stall_timeout(us(10)), us(20_000));
        assert_eq!(stall_timeout(us(10_000)), us(160_000));
        assert_eq!(stall_timeout(Duration::MAX), Duration::MAX);
    }
}
