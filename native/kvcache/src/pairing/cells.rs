//! Where the page boundaries of both sides cut a request's tokens.

use std::ops::Range;

/// Most tokens of a request: one page each, they can still be listed.
pub(super) const MAX_TOKENS: u64 = 1 << 31;

/// A cell is a stretch of tokens between neighbouring page boundaries of either side: the most that
/// lies in one page here and in one page there. Cells are numbered from token 0.
#[derive(Debug)]
pub(super) struct Cells {
    source_page: u64,
    target_page: u64,
    /// Tokens after which both sides begin a page again, and the pattern repeats.
    cycle: u64,
    /// The first token of each cell of a cycle.
    starts: Box<[u64]>,
    /// The end of the tokens of the last one that are sent.
    end: u64,
}

impl Cells {
    /// Cells of pages of that many tokens, each at least 1 and at most 2^16.
    pub fn new(source_page: u32, target_page: u32) -> Self {
        let (a, b) = (u64::from(source_page), u64::from(target_page));
        let cycle = cycle_tokens(a, b);
        let mut starts: Vec<u64> =
            (0..cycle / a).map(|i| i * a).chain((0..cycle / b).map(|i| i * b)).collect();
        starts.sort_unstable();
        starts.dedup();
        Self { source_page: a, target_page: b, cycle, starts: starts.into(), end: cycle }
    }

    /// One cell for any number of tokens, sent as one token: states.
    pub fn of_state() -> Self {
        let all = MAX_TOKENS;
        Self { source_page: all, target_page: all, cycle: all, starts: [0].into(), end: 1 }
    }

    /// How many cells a cycle has.
    pub fn phases(&self) -> usize {
        self.starts.len()
    }

    pub fn source_page(&self) -> u64 {
        self.source_page
    }

    pub fn target_page(&self) -> u64 {
        self.target_page
    }

    /// Source pages of a cycle.
    pub fn source_pages(&self) -> u64 {
        self.cycle / self.source_page
    }

    /// Target pages of a cycle.
    pub fn target_pages(&self) -> u64 {
        self.cycle / self.target_page
    }

    /// Which cell holds a token, at most [`MAX_TOKENS`].
    pub fn at(&self, token: u64) -> u64 {
        let rest = token % self.cycle;
        let phase = rest / self.source_page + rest / self.target_page;
        token / self.cycle * self.phases() as u64 + phase
    }

    /// The tokens of a cell of the first cycle that are sent.
    pub fn tokens(&self, phase: usize) -> Range<u64> {
        self.starts[phase]..self.starts.get(phase + 1).copied().unwrap_or(self.end)
    }

    /// The cycles in which a range of cells has the cell of that phase.
    pub fn cycles(&self, cells: &Range<u64>, phase: usize) -> Range<u64> {
        let until = |end: u64| {
            let (cycles, rest) = (end / self.phases() as u64, end % self.phases() as u64);
            cycles + u64::from(rest > phase as u64)
        };
        until(cells.start)..until(cells.end)
    }
}

/// The least common multiple.
pub(super) fn cycle_tokens(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}

/// Cells of a cycle, without making them.
pub(super) fn phases(a: u64, b: u64) -> u64 {
    let cycle = cycle_tokens(a, b);
    cycle / a + cycle / b - 1
}
