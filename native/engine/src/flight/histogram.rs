//! Histograms of durations by powers of two: cheap to keep, and summable over engines.

/// Buckets of a histogram; the last one has no upper bound.
pub const BUCKETS: usize = 40;

/// Durations by powers of two of nanoseconds: bucket `i` counts those in [2^(i-1), 2^i) ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// Nanoseconds of all together.
    pub total: u64,
    pub buckets: [u64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Self { total: 0, buckets: [0; BUCKETS] }
    }
}

impl Histogram {
    /// Counts so many nanoseconds `weight` times: for those of which only some are looked at.
    #[inline]
    pub fn add(&mut self, ns: u64, weight: u32) {
        let bucket = (u64::BITS - ns.leading_zeros()) as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += u64::from(weight);
        self.total = self.total.saturating_add(ns.saturating_mul(u64::from(weight)));
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_bucket_of_the_power_of_two_above_it() {
        let mut h = Histogram::default();
        for ns in [0, 1, 2, 3, 4, 1023, 1024] {
            h.add(ns, 1);
        }
        h.add(u64::MAX, 2);
        let filled: Vec<_> =
            h.buckets.iter().enumerate().filter(|(_, n)| **n > 0).map(|(i, n)| (i, *n)).collect();
        assert_eq!(filled[..6], [(0, 1), (1, 1), (2, 2), (3, 1), (10, 1), (11, 1)]);
        assert_eq!(filled[6], (BUCKETS - 1, 2));
        assert_eq!(h.count(), 9);
    }
}
