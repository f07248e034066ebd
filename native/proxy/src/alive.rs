//! Which ranks are there: one word for each, for all threads of a proxy and its device.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use parking_lot::Mutex;

use crate::ProxyError;

/// Bit 0 of a rank's word says that it is there, the others which life of it.
#[derive(Debug)]
pub struct Alive {
    words: Box<[AtomicU64]>,
    changes: AtomicU64,
    threads: usize,
    ending: Mutex<Vec<Ending>>,
}

/// A life that not all threads have given up yet.
#[derive(Debug)]
struct Ending {
    rank: usize,
    incarnation: u32,
    /// Threads that have.
    given_up: usize,
    /// Why it is lost, if it is.
    error: Option<ProxyError>,
}

impl Alive {
    pub(crate) fn new(ranks: usize, threads: usize) -> Self {
        let words = (0..ranks).map(|_| AtomicU64::new(0)).collect();
        Self { words, changes: AtomicU64::new(0), threads, ending: Mutex::default() }
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

    /// Why a life is lost, to be told when all threads have given it up.
    pub(crate) fn lost(&self, rank: usize, incarnation: u32, error: ProxyError) {
        self.ending(rank, incarnation, |ending| ending.error = Some(error));
    }

    /// One more thread has given a life up, after it took in what that had sent it. Says why the life is lost to the
    /// last of them: whoever is told earlier might miss what another thread has yet to take in.
    pub(crate) fn given_up(&self, rank: usize, incarnation: u32) -> Option<ProxyError> {
        self.ending(rank, incarnation, |ending| ending.given_up += 1)
    }

    fn ending(
        &self,
        rank: usize,
        incarnation: u32,
        change: impl FnOnce(&mut Ending),
    ) -> Option<ProxyError> {
        let mut all = self.ending.lock();
        let known = all.iter().position(|e| (e.rank, e.incarnation) == (rank, incarnation));
        let at = known.unwrap_or(all.len());
        if known.is_none() {
            all.push(Ending { rank, incarnation, given_up: 0, error: None });
        }
        change(&mut all[at]);
        let over = all[at].given_up >= self.threads;
        over.then(|| all.swap_remove(at)).and_then(|ending| ending.error)
    }

    /// Whether this life has ended.
    pub(crate) fn has_ended(&self, rank: usize, incarnation: u32) -> bool {
        self.words[rank].load(Acquire) != u64::from(incarnation) << 1 | 1
    }
}
