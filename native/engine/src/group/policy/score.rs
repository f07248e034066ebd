//! Which rail takes the next slice: the adaptive choice, static round-robin, and random.
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
//! and rails whose scores differ by less than can be predicted take turns. The two blind choices
//! are those of TENT's predecessor (§2.2.2) and stand beside it for comparison.

use smallvec::SmallVec;

use super::estimate::Speed;
use crate::api::MAX_RAILS;

/// How far a rail is from the memory (TENT §3.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// GPU memory: under the same or the nearest PCIe switch. Host memory: on its NUMA node.
    Near,
    /// On the same NUMA node, under another PCIe switch.
    Node,
    /// On another NUMA node.
    Far,
}

/// What a choice knows of one rail.
#[derive(Clone, Copy, Debug)]
pub struct RailView {
    /// Bytes posted on it that are not done.
    pub queued: u64,
    pub speed: Speed,
    pub tier: Tier,
    /// Not to be used: its breaker is open, or the slice has failed on it.
    pub excluded: bool,
    /// Its windows and queues take the slice now.
    pub room: bool,
    /// It ends at the remote NIC that belongs to the local one (§3.3.1: one-to-one is favoured).
    pub paired: bool,
}

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub length: u64,
    /// Bytes that wait for a rail behind this slice, of this request and later ones.
    pub behind: u64,
}

/// A policy, with what it remembers from one slice to the next.
#[derive(Clone, Debug)]
pub enum Choice {
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
    /// What a score is multiplied by for the tiers `Near`, `Node` and `Far`. How much slower a far
    /// rail is has been measured; this is for what it takes from others on the way.
    pub penalty: [f64; 3],
    next: usize,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { tolerance: 0.05, penalty: [1.0, 1.2, 2.0], next: 0 }
    }
}

impl Choice {
    pub fn adaptive() -> Self {
        Self::Adaptive(Adaptive::default())
    }

    pub fn round_robin() -> Self {
        Self::RoundRobin { next: 0 }
    }

    pub fn random(seed: u64) -> Self {
        Self::Random(fastrand::Rng::with_seed(seed))
    }

    /// The rail that takes the slice. `None`: it waits until a rail has finished something or is
    /// no longer excluded.
    pub fn pick(&mut self, rails: &[RailView], load: Load) -> Option<usize> {
        match self {
            Self::Adaptive(adaptive) => adaptive.pick(rails, load),
            Self::RoundRobin { next } => {
                let rail = first_from(*next, rails, |r| !r.excluded)?;
                // Static: a rail that is full is waited for, not passed over.
                rails[rail].room.then(|| {
                    *next = rail + 1;
                    rail
                })
            }
            Self::Random(rng) => {
                let usable = rails.iter().filter(|r| !r.excluded).count();
                if usable == 0 {
                    return None;
                }
                // A draw that finds its rail full is repeated with the same outcome.
                let mut after = rng.clone();
                let drawn = after.usize(..usable);
                let (rail, view) =
                    rails.iter().enumerate().filter(|(_, r)| !r.excluded).nth(drawn)?;
                view.room.then(|| {
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
            rails.iter().zip(&predicted).map(|(r, p)| p * self.penalty(r.tier)).collect();
        let usable = |i: usize| !rails[i].excluded;
        let least = |those: &dyn Fn(usize) -> bool| {
            (0..rails.len()).filter(|i| those(*i)).min_by(|a, b| scores[*a].total_cmp(&scores[*b]))
        };
        let best = scores[least(&usable)?];
        let band = best * (1.0 + self.tolerance);

        let open = |i: usize| usable(i) && rails[i].room;
        let good = |i: usize| open(i) && scores[i] <= band;
        let from = self.next;
        let in_turn = |those: &dyn Fn(usize) -> bool| cyclic(from, rails.len()).find(|i| those(*i));
        let chosen = in_turn(&|i| good(i) && rails[i].paired).or_else(|| in_turn(&good));
        if let Some(rail) = chosen {
            self.next = rail + 1;
            return Some(rail);
        }

        // The best are full. A worse one helps only if it is done by the time at which all rails
        // together are through with everything that waits: else the slice, and its request with
        // it, ends later than if it had waited.
        let rail = least(&open)?;
        let draining = (0..rails.len()).any(|i| usable(i) && !rails[i].room && rails[i].queued > 0);
        let helps = predicted[rail] <= drained(rails, load);
        (helps || !draining).then(|| {
            self.next = rail + 1;
            rail
        })
    }

    fn penalty(&self, tier: Tier) -> f64 {
        match tier {
            Tier::Near => self.penalty[0],
            Tier::Node => self.penalty[1],
            Tier::Far => self.penalty[2],
        }
    }
}

/// When all usable rails together would be done with what they have and what waits, ns.
fn drained(rails: &[RailView], load: Load) -> f64 {
    let usable = || rails.iter().filter(|r| !r.excluded);
    let bytes = usable().map(|r| r.queued as f64).sum::<f64>() + load.length as f64;
    let speed: f64 = usable().map(|r| r.speed.bytes_per_ns.max(0.0)).sum();
    (bytes + load.behind as f64) / speed
}

fn cyclic(from: usize, n: usize) -> impl Iterator<Item = usize> {
    (0..n).map(move |i| (from % n + i) % n)
}

fn first_from(from: usize, rails: &[RailView], those: impl Fn(&RailView) -> bool) -> Option<usize> {
    cyclic(from, rails.len()).find(|i| those(&rails[*i]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const K64: u64 = 64 << 10;
    const ONE: Load = Load { length: K64, behind: 0 };

    fn rail(gbits: f64, queued: u64) -> RailView {
        let speed = Speed { bytes_per_ns: gbits / 8.0, latency_ns: 0.0 };
        RailView { queued, speed, tier: Tier::Near, excluded: false, room: true, paired: true }
    }

    fn full(view: RailView) -> RailView {
        RailView { room: false, ..view }
    }

    fn gone(view: RailView) -> RailView {
        RailView { excluded: true, ..view }
    }

    fn at(tier: Tier, view: RailView) -> RailView {
        RailView { tier, ..view }
    }

    fn late(view: RailView, latency_ns: f64) -> RailView {
        RailView { speed: Speed { latency_ns, ..view.speed }, ..view }
    }

    fn unpaired(view: RailView) -> RailView {
        RailView { paired: false, ..view }
    }

    #[test]
    fn adaptive_takes_the_rail_that_is_done_first() {
        let much = Load { length: K64, behind: 64 * K64 };
        #[rustfmt::skip]
        let table: &[(&str, &[RailView], Load, Option<usize>)] = &[
            ("nothing there", &[], ONE, None),
            ("all excluded", &[gone(rail(400.0, 0))], ONE, None),
            ("shorter queue", &[rail(400.0, 9 * K64), rail(400.0, K64)], ONE, Some(1)),
            ("faster", &[rail(100.0, 0), rail(400.0, 0)], ONE, Some(1)),
            ("faster behind a queue", &[rail(100.0, 0), rail(400.0, 2 * K64)], ONE, Some(1)),
            ("slower but free", &[rail(100.0, 0), rail(400.0, 4 * K64)], ONE, Some(0)),
            ("less latency", &[late(rail(400.0, 0), 1e5), rail(100.0, 0)], ONE, Some(1)),
            ("latency matters less for much", &[late(rail(400.0, 0), 1e5), rail(100.0, 0)],
                Load { length: 256 * K64, behind: 0 }, Some(0)),
            ("nearer", &[at(Tier::Far, rail(400.0, 0)), at(Tier::Near, rail(400.0, 0))], ONE, Some(1)),
            ("same node before other", &[at(Tier::Far, rail(400.0, 0)), at(Tier::Node, rail(400.0, 0))], ONE, Some(1)),
            ("far but much faster", &[at(Tier::Far, rail(400.0, 0)), rail(100.0, 0)], ONE, Some(0)),
            ("its own remote NIC", &[unpaired(rail(400.0, 0)), rail(400.0, 0)], ONE, Some(1)),
            ("a free one before its own", &[unpaired(rail(400.0, 0)), rail(400.0, K64)], ONE, Some(0)),
            ("excluded", &[gone(rail(400.0, 0)), rail(100.0, 9 * K64)], ONE, Some(1)),
            ("an equal one with room", &[full(rail(400.0, K64)), rail(400.0, K64)], ONE, Some(1)),
            ("better wait", &[full(rail(400.0, K64)), rail(100.0, 0)], ONE, None),
            ("too much to wait", &[full(rail(400.0, K64)), rail(100.0, 0)], much, Some(1)),
            ("nothing to wait for", &[full(rail(400.0, 0)), rail(100.0, 0)], ONE, Some(1)),
            ("far too slow to help", &[full(rail(400.0, K64)), rail(0.1, 0)], much, None),
            ("no speed at all", &[gone(rail(400.0, K64)), rail(0.0, 0)], ONE, Some(1)),
            ("all full", &[full(rail(400.0, K64)), full(rail(400.0, 0))], ONE, None),
        ];
        for (name, rails, load, expected) in table {
            assert_eq!(Choice::adaptive().pick(rails, *load), *expected, "{name}");
        }
    }

    #[test]
    fn equal_rails_take_turns() {
        let mut choice = Choice::adaptive();
        // Within the tolerance, though never quite equal.
        let rails = [rail(400.0, 0), rail(396.0, 0), rail(404.0, 0), rail(100.0, 0)];
        let picked: Vec<_> = (0..6).map(|_| choice.pick(&rails, ONE)).collect();
        assert_eq!(picked, [0, 1, 2, 0, 1, 2].map(Some));
    }

    #[test]
    fn static_round_robin_is_blind_and_waits_for_its_turn() {
        let mut choice = Choice::round_robin();
        let mut rails = [rail(400.0, 0), rail(1.0, 99 * K64), gone(rail(400.0, 0)), rail(400.0, 0)];
        let picked: Vec<_> = (0..4).map(|_| choice.pick(&rails, ONE)).collect();
        assert_eq!(picked, [0, 1, 3, 0].map(Some));
        rails[1].room = false;
        assert_eq!(choice.pick(&rails, ONE), None);
        rails[1].room = true;
        assert_eq!(choice.pick(&rails, ONE), Some(1));
        assert_eq!(choice.pick(&[], ONE), None);
        assert_eq!(choice.pick(&[gone(rail(1.0, 0))], ONE), None);
    }

    #[test]
    fn random_is_blind_repeatable_and_even() {
        let rails = [rail(400.0, 0), rail(1.0, 99 * K64), gone(rail(400.0, 0)), rail(9.0, 0)];
        let draw = |seed| {
            let mut choice = Choice::random(seed);
            (0..3000).map(|_| choice.pick(&rails, ONE)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        for rail in [0, 1, 3] {
            let n = draw(7).iter().filter(|r| **r == Some(rail)).count();
            assert!((850..1150).contains(&n), "{rail}: {n}");
        }
        // A draw whose rail is full stays drawn.
        let mut choice = Choice::random(7);
        assert_eq!(choice.pick(&rails.map(full), ONE), None);
        assert_eq!(choice.pick(&rails, ONE), draw(7)[0]);
        assert_eq!(choice.pick(&[], ONE), None);
    }

    prop_compose! {
        fn any_rail()(
            queued in prop_oneof![Just(0), 0u64..1 << 24, any::<u64>()],
            bytes_per_ns in prop_oneof![0.01f64..100.0, Just(0.0), Just(f64::NAN)],
            latency_ns in prop_oneof![0.0f64..1e6, Just(f64::NAN)],
            tier in prop_oneof![Just(Tier::Near), Just(Tier::Node), Just(Tier::Far)],
            excluded in any::<bool>(), room in any::<bool>(), paired in any::<bool>(),
        ) -> RailView {
            let speed = Speed { bytes_per_ns, latency_ns };
            RailView { queued, speed, tier, excluded, room, paired }
        }
    }

    proptest! {
        #[test]
        fn no_choice_takes_a_rail_that_is_excluded_or_full_nor_waits_for_nothing(
            rails in prop::collection::vec(any_rail(), 0..6), which in 0usize..3,
            length in any::<u64>(), behind in any::<u64>(), picks in 1usize..5,
        ) {
            let mut choice =
                [Choice::adaptive(), Choice::round_robin(), Choice::random(length)][which].clone();
            for _ in 0..picks {
                match choice.pick(&rails, Load { length, behind }) {
                    Some(i) => prop_assert!(!rails[i].excluded && rails[i].room),
                    None if which == 0 => {
                        // There is a full rail to wait for, or none with room.
                        let usable = || rails.iter().filter(|r| !r.excluded);
                        prop_assert!(
                            usable().any(|r| !r.room && r.queued > 0) || !usable().any(|r| r.room)
                        );
                    }
                    None => prop_assert!(!rails.iter().any(|r| !r.excluded)
                        || rails.iter().any(|r| !r.excluded && !r.room)),
                }
            }
        }
    }
}
