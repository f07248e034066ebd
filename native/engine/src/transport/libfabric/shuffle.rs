//! Test aid: delivers events in random order and drops messages, as SRD does now and then.

/// Holds events back for a random number of polls.
pub(super) struct Shuffle<E> {
    rng: fastrand::Rng,
    held_back: Vec<(u8, E)>,
}

/// Polls for which an event is held back at most.
const MAX_HELD_POLLS: u8 = 6;
/// One in so many messages is dropped, as by providers that report delivery early and whose
/// connection then breaks.
const LOST: u8 = 32;

impl<E> Shuffle<E> {
    pub fn new(seed: u64) -> Self {
        Self { rng: fastrand::Rng::with_seed(seed), held_back: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.held_back.is_empty()
    }

    /// Whether to drop a message.
    pub fn drops(&mut self) -> bool {
        self.rng.u8(..LOST) == 0
    }

    /// Takes the events of this poll, and returns those that are due.
    pub fn deliver(&mut self, events: &mut Vec<E>) {
        for event in events.drain(..) {
            self.held_back.push((self.rng.u8(..=MAX_HELD_POLLS), event));
        }
        let mut i = 0;
        while i < self.held_back.len() {
            if self.held_back[i].0 == 0 {
                events.push(self.held_back.swap_remove(i).1);
            } else {
                self.held_back[i].0 -= 1;
                i += 1;
            }
        }
        self.rng.shuffle(events);
    }

    /// A random order of `n` chunks: a start, and a step without common divisor with `n`.
    pub fn order(&mut self, n: u32) -> PostOrder {
        let start = self.rng.u32(..n.max(1));
        let step = (1..n).rev().find(|s| gcd(*s, n) == 1).unwrap_or(1);
        PostOrder { start, step, n }
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

/// A permutation of `0..n`.
#[derive(Clone, Copy, Debug)]
pub(super) struct PostOrder {
    start: u32,
    step: u32,
    n: u32,
}

impl PostOrder {
    pub fn sequential(n: u32) -> Self {
        Self { start: 0, step: 1, n }
    }

    #[inline]
    pub fn nth(&self, i: u32) -> u32 {
        if self.step == 1 && self.start == 0 {
            return i;
        }
        let i = u64::from(self.start) + u64::from(i) * u64::from(self.step);
        (i % u64::from(self.n)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_delivered_once_and_out_of_order() {
        let mut shuffle = Shuffle::new(7);
        let mut out = Vec::new();
        for round in 0..10 {
            let mut events: Vec<u32> = (round * 10..round * 10 + 10).collect();
            shuffle.deliver(&mut events);
            out.extend(events);
        }
        while !shuffle.is_empty() {
            let mut events = Vec::new();
            shuffle.deliver(&mut events);
            out.extend(events);
        }
        assert!(!out.is_sorted());
        out.sort_unstable();
        assert_eq!(out, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn orders_visit_every_chunk_once() {
        let mut shuffle = Shuffle::<u8>::new(1);
        for n in 1..40 {
            for order in [shuffle.order(n), PostOrder::sequential(n)] {
                let mut seen: Vec<u32> = (0..n).map(|i| order.nth(i)).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..n).collect::<Vec<_>>());
            }
        }
    }
}
