//! Deliveries in an order that nobody may rely on: what SRD does now and then, done all the time.

/// Events that are handed on in a random order, each after a random number of polls.
pub(super) struct Shuffle<E> {
    rng: fastrand::Rng,
    held: Vec<(u8, E)>,
}

/// Polls that an event is kept back at most.
const LONGEST: u8 = 6;
/// Of so many messages one is lost: as by providers that say delivered when a message is on its way,
/// and whose connection breaks then.
const LOST: u8 = 32;

impl<E> Shuffle<E> {
    pub fn new(seed: u64) -> Self {
        Self { rng: fastrand::Rng::with_seed(seed), held: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether a message is lost.
    pub fn loses(&mut self) -> bool {
        self.rng.u8(..LOST) == 0
    }

    /// Takes what came with this poll, and gives what is due.
    pub fn pass(&mut self, events: &mut Vec<E>) {
        for event in events.drain(..) {
            self.held.push((self.rng.u8(..=LONGEST), event));
        }
        let mut i = 0;
        while i < self.held.len() {
            if self.held[i].0 == 0 {
                events.push(self.held.swap_remove(i).1);
            } else {
                self.held[i].0 -= 1;
                i += 1;
            }
        }
        self.rng.shuffle(events);
    }

    /// The order in which to post `n` pieces: a start and a step without common divisor with `n`.
    pub fn order(&mut self, n: u32) -> Order {
        let start = self.rng.u32(..n.max(1));
        let step = (1..n).rev().find(|s| gcd(*s, n) == 1).unwrap_or(1);
        Order { start, step, n }
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}

/// A walk over `0..n`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    start: u32,
    step: u32,
    n: u32,
}

impl Order {
    pub fn straight(n: u32) -> Self {
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
    fn everything_comes_out_once_and_not_in_order() {
        let mut shuffle = Shuffle::new(7);
        let mut out = Vec::new();
        for round in 0..10 {
            let mut events: Vec<u32> = (round * 10..round * 10 + 10).collect();
            shuffle.pass(&mut events);
            out.extend(events);
        }
        while !shuffle.is_empty() {
            let mut events = Vec::new();
            shuffle.pass(&mut events);
            out.extend(events);
        }
        assert!(!out.is_sorted());
        out.sort_unstable();
        assert_eq!(out, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn orders_visit_every_piece_once() {
        let mut shuffle = Shuffle::<u8>::new(1);
        for n in 1..40 {
            for order in [shuffle.order(n), Order::straight(n)] {
                let mut seen: Vec<u32> = (0..n).map(|i| order.nth(i)).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..n).collect::<Vec<_>>());
            }
        }
    }
}
