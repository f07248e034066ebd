//! Which of a peer's numbered work requests were carried out, in whatever order they came (IC-3).

use std::collections::BTreeSet;

/// Numbers beyond the first gap, and refused ones, that are remembered: more than a link ever has under
/// way.
const MOST: usize = 1 << 17;

/// The numbers count from 1 on and have no gaps at the peer that gives them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Landed {
    /// All up to this one are over here.
    upto: u64,
    /// And these.
    beyond: BTreeSet<u64>,
    /// These were not carried out.
    refused: BTreeSet<u64>,
    lost_track: bool,
}

impl Landed {
    /// A work request is over here: carried out in full, or refused.
    #[inline]
    pub fn note(&mut self, number: u64, done: bool) {
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
        if self.remembered() > MOST {
            // No receipt will be asked for: nothing needs to be remembered.
            self.lost_track = true;
            (self.beyond, self.refused) = Default::default();
        }
    }

    /// How many numbers are kept one by one.
    pub fn remembered(&self) -> usize {
        self.beyond.len() + self.refused.len()
    }

    /// The number that ends in these `bits` bits and is nearest to those of late.
    pub fn widen(&self, low: u64, bits: u32) -> u64 {
        let span = 1u64 << bits;
        let base = self.upto & !(span - 1) | low;
        match base {
            b if b + span / 2 < self.upto => b + span,
            b if b > self.upto + span / 2 && b >= span => b - span,
            b => b,
        }
    }

    /// Whether all of a work request has come, and its count was reported; `None` if that is unknown.
    pub fn contains(&self, number: u64) -> Option<bool> {
        let over = number <= self.upto || self.beyond.contains(&number);
        (!self.lost_track).then(|| over && !self.refused.contains(&number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_is_known_in_any_order() {
        let mut landed = Landed::default();
        for n in [1, 2, 5, 4] {
            landed.note(n, n != 4);
        }
        let known: Vec<_> = (1..=6).map(|n| landed.contains(n)).collect();
        assert_eq!(known, [true, true, false, false, true, false].map(Some));
        landed.note(3, true);
        assert_eq!((landed.upto, landed.beyond.len()), (5, 0));
        assert_eq!((landed.contains(3), landed.contains(4)), (Some(true), Some(false)));
        (10..10 + 2 * MOST as u64).for_each(|n| landed.note(n, true));
        assert_eq!(landed.contains(1), None, "too much to remember");
        assert_eq!((landed.remembered(), landed.widen(5, 31)), (0, 5));
    }

    #[test]
    fn short_numbers_are_widened() {
        let mut landed = Landed { upto: (1 << 31) - 2, ..Landed::default() };
        assert_eq!(landed.widen((1 << 31) - 1, 31), (1 << 31) - 1);
        assert_eq!(landed.widen(0, 31), 1 << 31);
        assert_eq!(landed.widen(3, 31), (1 << 31) + 3);
        landed.upto = (1 << 31) + 5;
        assert_eq!(landed.widen((1 << 31) - 1, 31), (1 << 31) - 1);
        assert_eq!(landed.widen(9, 31), (1 << 31) + 9);
    }
}
