//! Which ranks are there: one word for each, for all threads of a proxy and its device.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};

/// Bit 0 of a rank's word says that it is there, the others which life of it.
#[derive(Debug)]
pub struct Alive {
    words: Box<[AtomicU64]>,
    changes: AtomicU64,
}

impl Alive {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { words: (0..ranks).map(|_| AtomicU64::new(0)).collect(), changes: AtomicU64::new(0) }
    }

    #[inline]
    pub fn is_alive(&self, rank: usize) -> bool {
        self.words.get(rank).is_some_and(|w| w.load(Acquire) & 1 == 1)
    }

    /// The words themselves, by rank.
    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// The latest life of a rank; 0 before the first.
    pub(crate) fn incarnation(&self, rank: usize) -> u32 {
        (self.words[rank].load(Acquire) >> 1) as u32
    }

    /// Grows with every change.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Acquire)
    }

    /// A life begins, unless it or a later one has.
    pub(crate) fn begin(&self, rank: usize, incarnation: u32) {
        let later = |word: u64| {
            (word >> 1 < u64::from(incarnation)).then_some(u64::from(incarnation) << 1 | 1)
        };
        let _ = self.words[rank].fetch_update(AcqRel, Acquire, later);
        self.changes.fetch_add(1, AcqRel);
    }

    /// A life ends; true if that is news.
    pub(crate) fn end(&self, rank: usize, incarnation: u32) -> bool {
        let word = u64::from(incarnation) << 1;
        let ended = self.words[rank].compare_exchange(word | 1, word, AcqRel, Relaxed).is_ok();
        self.changes.fetch_add(1, AcqRel);
        ended
    }

    /// Whether this life has ended.
    pub(crate) fn has_ended(&self, rank: usize, incarnation: u32) -> bool {
        self.words[rank].load(Acquire) != u64::from(incarnation) << 1 | 1
    }
}
