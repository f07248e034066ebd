//! Which of several routines is the fastest here, learnt while they are used.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

pub(super) const MOST: usize = 4;
/// Every so many uses the best is timed, and right after it one of the others.
const EVERY: u32 = 64;
/// Pairs with each of the others that come first, one after the other.
const TRIALS: u32 = 4;
/// An equal cost.
const ONE: u64 = 1 << 10;
/// Whoever costs less than this of the best takes its place.
const CLEARLY: u64 = ONE - ONE / 32;

/// Compares routines in pairs of uses that follow each other: what else goes on in the machine slows both
/// down alike, and by far more than routines differ.
#[derive(Debug)]
pub(super) struct Choice {
    routines: u32,
    turn: AtomicU32,
    best: AtomicU32,
    /// What the best cost in the pair that is being measured, picoseconds a byte.
    reference: AtomicU64,
    /// Smoothed cost of each, `ONE` being that of the best.
    ratio: [AtomicU64; MOST],
}

/// Which routine to use, and how what it takes is learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub routine: usize,
    pub timed: bool,
}

impl Choice {
    pub fn new(routines: usize) -> Self {
        Self {
            routines: routines as u32,
            turn: AtomicU32::new(0),
            best: AtomicU32::new(0),
            reference: AtomicU64::new(0),
            ratio: [const { AtomicU64::new(ONE) }; MOST],
        }
    }

    pub fn best(&self) -> usize {
        self.best.load(Relaxed) as usize
    }

    #[inline]
    pub fn choose(&self) -> Use {
        let (best, others) = (self.best.load(Relaxed), self.routines - 1);
        let turn = self.turn.fetch_add(1, Relaxed);
        let (pair, at) = match turn < 2 * TRIALS * others {
            true => (turn / 2, turn % 2),
            false => (turn / EVERY, turn % EVERY),
        };
        let routine = match at == 1 && others > 0 {
            true => (best + 1 + pair % others) % self.routines,
            false => best,
        };
        Use { routine: routine as usize, timed: at < 2 && others > 0 }
    }

    /// Takes what a timed use cost, picoseconds a byte.
    pub fn learn(&self, routine: usize, cost: u64) {
        if routine == self.best() {
            self.reference.store(cost.max(1), Relaxed);
            return;
        }
        // Threads that measure at the same time take each other's reference: a worse guess, no more.
        let reference = self.reference.swap(0, Relaxed);
        if reference == 0 {
            return;
        }
        let seen = (cost * ONE / reference).clamp(ONE / 2, 2 * ONE);
        let old = self.ratio[routine].load(Relaxed);
        let new = (7 * old + seen) / 8;
        if new >= CLEARLY {
            return self.ratio[routine].store(new, Relaxed);
        }
        self.best.store(routine as u32, Relaxed);
        // To the new one nobody has been compared yet.
        self.ratio.iter().for_each(|ratio| ratio.store(ONE, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Share of uses that each routine gets while its cost is `cost` times what the machine's other
    /// work makes of it, and one use in ten is held up.
    fn shares(costs: &[u64], uses: u32, seed: u64) -> Vec<f64> {
        let choice = Choice::new(costs.len());
        let mut draw = fastrand::Rng::with_seed(seed);
        let (mut slow, mut used) = (1.0, vec![0u32; costs.len()]);
        for _ in 0..uses {
            if draw.u32(..200) == 0 {
                slow = 1.0 + 3.0 * draw.f64();
            }
            let held = if draw.u32(..10) == 0 { 5.0 } else { 1.0 + 0.2 * draw.f64() };
            let chosen = choice.choose();
            used[chosen.routine] += 1;
            if chosen.timed {
                choice.learn(chosen.routine, (costs[chosen.routine] as f64 * slow * held) as u64);
            }
        }
        used.iter().map(|n| f64::from(*n) / f64::from(uses)).collect()
    }

    #[test]
    fn the_cheapest_is_used_though_everything_slows_down_and_recovers() {
        for seed in 0..20 {
            let shares = shares(&[70, 55, 110], 50_000, seed);
            assert!(shares[1] > 0.9, "{seed}: {shares:?}");
        }
    }

    #[test]
    fn a_routine_that_becomes_slow_is_left() {
        let choice = Choice::new(2);
        let mut last = 0;
        for turn in 0..20_000u64 {
            let chosen = choice.choose();
            let cost = if turn < 10_000 { [100, 150] } else { [300, 150] };
            if chosen.timed {
                choice.learn(chosen.routine, cost[chosen.routine]);
            }
            last = choice.best();
            assert!(turn >= 10_000 || last == 0);
        }
        assert_eq!(last, 1);
    }

    #[test]
    fn one_alone_is_never_timed() {
        let choice = Choice::new(1);
        assert!((0..200).all(|_| choice.choose() == Use { routine: 0, timed: false }));
    }
}
