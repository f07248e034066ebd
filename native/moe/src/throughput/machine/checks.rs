//! Checks before anything is done: calls out of turn, tensors that don't fit.

use std::sync::Arc;

use fabric_engine::{EngineError, Result};

use super::{Machine, Phase};
use crate::{
    exchange::Dispatched,
    kernels::{Float, Part, PartMut},
    routes::Routes,
};

impl Machine {
    /// Checks that the exchange is open, and that the tokens of the last dispatch are sent.
    ///
    /// # Errors
    /// [`EngineError::PeerLost`], [`EngineError::Invalid`].
    pub fn check_may_dispatch(&mut self, call: &str) -> Result<()> {
        if !matches!(self.phase, Phase::Idle | Phase::Collected) {
            self.check()?;
            return Err(self.phase.refuse(call));
        }
        for (rank, cause) in std::mem::take(&mut self.gone) {
            self.fail(rank, cause);
        }
        self.check()
    }

    /// Checks that the tokens fit the shape. Changes nothing.
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
        self.spec.shape.check_tokens(parts, routes.tokens)?;
        Ok(routes)
    }

    /// Checks that tokens may go to these experts. Changes nothing.
    ///
    /// # Errors
    /// [`EngineError::Invalid`].
    pub fn check_routes(&self, indices: &[i64], weights: Option<Part<'_>>) -> Result<Routes> {
        let shape = &self.ctx.spec.shape;
        let routes = Routes::new(shape, indices)?;
        shape.check_weights(weights, routes.tokens)?;
        Ok(routes)
    }

    /// Checks that the caller has room for the arriving rows.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't suffice, or out of turn.
    pub fn check_room(&mut self, out: &[PartMut<'_>]) -> Result<Dispatched> {
        let placing = self.check_collecting()?;
        self.spec.shape.check_row_buffers(out, placing.rows)?;
        Ok(placing)
    }

    /// Checks that the caller's room for rows has at least the number of arriving rows.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for room that doesn't suffice, or out of turn.
    pub fn check_kernel_room(&mut self, rows: u64) -> Result<Dispatched> {
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
        let placing = self.arrivals.placing().filter(|_| self.phase == Phase::Dispatched);
        placing
            .map(Arc::clone)
            .ok_or_else(|| self.phase.refuse("to collect rows before they are placed"))
    }

    /// Checks that the answers match the arrived rows and the phase accepts answers.
    ///
    /// # Errors
    /// [`EngineError::Invalid`], [`EngineError::PeerLost`].
    pub(super) fn check_answers(&mut self, answers: &Part<'_>) -> Result<()> {
        let rows = self.check_answering()?;
        self.spec.shape.check_answers(answers, rows)
    }

    /// The same of answers to so many rows.
    pub(super) fn check_kernel_answers(&mut self, rows: u64) -> Result<()> {
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
        let placing = self.arrivals.placing().filter(|_| self.phase == Phase::Collected);
        placing.map(|p| p.rows).ok_or_else(|| self.phase.refuse("combine_send"))
    }

    /// Checks that the sums fit and the phase accepts sums.
    ///
    /// # Errors
    /// [`EngineError::Invalid`].
    pub fn check_sums(&mut self, out: &PartMut<'_>, float: Float) -> Result<()> {
        self.check_kernel_sums()?;
        self.spec.shape.check_sums(out, float, self.tokens)
    }

    /// Checks that the phase accepts sums.
    ///
    /// # Errors
    /// [`EngineError::Invalid`], [`EngineError::PeerLost`].
    pub fn check_kernel_sums(&mut self) -> Result<()> {
        self.check()?;
        match self.phase {
            Phase::Answered => Ok(()),
            _ => Err(self.phase.refuse("combine_recv")),
        }
    }
}
