//! The protocol between an exchange and the kernels that execute it, in memory that both reach.
//!
//! Kernels push one command per [`Told`] into a FIFO, in order. The host sets a [`Word`] when its
//! event has happened, and kernels wait for it. Both only grow: a value names the exchange and the
//! phase. A table beside them is written before its word, and again only after the other side has
//! answered.

use std::sync::atomic::Ordering::{Relaxed, Release};

use fabric_engine::{EngineError, Result};
pub use fabric_proxy::{
    command::{Add, Command},
    raw::{Area, AtomicWords, Completed, Parts, PusherSide, Slot},
};

use crate::{routes::Routes, shape::Shape};

/// What a device waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Not 0: the exchange has ended, and nothing more comes.
    Abort,
    /// The last exchange is over: twice its number, and one more if its answers were summed.
    Over,
    /// The rows of each source are known.
    Routes,
    /// There are rows to hand out.
    Rows,
    /// There is room for answers.
    Room,
    /// The answers have come.
    Answers,
    /// Where the first rows for each rank go.
    Ways,
}

/// What a device has done: the slot of an atomic to its own rank, which adds 0 if something that it
/// waited for before did not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The routes are written.
    Begun,
    /// The rows are packed.
    Packed,
    /// The available rows are handed out.
    HandedOut,
    /// The answers are written where there was room.
    Answered,
    /// The answers have been read.
    Summed,
    /// The kernels have reached the answers.
    Combining,
}

/// A command that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    pub told: Told,
    /// What it waited for before came.
    pub well: bool,
}

impl Told {
    const ALL: [Self; 6] =
        [Self::Begun, Self::Packed, Self::HandedOut, Self::Answered, Self::Summed, Self::Combining];
}

impl Said {
    /// # Errors
    /// What it is instead.
    pub fn of(words: [u64; 2], rank: u32) -> Result<Self, String> {
        match Command::decode(words).map_err(|e| e.to_string())? {
            Command::Atomic { rank: to, add, .. } if u32::from(to) == rank => {
                let slot = usize::from(add.slot);
                let told = Told::ALL.get(slot).copied();
                let told = told.ok_or_else(|| format!("an exchange has no slot {slot}"))?;
                Ok(Self { told, well: add.value != 0 })
            }
            other => Err(format!("an exchange takes atomics to its own rank, and no {other:?}")),
        }
    }

    /// # Errors
    /// It went on without what it waited for.
    pub fn came(self) -> Result<Told, String> {
        let Self { told, well } = self;
        well.then_some(told).ok_or_else(|| {
            format!(
                "the device waited for too long before it said {told:?}; raise the timeout, or have every rank make \
                 the same calls"
            )
        })
    }
}

/// Rows of a source, for kernels: `BLANK` in place of where they lie if they don't come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub source: u32,
    pub first: u64,
    pub rows: u64,
    pub place: u64,
}

pub const BLANK: u64 = u64::MAX;

/// In a place: it is an address that the device stores to, and not an offset in this rank's rows.
pub const STORED: u64 = 1 << 62;

/// Where a rank's rows go, for kernels that pack them: so many first ones to an address at that
/// rank, and all others to this rank's own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowWay {
    pub to: u64,
    pub rows: u64,
}

/// Words of the memory: first, and how many.
type Area8 = (usize, usize);

/// Where what lies in the shared memory, in words of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// A fault or all ones, the number of tokens, and the rows for each expert, by the device.
    pub note: Area8,
    /// Rows of each source for each local expert.
    pub incoming: Area8,
    /// How many chunks of rows there are, and those.
    pub lot: Area8,
    /// The same for answers.
    pub answers: Area8,
    /// A byte for each rank.
    pub missing: Area8,
    /// To how many ranks the device stores rows now, and of each rank where its rows go.
    pub ways: Area8,
    pub words: usize,
}

impl Layout {
    pub fn new(shape: &Shape) -> Self {
        let (ranks, experts) = (shape.ranks as usize, shape.experts as usize);
        // A line for the words, which are polled.
        let mut end = 16;
        let mut area = |words: usize| {
            let begin = end;
            end = (begin + words).next_multiple_of(8);
            (begin, words)
        };
        let note = area(2 + experts.div_ceil(2));
        let incoming = area((ranks * shape.local_experts() as usize).div_ceil(2));
        let lot = area(1 + 3 * 2 * ranks);
        let answers = area(1 + 3 * ranks);
        let missing = area(ranks.div_ceil(8));
        let ways = area(1 + 2 * ranks);
        Self { note, incoming, lot, answers, missing, ways, words: end }
    }

    /// By name.
    pub fn areas(&self) -> Vec<(&'static str, usize, usize)> {
        let named = [
            ("note", self.note),
            ("incoming", self.incoming),
            ("lot", self.lot),
            ("answers", self.answers),
            ("missing", self.missing),
            ("ways", self.ways),
        ];
        named.into_iter().map(|(name, (first, words))| (name, first, words)).collect()
    }
}

/// In how many turns rows can come, and answers can leave, at most: one of each where the shared
/// buffer takes all.
pub fn turns(shape: &Shape) -> (u64, u64) {
    let (others, room) = (u64::from(shape.ranks) - 1, shape.shared_rows());
    // A turn that isn't the last fills the buffer.
    let rows = (others * (shape.pair_rows() - shape.private_rows())).div_ceil(room).max(1);
    let all = others * shape.pair_rows();
    // Answers to one rank leave in pieces of the buffer's size, and any two turns in a row are more
    // than the buffer.
    let pieces = others * shape.pair_rows().div_ceil(room);
    let answers = if all <= room { 1 } else { pieces.min(2 * all.div_ceil(room)) };
    (rows, answers.max(1))
}

/// The memory itself.
#[derive(Debug)]
pub struct Shared {
    words: AtomicWords,
    layout: Layout,
}

impl Shared {
    /// # Errors
    /// [`EngineError::Invalid`] for another number of words than [`Layout::words`].
    pub fn new(words: AtomicWords, shape: &Shape) -> Result<Self> {
        let layout = Layout::new(shape);
        if words.len() != layout.words {
            let text = format!("{} words to share; give {}", words.len(), layout.words);
            return Err(EngineError::Invalid(text));
        }
        Ok(Self { words, layout })
    }

    /// Readers of the value can read everything that was written before.
    pub fn set(&self, word: Word, value: u64) {
        self.words[word as usize].store(value, Release);
    }

    /// The counts that the device has routed, or the first fault that it found; faulty rows are not
    /// counted.
    ///
    /// # Errors
    /// Invalid counts.
    pub fn note(&self, shape: &Shape) -> Result<(Routes, Option<u64>)> {
        let first = self.layout.note.0;
        let word = |i: usize| self.words[first + i].load(Relaxed);
        let counts = (0..shape.experts as usize).map(|i| (word(2 + i / 2) >> (i % 2 * 32)) as u32);
        let routes = Routes::counted(shape, word(1) as u32, counts.collect())?;
        Ok((routes, Some(word(0)).filter(|fault| *fault != u64::MAX)))
    }

    pub fn put_incoming(&self, incoming: &[Vec<u32>], local: usize) {
        let all = incoming.iter().flat_map(|of| {
            let rest = local - of.len().min(local);
            of.iter().copied().chain(std::iter::repeat_n(0, rest)).take(local)
        });
        let all: Vec<u32> = all.collect();
        let pairs = all
            .chunks(2)
            .map(|pair| u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32);
        self.put(self.layout.incoming, pairs);
    }

    pub fn put_lot(&self, lot: &[Listed]) {
        self.put_chunks(self.layout.lot, lot);
    }

    pub fn put_answers(&self, answers: &[Listed]) {
        self.put_chunks(self.layout.answers, answers);
    }

    pub fn put_ways(&self, ways: &[RowWay]) {
        let stored = ways.iter().filter(|way| way.rows != 0).count() as u64;
        let words = ways.iter().flat_map(|way| [way.to, way.rows]);
        self.put(self.layout.ways, std::iter::once(stored).chain(words));
    }

    pub fn put_missing(&self, missing: &[bool]) {
        let words = missing.chunks(8).map(|bytes| {
            bytes.iter().rev().fold(0u64, |word, missing| word << 8 | u64::from(*missing))
        });
        self.put(self.layout.missing, words);
    }

    /// Ends the exchange: waiting kernels continue, and everything they read is empty.
    pub fn abort(&self) {
        self.clear();
        self.set(Word::Abort, 1);
    }

    /// Initial contents (RS-1): no rows, no room, and every rank's answers are missing.
    pub fn clear(&self) {
        let clear = |(first, n): Area8| {
            self.words[first..first + n].iter().for_each(|word| word.store(0, Relaxed));
        };
        let Layout { incoming, lot, answers, ways, .. } = self.layout;
        [incoming, lot, answers, ways].into_iter().for_each(clear);
        self.put(self.layout.missing, std::iter::repeat_n(u64::MAX, self.layout.missing.1));
    }

    fn put_chunks(&self, area: Area8, chunks: &[Listed]) {
        let words =
            chunks.iter().flat_map(|c| [u64::from(c.source) | c.rows << 32, c.first, c.place]);
        self.put(area, std::iter::once(chunks.len() as u64).chain(words));
    }

    fn put(&self, (first, n): Area8, words: impl Iterator<Item = u64>) {
        for (word, value) in self.words[first..first + n].iter().zip(words) {
            word.store(value, Relaxed);
        }
    }
}
