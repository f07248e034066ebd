//! Estimates a rail's speed from its finished slices.
//!
//! TENT §3.3.1 keeps an exponentially weighted moving average of each NIC's latency. Here two
//! numbers are kept, so that a slice behind a long queue doesn't make its rail look slow: the time
//! per byte while the rail is busy, and what a slice needs beyond that when it has the rail to
//! itself.

use std::time::Duration;

use super::size::SMALLEST;
use crate::time::Time;

/// Share of a new sample taken while the rail was busy, the same once samples agree that the rail
/// has changed, and the share of one taken while the rail was idle, where bytes and latency can't
/// be told apart well.
const BUSY: f64 = 0.125;
const CHANGED: f64 = 0.25;
const IDLE: f64 = 1.0 / 16.0;
/// Share of what an idle rail's slice took beyond its bytes that goes into the latency.
const RISE: f64 = 0.125;
/// A first sample that is this many times off counts as this much; every further one to the same
/// side may be twice as far off. One outlier moves the estimate by 6% at most, a rail that has
/// really changed is found out within a few slices.
const OFF: f64 = 1.5;
const MAX_DOUBLINGS: u8 = 10;
/// Slices that are seen to be done together count as so many samples at most.
const MAX_SLICES: i8 = 8;
/// Samples that are averaged before the moving average begins.
const FIRST: u8 = 8;
/// Time without samples after which an estimate drifts back to the nominal speed, by half each
/// `HALF`.
const STALE: Duration = Duration::from_millis(100);
const HALF: Duration = Duration::from_millis(50);

/// The estimated speed of one rail.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Nanoseconds per byte.
    per_byte: f64,
    nominal: f64,
    latency: f64,
    /// Samples in a row that were off to one side: below 0 faster, above 0 slower.
    streak: i8,
    /// Samples taken while it was busy, as far as they matter.
    busy: u8,
    /// Whether the rail has carried a large slice alone.
    tried: bool,
    /// Completions seen together at `last`, not yet a sample.
    open: Sample,
    last: Time,
    /// When it last finished a slice that is large enough to tell its bandwidth.
    measured: Time,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sample {
    slices: i8,
    bytes: f64,
    took: f64,
    alone: bool,
    stale: bool,
}

/// The numbers of an estimate that predict: see [`Estimate::speed`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    pub bytes_per_ns: f64,
    pub latency_ns: f64,
}

impl Speed {
    /// Time until the last of these bytes arrives, ns; infinite if the speed is 0.
    pub fn takes(self, bytes: u64) -> f64 {
        match self.bytes_per_ns > 0.0 {
            true => self.latency_ns.max(0.0) + bytes as f64 / self.bytes_per_ns,
            false => f64::INFINITY,
        }
    }
}

impl Estimate {
    /// For a rail of this nominal speed: that of the link, or a guess that is rather too high.
    pub fn new(bytes_per_ns: f64) -> Self {
        // NaN and nonsense become a byte per nanosecond.
        let speed = if bytes_per_ns > 0.0 && bytes_per_ns.is_finite() { bytes_per_ns } else { 1.0 };
        Self {
            per_byte: 1.0 / speed,
            nominal: 1.0 / speed,
            latency: 0.0,
            streak: 0,
            busy: 0,
            tried: false,
            open: Sample::default(),
            last: Time(0),
            measured: Time(0),
        }
    }

    /// A slice of `bytes`, posted at `posted`, is done. `queued`: bytes on the rail when it was
    /// posted, without its own.
    pub fn completed(&mut self, now: Time, posted: Time, bytes: u64, queued: u64) {
        if bytes == 0 {
            return;
        }
        if now != self.last {
            self.fold();
            // The rail has served this slice since the last one left it, or since it got here.
            let arrived = posted.after(Duration::from_nanos(self.latency as u64));
            let start = arrived.max(self.last).min(now);
            let took = now.since(if queued == 0 { posted } else { start });
            let stale = queued < SMALLEST && freshness(posted, self.measured) < 1.0;
            let took = took.as_nanos() as f64;
            self.open = Sample { slices: 0, bytes: 0.0, took, alone: queued == 0, stale };
            self.last = now;
        } else if self.open.alone {
            // Several that were seen at one time; the rail wasn't one slice's own.
            self.open.alone = false;
        }
        // Completions arrive in bunches: only whole bunches give a speed.
        self.open.bytes += bytes as f64;
        self.open.slices = (self.open.slices + 1).min(MAX_SLICES);
        if bytes >= SMALLEST {
            self.measured = now;
        }
        let beyond = now.since(posted).as_nanos() as f64 - bytes as f64 * self.per_byte;
        if beyond < self.latency {
            self.latency = (self.latency + beyond.max(0.0)) / 2.0;
        }
    }

    /// Adds the complete sample to the estimate.
    fn fold(&mut self) {
        let Sample { slices, bytes, took, alone, stale } = std::mem::take(&mut self.open);
        // Small slices measure the message rate of a rail, not its bandwidth.
        let small = bytes < SMALLEST as f64;
        if bytes == 0.0 || took == 0.0 || (small && !alone) {
            return;
        }
        if self.busy < FIRST && !(alone && (self.tried || self.busy > 0)) {
            return self.learn(bytes, took, alone);
        }
        if stale && !small {
            // Neither what was known nor the nominal speed is worth much: believe the sample, as
            // far as it lies between the two. What goes beyond them is a sample as any other.
            let sample = (took - self.latency).max(0.0) / bytes;
            let (low, high) = (self.per_byte.min(self.nominal), self.per_byte.max(self.nominal));
            self.per_byte = sample.clamp(low, high);
            if sample == self.per_byte {
                self.streak = 0;
                return;
            }
        }
        let latency = if alone { self.latency } else { 0.0 };
        let expected = latency + bytes * self.per_byte;
        let limit = self.limit(took / expected, slices);
        let ratio = (took / expected).clamp(1.0 / limit, limit);
        let share = match (alone, self.streak) {
            (true, _) => IDLE,
            (false, -1..=1) => BUSY,
            (false, _) => CHANGED,
        };
        let share = 1.0 - (1.0 - share).powi(slices.into());
        // The mean of logarithms: as quick to see that a rail is faster as that it is slower.
        self.per_byte *= ratio.powf(share);
        if alone {
            let beyond = expected * ratio - bytes * self.per_byte;
            self.latency += (beyond - self.latency).max(0.0) * RISE;
        }
        self.nominal = self.nominal.min(self.per_byte);
    }

    /// Takes the first samples as they are: the nominal speed may be wrong by a factor of
    /// thousands.
    fn learn(&mut self, bytes: f64, took: f64, alone: bool) {
        if alone {
            // How much of it is latency will be seen once the rail is busy.
            if bytes >= SMALLEST as f64 {
                self.tried = true;
                self.per_byte = took / bytes;
            } else {
                self.latency = (took - bytes * self.per_byte).max(0.0);
            }
        } else {
            // The mean of those so far, until the moving average takes over.
            self.busy += 1;
            self.per_byte *= (took / (bytes * self.per_byte)).powf(1.0 / f64::from(self.busy));
        }
        self.nominal = self.nominal.min(self.per_byte);
    }

    fn limit(&mut self, ratio: f64, slices: i8) -> f64 {
        let side = slices * (i8::from(ratio > OFF) - i8::from(ratio < 1.0 / OFF));
        if side == 0 || side.signum() != self.streak.signum() {
            self.streak = side;
        } else {
            self.streak = self.streak.saturating_add(side);
        }
        let doublings = self.streak.unsigned_abs().saturating_sub(1).min(MAX_DOUBLINGS);
        OFF * f64::from(1u32 << doublings)
    }

    /// Expected speed of the rail for a slice of `length`, with `queued` bytes in flight.
    ///
    /// A rail that is avoided because it was slow gives no samples, so its recovery would go
    /// unseen. Therefore the estimate of an idle rail drifts to the nominal speed. The next slice
    /// on it then gives a sample. Small slices tell a rail's latency and not its bandwidth: for
    /// large ones it drifts although small ones go over it.
    pub fn speed(&self, now: Time, queued: u64, length: u64) -> Speed {
        let mut seen = *self;
        seen.fold();
        let known = if queued == 0 { freshness(now, self.last) } else { 1.0 };
        let measured = match queued < SMALLEST && length >= SMALLEST {
            true => freshness(now, self.measured),
            false => known,
        };
        let per_byte = seen.nominal + (seen.per_byte - seen.nominal) * measured;
        Speed { bytes_per_ns: 1.0 / per_byte, latency_ns: seen.latency * known }
    }

    /// Bytes that it is known to carry in so long; 0 until it has carried something.
    pub fn carries(&self, time: Duration) -> u64 {
        match self.tried || self.busy > 0 {
            true => (time.as_nanos() as f64 / self.per_byte) as u64,
            false => 0,
        }
    }
}

/// 1 while an estimate is fresh whose last sample was seen then, towards 0 as it ages.
fn freshness(now: Time, last: Time) -> f64 {
    match now.since(last).checked_sub(STALE) {
        None => 1.0,
        Some(over) => (-(over.as_secs_f64() / HALF.as_secs_f64())).exp2(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: u64 = 64 << 10;

    /// A rail that serves slices one after the other.
    struct Rail {
        now: u64,
        latency: u64,
        per_byte: f64,
    }

    impl Rail {
        /// `n` slices with never fewer than four on the way, or each alone.
        fn carry(&mut self, e: &mut Estimate, n: usize, busy: bool) {
            let service = (SLICE as f64 * self.per_byte) as u64;
            for i in 0..n as u64 {
                let (posted, queued) = match busy {
                    true => {
                        self.now += service;
                        (self.now.saturating_sub(4 * service + self.latency), 3 * SLICE)
                    }
                    false => {
                        let posted = self.now + 100 * i;
                        self.now = posted + self.latency + service;
                        (posted, 0)
                    }
                };
                e.completed(Time(self.now), Time(posted), SLICE, queued);
            }
        }
    }

    fn off(e: &Estimate, rail: &Rail) -> f64 {
        let expected = rail.latency as f64 + SLICE as f64 * rail.per_byte;
        e.speed(Time(rail.now), SLICE, SLICE).takes(SLICE) / expected
    }

    #[test]
    fn a_busy_rail_is_known_within_a_few_slices() {
        for factor in [0.1, 0.5, 1.0, 3.0, 10.0] {
            let mut e = Estimate::new(50.0);
            let mut rail = Rail { now: 1 << 20, latency: 0, per_byte: 0.02 * factor };
            rail.carry(&mut e, 16, true);
            assert!((0.8..1.25).contains(&off(&e, &rail)), "{factor}: {}", off(&e, &rail));
        }
    }

    #[test]
    fn what_was_expected_counts_for_nothing_once_a_rail_has_carried_something() {
        for (n, busy) in [(0, false), (1, true)] {
            let mut e = Estimate::new(50.0);
            let mut rail = Rail { now: 1 << 40, latency: 0, per_byte: 333.0 };
            rail.carry(&mut e, 1, false);
            rail.carry(&mut e, n, busy);
            assert!((0.8..1.25).contains(&off(&e, &rail)), "{n}: {}", off(&e, &rail));
        }
        // Small slices are mostly latency and must not change the speed: alone, many at a time, or
        // on a known idle rail.
        let mut e = Estimate::new(50.0);
        for i in 0..64u64 {
            let now = (1 << 20) + 5_000 * i;
            e.completed(Time(now), Time(now - 5_000), 8, i % 4 * 8);
        }
        assert!(e.speed(Time(1 << 21), SLICE, SLICE).bytes_per_ns > 40.0, "{e:?}");
        let mut rail = Rail { now: 1 << 40, latency: 5_000, per_byte: 8.0 };
        rail.carry(&mut e, 40, true);
        let later = Time(rail.now + 1_000_000_000);
        e.completed(later, Time(later.0 - 3_000), 4096, 0);
        assert!(e.speed(later.after(STALE / 2), SLICE, SLICE).bytes_per_ns < 0.2, "{e:?}");
    }

    #[test]
    fn a_slice_alone_is_predicted_with_its_latency() {
        let mut e = Estimate::new(50.0);
        let mut rail = Rail { now: 0, latency: 5_000, per_byte: 0.02 };
        rail.carry(&mut e, 40, false);
        assert!((0.9..1.1).contains(&off(&e, &rail)), "{}", off(&e, &rail));
        rail.carry(&mut e, 60, true);
        let speed = e.speed(Time(rail.now), SLICE, SLICE);
        assert!((45.0..55.0).contains(&speed.bytes_per_ns), "{speed:?}");
    }

    #[test]
    fn one_outlier_moves_the_estimate_by_6_percent_at_most() {
        for (i, took) in [1u64, 10, 1_000_000, 1 << 40].into_iter().enumerate() {
            for queued in [0, SLICE] {
                let mut e = Estimate::new(50.0);
                let mut rail = Rail { now: 1 << 20, latency: 0, per_byte: 0.02 };
                rail.carry(&mut e, 50, true);
                let before = e.speed(Time(rail.now), SLICE, SLICE).bytes_per_ns;
                let posted = Time(rail.now);
                rail.now += took;
                e.completed(Time(rail.now), posted, SLICE, queued);
                let after = e.speed(Time(rail.now), SLICE, SLICE).bytes_per_ns;
                assert!((0.94..1.06).contains(&(after / before)), "{i}: {before} {after}");
            }
        }
    }

    #[test]
    fn completions_seen_together_are_one_sample() {
        let mut e = Estimate::new(50.0);
        let service = (SLICE as f64 * 0.02) as u64;
        for bunch in 1..50 {
            let now = Time(bunch * 8 * service);
            for _ in 0..8 {
                e.completed(now, Time(now.0.saturating_sub(16 * service)), SLICE, SLICE);
            }
        }
        let speed = e.speed(Time(50 * 8 * service), SLICE, SLICE);
        assert!((45.0..55.0).contains(&speed.bytes_per_ns), "{speed:?}");
    }

    #[test]
    fn a_slow_rail_is_tried_again_with_one_slice() {
        let mut e = Estimate::new(50.0);
        let mut rail = Rail { now: 0, latency: 0, per_byte: 2.0 };
        rail.carry(&mut e, 60, true);
        let slow = e.speed(Time(rail.now), 0, SLICE).bytes_per_ns;
        assert!(slow < 0.6, "{slow}");
        let later = Time(rail.now).after(Duration::from_millis(600));
        assert!(e.speed(later, 0, SLICE).bytes_per_ns > 40.0, "idle, so tried again");
        assert!(e.speed(later, SLICE, SLICE).bytes_per_ns < 0.6, "but by one slice only");

        // Still slow: known at once. Recovered: known at once too.
        for (per_byte, range) in [(2.0, 0.4..0.6), (0.02, 40.0..60.0)] {
            let mut e = e;
            let mut rail = Rail { now: later.0, latency: 0, per_byte };
            rail.carry(&mut e, 2, false);
            let speed = e.speed(Time(rail.now), SLICE, SLICE).bytes_per_ns;
            assert!(range.contains(&speed), "{speed}");
        }
    }

    #[test]
    fn a_slow_rail_is_tried_again_although_small_slices_go_over_it() {
        for (small, queued) in [(8, 0), (8, 8), (4096, 0), (4096, 4096), (SMALLEST - 1, 0)] {
            let mut e = Estimate::new(50.0);
            let mut rail = Rail { now: 0, latency: 0, per_byte: 20.0 };
            rail.carry(&mut e, 60, true);
            assert!(e.speed(Time(rail.now), queued, SLICE).bytes_per_ns < 0.06);
            for _ in 0..120 {
                rail.now += 10_000_000;
                e.completed(Time(rail.now), Time(rail.now - 5_000), small, queued);
            }
            let now = Time(rail.now + 1_000_000);
            let speed = e.speed(now, queued, SLICE).bytes_per_ns;
            assert!(speed > 40.0, "{small}, {queued}: {speed}");
            let busy = e.speed(now, SLICE, SLICE).bytes_per_ns;
            assert!(busy < 20.0, "{small}, {queued}: {busy}, but by one slice only");
            // Found slow, or not, with this slice.
            for (per_byte, range) in [(20.0, 0.03..20.0), (0.02, 40.0..60.0)] {
                let (mut e, took) = (e, (SLICE as f64 * per_byte) as u64);
                e.completed(now.after(Duration::from_nanos(took)), now, SLICE, queued);
                let speed = e.speed(now.after(Duration::from_nanos(took)), SLICE, SLICE);
                let speed = speed.bytes_per_ns;
                assert!(range.contains(&speed), "{small}, {queued}, {per_byte}: {speed}");
            }
        }
    }

    #[test]
    fn a_rail_that_slows_down_is_known_however_rarely_its_completions_are_seen() {
        // Bunches of eight, each after a pause in which the estimate ages.
        for (queued, pause) in [(SLICE, 0), (0, 1_000_000_000)] {
            let mut e = Estimate::new(50.0);
            let mut now = 1 << 30;
            for per_byte in [333.0, 1333.0] {
                for _ in 0..6 {
                    let posted = Time(now + pause);
                    now = posted.0 + (8.0 * SLICE as f64 * per_byte) as u64;
                    for i in 0..8 {
                        e.completed(Time(now), posted, SLICE, queued + i * SLICE);
                    }
                }
                let off = e.speed(Time(now), SLICE, SLICE).bytes_per_ns * per_byte;
                assert!((0.7..1.4).contains(&off), "{pause}, {per_byte}: {off}");
            }
        }
    }

    #[test]
    fn nonsense_is_survived() {
        for speed in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let mut e = Estimate::new(speed);
            e.completed(Time(0), Time(5), 0, 0);
            e.completed(Time(0), Time(5), u64::MAX, 0);
            e.completed(Time(9), Time::NEVER, 1, u64::MAX);
            e.completed(Time(4), Time(9), 1, 1);
            e.completed(Time::NEVER, Time(0), u64::MAX, 0);
            let takes = e.speed(Time(3), 0, SLICE).takes(1 << 20);
            assert!(takes >= 0.0 && takes.is_finite(), "{takes}");
        }
    }
}
