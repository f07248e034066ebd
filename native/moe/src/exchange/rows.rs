//! Copies rows and answers into memory that is sent, and out of memory that arrived.

use std::sync::Arc;

use fabric_engine::Result;
use parking_lot::MutexGuard;

use super::{
    act::Act,
    link::{Answer, Chunk, Link, Lot},
    state::Cursor,
    waits::Until,
    Inner, AT_ONE_GO,
};
use crate::{
    kernels::{weighted_sum, Answers, Float, Part, PartMut},
    phase::Phase,
    routes::{Placing, Routes, NONE},
    shape::Shape,
};

impl Inner {
    /// Puts the rows for a rank behind one another.
    pub(super) fn pack(&self, parts: &[Part<'_>], routes: &Routes, rank: u32) -> Result<()> {
        let first = routes.first_to(rank);
        for row in first..first + routes.rows_to(rank) {
            let token = routes.token_of[row as usize] as usize;
            let mut offset = self.memory.own(row);
            for part in parts {
                self.rows.put(offset, part.row(token))?;
                offset += part.width as u64;
            }
        }
        Ok(())
    }

    pub(super) fn collect(self: &Arc<Self>, out: &mut [PartMut<'_>]) -> Result<bool> {
        let state = self.state.lock();
        let placing = state.placing.clone().filter(|_| state.phase == Phase::Dispatched);
        let Some(placing) = placing else {
            return Err(state.phase.refuse("to collect rows before they are placed"));
        };
        self.shape.check_row_buffers(out, placing.rows)?;
        let lots: Vec<Lot> = state.here().filter_map(Link::lot).collect();
        drop(state);
        for lot in &lots {
            for chunk in &lot.chunks {
                self.hand_out(&placing, lot.source, *chunk, out)?;
            }
        }
        let mut acts = Vec::new();
        let mut state = self.state.lock();
        for lot in lots {
            state.handed_out(&lot, &mut acts);
        }
        let all = state.all_collected();
        if all {
            let rows = state.routes.rows_to(self.rank);
            let place = self.memory.own(state.routes.first_to(self.rank));
            let gone: Vec<u32> =
                state.others().filter(|r| state.links[*r as usize].is_none()).collect();
            drop(state);
            // This rank's own rows never left.
            self.hand_out(&placing, self.rank, Chunk { first: 0, rows, place }, out)?;
            for rank in gone {
                blank(&placing, rank, out);
            }
            state = self.state.lock();
            state.collected(&mut acts);
        }
        drop(state);
        self.run(acts);
        Ok(all)
    }

    /// Copies rows of a source to where they belong.
    fn hand_out(
        &self,
        placing: &Placing,
        source: u32,
        chunk: Chunk,
        out: &mut [PartMut<'_>],
    ) -> Result<()> {
        let stride = self.shape.row_stride();
        for run in placing.runs(source, chunk.first, chunk.first + chunk.rows) {
            let from = chunk.place + (run.from - chunk.first) * stride;
            self.rows.with_bytes(from, run.rows * stride, |bytes| {
                let mut begin = 0;
                for part in out.iter_mut() {
                    copy_rows(
                        bytes,
                        begin,
                        stride as usize,
                        part,
                        run.to as usize,
                        run.rows as usize,
                    );
                    begin += part.width;
                }
            })?;
        }
        Ok(())
    }

    /// Sends as many answers as there is room for now; true when those were the last.
    pub(super) fn answer(self: &Arc<Self>, answers: Part<'_>) -> Result<bool> {
        let mut state = self.state.lock();
        let turn = matches!(state.phase, Phase::Collected | Phase::Answering);
        let Some(placing) = state.placing.clone().filter(|_| turn) else {
            return Err(state.phase.refuse("combine_send"));
        };
        self.shape.check_answers(&answers, placing.rows)?;
        let mut acts = Vec::new();
        if state.phase == Phase::Collected {
            // What a lost rank still writes must not meet answers in the shared buffer, nor must
            // those that are still on their way to one (MR-1).
            if !state.holds(Until::AnswersLeft) {
                return Ok(false);
            }
            state.begin_answers(&mut acts);
        }
        drop(state);
        let sent = self.send_answers(&placing, answers, &mut acts);
        self.run(acts);
        if !sent? {
            return Ok(false);
        }
        // Own rows have to have left before their answers take their place.
        let state = self.state.lock();
        if !state.holds(Until::AnswersLeft) {
            return Ok(false);
        }
        let (first, rows) = (state.routes.first_to(self.rank), state.routes.rows_to(self.rank));
        drop(state);
        self.put_answers(&placing, self.rank, (0, rows), answers, self.memory.own_back(first))?;
        self.state.lock().phase = Phase::Answered;
        Ok(true)
    }

    /// Answers to the others, until there is no room; true when all were sent.
    fn send_answers(
        self: &Arc<Self>,
        placing: &Placing,
        answers: Part<'_>,
        acts: &mut Vec<Act>,
    ) -> Result<bool> {
        let mut nbytes = 0;
        let mut state = self.state.lock();
        while let Some(rank) = state.others().nth(state.cursor.ranks as usize) {
            let (room, cursor) = (self.shape.shared_rows(), state.cursor);
            let rows = (placing.rows_of(rank) - cursor.rows).min(room);
            if rows == 0 || state.link(rank).is_none() {
                state.cursor = Cursor { ranks: cursor.ranks + 1, rows: 0, ..cursor };
                continue;
            }
            if cursor.place + rows > room {
                if state.answers_out + state.unsettled > 0 {
                    return Ok(false);
                }
                state.cursor.place = 0;
            }
            let (place, first) = (state.cursor.place, cursor.rows);
            drop(state);
            let to = self.memory.shared_back(place);
            self.put_answers(placing, rank, (first, rows), answers, to)?;
            nbytes += rows * self.shape.back_stride();
            state = self.state.lock();
            (state.cursor.place, state.cursor.rows) = (place + rows, first + rows);
            state.answer(rank, Answer { place, first, rows }, acts);
            if nbytes >= AT_ONE_GO {
                nbytes = 0;
                MutexGuard::unlocked(&mut state, || self.run(std::mem::take(acts)));
            }
        }
        Ok(true)
    }

    /// Puts the answers to rows of a source behind one another.
    fn put_answers(
        &self,
        placing: &Placing,
        source: u32,
        (first, rows): (u64, u64),
        answers: Part<'_>,
        to: u64,
    ) -> Result<()> {
        let stride = self.shape.back_stride();
        for run in placing.runs(source, first, first + rows) {
            for i in 0..run.rows {
                let offset = to + (run.from - first + i) * stride;
                self.rows.put(offset, answers.row((run.to + i) as usize))?;
            }
        }
        Ok(())
    }

    pub(super) fn single(
        &self,
        routes: &Routes,
        missing: &[bool],
        out: &mut PartMut<'_>,
    ) -> Result<()> {
        let nbytes = routes.token_of.len() as u64 * self.shape.back_stride();
        self.rows.with_bytes(self.memory.own_back(0), nbytes, |bytes| {
            let answers = Came { bytes, routes, missing, shape: &self.shape };
            for (i, row) in routes.row_of.iter().enumerate() {
                match answers.row(*row).filter(|_| *row != NONE) {
                    Some(answer) => out.row(i).copy_from_slice(answer),
                    None => out.row(i).fill(0),
                }
            }
        })
    }

    pub(super) fn sum(
        &self,
        routes: &Routes,
        missing: &[bool],
        weights: Option<Part<'_>>,
        out: &mut PartMut<'_>,
        float: Float,
    ) -> Result<()> {
        let shape = &self.shape;
        let nbytes = routes.token_of.len() as u64 * shape.back_stride();
        self.rows.with_bytes(self.memory.own_back(0), nbytes, |bytes| {
            let answers = Came { bytes, routes, missing, shape };
            let rows = (routes.row_of.as_slice(), shape.topk as usize);
            let back = (shape.back.float, shape.back.elements as usize);
            weighted_sum(&answers, back, rows, weights, out, float);
        })
    }
}

/// The answers in this rank's memory.
struct Came<'a> {
    bytes: &'a [u8],
    routes: &'a Routes,
    missing: &'a [bool],
    shape: &'a Shape,
}

impl Answers for Came<'_> {
    fn row(&self, row: u32) -> Option<&[u8]> {
        let rank = self.routes.first.partition_point(|first| *first <= row) - 1;
        let begin = row as usize * self.shape.back_stride() as usize;
        let here = !self.missing.get(rank).copied().unwrap_or(true);
        self.bytes.get(begin..begin + self.shape.back_nbytes() as usize).filter(|_| here)
    }
}

fn copy_rows(
    bytes: &[u8],
    begin: usize,
    stride: usize,
    part: &mut PartMut<'_>,
    to: usize,
    rows: usize,
) {
    if stride == part.width && part.stride == part.width {
        let at = to * part.stride;
        if let Some(out) = part.bytes.get_mut(at..at + rows * stride) {
            out.copy_from_slice(&bytes[..rows * stride]);
        }
        return;
    }
    for i in 0..rows {
        let from = i * stride + begin;
        let out = part.row(to + i);
        out.copy_from_slice(&bytes[from..from + out.len()]);
    }
}

/// Zeros in place of rows that a lost rank didn't send (RS-1).
fn blank(placing: &Placing, source: u32, out: &mut [PartMut<'_>]) {
    for run in placing.runs(source, 0, placing.rows_of(source)) {
        for row in run.to..run.to + run.rows {
            out.iter_mut().for_each(|part| part.row(row as usize).fill(0));
        }
    }
}
