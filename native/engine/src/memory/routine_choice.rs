//! Learns which of several routines is the fastest, while they are used.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Most routines of one choice.
pub(super) const MAX_ROUTINES: usize = 4;
/// Uses between two comparisons. It is no multiple of callers' group sizes, because the first copy
/// of a group is slower.
const EVERY: u32 = 127;
/// Initial comparisons with each other routine, without a pause.
const TRIALS: u32 = 16;
/// Uses of one comparison. The first is not timed, because the cache is cold after a pause. The
/// best and another routine follow, and take turns to be first.
const USES: u32 = 3;
/// Comparisons under way at a time; further ones overwrite each other.
const UNDER_WAY: usize = 8;
/// The ratio of equal costs.
const ONE: u64 = 1 << 10;
/// The step of a ratio per comparison.
const STEP: u64 = ONE / 128;
/// Ratio below which a candidate replaces the best routine.
const REPLACE_RATIO: u64 = ONE - ONE / 32;
/// Largest ratio. A routine that becomes cheap is thus found soon.
const MAX_RATIO: u64 = ONE + ONE / 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ComparedRoutine {
    Best,
    Other,
}

/// Compares routines in successive uses. Other load slows all routines alike, and by more than they
/// differ. The median of the comparisons counts, and each comparison moves it by one step. So a
/// comparison in which a thread lost its core has no more weight than others.
#[derive(Debug)]
pub(super) struct RoutineChoice {
    routines: u32,
    turn: AtomicU32,
    best: AtomicU32,
    /// Comparisons of which one side has ended: see [`half`]. Threads take turns, so either side
    /// may end first, and several comparisons may be under way.
    halves: [AtomicU64; UNDER_WAY],
    /// The median cost of each routine relative to the best, which is `ONE`.
    ratio: [AtomicU64; MAX_ROUTINES],
}

/// One use of a routine, and the comparison to which its time belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RoutineUse {
    pub routine: usize,
    side: Option<ComparedRoutine>,
    /// The number of its comparison.
    round: u32,
    other: usize,
}

/// One side of a comparison: its number, and the cost in picoseconds per byte.
fn half(round: u32, cost: u64) -> u64 {
    u64::from(round) << 32 | cost.clamp(1, u64::from(u32::MAX))
}

fn cost_of(half: u64) -> u64 {
    half & u64::from(u32::MAX)
}

impl RoutineUse {
    /// A use that is not timed.
    pub fn untimed(routine: usize) -> Self {
        Self { routine, side: None, round: 0, other: routine }
    }

    pub fn is_timed(&self) -> bool {
        self.side.is_some()
    }
}

impl RoutineChoice {
    pub fn new(routines: usize) -> Self {
        Self {
            routines: routines as u32,
            turn: AtomicU32::new(0),
            best: AtomicU32::new(0),
            halves: [const { AtomicU64::new(u64::MAX) }; UNDER_WAY],
            ratio: [const { AtomicU64::new(ONE) }; MAX_ROUTINES],
        }
    }

    pub fn best(&self) -> usize {
        self.best.load(Relaxed) as usize
    }

    #[inline]
    pub fn choose(&self) -> RoutineUse {
        let (best, others) = (self.best.load(Relaxed), self.routines - 1);
        if others == 0 {
            return RoutineUse::untimed(0);
        }
        let turn = self.turn.fetch_add(1, Relaxed);
        let (round, at) = match turn < USES * TRIALS * others {
            true => (turn / USES, turn % USES),
            false => (turn / EVERY, turn % EVERY),
        };
        if at == 0 || at >= USES {
            return RoutineUse::untimed(best as usize);
        }
        let other = ((best + 1 + round / 2 % others) % self.routines) as usize;
        let (routine, side) = match (at == 1) == round.is_multiple_of(2) {
            true => (best as usize, ComparedRoutine::Best),
            false => (other, ComparedRoutine::Other),
        };
        RoutineUse { routine, side: Some(side), round, other }
    }

    /// Records the cost of a timed use, picoseconds per byte.
    pub fn learn(&self, used: RoutineUse, cost: u64) {
        let Some(side) = used.side else { return };
        let mine = half(used.round, cost);
        let first = self.halves[used.round as usize % UNDER_WAY].swap(mine, Relaxed);
        if first >> 32 != mine >> 32 {
            return;
        }
        let (mine, first) = (cost_of(mine), cost_of(first));
        let (best, other) =
            if side == ComparedRoutine::Best { (mine, first) } else { (first, mine) };
        let (ratio, seen) = (&self.ratio[used.other], other * ONE / best);
        let old = ratio.load(Relaxed);
        let new = if seen < old { old - STEP } else { (old + STEP).min(MAX_RATIO) };
        if new >= REPLACE_RATIO {
            return ratio.store(new, Relaxed);
        }
        self.best.store(used.other as u32, Relaxed);
        // No candidate has been compared with the new one yet.
        self.ratio.iter().for_each(|ratio| ratio.store(ONE, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Share of uses that each routine gets while its cost is `cost` times what the machine's other
    /// work makes of it, and one use in ten is held up.
    fn shares(costs: &[u64], uses: u32, seed: u64) -> Vec<f64> {
        let choice = RoutineChoice::new(costs.len());
        let mut draw = fastrand::Rng::with_seed(seed);
        let (mut slow, mut used) = (1.0, vec![0u32; costs.len()]);
        for _ in 0..uses {
            if draw.u32(..200) == 0 {
                slow = 1.0 + 3.0 * draw.f64();
            }
            let held = if draw.u32(..10) == 0 { 5.0 } else { 1.0 + 0.2 * draw.f64() };
            let chosen = choice.choose();
            used[chosen.routine] += 1;
            choice.learn(chosen, (costs[chosen.routine] as f64 * slow * held) as u64);
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
    fn those_who_copy_in_groups_and_are_often_held_up_stay_with_the_cheapest() {
        for (seed, group) in (0..20).flat_map(|seed| [16u64, 64, 127].map(|group| (seed, group))) {
            let (choice, mut draw) = (RoutineChoice::new(3), fastrand::Rng::with_seed(seed));
            let mut cheapest = 0u32;
            for turn in 0..50_000 {
                let cold = if turn % group == 0 { 3.0 } else { 1.0 };
                let held = if draw.u32(..8) == 0 { 4.0 } else { 1.0 + 0.2 * draw.f64() };
                let chosen = choice.choose();
                cheapest += u32::from(chosen.routine == 1);
                choice.learn(chosen, ([110.0, 100.0, 130.0][chosen.routine] * cold * held) as u64);
            }
            assert!(cheapest > 45_000, "seed {seed}, groups of {group}: {cheapest} of 50,000");
        }
    }

    #[test]
    fn threads_that_copy_at_the_same_time_find_the_cheapest() {
        for (seed, threads) in (0..20).flat_map(|seed| [2, 4, 8, 16].map(|n| (seed, n))) {
            let (choice, mut draw) = (RoutineChoice::new(3), fastrand::Rng::with_seed(seed));
            // The running copies: end time, routine, duration.
            let mut busy: Vec<(f64, RoutineUse, f64)> = Vec::new();
            let (mut now, mut cheapest) = (0.0, 0u32);
            for _ in 0..50_000 {
                if busy.len() == threads {
                    let next = (0..threads).min_by(|a, b| busy[*a].0.total_cmp(&busy[*b].0));
                    let (end, used, cost) = busy.swap_remove(next.unwrap());
                    now = end;
                    choice.learn(used, cost as u64);
                }
                let used = choice.choose();
                cheapest += u32::from(used.routine == 1);
                let held = if draw.u32(..10) == 0 { 4.0 } else { 1.0 + 0.2 * draw.f64() };
                let cost = [150.0, 100.0, 200.0][used.routine] * held;
                busy.push((now + cost, used, cost));
            }
            assert!(cheapest > 45_000, "seed {seed}, {threads} threads: {cheapest} of 50,000");
        }
    }

    #[test]
    fn a_routine_that_becomes_slow_is_left() {
        let choice = RoutineChoice::new(2);
        let mut last = 0;
        for turn in 0..20_000u64 {
            let chosen = choice.choose();
            let cost = if turn < 10_000 { [100, 150] } else { [300, 150] };
            choice.learn(chosen, cost[chosen.routine]);
            last = choice.best();
            assert!(turn >= 10_000 || last == 0);
        }
        assert_eq!(last, 1);
    }

    #[test]
    fn one_alone_is_never_timed() {
        let choice = RoutineChoice::new(1);
        assert!((0..200).all(|_| !choice.choose().is_timed()));
    }
}
