//! The clocks of engines: none shows the same time as another, nor runs as fast.

use std::sync::{
    atomic::{AtomicU64, Ordering::SeqCst},
    Arc,
};

use crate::time::Time;

const MILLION: i64 = 1_000_000;
/// How far apart two clocks can be, nanoseconds: an hour.
const FAR: u64 = 3_600_000_000_000;

/// What one engine takes for the time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    shown: Arc<AtomicU64>,
    offset: u64,
    /// So many of its nanoseconds are a millisecond.
    rate: u64,
}

impl Clock {
    /// A clock that is off by up to so many parts per million, if that isn't 0.
    pub fn random(skew: u32, rng: &mut fastrand::Rng) -> Self {
        let skew = i64::from(skew);
        let (offset, off) = match skew {
            0 => (0, 0),
            _ => (rng.u64(..FAR), rng.i64(-skew..=skew)),
        };
        Self { shown: Arc::default(), offset, rate: (MILLION + off) as u64 }
    }

    pub fn shown(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.shown)
    }

    /// Sets it to what it shows at this time.
    pub fn set(&self, now: Time) -> Time {
        let at = self.at(now);
        self.shown.fetch_max(at.0, SeqCst);
        at
    }

    pub fn at(&self, now: Time) -> Time {
        let gone = u128::from(now.0) * u128::from(self.rate) / MILLION as u128;
        Time(u64::try_from(gone).map_or(u64::MAX, |gone| gone.saturating_add(self.offset)))
    }

    /// The first moment at which it shows this.
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
    fn a_clock_that_is_off_shows_what_is_asked_for_at_the_first_such_moment() {
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
