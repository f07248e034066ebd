//! Decides whether a rail may be used: each has a circuit breaker.
//!
//! TENT §3.4.1: a rail that fails is excluded from scheduling and comes back once it is restored.
//! The states are those of a circuit breaker:
//!
//! ```text
//! Closed --failure--> Open --rest is over--> HalfOpen --probe succeeds--> Closed
//!                      ^-----------probe fails-----------'
//! ```
//!
//! A *dead* rail is probed at intervals that double up to [`PROBE_CAP`], so that it is used again
//! soon after its repair. A rail *flaps* if it answers its probe and fails again within
//! [`FORGIVE_TIME`]. It rests longer each time: twice as long as before, and [`SHARE`] times as
//! long as it was in use, up to [`CAP`].
//!
//! So a rail that stays up for `u` at a time is in use for at most 1/10 of the time where
//! `u <= CAP / 9`, and for at most `u / (u + CAP)` in the long run in any case, counted from its
//! first return.

use std::time::Duration;

use crate::time::Time;

/// The rest after a first failure, and the first interval between probes.
pub const BASE: Duration = Duration::from_millis(50);
/// The longest interval between unanswered probes.
pub const PROBE_CAP: Duration = Duration::from_millis(500);
/// The longest rest of a flapping rail.
pub const CAP: Duration = Duration::from_secs(30);
/// Time in use after which earlier failures no longer count.
pub const FORGIVE_TIME: Duration = Duration::from_secs(60);
/// A flapping rail rests at least this many times as long as it was in use.
pub const SHARE: u32 = 9;
/// Timeout of a probe; after it another one may begin.
pub const PROBE_LOST: Duration = Duration::from_secs(1);

/// Permission to use the rail. The result is reported with it, so that work from before a failure
/// never counts as a probe or as a second failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BreakerState {
    Closed { since: Time },
    Open { until: Time },
    HalfOpen { since: Time },
}

/// The health of one rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breaker {
    state: BreakerState,
    /// Counts changes of the state.
    era: u32,
    /// The rest after the last failure in use; zero if there was none, or it is forgiven.
    rest: Duration,
    /// The rest after the next probe that fails.
    interval: Duration,
}

impl Breaker {
    pub fn new(now: Time) -> Self {
        let state = BreakerState::Closed { since: now };
        Self { state, era: 0, rest: Duration::ZERO, interval: BASE }
    }

    /// Whether `permit` would say no.
    pub fn excluded(&self, now: Time) -> bool {
        now < self.opens()
    }

    /// When `permit` will say yes; in the past if it does already.
    pub fn opens(&self) -> Time {
        match self.state {
            BreakerState::Closed { since } => since,
            BreakerState::Open { until } => until,
            BreakerState::HalfOpen { since } => since.after(PROBE_LOST),
        }
    }

    /// Leave to use it now. After a rest it is for a probe, and for one at a time.
    pub fn permit(&mut self, now: Time) -> Option<Permit> {
        if self.excluded(now) {
            return None;
        }
        if !matches!(self.state, BreakerState::Closed { .. }) {
            self.set_state(BreakerState::HalfOpen { since: now });
        }
        Some(Permit(self.era))
    }

    /// Whether the use that this pass was for went well.
    pub fn report(&mut self, now: Time, pass: Permit, well: bool) {
        if pass.0 != self.era {
            return;
        }
        match (self.state, well) {
            (BreakerState::Closed { .. }, true) => {}
            (BreakerState::Closed { since }, false) => self.fail(now, now.since(since)),
            (BreakerState::HalfOpen { .. }, true) => {
                self.set_state(BreakerState::Closed { since: now })
            }
            (BreakerState::HalfOpen { .. }, false) => {
                self.set_state(BreakerState::Open { until: now.after(self.interval) });
                self.interval = (self.interval * 2).min(PROBE_CAP);
            }
            // A pass is of the era in which it was given, and none is given while open.
            (BreakerState::Open { .. }, _) => {}
        }
    }

    fn fail(&mut self, now: Time, used: Duration) {
        self.rest = match self.rest.is_zero() || used >= FORGIVE_TIME {
            true => BASE,
            false => (self.rest * 2).max(used * SHARE).min(CAP),
        };
        self.interval = BASE;
        self.set_state(BreakerState::Open { until: now.after(self.rest) });
    }

    fn set_state(&mut self, state: BreakerState) {
        self.state = state;
        self.era = self.era.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(n: u64) -> Time {
        Time(n * 1_000_000)
    }

    /// Closes an open breaker by a probe at the first possible time; returns that time.
    fn revive(b: &mut Breaker) -> Time {
        let at = b.opens();
        let probe = b.permit(at).unwrap();
        b.report(at, probe, true);
        assert_eq!(b.state, BreakerState::Closed { since: at });
        at
    }

    fn fail(b: &mut Breaker, at: Time) -> Duration {
        let pass = b.permit(at).unwrap();
        b.report(at, pass, false);
        b.opens().since(at)
    }

    #[test]
    fn an_error_excludes_until_a_probe_succeeds() {
        let mut b = Breaker::new(ms(0));
        assert_eq!(fail(&mut b, ms(10)), BASE);
        assert!(b.excluded(ms(59)) && b.permit(ms(59)).is_none());
        assert!(!b.excluded(ms(60)));
        let probe = b.permit(ms(60)).unwrap();
        assert!(b.permit(ms(60)).is_none(), "one probe at a time");
        b.report(ms(61), probe, true);
        assert_eq!(b.state, BreakerState::Closed { since: ms(61) });
        assert!(b.permit(ms(61)).is_some() && b.permit(ms(61)).is_some());
    }

    #[test]
    fn what_was_posted_before_a_failure_says_nothing_after_it() {
        let mut b = Breaker::new(ms(0));
        let old = b.permit(ms(0)).unwrap();
        fail(&mut b, ms(1));
        let open = b;
        b.report(ms(2), old, false);
        b.report(ms(2), old, true);
        assert_eq!(b, open);
        let probe = b.permit(ms(51)).unwrap();
        let half = b;
        b.report(ms(52), old, false);
        b.report(ms(52), old, true);
        assert_eq!(b, half);
        b.report(ms(52), probe, true);
        b.report(ms(52), old, false);
        assert!(!b.excluded(ms(52)));
    }

    #[test]
    fn a_dead_rail_is_probed_twice_a_second_and_a_lost_probe_is_no_end() {
        let mut b = Breaker::new(ms(0));
        fail(&mut b, ms(0));
        let rests: Vec<_> = (0..7).map(|_| fail_probe(&mut b)).collect();
        assert_eq!(rests, [50, 100, 200, 400, 500, 500, 500]);
        let at = b.opens();
        let lost = b.permit(at).unwrap();
        assert!(b.excluded(at.after(PROBE_LOST - Duration::from_nanos(1))));
        let again = at.after(PROBE_LOST);
        let probe = b.permit(again).unwrap();
        b.report(again, lost, false);
        b.report(again, probe, true);
        assert!(matches!(b.state, BreakerState::Closed { .. }));
        // However long it was dead, it has failed once.
        assert_eq!(fail(&mut b, again), BASE * 2);
    }

    fn fail_probe(b: &mut Breaker) -> u128 {
        let at = b.opens();
        fail(b, at).as_millis()
    }

    #[test]
    fn rest_doubles_while_a_rail_flaps_up_to_a_cap_and_is_forgiven() {
        let mut b = Breaker::new(ms(0));
        let mut at = ms(0);
        let mut rests = Vec::new();
        for _ in 0..12 {
            rests.push(fail(&mut b, at.after(Duration::from_millis(1))).as_millis());
            at = revive(&mut b);
        }
        let doubled = [50, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 30000, 30000];
        assert_eq!(rests, doubled);
        assert_eq!(fail(&mut b, at.after(FORGIVE_TIME - Duration::from_nanos(1))), CAP);
        at = revive(&mut b);
        assert_eq!(fail(&mut b, at.after(FORGIVE_TIME)), BASE);
    }

    proptest! {
        /// The bound that the module states, for any rail that stays up no longer than `most`.
        #[test]
        fn a_flapping_rail_is_seldom_in_use(
            ups in prop::collection::vec(1u64..1000, 30..200), most_ms in 1u64..3333,
            dead_probes in prop::collection::vec(0usize..4, 200),
        ) {
            let mut b = Breaker::new(ms(0));
            fail(&mut b, ms(0));
            let start = revive(&mut b);
            let (mut at, mut used) = (start, Duration::ZERO);
            for (up, dead) in ups.iter().zip(dead_probes) {
                let up = Duration::from_millis(most_ms) * *up as u32 / 1000;
                at = at.after(up);
                used += up;
                fail(&mut b, at);
                for _ in 0..dead {
                    fail_probe(&mut b);
                }
                at = revive(&mut b);
                prop_assert!(used * 10 <= at.since(start), "{used:?} of {:?}", at.since(start));
            }
            // In the long run no more than u / (u + CAP); its first ten rests were shorter.
            let all = at.since(start).as_secs_f64();
            let most = most_ms as f64 / 1e3;
            let long = all * most / (most + CAP.as_secs_f64()) + 10.0 * most;
            prop_assert!(used.as_secs_f64() <= long, "{used:?} of {all}");
        }

        #[test]
        fn a_rail_can_always_be_tried_again_within_the_cap(
            steps in prop::collection::vec((0u64..5_000, any::<Option<bool>>(), any::<bool>()), 1..200),
        ) {
            let mut now = ms(0);
            let mut b = Breaker::new(now);
            let mut passes = Vec::new();
            for (wait, well, old) in steps {
                now = now.after(Duration::from_millis(wait));
                let excluded = b.excluded(now);
                let pass = b.permit(now);
                prop_assert_eq!(pass.is_none(), excluded);
                passes.extend(pass);
                let pass = if old { passes.first() } else { passes.last() };
                if let (Some(pass), Some(well)) = (pass, well) {
                    b.report(now, *pass, well);
                }
                prop_assert!(b.opens() <= now.after(CAP));
            }
        }
    }
}
