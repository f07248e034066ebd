//! Selects the rail of the next slice: adaptive, static round-robin, or random.
//!
//! TENT §3.3.1 scores a rail by the product of a load factor, a latency factor and an affinity
//! factor, without giving them, and takes the highest. Here the first two are one quantity with a
//! unit, the predicted time until the slice would be done,
//!
//! ```text
//! predicted = latency + (queued + length) / bandwidth
//! score     = predicted * penalty(tier)                       less is better
//! ```
//!
//! and rails whose scores differ by less than the prediction error take turns. The two blind
//! selectors are those of TENT's predecessor (§2.2.2), for comparison.

use smallvec::SmallVec;

use super::estimate::Speed;
use crate::{api::MAX_RAILS, topology::Tier};

/// One rail, as a selector sees it.
#[derive(Clone, Copy, Debug)]
pub struct RailView {
    /// Bytes posted on it that are not done.
    pub queued: u64,
    pub speed: Speed,
    /// Distance from the memory that the engine serves.
    pub tier: Tier,
    /// Whether the windows and queues of the rail have room for the slice now.
    pub room: bool,
}

/// A slice to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub length: u64,
    /// Bytes that wait for a rail behind this slice, of this request and later ones.
    pub behind: u64,
}

/// A policy, and its state between slices.
#[derive(Clone, Debug)]
pub enum RailSelector {
    Adaptive(Adaptive),
    /// Each rail in its turn, whatever its speed and load. `next` is whose turn it is.
    RoundRobin {
        next: usize,
    },
    /// Any rail, whatever its speed and load.
    Random(fastrand::Rng),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adaptive {
    /// Scores so close, as a share of the best, are equal.
    pub tolerance: f64,
    next: usize,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { tolerance: 0.05, next: 0 }
    }
}

impl RailSelector {
    pub fn adaptive() -> Self {
        Self::Adaptive(Adaptive::default())
    }

    pub fn round_robin() -> Self {
        Self::RoundRobin { next: 0 }
    }

    pub fn random(seed: u64) -> Self {
        Self::Random(fastrand::Rng::with_seed(seed))
    }

    /// The rail that takes the slice. `None`: it waits until a rail has finished something.
    pub fn pick(&mut self, rails: &[RailView], load: Load) -> Option<usize> {
        match self {
            Self::Adaptive(adaptive) => adaptive.pick(rails, load),
            // Static: a rail that is full is waited for, not passed over.
            Self::RoundRobin { next } => {
                let rail = *next % rails.len().max(1);
                rails.get(rail)?.room.then(|| {
                    *next = rail + 1;
                    rail
                })
            }
            Self::Random(rng) => {
                if rails.is_empty() {
                    return None;
                }
                // A draw that finds its rail full is repeated with the same outcome.
                let mut after = rng.clone();
                let rail = after.usize(..rails.len());
                rails[rail].room.then(|| {
                    *rng = after;
                    rail
                })
            }
        }
    }
}

impl Adaptive {
    fn pick(&mut self, rails: &[RailView], load: Load) -> Option<usize> {
        let predicted: SmallVec<[f64; 2 * MAX_RAILS]> =
            rails.iter().map(|r| r.speed.takes(r.queued.saturating_add(load.length))).collect();
        let scores: SmallVec<[f64; 2 * MAX_RAILS]> =
            rails.iter().zip(&predicted).map(|(r, p)| p * penalty(r.tier)).collect();
        let least = |those: &dyn Fn(usize) -> bool| {
            (0..rails.len()).filter(|i| those(*i)).min_by(|a, b| scores[*a].total_cmp(&scores[*b]))
        };
        let best = scores[least(&|_| true)?];
        let band = best * (1.0 + self.tolerance);

        let open = |i: usize| rails[i].room;
        let good = |i: &usize| open(*i) && scores[*i] <= band;
        if let Some(rail) = cyclic(self.next, rails.len()).find(good) {
            self.next = rail + 1;
            return Some(rail);
        }

        // The best are full. A worse one helps only if it is done by the time at which all rails
        // together are through with everything that waits: else the slice, and its request with
        // it, ends later than if it had waited.
        let rail = least(&open)?;
        let draining = rails.iter().any(|r| !r.room && r.queued > 0);
        let helps = predicted[rail] <= drained(rails, load);
        (helps || !draining).then(|| {
            self.next = rail + 1;
            rail
        })
    }
}

/// The factor of a score by distance. The estimate has measured how slow a far rail is; the penalty
/// is for shared buses on its way. An unknown distance counts as medium.
fn penalty(tier: Tier) -> f64 {
    match tier {
        Tier::Switch => 1.0,
        Tier::RootComplex | Tier::Node | Tier::Unknown => 1.2,
        Tier::System => 2.0,
    }
}

/// The time in which all rails together would finish their queues and the load, ns.
fn drained(rails: &[RailView], load: Load) -> f64 {
    let bytes = rails.iter().map(|r| r.queued as f64).sum::<f64>() + load.length as f64;
    let speed: f64 = rails.iter().map(|r| r.speed.bytes_per_ns.max(0.0)).sum();
    (bytes + load.behind as f64) / speed
}

fn cyclic(from: usize, n: usize) -> impl Iterator<Item = usize> {
    (0..n).map(move |i| (from % n + i) % n)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const K64: u64 = 64 << 10;
    const ONE: Load = Load { length: K64, behind: 0 };

    fn rail(gbits: f64, queued: u64) -> RailView {
        let speed = Speed { bytes_per_ns: gbits / 8.0, latency_ns: 0.0 };
        RailView { queued, speed, tier: Tier::Switch, room: true }
    }

    fn full(view: RailView) -> RailView {
        RailView { room: false, ..view }
    }

    fn at(tier: Tier, view: RailView) -> RailView {
        RailView { tier, ..view }
    }

    fn late(view: RailView, latency_ns: f64) -> RailView {
        RailView { speed: Speed { latency_ns, ..view.speed }, ..view }
    }

    #[test]
    fn adaptive_takes_the_rail_that_is_done_first() {
        let much = Load { length: K64, behind: 64 * K64 };
        #[rustfmt::skip]
        let table: &[(&str, &[RailView], Load, Option<usize>)] = &[
            ("nothing there", &[], ONE, None),
            ("shorter queue", &[rail(400.0, 9 * K64), rail(400.0, K64)], ONE, Some(1)),
            ("faster", &[rail(100.0, 0), rail(400.0, 0)], ONE, Some(1)),
            ("faster behind a queue", &[rail(100.0, 0), rail(400.0, 2 * K64)], ONE, Some(1)),
            ("slower but free", &[rail(100.0, 0), rail(400.0, 4 * K64)], ONE, Some(0)),
            ("less latency", &[late(rail(400.0, 0), 1e5), rail(100.0, 0)], ONE, Some(1)),
            ("latency matters less for much", &[late(rail(400.0, 0), 1e5), rail(100.0, 0)],
                Load { length: 256 * K64, behind: 0 }, Some(0)),
            ("nearer", &[at(Tier::System, rail(400.0, 0)), at(Tier::Switch, rail(400.0, 0))], ONE, Some(1)),
            ("same node before other", &[at(Tier::System, rail(400.0, 0)), at(Tier::Node, rail(400.0, 0))], ONE, Some(1)),
            ("far but much faster", &[at(Tier::System, rail(400.0, 0)), rail(100.0, 0)], ONE, Some(0)),
            ("an equal one with room", &[full(rail(400.0, K64)), rail(400.0, K64)], ONE, Some(1)),
            ("better wait", &[full(rail(400.0, K64)), rail(100.0, 0)], ONE, None),
            ("too much to wait", &[full(rail(400.0, K64)), rail(100.0, 0)], much, Some(1)),
            ("nothing to wait for", &[full(rail(400.0, 0)), rail(100.0, 0)], ONE, Some(1)),
            ("far too slow to help", &[full(rail(400.0, K64)), rail(0.1, 0)], much, None),
            ("all full", &[full(rail(400.0, K64)), full(rail(400.0, 0))], ONE, None),
        ];
        for (name, rails, load, expected) in table {
            assert_eq!(RailSelector::adaptive().pick(rails, *load), *expected, "{name}");
        }
    }

    #[test]
    fn equal_rails_take_turns() {
        let mut selector = RailSelector::adaptive();
        // Within the tolerance, though never quite equal.
        let rails = [rail(400.0, 0), rail(396.0, 0), rail(404.0, 0), rail(100.0, 0)];
        let picked: Vec<_> = (0..6).map(|_| selector.pick(&rails, ONE)).collect();
        assert_eq!(picked, [0, 1, 2, 0, 1, 2].map(Some));
    }

    #[test]
    fn static_round_robin_is_blind_and_waits_for_its_turn() {
        let mut selector = RailSelector::round_robin();
        let mut rails = [rail(400.0, 0), rail(1.0, 99 * K64), rail(400.0, 0)];
        let picked: Vec<_> = (0..4).map(|_| selector.pick(&rails, ONE)).collect();
        assert_eq!(picked, [0, 1, 2, 0].map(Some));
        rails[1].room = false;
        assert_eq!(selector.pick(&rails, ONE), None);
        rails[1].room = true;
        assert_eq!(selector.pick(&rails, ONE), Some(1));
        assert_eq!(selector.pick(&[], ONE), None);
    }

    #[test]
    fn random_is_blind_repeatable_and_even() {
        let rails = [rail(400.0, 0), rail(1.0, 99 * K64), rail(9.0, 0)];
        let draw = |seed| {
            let mut selector = RailSelector::random(seed);
            (0..3000).map(|_| selector.pick(&rails, ONE)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        for rail in [0, 1, 2] {
            let n = draw(7).iter().filter(|r| **r == Some(rail)).count();
            assert!((850..1150).contains(&n), "{rail}: {n}");
        }
        // A draw whose rail is full stays drawn.
        let mut selector = RailSelector::random(7);
        assert_eq!(selector.pick(&rails.map(full), ONE), None);
        assert_eq!(selector.pick(&rails, ONE), draw(7)[0]);
        assert_eq!(selector.pick(&[], ONE), None);
    }

    prop_compose! {
        fn any_rail()(
            queued in prop_oneof![Just(0), 0u64..1 << 24, any::<u64>()],
            bytes_per_ns in prop_oneof![0.01f64..100.0, Just(0.0), Just(f64::NAN)],
            latency_ns in prop_oneof![0.0f64..1e6, Just(f64::NAN)],
            tier in prop_oneof![Just(Tier::Switch), Just(Tier::Node), Just(Tier::System)],
            room in any::<bool>(),
        ) -> RailView {
            let speed = Speed { bytes_per_ns, latency_ns };
            RailView { queued, speed, tier, room }
        }
    }

    proptest! {
        #[test]
        fn no_choice_takes_a_rail_that_is_full_nor_waits_for_nothing(
            rails in prop::collection::vec(any_rail(), 0..6), which in 0usize..3,
            length in any::<u64>(), behind in any::<u64>(), picks in 1usize..5,
        ) {
            let mut selector =
                [RailSelector::adaptive(), RailSelector::round_robin(), RailSelector::random(length)][which].clone();
            for _ in 0..picks {
                match selector.pick(&rails, Load { length, behind }) {
                    Some(i) => prop_assert!(rails[i].room),
                    // There is a full rail to wait for, or none at all.
                    None => prop_assert!(rails.iter().any(|r| !r.room) || rails.is_empty()),
                }
            }
        }
    }
}
