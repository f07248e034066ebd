//! The destination of each row. A row is a token on its way to one of its experts.
//!
//! A rank's rows are sorted by expert, and those of one expert by token. So the rows for one rank
//! are contiguous, and the counts per expert determine which row belongs to which expert
//! (fabric-lib §6.2). Answers come back in the same order.

use fabric_engine::{EngineError, Result};

use crate::shape::Shape;

/// A (token, expert) that isn't there: its index was -1.
pub const NONE: u32 = u32::MAX;

/// The rows of one rank's tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    /// Tokens.
    pub tokens: u32,
    /// Of each row, its token.
    pub token_of: Vec<u32>,
    /// Of each (token, k), its row, or [`NONE`]: `tokens * topk`.
    pub row_of: Vec<u32>,
    /// Rows for each expert.
    pub counts: Vec<u32>,
    /// The first row for each rank, and the number of all.
    pub first: Vec<u32>,
}

impl Routes {
    /// `indices` are the experts of each token, `topk` of them; -1 for none. A token that names an
    /// expert twice sends it one row, whose answer counts for both.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: too many tokens, or an unknown expert.
    pub fn new(shape: &Shape, indices: &[i64]) -> Result<Self> {
        let topk = shape.topk as usize;
        if !indices.len().is_multiple_of(topk) {
            let text = format!("{} indices are not {topk} for each token", indices.len());
            return Err(EngineError::Invalid(text));
        }
        let tokens = indices.len() / topk;
        if tokens > shape.max_tokens as usize {
            return Err(EngineError::Invalid(format!(
                "{tokens} tokens, and there is room for {}; send fewer at a time, or raise max_tokens",
                shape.max_tokens
            )));
        }
        let mut counts = vec![0u32; shape.experts as usize];
        let mut last = vec![NONE; shape.experts as usize];
        for (i, expert) in indices.iter().enumerate() {
            if *expert == -1 {
                continue;
            }
            let token = (i / topk) as u32;
            let place = usize::try_from(*expert).ok().and_then(|e| last.get_mut(e));
            let Some(place) = place else {
                return Err(EngineError::Invalid(format!(
                    "token {token} goes to expert {expert}, and there are {} from 0; -1 is none",
                    shape.experts
                )));
            };
            if std::mem::replace(place, token) != token {
                counts[*expert as usize] += 1;
            }
        }
        let mut next = running(&counts);
        let local = shape.local_experts() as usize;
        let first = next.iter().step_by(local).copied().collect();
        let total = next[next.len() - 1] as usize;
        let (mut token_of, mut row_of) = (vec![0; total], vec![NONE; indices.len()]);
        for (i, expert) in indices.iter().enumerate().filter(|(_, e)| **e >= 0) {
            let begin = i / topk * topk;
            if let Some(earlier) = indices[begin..i].iter().position(|e| e == expert) {
                row_of[i] = row_of[begin + earlier];
                continue;
            }
            let row = &mut next[*expert as usize];
            token_of[*row as usize] = (i / topk) as u32;
            row_of[i] = *row;
            *row += 1;
        }
        Ok(Self { tokens: tokens as u32, token_of, row_of, counts, first })
    }

    /// Routes from a device's counts; only the device knows which row is whose.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: no tokens of this shape have so many rows.
    pub fn counted(shape: &Shape, tokens: u32, counts: Vec<u32>) -> Result<Self> {
        let rows: u64 = counts.iter().map(|n| u64::from(*n)).sum();
        let most = counts.iter().copied().max().unwrap_or(0);
        if tokens > shape.max_tokens || most > tokens || rows > shape.out_rows() {
            let text = format!("{tokens} tokens can't have {rows} rows, {most} for one expert");
            return Err(EngineError::Invalid(text));
        }
        let local = shape.local_experts() as usize;
        let first = running(&counts).into_iter().step_by(local).collect();
        Ok(Self { tokens, counts, first, ..Self::default() })
    }

    /// Rows for a rank.
    pub fn rows_to(&self, rank: u32) -> u64 {
        let rank = rank as usize;
        match self.first.get(rank..=rank + 1) {
            Some([begin, end]) => u64::from(end - begin),
            _ => 0,
        }
    }

    /// The first row for a rank.
    pub fn first_to(&self, rank: u32) -> u64 {
        self.first.get(rank as usize).copied().unwrap_or(0).into()
    }

    /// Rows for each expert of a rank.
    pub fn counts_to(&self, shape: &Shape, rank: u32) -> &[u32] {
        let local = shape.local_experts() as usize;
        self.counts.get(rank as usize * local..(rank as usize + 1) * local).unwrap_or(&[])
    }
}

/// Sums of all before, and of all.
fn running(counts: &[u32]) -> Vec<u32> {
    let mut sum = 0;
    let mut sums = Vec::with_capacity(counts.len() + 1);
    sums.push(0);
    for n in counts {
        sum += n;
        sums.push(sum);
    }
    sums
}

/// Order of the experts' rows in the output of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Behind one another, the rows of each expert filled up to a multiple: for a grouped GEMM.
    Packed { multiple: u32 },
    /// Each expert's begin at a multiple of this many rows: for a batched GEMM.
    Strided { rows: u32 },
}

/// Positions of the rows of all sources: by expert, then by source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPlacement {
    /// Rows of each expert, of all sources.
    pub counts: Vec<u32>,
    /// The first row of each expert.
    pub starts: Vec<u32>,
    /// Rows in all, those that fill up included.
    pub rows: u64,
    pub order: Order,
    /// Of each source, its rows for each expert; none from one that is left out.
    incoming: Vec<Vec<u32>>,
    /// Of each source, where its first row of each expert goes.
    sources: Vec<Vec<u32>>,
}

/// Rows that stay together: `rows` from `from` of a source go to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub from: u64,
    pub to: u64,
    pub rows: u64,
}

impl RowPlacement {
    /// `incoming[source]` are the rows of a source for each local expert; none from one that is
    /// left out.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if an expert gets more rows than a stride has.
    pub fn new(experts: u32, incoming: Vec<Vec<u32>>, order: Order) -> Result<Self> {
        let experts = experts as usize;
        let mut counts = vec![0u32; experts];
        for (sum, n) in incoming.iter().flat_map(|of| counts_of(of, experts).enumerate()) {
            counts[sum] += n;
        }
        let mut starts = Vec::with_capacity(experts);
        let mut rows = 0u64;
        for (expert, n) in counts.iter().enumerate() {
            starts.push(rows as u32);
            rows += match order {
                Order::Packed { multiple } => u64::from(n.next_multiple_of(multiple.max(1))),
                Order::Strided { rows } if *n > rows => {
                    return Err(EngineError::Invalid(format!(
                        "local expert {expert} gets {n} rows, and each has room for {rows}; make room for \
                         as many as can come"
                    )))
                }
                Order::Strided { rows } => u64::from(rows),
            };
        }
        if rows > u64::from(u32::MAX) {
            let text =
                format!("{rows} rows can't be counted in 32 bits; give experts a smaller stride");
            return Err(EngineError::Invalid(text));
        }
        let mut next = starts.clone();
        let mut sources = Vec::with_capacity(incoming.len());
        for of in &incoming {
            sources.push(next.clone());
            for (place, n) in next.iter_mut().zip(counts_of(of, experts)) {
                *place += n;
            }
        }
        Ok(Self { counts, starts, rows, order, incoming, sources })
    }

    /// Rows of a source.
    pub fn rows_of(&self, source: u32) -> u64 {
        let of = self.incoming.get(source as usize).map(Vec::as_slice).unwrap_or(&[]);
        of.iter().map(|n| u64::from(*n)).sum()
    }

    /// Position of a source's first row for each expert.
    pub fn firsts(&self, source: u32) -> &[u32] {
        self.sources.get(source as usize).map_or(&[], Vec::as_slice)
    }

    /// Positions of rows `begin..end` of a source, as runs.
    pub fn runs(&self, source: u32, begin: u64, end: u64) -> impl Iterator<Item = Run> + '_ {
        let places = self.sources.get(source as usize).map(Vec::as_slice).unwrap_or(&[]);
        let of = self.incoming.get(source as usize).map(Vec::as_slice).unwrap_or(&[]);
        let mut first = 0u64;
        places.iter().zip(of).filter_map(move |(place, n)| {
            let (low, high) = (first.max(begin), (first + u64::from(*n)).min(end));
            let skipped = low - first;
            first += u64::from(*n);
            let run = || Run { from: low, to: u64::from(*place) + skipped, rows: high - low };
            (low < high).then(run)
        })
    }
}

fn counts_of(of: &[u32], experts: usize) -> impl Iterator<Item = u32> + '_ {
    of.iter().copied().take(experts)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{kernels::Float, AnswerFormat};

    fn shape(ranks: u32, local: u32, topk: u32, max_tokens: u32) -> Shape {
        let back = AnswerFormat { elements: 4, float: Float::F32 };
        Shape {
            ranks,
            experts: ranks * local,
            topk,
            max_tokens,
            row_nbytes: 8,
            back,
            private_rows: 1,
            shared_rows: None,
        }
    }

    #[test]
    fn rows_are_in_the_order_of_experts_and_tokens() {
        let routes = Routes::new(&shape(2, 2, 2, 4), &[3, 0, -1, 3, 0, 2]).unwrap();
        assert_eq!(routes.counts, [2, 0, 1, 2]);
        assert_eq!(routes.token_of, [0, 2, 2, 0, 1]);
        assert_eq!(routes.row_of, [3, 0, NONE, 4, 1, 2]);
        assert_eq!((routes.rows_to(0), routes.rows_to(1), routes.first_to(1)), (2, 3, 2));
    }

    #[test]
    fn an_expert_that_a_token_names_twice_gets_one_row() {
        let routes = Routes::new(&shape(2, 2, 3, 2), &[3, 0, 3, 2, 2, -1]).unwrap();
        assert_eq!(routes.counts, [1, 0, 1, 1]);
        assert_eq!(routes.token_of, [0, 1, 0]);
        assert_eq!(routes.row_of, [2, 0, 2, 1, 1, NONE]);
    }

    #[test]
    fn what_no_token_can_ask_for_is_refused() {
        let shape = shape(2, 2, 2, 2);
        for (indices, word) in [
            (&[0i64, 4][..], "expert 4"),
            (&[0, -2], "expert -2"),
            (&[0, 1, 2], "for each token"),
            (&[0, 1, 0, 1, 0, 1], "room for 2"),
        ] {
            let error = Routes::new(&shape, indices).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    proptest! {
        /// For any input, every row of every source has its own place, in its expert's part.
        #[test]
        fn every_row_has_one_place(
            incoming in prop::collection::vec(prop::collection::vec(0u32..5, 3), 1..5),
            multiple in 1u32..6,
            cut in 0u64..8,
        ) {
            for order in [Order::Packed { multiple }, Order::Strided { rows: 20 }] {
                let placing = RowPlacement::new(3, incoming.clone(), order).unwrap();
                let mut taken = vec![false; placing.rows as usize];
                for (source, of) in incoming.iter().enumerate() {
                    let total: u64 = of.iter().map(|n| u64::from(*n)).sum();
                    let cut = cut.min(total);
                    for (begin, end) in [(0, cut), (cut, total)] {
                        let mut next = begin;
                        for run in placing.runs(source as u32, begin, end) {
                            prop_assert_eq!(run.from, next);
                            next += run.rows;
                            for row in run.to..run.to + run.rows {
                                prop_assert!(!std::mem::replace(&mut taken[row as usize], true));
                            }
                        }
                        prop_assert_eq!(next, end);
                    }
                }
                let all: u32 = placing.counts.iter().sum();
                prop_assert_eq!(taken.iter().filter(|t| **t).count(), all as usize);
                for (start, n) in placing.starts.iter().zip(&placing.counts) {
                    prop_assert!(taken[*start as usize..(start + n) as usize].iter().all(|t| *t));
                }
            }
        }
    }
}
