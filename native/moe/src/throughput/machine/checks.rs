//! Checks before anything is done: calls out of turn, tensors that don't fit.

use std::sync::Arc;

use fabric_engine::{EngineError, Result};

use super::{Machine, Step};
use crate::{
    exchange::Dispatched,
    kernels::{Float, Part, PartMut},
    routes::Routes,
};

impl Machine {
    /// That the exchange hasn't ended, and the next one may begin when the tokens of the last have
    /// left.
    ///
    /// # Errors
    /// [`EngineError::PeerLost`], [`EngineError::Invalid`].
    pub fn check_turn(&mut self, call: &str) -> Result<()> {
        if !matches!(self.step, Step::Idle | Step::Collected) {
            self.check()?;
            return Err(self.out_of_turn(call));
        }
        for (rank, cause) in std::mem::take(&mut self.gone) {
            self.fail(rank, cause);
        }
        self.check()
    }

    /// That these tokens fit the shape; nothing is changed.
    ///
    /// # Errors
    /// [`EngineError::Invalid`].
    pub fn check_tokens(
        &self,
        parts: &[Part<'_>],
        indices: &[i64],
        weights: Option<Part<'_>>,
    ) -> Result<Routes> {
        let routes = self.check_routes(indices, weights)?;
        let shape = &self.ctx.spec.shape;
        let width: usize = parts.iter().map(|p| p.width).sum();
        if width != shape.row_nbytes as usize {
            return Err(EngineError::Invalid(format!(
                "a token has {width} bytes here, and {} in the exchange",
                shape.row_nbytes
            )));
        }
        parts.iter().try_for_each(|part| part.check("tokens", routes.tokens.into()))?;
        Ok(routes)
    }

    /// That tokens may go to these experts; nothing is changed.
    ///
    /// # Errors
    /// [`EngineError::Invalid`].
    pub fn check_routes(&self, indices: &[i64], weights: Option<Part<'_>>) -> Result<Routes> {
        let shape = &self.ctx.spec.shape;
        let routes = Routes::new(shape, indices)?;
        if let Some(weights) = weights {
            if weights.width != 4 * shape.topk as usize {
                return Err(EngineError::Invalid(format!(
                    "weights of {} bytes for each token; give {} 32-bit floats",
                    weights.width, shape.topk
                )));
            }
            weights.check("weights", routes.tokens.into())?;
        }
        Ok(routes)
    }

    /// That there is room for the rows that come.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't suffice, or out of turn.
    pub fn check_room(&mut self, out: &[PartMut<'_>]) -> Result<Dispatched> {
        let placing = self.check_collecting()?;
        let width: usize = out.iter().map(|p| p.width).sum();
        if width != self.ctx.spec.shape.row_nbytes as usize {
            return Err(EngineError::Invalid(format!(
                "there is room for rows of {width} bytes, and they have {}",
                self.ctx.spec.shape.row_nbytes
            )));
        }
        out.iter().try_for_each(|part| part.check("room for rows", placing.rows))?;
        Ok(placing)
    }

    /// That there is room for the rows that come, for so many of them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't suffice, or out of turn.
    pub fn check_far_room(&mut self, rows: u64) -> Result<Dispatched> {
        let placing = self.check_collecting()?;
        match rows < placing.rows {
            false => Ok(placing),
            true => Err(EngineError::Invalid(format!(
                "there is room for {rows} rows, and {} come",
                placing.rows
            ))),
        }
    }

    fn check_collecting(&mut self) -> Result<Dispatched> {
        self.check()?;
        let placing = self.arrivals.placing().filter(|_| self.step == Step::Dispatched);
        placing
            .map(Arc::clone)
            .ok_or_else(|| self.out_of_turn("to collect rows before they are placed"))
    }

    /// That these are answers to the rows that came, and it is their turn.
    ///
    /// # Errors
    /// [`EngineError::Invalid`], [`EngineError::PeerLost`].
    pub(super) fn check_answers(&mut self, answers: &Part<'_>) -> Result<()> {
        let rows = self.check_answering()?;
        let shape = &self.ctx.spec.shape;
        if answers.width as u64 != shape.back_nbytes() {
            return Err(EngineError::Invalid(format!(
                "an answer has {} bytes here, and {} in the exchange",
                answers.width,
                shape.back_nbytes()
            )));
        }
        answers.check("answers", rows)
    }

    /// The same of answers to so many rows.
    pub(super) fn check_far_answers(&mut self, rows: u64) -> Result<()> {
        let all = self.check_answering()?;
        match rows < all {
            false => Ok(()),
            true => {
                let text = format!("answers to {rows} rows, and there are {all}");
                Err(EngineError::Invalid(text))
            }
        }
    }

    /// Rows that are to be answered now.
    fn check_answering(&mut self) -> Result<u64> {
        self.check()?;
        let placing = self.arrivals.placing().filter(|_| self.step == Step::Collected);
        placing.map(|p| p.rows).ok_or_else(|| self.out_of_turn("combine_send"))
    }

    /// That the sums fit, and it is their turn.
    ///
    /// # Errors
    /// [`EngineError::Invalid`].
    pub fn check_sums(&mut self, out: &PartMut<'_>, float: Float) -> Result<()> {
        self.check_far_sums()?;
        let wide = u64::from(self.ctx.spec.shape.back.elements) * float.nbytes();
        if out.width as u64 != wide {
            return Err(EngineError::Invalid(format!(
                "there is room for sums of {} bytes, and they have {wide}",
                out.width
            )));
        }
        out.check("room for sums", self.tokens.into())
    }

    /// That it is the turn of sums.
    ///
    /// # Errors
    /// [`EngineError::Invalid`], [`EngineError::PeerLost`].
    pub fn check_far_sums(&mut self) -> Result<()> {
        self.check()?;
        match self.step {
            Step::Answered => Ok(()),
            _ => Err(self.out_of_turn("combine_recv")),
        }
    }

    pub(super) fn out_of_turn(&self, call: &str) -> EngineError {
        let next = match self.step {
            Step::Idle => "dispatch_send",
            Step::Dispatched => "dispatch_recv",
            Step::Answering => "combine_send",
            Step::Collected => "combine_send, or dispatch_send if every rank leaves combine out",
            Step::Answered => "combine_recv",
        };
        EngineError::Invalid(format!("{call} is not next; it is {next}"))
    }
}
