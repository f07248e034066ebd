//! Monotonic time as plain nanoseconds, so that a virtual clock can stand in for the real one.

use std::time::Duration;

/// Nanoseconds since an arbitrary start; real or virtual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    pub const NEVER: Time = Time(u64::MAX);

    /// The machine's monotonic clock.
    pub fn now() -> Self {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Time((t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64))
    }

    /// `NEVER` when the sum does not fit.
    pub fn after(self, d: Duration) -> Self {
        u64::try_from(d.as_nanos()).map_or(Time::NEVER, |n| Time(self.0.saturating_add(n)))
    }

    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.nanos_since(earlier))
    }

    /// As a number: a duration is divided into seconds and the rest.
    #[inline]
    pub fn nanos_since(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
