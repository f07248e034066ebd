//! Divides the window of a NIC among the engines of a host that share it.
//!
//! TENT §3.3.2 keeps quotas of processes in shared memory, so that no process saturates a NIC. It
//! leaves the division open. Here every engine computes its own part from the demands of all, and
//! no engine decides for others:
//!
//! 1. Classes come one after another, as in [`admit`](super::admit): bulk divides what latency
//!    leaves, background what both leave.
//! 2. Within a class the division is max-min fair by weight. An engine that wants less than its part
//!    gets its demand, and the rest is divided among the others.
//! 3. An engine's own window is its part at unlimited own demand in that class, so that it holds
//!    for all slices. If all engines read the same demands, the used parts add up to at most the
//!    window.
//! 4. Every sender may have [`MIN_WINDOW`] bytes in flight, so that no sender starves. The sum exceeds
//!    the window by at most `MIN_WINDOW` per engine.

use super::classes::ByClass;
use crate::api::Priority;

/// Least window of an engine, bytes: one smallest slice.
pub const MIN_WINDOW: u64 = super::size::SMALLEST;
/// Largest weight of an engine.
pub const MAX_WEIGHT: u32 = 1024;

/// An engine that shares a NIC, as it describes itself. Any numbers are safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicSharer {
    pub weight: u32,
    /// Bytes of the engine in flight on the NIC and waiting for it.
    pub demand: ByClass,
}

impl NicSharer {
    fn weight(&self) -> u64 {
        u64::from(self.weight.clamp(1, MAX_WEIGHT))
    }
}

/// The part of `window` of engine `own`: bytes of each class *and those above it* that it may have
/// under way.
pub fn divide(window: u64, own: NicSharer, others: &[NicSharer]) -> ByClass {
    // What the classes above leave, and what of theirs is ours.
    let (mut left, mut above) = (window, 0);
    let [latency, bulk, background] = Priority::ALL.map(|class| {
        let most = part(left, own.weight(), others, class);
        let limit = (above + most).max(MIN_WINDOW.min(window));
        let wanted = own.demand.of(class);
        above += most.min(wanted);
        // Max-min fairness leaves nothing unused that anyone wants.
        let all = others.iter().fold(wanted, |n, p| n.saturating_add(p.demand.of(class)));
        left = left.saturating_sub(all);
        limit
    });
    ByClass { latency, bulk, background }
}

/// The part of an engine of this weight that wants everything.
fn part(bytes: u64, weight: u64, others: &[NicSharer], class: Priority) -> u64 {
    let mut satisfied = usize::MAX;
    // Per unit of weight everyone gets at most `left / weights`. Each round sets those aside that
    // want less, which leaves more to the others, until none is set aside any more.
    let (mut left, mut weights) =
        (bytes, others.iter().fold(weight, |n, p| n.saturating_add(p.weight())));
    loop {
        let is_satisfied = |p: &&NicSharer| {
            u128::from(p.demand.of(class)) * u128::from(weights)
                <= u128::from(left) * u128::from(p.weight())
        };
        let (mut count, mut wanted, mut theirs) = (0, 0u64, 0);
        for sharer in others.iter().filter(is_satisfied) {
            count += 1;
            wanted = wanted.saturating_add(sharer.demand.of(class));
            theirs += sharer.weight();
        }
        if count == satisfied {
            return (u128::from(left) * u128::from(weight) / u128::from(weights)) as u64;
        }
        satisfied = count;
        left = bytes.saturating_sub(wanted);
        weights = others.iter().fold(weight, |n, p| n.saturating_add(p.weight())) - theirs;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const M: u64 = 1 << 20;
    const WINDOW: u64 = 8 * M;

    fn sharer(weight: u32, latency: u64, bulk: u64, background: u64) -> NicSharer {
        NicSharer { weight, demand: ByClass { latency, bulk, background } }
    }

    fn bulk(bytes: u64) -> NicSharer {
        sharer(1, 0, bytes, 0)
    }

    #[test]
    fn a_window_is_divided_among_those_who_want_it() {
        let idle = bulk(0);
        let busy = bulk(99 * M);
        #[rustfmt::skip]
        let table: [(&str, NicSharer, &[NicSharer], [u64; 3]); 13] = [
            ("alone",                busy, &[],                              [8 * M, 8 * M, 8 * M]),
            ("alone and idle",       idle, &[],                              [8 * M, 8 * M, 8 * M]),
            ("others idle",          busy, &[idle, idle],                    [8 * M, 8 * M, 8 * M]),
            ("two busy",             busy, &[busy],                          [8 * M, 4 * M, 4 * M]),
            ("four busy, one idle",  busy, &[busy, idle, busy, busy],        [8 * M, 2 * M, 2 * M]),
            ("who begins",           idle, &[busy],                          [8 * M, 4 * M, MIN_WINDOW]),
            ("who wants little",     busy, &[bulk(M), busy],                 [8 * M, 7 * M / 2, 7 * M / 2]),
            ("small ones first",     busy, &[bulk(M), bulk(2 * M)],          [8 * M, 5 * M, 5 * M]),
            ("three times as heavy", sharer(3, 0, 99 * M, 0), &[busy],        [8 * M, 6 * M, 6 * M]),
            ("a third as heavy",     busy, &[sharer(3, 0, 99 * M, 0)],        [8 * M, 2 * M, 2 * M]),
            ("their latency first",  busy, &[sharer(1, 6 * M, 99 * M, 0)],    [4 * M, M, M]),
            ("our latency first",    sharer(1, 2 * M, 99 * M, 0), &[busy],    [8 * M, 5 * M, 5 * M]),
            ("background last",      sharer(1, 0, 0, 99 * M), &[bulk(M), sharer(1, 0, 0, 99 * M)],
                                                                             [8 * M, 7 * M, 7 * M / 2]),
        ];
        for (name, own, others, [latency, bulk, background]) in table {
            let expected = ByClass { latency, bulk, background };
            assert_eq!(divide(WINDOW, own, others), expected, "{name}");
        }
    }

    #[test]
    fn numbers_without_sense_are_survived() {
        let mad = sharer(u32::MAX, u64::MAX, u64::MAX, u64::MAX);
        let crowd = [mad; 200];
        for window in [0, 1, MIN_WINDOW - 1, WINDOW, u64::MAX] {
            for own in [mad, sharer(0, 0, 0, 0), bulk(1)] {
                let w = divide(window, own, &crowd);
                assert!(w.latency <= window && w.background >= MIN_WINDOW.min(window), "{w:?}");
            }
        }
        // Weight 0 counts as 1, and none for more than the heaviest.
        assert_eq!(divide(WINDOW, sharer(0, 0, M, 0), &[bulk(99 * M)]).bulk, 4 * M);
        let half = divide(WINDOW, sharer(u32::MAX, 0, M, 0), &[sharer(MAX_WEIGHT, 0, 99 * M, 0)]);
        assert_eq!(half.bulk, 4 * M);
    }

    fn any_bytes() -> impl Strategy<Value = u64> {
        prop_oneof![3 => Just(0), 3 => 0..4 * M, 2 => Just(99 * M), 1 => any::<u64>()]
    }

    prop_compose! {
        fn any_sharer()(
            weight in prop_oneof![4 => Just(1), 2 => 0u32..9, 1 => any::<u32>()],
            latency in any_bytes(), bulk in any_bytes(), background in any_bytes(),
        ) -> NicSharer {
            sharer(weight, latency, bulk, background)
        }
    }

    fn any_sharers() -> impl Strategy<Value = Vec<NicSharer>> {
        prop::collection::vec(any_sharer(), 1..12)
    }

    /// Each engine's windows, as it computes them itself.
    fn all(window: u64, sharers: &[NicSharer]) -> Vec<ByClass> {
        let others = |i: usize| {
            let theirs = sharers.iter().enumerate().filter(|(j, _)| *j != i);
            theirs.map(|(_, p)| *p).collect::<Vec<_>>()
        };
        (0..sharers.len()).map(|i| divide(window, sharers[i], &others(i))).collect()
    }

    /// Bytes that an engine with these windows has in flight if it fills them.
    fn use_of(sharer: &NicSharer, windows: &ByClass) -> u64 {
        Priority::ALL.iter().fold(0u64, |used, class| {
            let room = windows.of(*class).saturating_sub(used);
            used + sharer.demand.of(*class).min(room)
        })
    }

    proptest! {
        #[test]
        fn what_all_use_adds_up_to_the_window(
            sharers in any_sharers(), window in prop_oneof![Just(WINDOW), 0..64 * M],
        ) {
            let windows = all(window, &sharers);
            let uses = sharers.iter().zip(&windows).map(|(p, w)| use_of(p, w));
            let sum: u64 = uses.sum();
            let n = sharers.len() as u64;
            prop_assert!(sum <= window + n * MIN_WINDOW, "{sum} of {window}");
            // And nothing is left that anyone wants, but for fractions of a byte.
            let wanted = sharers.iter().fold(0u64, |n, p| n.saturating_add(p.demand.total()));
            prop_assert!(sum + 3 * n >= window.min(wanted), "{sum} of {window}, {wanted} wanted");
        }

        #[test]
        fn no_sender_starves_and_a_class_has_no_less_than_the_one_below(
            own in any_sharer(), others in any_sharers(), window in 0..64 * M,
        ) {
            let w = divide(window, own, &others);
            prop_assert!(w.background >= MIN_WINDOW.min(window));
            prop_assert!(w.latency <= window && w.bulk <= w.latency && w.background <= w.bulk, "{w:?}");
        }

        #[test]
        fn alone_means_all(own in any_sharer(), idle in 0usize..9, weight in any::<u32>()) {
            let w = divide(WINDOW, own, &vec![sharer(weight, 0, 0, 0); idle]);
            prop_assert_eq!(w, ByClass::all(WINDOW));
        }

        #[test]
        fn what_others_do_in_a_lower_class_never_matters(own in any_sharer(), others in any_sharers()) {
            let strip = |from: Priority| {
                let mut rest = others.clone();
                for p in &mut rest {
                    p.demand.background = 0;
                    if from == Priority::Bulk { p.demand.bulk = 0 }
                }
                rest
            };
            let w = divide(WINDOW, own, &others);
            prop_assert_eq!(w.latency, divide(WINDOW, own, &strip(Priority::Bulk)).latency);
            prop_assert_eq!(w.bulk, divide(WINDOW, own, &strip(Priority::Background)).bulk);
        }

        #[test]
        fn who_wants_everything_gets_by_weight(weights in prop::collection::vec(1u32..9, 1..9)) {
            let sharers: Vec<_> = weights.iter().map(|w| sharer(*w, 0, 99 * M, 0)).collect();
            let sum: u64 = weights.iter().map(|w| u64::from(*w)).sum();
            for (weight, w) in weights.iter().zip(all(WINDOW, &sharers)) {
                prop_assert_eq!(w.bulk, (WINDOW * u64::from(*weight) / sum).max(MIN_WINDOW));
            }
        }

        /// Else an engine could gain by claiming less, or lose by another's leaving.
        #[test]
        fn less_demand_elsewhere_is_never_less_window_here(
            own in any_sharer(), mut others in any_sharers(), which in any::<prop::sample::Index>(),
            less in any_sharer(),
        ) {
            let before = divide(WINDOW, own, &others);
            let other = which.get_mut(&mut others);
            let min = |a: u64, b: u64| a.min(b);
            other.demand = ByClass {
                latency: min(other.demand.latency, less.demand.latency),
                bulk: min(other.demand.bulk, less.demand.bulk),
                background: min(other.demand.background, less.demand.background),
            };
            let after = divide(WINDOW, own, &others);
            // Rounding may take a byte of each class.
            for class in Priority::ALL {
                prop_assert!(after.of(class) + 3 >= before.of(class), "{before:?} {after:?}");
            }
        }
    }
}
