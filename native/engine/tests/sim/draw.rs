//! Draws cases from a seed.

use fabric_engine::transport::sim::Fault;

use crate::case::{Case, Ns, Schedule, Shape, Step, COUNTERS, MS, PLAIN, US};

impl Case {
    pub fn random(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut shape = Shape::random(&mut rng);
        let spare = rng.u32(..4) == 0;
        if spare {
            shape.half_open = 0;
            shape.rails.iter_mut().for_each(|n| *n = (*n).max(2));
        }
        let focus = rng.u32(..3) > 0;
        let mut draw = Draw { rng, shape: &shape, focus };
        let steps = 3 + draw.rng.usize(..18);
        let mut work: Vec<_> = (0..steps).map(|_| draw.step()).collect();
        let faults = draw.rng.usize(..7);
        let mut faults: Schedule = (0..faults).flat_map(|_| draw.faults(&mut work)).collect();
        if spare {
            let rail = draw.node();
            faults.retain_mut(|(_, f)| keep_to_one_nic(f, rail));
            faults.truncate(6);
            work.retain(|(_, s)| !s.may_fail());
        }
        faults.sort_by_key(|(at, _)| *at);
        work.sort_by_key(|(at, _)| *at);
        Self { seed, shape, work, faults }
    }
}

impl Shape {
    fn random(rng: &mut fastrand::Rng) -> Self {
        let nodes = 2 + [0, 0, 0, 1, 1, 2][rng.usize(..6)];
        Self {
            rails: (0..nodes).map(|_| [1, 2, 2, 3][rng.usize(..4)]).collect(),
            ordered: rng.bool(),
            page_counts: rng.bool(),
            half_open: [0, 0, 3][rng.usize(..3)],
            max_bytes: [64, 256, 1000][rng.usize(..3)],
            window: [2, 16][rng.usize(..2)],
            longest_delay: [20 * US, 50 * US, 300 * US][rng.usize(..3)],
            rate: [None, None, Some(1.0)][rng.usize(..3)],
            peer_timeout: [2 * MS, 20 * MS, 2000 * MS][rng.usize(..3)],
            connected: rng.bool(),
            skew: [0, 0, 50_000][rng.usize(..3)],
        }
    }
}

/// Moves a fault to NIC 0 of a node; false if that is impossible.
fn keep_to_one_nic(fault: &mut Fault, the: u8) -> bool {
    use Fault::*;
    match fault {
        WorkFails { node, rail, .. }
        | LinkLost { node, rail, .. }
        | NicDown { node, rail, .. }
        | NicUp { node, rail } => (*node, *rail) = (the, 0),
        _ => return false,
    }
    true
}

struct Draw<'a> {
    rng: fastrand::Rng,
    shape: &'a Shape,
    /// Most work goes from node 0 to node 1, and to its first counter.
    focus: bool,
}

impl Draw<'_> {
    fn node(&mut self) -> u8 {
        self.rng.u8(..self.shape.rails.len() as u8)
    }

    fn two(&mut self) -> (u8, u8) {
        if self.focus && self.rng.u32(..4) > 0 {
            return (0, 1);
        }
        let (a, b) = (self.node(), self.rng.u8(1..self.shape.rails.len() as u8));
        (a, (a + b) % self.shape.rails.len() as u8)
    }

    fn some<T>(&mut self, one_in: u32, f: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.rng.u32(..one_in) == 0).then(|| f(self))
    }

    /// Below or above the limit of one work request.
    fn len(&mut self) -> u64 {
        let max = self.shape.max_bytes;
        match self.rng.bool() {
            true => self.rng.u64(1..=max),
            false => self.rng.u64(max..=max * 6),
        }
    }

    fn time(&mut self, most: Ns) -> Ns {
        // Uniform on a logarithmic scale: short times matter as much as long ones.
        let bits = self.rng.u32(10..=most.max(2048).ilog2());
        self.rng.u64(..1 << bits).min(most)
    }

    fn within(&mut self) -> Option<Ns> {
        self.some(5, |d| 20 * US + d.time(4 * MS))
    }

    fn any_counter(&mut self) -> u8 {
        match self.focus && self.rng.bool() {
            true => 0,
            false => self.rng.u8(..COUNTERS),
        }
    }

    fn counter(&mut self) -> Option<u8> {
        let counter = self.any_counter();
        self.some(5, |_| ()).map_or(Some(counter), |()| None)
    }

    fn step(&mut self) -> (Ns, Step) {
        let at = self.time(3 * MS);
        let (from, to) = self.two();
        let all = |d: &Self| (0..d.shape.rails.len() as u8).filter(|n| *n != from).collect();
        let step = match self.rng.u32(..100) {
            0..=29 => Step::Write {
                from,
                to,
                len: self.len(),
                counter: self.counter(),
                rail: self.some(10, |d| d.rng.u8(..2)),
                within: self.within(),
            },
            30..=47 => Step::Pages {
                from,
                to,
                len: if self.rng.bool() { self.rng.u64(1..100) } else { self.len() },
                pages: self.rng.u32(1..12),
                counter: self.counter(),
                within: self.within(),
            },
            48..=55 => {
                Step::Scatter { from, to: all(self), len: self.len(), within: self.within() }
            }
            56..=65 => Step::Read {
                from,
                of: to,
                len: self.len().min(1000),
                pages: self.rng.u32(1..3),
                within: self.within(),
            },
            66..=71 => Step::Barrier { from, to: all(self) },
            72..=77 => Step::Message { from, to, len: self.rng.u64(8..200) },
            78..=93 => Step::Expect {
                at: to,
                counter: self.any_counter(),
                n: self.rng.u32(1..6),
                writer: self.some(2, |_| from),
                within: 50 * US + self.rng.u64(..40 * MS),
            },
            94 => match self.some(8, |_| ()) {
                Some(()) => Step::Reuse { at: to, counter: self.rng.u8(..PLAIN) },
                None => Step::Barrier { from, to: vec![to] },
            },
            95..=96 => Step::Restart { node: to },
            _ => Step::OldKey { from, to },
        };
        (at, step)
    }

    /// One fault, or a few that belong together.
    fn faults(&mut self, work: &mut Vec<(Ns, Step)>) -> Schedule {
        let at = self.time(4 * MS);
        let node = self.node();
        let rail = self.rng.u8(..self.shape.rails[usize::from(node)]);
        let (link_index, work_index) = (self.rng.u8(..4), self.rng.u32(..8));
        let slow = self.shape.peer_timeout * 2;
        let mut late = || match self.rng.u32(..4) {
            0 => 0,
            1 => self.time(slow),
            _ => self.time(500 * US),
        };
        let (local_delay, remote_delay, link_down_after) = (late(), late(), late());
        let duration = self.time(8 * MS);
        match self.rng.u32(..100) {
            0..=14 => {
                vec![(at, Fault::WorkFails { node, rail, link_index, work_index, link_down_after })]
            }
            15..=39 => {
                vec![(at, Fault::LinkLost { node, rail, link_index, local_delay, remote_delay })]
            }
            40..=54 => vec![(at, Fault::Stall { node, rail, link_index, duration })],
            55..=71 => vec![
                (at, Fault::NicDown { node, rail, local_delay, remote_delay }),
                (at + duration, Fault::NicUp { node, rail }),
            ],
            72..=79 => {
                let mut flaps = Vec::new();
                for i in 0..3 {
                    let at = at + i * duration;
                    flaps.push((at, Fault::NicDown { node, rail, local_delay, remote_delay }));
                    flaps.push((at + duration / 2, Fault::NicUp { node, rail }));
                }
                flaps
            }
            80..=83 => vec![(at, Fault::Slow { node, rail, rate: 1 + self.rng.u32(..1000) })],
            84..=91 => {
                let isolated = u64::from(self.rng.u8(1..(1 << self.shape.rails.len()) - 1));
                let notice_after = self.some(2, |d| d.time(8 * MS));
                let permanent = self.rng.bool();
                vec![(at, Fault::Partition { isolated, notice_after, permanent, duration })]
            }
            _ => {
                if self.rng.bool() {
                    work.push((at + duration, Step::Restart { node }));
                }
                vec![(at, Fault::Crash { node, remote_delay })]
            }
        }
    }
}
