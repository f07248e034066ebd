//! The protocol between an exchange and the kernels that execute it, in memory that both reach.
//!
//! Kernels push one command per [`DeviceEvent`] into a FIFO, in order. The host sets a [`Word`]
//! when its condition holds, and kernels wait for it. Values only grow: a value names the exchange
//! and the round. A table is written before its word, and again only after the other side has
//! answered.

use std::sync::atomic::{
    fence,
    Ordering::{Relaxed, Release},
};

use fabric_engine::{EngineError, Result};
pub use fabric_proxy::{
    command::{Add, Command},
    raw::{Area, AtomicWords, Completed, Parts, PusherSide, Slot},
};

use crate::{routes::Routes, shape::Shape};

/// The words that a device waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Not 0: the exchange has ended.
    Abort,
    /// The last exchange has ended: twice its number, plus one if its answers were summed.
    Over,
    /// The rows of each source are known.
    Routes,
    /// There are rows to hand out.
    Rows,
    /// There is room for answers.
    Room,
    /// The answers have come.
    Answers,
    /// Destinations of the first rows for each rank.
    RowPaths,
}

/// Event of a device: the slot of an atomic to its own rank. The atomic adds twice the ticket of a
/// [`DeviceReport`], plus one unless the wait before it timed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
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

/// A decoded command of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    pub event: DeviceEvent,
    /// Names the launch whose caller waits for what comes of it; 0 in a CUDA graph, which no caller
    /// waits for.
    pub ticket: u32,
    /// The wait before it has not timed out.
    pub completed: bool,
}

impl DeviceEvent {
    const ALL: [Self; 6] =
        [Self::Begun, Self::Packed, Self::HandedOut, Self::Answered, Self::Summed, Self::Combining];
}

impl DeviceReport {
    /// # Errors
    /// A command that no device of `rank` sends.
    pub fn decode(words: [u64; 2], rank: u32) -> Result<Self, String> {
        match Command::decode(words).map_err(|e| e.to_string())? {
            Command::Atomic { rank: to, add, .. } if u32::from(to) == rank => {
                let slot = usize::from(add.slot);
                let event = DeviceEvent::ALL.get(slot).copied();
                let event = event.ok_or_else(|| {
                    format!("slot {slot} is out of range [0, {})", DeviceEvent::ALL.len())
                })?;
                let ticket = u32::try_from(add.value >> 1)
                    .map_err(|_| format!("value {} has no ticket of 32 bits", add.value))?;
                Ok(Self { event, ticket, completed: add.value & 1 != 0 })
            }
            other => Err(format!("got {other:?}, expected an atomic to rank {rank}")),
        }
    }

    /// # Errors
    /// The wait before it timed out.
    pub fn checked(self) -> Result<Self, String> {
        self.completed.then_some(self).ok_or_else(|| {
            format!(
                "the device's wait before {:?} timed out; raise the timeout, or have every rank make the same calls",
                self.event
            )
        })
    }
}

/// Rows of a source, for kernels. `place` is their offset, an address with [`STORE_ADDRESS`], or
/// [`ZERO_ROWS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedRows {
    pub source: u32,
    pub first: u64,
    pub rows: u64,
    pub place: u64,
}

/// A place: the source was lost, and its rows are zeros.
pub const ZERO_ROWS: u64 = u64::MAX;

/// A flag of a place: it is an address that the device stores to, not an offset in this rank's
/// rows.
pub const STORE_ADDRESS: u64 = 1 << 62;

/// Destination of the rows that kernels pack for a rank: the first `rows` to the address `to` at
/// that rank, the others to this rank's own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowPath {
    pub to: u64,
    pub rows: u64,
}

/// The first word, and the number of words.
type WordRange = (usize, usize);

/// The layout of the shared memory, in words of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Written by the device: a fault or all ones, the number of tokens, the rows for each expert.
    pub routes: WordRange,
    /// Rows of each source for each local expert.
    pub incoming: WordRange,
    /// The number of chunks of rows, then the chunks.
    pub rows: WordRange,
    /// The same for answers.
    pub answers: WordRange,
    /// A byte for each rank.
    pub missing: WordRange,
    /// The number of ranks that the device stores rows to, then the path of each rank's rows.
    pub row_paths: WordRange,
    pub words: usize,
}

impl Layout {
    pub fn new(shape: &Shape) -> Self {
        let (ranks, experts) = (shape.ranks as usize, shape.experts as usize);
        // The polled words have a cache line of their own.
        let mut end = 16;
        let mut area = |words: usize| {
            let begin = end;
            end = (begin + words).next_multiple_of(8);
            (begin, words)
        };
        let routes = area(2 + experts.div_ceil(2));
        let incoming = area((ranks * shape.local_experts() as usize).div_ceil(2));
        let rows = area(1 + 3 * 2 * ranks);
        let answers = area(1 + 3 * ranks);
        let missing = area(ranks.div_ceil(8));
        let row_paths = area(1 + 2 * ranks);
        Self { routes, incoming, rows, answers, missing, row_paths, words: end }
    }

    /// Each area's name, first word and number of words.
    pub fn areas(&self) -> Vec<(&'static str, usize, usize)> {
        let named = [
            ("note", self.routes),
            ("incoming", self.incoming),
            ("lot", self.rows),
            ("answers", self.answers),
            ("missing", self.missing),
            ("ways", self.row_paths),
        ];
        named.into_iter().map(|(name, (first, words))| (name, first, words)).collect()
    }
}

/// The maximum number of rounds of rows and of answers in an exchange: one of each where the shared
/// buffer holds all. A round is one filling of the shared buffer.
pub fn rounds(shape: &Shape) -> (u64, u64) {
    let (others, room) = (u64::from(shape.ranks) - 1, shape.shared_rows());
    // Every round but the last fills the buffer.
    let rows = (others * (shape.pair_rows() - shape.private_rows())).div_ceil(room).max(1);
    let all = others * shape.pair_rows();
    // Answers to one rank leave in chunks of the buffer's size, and two rounds in a row exceed the
    // buffer.
    let chunks = others * shape.pair_rows().div_ceil(room);
    let answers = if all <= room { 1 } else { chunks.min(2 * all.div_ceil(room)) };
    (rows, answers.max(1))
}

/// The shared memory.
#[derive(Debug)]
pub struct SharedWords {
    words: AtomicWords,
    layout: Layout,
}

impl SharedWords {
    /// # Errors
    /// [`EngineError::Invalid`] for another number of words than [`Layout::words`].
    pub fn new(words: AtomicWords, shape: &Shape) -> Result<Self> {
        let layout = Layout::new(shape);
        if words.len() != layout.words {
            let text = format!("got {} shared words, expected {}", words.len(), layout.words);
            return Err(EngineError::Invalid(text));
        }
        Ok(Self { words, layout })
    }

    /// Sets a word. Its readers see everything that was written before.
    pub fn set(&self, word: Word, value: u64) {
        self.words[word as usize].store(value, Release);
    }

    /// The device's counts, and the first fault that it found. Faulty rows are not counted.
    ///
    /// # Errors
    /// Invalid counts.
    pub fn read_routes(&self, shape: &Shape) -> Result<(Routes, Option<u64>)> {
        let first = self.layout.routes.0;
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

    pub fn put_rows(&self, rows: &[ListedRows]) {
        self.put_chunks(self.layout.rows, rows);
    }

    pub fn put_answers(&self, answers: &[ListedRows]) {
        self.put_chunks(self.layout.answers, answers);
    }

    pub fn put_row_paths(&self, paths: &[RowPath]) {
        let stored = paths.iter().filter(|path| path.rows != 0).count() as u64;
        let words = paths.iter().flat_map(|path| [path.to, path.rows]);
        self.put(self.layout.row_paths, std::iter::once(stored).chain(words));
    }

    pub fn put_missing(&self, missing: &[bool]) {
        let words = missing.chunks(8).map(|bytes| {
            bytes.iter().rev().fold(0u64, |word, missing| word << 8 | u64::from(*missing))
        });
        self.put(self.layout.missing, words);
    }

    /// Ends the exchange: waiting kernels continue, and read empty tables.
    pub fn abort(&self) {
        self.set(Word::Abort, 1);
        // A kernel that copies a table which is half cleared sees the word behind its copy.
        fence(Release);
        self.clear();
    }

    /// Clears the tables (RS-1): no rows, no room, and every rank's answers are missing.
    pub fn clear(&self) {
        let clear = |(first, n): WordRange| {
            self.words[first..first + n].iter().for_each(|word| word.store(0, Relaxed));
        };
        let Layout { incoming, rows, answers, row_paths, .. } = self.layout;
        [incoming, rows, answers, row_paths].into_iter().for_each(clear);
        self.put(self.layout.missing, std::iter::repeat_n(u64::MAX, self.layout.missing.1));
    }

    fn put_chunks(&self, area: WordRange, chunks: &[ListedRows]) {
        let words =
            chunks.iter().flat_map(|c| [u64::from(c.source) | c.rows << 32, c.first, c.place]);
        self.put(area, std::iter::once(chunks.len() as u64).chain(words));
    }

    fn put(&self, (first, n): WordRange, words: impl Iterator<Item = u64>) {
        for (word, value) in self.words[first..first + n].iter().zip(words) {
            word.store(value, Relaxed);
        }
    }
}
