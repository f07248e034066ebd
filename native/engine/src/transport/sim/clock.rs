//! The clocks of engines: they show different times and run at different rates.

use std::sync::{
    atomic::{AtomicU64, Ordering::SeqCst},
    Arc,
};

use crate::time::Time;

const MILLION: i64 = 1_000_000;
/// Largest difference between two clocks, nanoseconds: an hour.
const MAX_CLOCK_DIFFERENCE: u64 = 3_600_000_000_000;

/// The clock of one engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    shown: Arc<AtomicU64>,
    offset: u64,
    /// Nanoseconds of this clock per real millisecond.
    rate: u64,
}

impl Clock {
    /// A clock that is off by up to `skew` parts per million; exact if `skew` is 0.
    pub fn random(skew: u32, rng: &mut fastrand::Rng) -> Self {
        let skew = i64::from(skew);
        let (offset, off) = match skew {
            0 => (0, 0),
            _ => (rng.u64(..MAX_CLOCK_DIFFERENCE), rng.i64(-skew..=skew)),
        };
        Self { shown: Arc::default(), offset, rate: (MILLION + off) as u64 }
    }

    pub fn shown(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.shown)
    }

    /// Sets the clock to what it shows at `now`.
    pub fn set(&self, now: Time) -> Time {
        let at = self.at(now);
        self.shown.fetch_max(at.0, SeqCst);
        at
    }

    pub fn at(&self, now: Time) -> Time {
        let gone = u128::from(now.0) * u128::from(self.rate) / MILLION as u128;
        Time(u64::try_from(gone).map_or(u64::MAX, |gone| gone.saturating_add(self.offset)))
    }

    /// The first moment at which it shows `shown`.
    pub fn when(&self, shown: Time) -> Time {
        if shown == Time::NEVER {
            return shown;
        }
        let gone = u128::from(shown.0.saturating_sub(self.offset)) * MILLION as u128;
        Time(u64::try_from(gone.div_ceil(u128::from(self.rate))).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_is_the_first_moment_at_which_a_clock_shows_a_time() {
        let mut rng = fastrand::Rng::with_seed(1);
        for skew in [0, 1, 50_000, 500_000] {
            for _ in 0..1000 {
                let clock = Clock::random(skew, &mut rng);
                let shown = Time(clock.offset + rng.u64(1..1 << 40));
                let when = clock.when(shown);
                assert!(clock.at(when) >= shown && clock.at(Time(when.0 - 1)) < shown, "{clock:?}");
            }
            assert_eq!(Clock::random(skew, &mut rng).when(Time::NEVER), Time::NEVER);
        }
    }
}
