//! Liveness of ranks: one word for each rank, shared by all threads of a proxy and its device.

use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};

use crate::ProxyError;
use fabric_engine::locks::Mutex;

/// Bit 0 of a rank's word is set while it takes part; the other bits are its incarnation.
#[derive(Debug)]
pub struct Liveness {
    words: Box<[AtomicU64]>,
    changes: AtomicU64,
    threads: usize,
    ending: Mutex<Vec<PendingLoss>>,
    departures_expected: AtomicBool,
}

/// An ended incarnation that some threads have not dropped yet.
#[derive(Debug)]
struct PendingLoss {
    rank: usize,
    incarnation: u32,
    /// Number of threads that have dropped it.
    dropped: usize,
    /// The cause, if it was lost.
    error: Option<ProxyError>,
}

impl Liveness {
    pub(crate) fn new(ranks: usize, threads: usize) -> Self {
        let words = (0..ranks).map(|_| AtomicU64::new(0)).collect();
        Self {
            words,
            changes: AtomicU64::new(0),
            threads,
            ending: Mutex::default(),
            departures_expected: AtomicBool::new(false),
        }
    }

    #[inline]
    pub fn is_alive(&self, rank: usize) -> bool {
        self.words.get(rank).is_some_and(|w| w.load(Acquire) & 1 == 1)
    }

    /// From now on a rank that is lost has left after its last call: the log says so.
    pub fn expect_departures(&self) {
        self.departures_expected.store(true, Relaxed);
    }

    pub(crate) fn expects_departures(&self) -> bool {
        self.departures_expected.load(Relaxed)
    }

    /// The words, indexed by rank.
    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// The latest incarnation of a rank; 0 before the first.
    pub(crate) fn incarnation(&self, rank: usize) -> u32 {
        (self.words[rank].load(Acquire) >> 1) as u32
    }

    /// Grows with every change.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Acquire)
    }

    /// Begins an incarnation, unless it or a later one has begun.
    pub(crate) fn begin(&self, rank: usize, incarnation: u32) {
        let later = |word: u64| {
            (word >> 1 < u64::from(incarnation)).then_some(u64::from(incarnation) << 1 | 1)
        };
        let _ = self.words[rank].fetch_update(AcqRel, Acquire, later);
        self.changes.fetch_add(1, AcqRel);
    }

    /// Ends an incarnation. Returns whether this call ended it.
    pub(crate) fn end(&self, rank: usize, incarnation: u32) -> bool {
        let word = u64::from(incarnation) << 1;
        let ended = self.words[rank].compare_exchange(word | 1, word, AcqRel, Relaxed).is_ok();
        self.changes.fetch_add(1, AcqRel);
        ended
    }

    /// Records why an incarnation was lost; the event follows when all threads have dropped it.
    pub(crate) fn lost(&self, rank: usize, incarnation: u32, error: ProxyError) {
        self.ending(rank, incarnation, |ending| ending.error = Some(error));
    }

    /// Records that one more thread has dropped the incarnation and has applied what it sent
    /// before. The last thread gets the cause, so that the event comes after all that was sent.
    pub(crate) fn thread_dropped(&self, rank: usize, incarnation: u32) -> Option<ProxyError> {
        self.ending(rank, incarnation, |ending| ending.dropped += 1)
    }

    fn ending(
        &self,
        rank: usize,
        incarnation: u32,
        change: impl FnOnce(&mut PendingLoss),
    ) -> Option<ProxyError> {
        let mut all = self.ending.lock();
        let known = all.iter().position(|e| (e.rank, e.incarnation) == (rank, incarnation));
        let at = known.unwrap_or(all.len());
        if known.is_none() {
            all.push(PendingLoss { rank, incarnation, dropped: 0, error: None });
        }
        change(&mut all[at]);
        let over = all[at].dropped >= self.threads;
        over.then(|| all.swap_remove(at)).and_then(|ending| ending.error)
    }

    /// Whether this incarnation has ended.
    pub(crate) fn has_ended(&self, rank: usize, incarnation: u32) -> bool {
        self.words[rank].load(Acquire) != u64::from(incarnation) << 1 | 1
    }
}
