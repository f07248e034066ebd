//! Packs rows and answers to be sent, and copies arrived ones to the caller.

use std::sync::Arc;

use fabric_engine::{locks::MutexGuard, Result};

use super::{
    actions::Action,
    conditions::Condition,
    link::{Answer, Chunk, PeerLink, RowBatch},
    state::Cursor,
    Inner, BATCH_NBYTES,
};
use crate::{
    kernels::{weighted_sum, Answers, Float, Part, PartMut},
    phase::Phase,
    routes::{Routes, RowPlacement, NONE},
    shape::Shape,
};

impl Inner {
    /// Packs the rows for a rank contiguously.
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
        let batches: Vec<RowBatch> = state.here().filter_map(PeerLink::batch).collect();
        drop(state);
        for batch in &batches {
            for chunk in &batch.chunks {
                self.hand_out(&placing, batch.source, *chunk, out)?;
            }
        }
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        for batch in batches {
            state.handed_out(&batch, &mut actions);
        }
        let all = state.all_collected();
        if all {
            let rows = state.routes.rows_to(self.rank);
            let place = self.memory.own(state.routes.first_to(self.rank));
            let gone: Vec<u32> =
                state.others().filter(|r| state.links[*r as usize].is_none()).collect();
            drop(state);
            // This rank's own rows stay here.
            self.hand_out(&placing, self.rank, Chunk { first: 0, rows, place }, out)?;
            for rank in gone {
                zero_rows(&placing, rank, out);
            }
            state = self.state.lock();
            state.collected(&mut actions);
        }
        drop(state);
        self.run(actions);
        Ok(all)
    }

    /// Copies rows of a source to their places in the caller's tensors.
    fn hand_out(
        &self,
        placing: &RowPlacement,
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

    /// Sends as many answers as the shared buffer holds; true when those were the last.
    pub(super) fn answer(self: &Arc<Self>, answers: Part<'_>) -> Result<bool> {
        let mut state = self.state.lock();
        let may_answer = matches!(state.phase, Phase::Collected | Phase::Answering);
        let Some(placing) = state.placing.clone().filter(|_| may_answer) else {
            return Err(state.phase.refuse("combine_send"));
        };
        self.shape.check_answers(&answers, placing.rows)?;
        let mut actions = Vec::new();
        if state.phase == Phase::Collected {
            // A late write of a lost rank must not overwrite answers in the shared buffer, and a
            // late write to one must not read them (MR-1).
            if !state.holds(Condition::AnswersSent) {
                return Ok(false);
            }
            state.begin_answers(&mut actions);
        }
        drop(state);
        let sent = self.send_answers(&placing, answers, &mut actions);
        self.run(actions);
        if !sent? {
            return Ok(false);
        }
        // Own answers replace own rows, which must have left.
        let state = self.state.lock();
        if !state.holds(Condition::AnswersSent) {
            return Ok(false);
        }
        let (first, rows) = (state.routes.first_to(self.rank), state.routes.rows_to(self.rank));
        drop(state);
        self.put_answers(&placing, self.rank, (0, rows), answers, self.memory.own_back(first))?;
        self.state.lock().phase = Phase::Answered;
        Ok(true)
    }

    /// Sends answers to peers until the shared buffer is full; true when all were sent.
    fn send_answers(
        self: &Arc<Self>,
        placing: &RowPlacement,
        answers: Part<'_>,
        actions: &mut Vec<Action>,
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
                if state.answers_out + state.failed_in_flight > 0 {
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
            state.answer(rank, Answer { place, first, rows }, actions);
            if nbytes >= BATCH_NBYTES {
                nbytes = 0;
                MutexGuard::unlocked(&mut state, || self.run(std::mem::take(actions)));
            }
        }
        Ok(true)
    }

    /// Packs the answers to rows of a source contiguously.
    fn put_answers(
        &self,
        placing: &RowPlacement,
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
            let answers = ArrivedAnswers { bytes, routes, missing, shape: &self.shape };
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
            let answers = ArrivedAnswers { bytes, routes, missing, shape };
            let rows = (routes.row_of.as_slice(), shape.topk as usize);
            let back = (shape.back.float, shape.back.elements as usize);
            weighted_sum(&answers, back, rows, weights, out, float);
        })
    }
}

/// The answers in this rank's memory.
struct ArrivedAnswers<'a> {
    bytes: &'a [u8],
    routes: &'a Routes,
    missing: &'a [bool],
    shape: &'a Shape,
}

impl Answers for ArrivedAnswers<'_> {
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

/// Writes zeros for rows that a lost rank did not send (RS-1).
fn zero_rows(placing: &RowPlacement, source: u32, out: &mut [PartMut<'_>]) {
    for run in placing.runs(source, 0, placing.rows_of(source)) {
        for row in run.to..run.to + run.rows {
            out.iter_mut().for_each(|part| part.row(row as usize).fill(0));
        }
    }
}
