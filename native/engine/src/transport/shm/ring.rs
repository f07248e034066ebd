//! The ring of counts from a writer to its peer: one producer, one consumer, in memory that both
//! map.
//!
//! A record is valid when its sequence word matches its index and lap. So the consumer reads one
//! cache line, and the producer never waits for an index. The other side is trusted with the
//! records only: every index here is a local copy.

use crate::{
    domain::Count,
    sync::{
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{Acquire, Relaxed, SeqCst},
        },
        total_order,
    },
};

/// 16 bytes in shared memory; all zero is empty.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Slot {
    count: AtomicU64,
    sequence: AtomicU64,
}

/// The consumer's state, as the producer sees it.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Tail {
    /// Number of records consumed.
    consumed: AtomicU64,
    /// Whether the producer found the ring full and wants to be woken.
    stalled: AtomicU32,
    /// Whether the consumer has left.
    closed: AtomicU32,
}

/// A ring in private memory.
#[cfg(test)]
pub(super) fn memory(n: usize) -> (Box<[Slot]>, Tail) {
    let slot = || Slot { count: AtomicU64::new(0), sequence: AtomicU64::new(0) };
    let (stalled, closed) = (AtomicU32::new(0), AtomicU32::new(0));
    let tail = Tail { consumed: AtomicU64::new(0), stalled, closed };
    ((0..n).map(|_| slot()).collect(), tail)
}

#[derive(Debug)]
pub(super) struct Producer {
    next: u64,
    /// The consumer's progress when last read.
    consumed: u64,
}

impl Producer {
    pub fn new() -> Self {
        Self { next: 0, consumed: 0 }
    }

    /// Whether a record fits. If not, the consumer wakes the producer once one does.
    #[inline]
    pub fn has_room(&mut self, slots: &[Slot], tail: &Tail) -> bool {
        let capacity = slots.len() as u64;
        if self.next - self.consumed < capacity {
            return true;
        }
        self.check_tail(tail);
        if self.next - self.consumed < capacity {
            return true;
        }
        tail.stalled.store(1, SeqCst);
        total_order();
        // The consumer may have made room before it saw `stalled`.
        self.check_tail(tail);
        self.next - self.consumed < capacity
    }

    fn check_tail(&mut self, tail: &Tail) {
        // A hostile value may neither overtake `next` nor go back.
        self.consumed = tail.consumed.load(SeqCst).clamp(self.consumed, self.next);
    }

    /// Publishes a record. A consumer that reads it sees everything that this thread stored before
    /// (IC-2). The ring must have room. The record is ordered before later loads of this thread, as
    /// [`Producer::is_closed`] and the doorbell need: one instruction instead of a store and a
    /// fence for each of them.
    #[inline]
    pub fn push(&mut self, slots: &[Slot], count: Count) {
        let slot = &slots[(self.next % slots.len() as u64) as usize];
        slot.count.store(u64::from(count.imm) | u64::from(count.n) << 32, Relaxed);
        self.next += 1;
        slot.sequence.swap(self.next, SeqCst);
        total_order();
    }

    /// Whether the consumer may have left before it took the records pushed so far; it never takes
    /// those that it has not seen by then (IC-4).
    #[inline]
    pub fn is_closed(tail: &Tail) -> bool {
        tail.closed.load(SeqCst) != 0
    }
}

#[derive(Debug)]
pub(super) struct Consumer {
    next: u64,
    published: u64,
}

impl Consumer {
    pub fn new() -> Self {
        Self { next: 0, published: 0 }
    }

    #[inline]
    pub fn is_empty(&self, slots: &[Slot]) -> bool {
        let slot = &slots[(self.next % slots.len() as u64) as usize];
        slot.sequence.load(SeqCst) != self.next + 1
    }

    #[inline]
    pub fn pop(&mut self, slots: &[Slot]) -> Option<Count> {
        let slot = &slots[(self.next % slots.len() as u64) as usize];
        if slot.sequence.load(Acquire) != self.next + 1 {
            return None;
        }
        self.next += 1;
        let raw = slot.count.load(Relaxed);
        Some(Count { imm: raw as u32, n: (raw >> 32) as u32 })
    }

    /// The consumer leaves; later pushes see that. It must read the ring once more after this.
    pub fn close(tail: &Tail) {
        tail.closed.store(1, SeqCst);
        total_order();
    }

    /// Releases consumed slots; true if the producer stalled and must be woken.
    #[inline]
    pub fn publish(&mut self, slots: &[Slot], tail: &Tail, all: bool) -> bool {
        let behind = self.next - self.published;
        if behind == 0 || !(all || behind >= slots.len() as u64 / 4) {
            return false;
        }
        self.published = self.next;
        tail.consumed.store(self.next, SeqCst);
        total_order();
        tail.stalled.load(SeqCst) != 0 && tail.stalled.swap(0, SeqCst) != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ic_3_every_record_arrives_once_and_in_order_over_many_laps() {
        let (slots, tail) = memory(8);
        std::thread::scope(|s| {
            s.spawn(|| {
                let mut p = Producer::new();
                for i in 0..100_000 {
                    while !p.has_room(&slots, &tail) {
                        std::thread::yield_now();
                    }
                    p.push(&slots, Count { imm: i, n: i ^ 7 });
                }
            });
            let mut c = Consumer::new();
            let mut expected = 0;
            while expected < 100_000 {
                match c.pop(&slots) {
                    Some(count) => {
                        assert_eq!(count, Count { imm: expected, n: expected ^ 7 });
                        expected += 1;
                    }
                    None => std::thread::yield_now(),
                }
                c.publish(&slots, &tail, expected % 3 == 0);
            }
        });
    }

    #[test]
    fn a_hostile_tail_neither_overflows_nor_overwrites() {
        let (slots, tail) = memory(4);
        let mut p = Producer::new();
        for i in 0..4 {
            assert!(p.has_room(&slots, &tail));
            p.push(&slots, Count { imm: i, n: 1 });
        }
        assert!(!p.has_room(&slots, &tail));
        tail.consumed.store(u64::MAX, SeqCst);
        assert!(p.has_room(&slots, &tail));
        tail.consumed.store(0, SeqCst);
        assert!(p.has_room(&slots, &tail));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    #[test]
    fn ic_2_a_popped_record_comes_after_the_bytes_and_no_stall_is_lost() {
        loom::model(|| {
            let shared = Arc::new((memory(2), AtomicU64::new(0)));
            let peer_link = Arc::clone(&shared);
            let producer = thread::spawn(move || {
                let ((slots, tail), data) = &*peer_link;
                let mut p = Producer::new();
                let mut stalled = false;
                for i in 1..=3u32 {
                    if !p.has_room(slots, tail) {
                        stalled = true;
                        break;
                    }
                    data.store(u64::from(i), Relaxed);
                    p.push(slots, Count { imm: i, n: 1 });
                }
                stalled
            });
            let ((slots, tail), data) = &*shared;
            let mut c = Consumer::new();
            let mut woken = false;
            for _ in 0..3 {
                if let Some(count) = c.pop(slots) {
                    assert!(data.load(Relaxed) >= u64::from(count.imm));
                }
                woken |= c.publish(slots, tail, true);
            }
            let stalled = producer.join().unwrap();
            // A stalled producer is woken by this or a later publication.
            if stalled && !woken {
                while c.pop(slots).is_some() {}
                assert!(c.publish(slots, tail, true));
            }
        });
    }
}
