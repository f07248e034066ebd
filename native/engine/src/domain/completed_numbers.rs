//! The numbered work requests of a peer that were carried out, in any order (IC-3).

use std::collections::BTreeSet;

/// Numbers beyond the first gap, and refused ones, that are remembered. No link has more work under
/// way.
const MAX_REMEMBERED: usize = 1 << 17;

/// Numbers of completed work requests. The peer numbers them from 1 on, without gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompletedNumbers {
    /// All numbers up to this one have ended here.
    upto: u64,
    /// Further numbers that have ended.
    beyond: BTreeSet<u64>,
    /// Numbers that were refused, and not carried out.
    refused: BTreeSet<u64>,
    lost_track: bool,
}

impl CompletedNumbers {
    /// Records that a work request has ended here: `done` if it was carried out in full, else
    /// refused.
    #[inline]
    pub fn record(&mut self, number: u64, done: bool) {
        if self.lost_track {
            self.upto = self.upto.max(number);
            return;
        }
        if !done {
            self.refused.insert(number);
        }
        if number == self.upto + 1 && self.beyond.is_empty() {
            self.upto = number;
        } else if number > self.upto {
            self.beyond.insert(number);
            while self.beyond.remove(&(self.upto + 1)) {
                self.upto += 1;
            }
        }
        if self.remembered() > MAX_REMEMBERED {
            // The peer asks for no receipt of so much work.
            self.lost_track = true;
            (self.beyond, self.refused) = Default::default();
        }
    }

    /// Numbers that are kept one by one.
    pub fn remembered(&self) -> usize {
        self.beyond.len() + self.refused.len()
    }

    /// The full number whose lowest `bits` bits are `low`: the one nearest to the latest numbers.
    pub fn widen(&self, low: u64, bits: u32) -> u64 {
        let span = 1u64 << bits;
        let base = self.upto & !(span - 1) | low;
        match base {
            b if b + span / 2 < self.upto => b + span,
            b if b > self.upto + span / 2 && b >= span => b - span,
            b => b,
        }
    }

    /// Whether a work request was carried out in full and its count reported; `None` if unknown.
    pub fn contains(&self, number: u64) -> Option<bool> {
        let over = number <= self.upto || self.beyond.contains(&number);
        (!self.lost_track).then(|| over && !self.refused.contains(&number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completed_numbers_are_known_in_any_order() {
        let mut completed = CompletedNumbers::default();
        for n in [1, 2, 5, 4] {
            completed.record(n, n != 4);
        }
        let known: Vec<_> = (1..=6).map(|n| completed.contains(n)).collect();
        assert_eq!(known, [true, true, false, false, true, false].map(Some));
        completed.record(3, true);
        assert_eq!((completed.upto, completed.beyond.len()), (5, 0));
        assert_eq!((completed.contains(3), completed.contains(4)), (Some(true), Some(false)));
        (10..10 + 2 * MAX_REMEMBERED as u64).for_each(|n| completed.record(n, true));
        assert_eq!(completed.contains(1), None, "too much to remember");
        assert_eq!((completed.remembered(), completed.widen(5, 31)), (0, 5));
    }

    #[test]
    fn short_numbers_are_widened() {
        let mut completed = CompletedNumbers { upto: (1 << 31) - 2, ..CompletedNumbers::default() };
        assert_eq!(completed.widen((1 << 31) - 1, 31), (1 << 31) - 1);
        assert_eq!(completed.widen(0, 31), 1 << 31);
        assert_eq!(completed.widen(3, 31), (1 << 31) + 3);
        completed.upto = (1 << 31) + 5;
        assert_eq!(completed.widen((1 << 31) - 1, 31), (1 << 31) - 1);
        assert_eq!(completed.widen(9, 31), (1 << 31) + 9);
    }
}
