//! What an exchange brings: rows, answers to them, sums.

use fabric_engine::Result;

use super::{Channel, Machine, Phase};
use crate::{
    exchange::Dispatched,
    kernels::{store, Float, Part, PartMut},
    routes::Order,
};

impl Machine {
    /// Computes the placement of rows, once all lanes have announced their numbers.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] out of turn, or if an expert gets more rows than `order` has room
    /// for.
    pub fn arriving(&mut self, order: Order) -> Result<Option<Dispatched>> {
        self.check()?;
        if self.phase != Phase::Dispatched {
            return Err(self.phase.refuse("dispatch_recv"));
        }
        if !self.arrivals.are_known() {
            return Ok(None);
        }
        let begun = self.channels.iter().any(Channel::has_begun);
        self.arrivals.place(self.spec.shape.local_experts(), order, begun).map(Some)
    }

    /// The placement of rows, once it was requested.
    pub fn placing(&self) -> Option<Dispatched> {
        self.arrivals.placing().cloned()
    }

    /// Whether all rows have come, and all that pass through this rank have gone on; the next thing
    /// are answers then.
    pub fn is_collected(&mut self) -> bool {
        if self.phase == Phase::Dispatched && self.channels.iter().all(Channel::is_dispatched) {
            self.phase = Phase::Collected;
            for channel in &mut self.channels {
                channel.settled = Some(channel.commands.drain());
            }
        }
        self.phase != Phase::Dispatched
    }

    /// Answers come now. They lie where the rows were put.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for answers that don't fit the shape, or out of turn.
    pub fn begin_answers(&mut self, answers: &Part<'_>) -> Result<()> {
        self.check_answers(answers)?;
        self.phase = Phase::Answering;
        Ok(())
    }

    /// As [`Machine::begin_answers`], of answers to so many rows, wherever they are.
    ///
    /// # Errors
    /// As [`Machine::begin_answers`].
    pub fn begin_kernel_answers(&mut self, rows: u64) -> Result<()> {
        self.check_kernel_answers(rows)?;
        self.phase = Phase::Answering;
        Ok(())
    }

    /// Whether no rank needs this rank's answers any more.
    pub fn is_answered(&mut self) -> bool {
        if self.phase == Phase::Answering && self.channels.iter().all(Channel::is_answered) {
            self.phase = Phase::Answered;
        }
        self.phase != Phase::Answering
    }

    /// Whether this rank's sums are made.
    pub fn is_summed(&self) -> bool {
        self.phase == Phase::Answered && self.channels.iter().all(Channel::is_summed)
    }

    /// Hands out the sums, which ends the exchange.
    ///
    /// # Errors
    /// As [`Machine::check_sums`].
    pub fn take_sums(&mut self, out: &mut PartMut<'_>, float: Float) -> Result<()> {
        self.check_sums(out, float)?;
        let wide = self.ctx.spec.shape.back.elements as usize;
        let sums = self.jobs.totals().chunks_exact(wide).take(self.tokens as usize);
        sums.enumerate().for_each(|(token, sum)| store(sum, out.row(token), float));
        self.phase = Phase::Idle;
        Ok(())
    }

    /// As [`Machine::take_sums`] of sums that lie where the worker put them: of how many tokens.
    ///
    /// # Errors
    /// [`EngineError::Invalid`], out of turn.
    pub fn take_kernel_sums(&mut self) -> Result<u32> {
        self.check_kernel_sums()?;
        self.phase = Phase::Idle;
        Ok(self.tokens)
    }
}
