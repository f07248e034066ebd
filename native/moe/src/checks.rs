//! Checks of a call's arguments against the shape of an exchange, before anything is sent.

use std::time::Duration;

use fabric_engine::{
    locks::{Mutex, MutexGuard},
    EngineError, Result,
};

use crate::{
    kernels::{Float, Part, PartMut},
    shape::Shape,
};

/// Locks an exchange for one call.
///
/// # Errors
/// [`EngineError::Invalid`] while another thread is in a call.
pub(crate) fn enter(caller: &Mutex<()>) -> Result<MutexGuard<'_, ()>> {
    caller.try_lock().ok_or_else(|| {
        let text = "another thread is in a call of this exchange; make one exchange per thread";
        EngineError::Invalid(text.into())
    })
}

/// A timeout in nanoseconds; at most 584 years.
pub(crate) fn nanos(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
}

/// # Errors
/// [`EngineError::Invalid`] for a rank that is out of range.
pub(crate) fn check_rank(rank: u32, ranks: u32) -> Result<()> {
    match rank < ranks {
        true => Ok(()),
        false => Err(EngineError::Invalid(format!("rank {rank} is out of range [0, {ranks})"))),
    }
}

/// # Errors
/// [`EngineError::Invalid`] for a rank that is out of range, or for this rank.
pub(crate) fn check_peer(rank: u32, own: u32, ranks: u32) -> Result<()> {
    check_rank(rank, ranks)?;
    match rank == own {
        false => Ok(()),
        true => Err(EngineError::Invalid(format!("rank {rank} is this rank; name another one"))),
    }
}

fn check_width(what: &str, got: usize, expected: u64) -> Result<()> {
    match got as u64 == expected {
        true => Ok(()),
        false => Err(EngineError::Invalid(format!("{what}: got {got} bytes, expected {expected}"))),
    }
}

/// Each of these returns [`EngineError::Invalid`] for a tensor that doesn't fit.
impl Shape {
    /// `parts` make up the rows of so many tokens.
    pub(crate) fn check_tokens(&self, parts: &[Part<'_>], tokens: u32) -> Result<()> {
        let width = parts.iter().map(|p| p.width).sum();
        check_width("bytes of a token", width, self.row_nbytes.into())?;
        parts.iter().try_for_each(|part| part.check("tokens", tokens.into()))
    }

    /// `topk` 32-bit floats for each token.
    pub(crate) fn check_weights(&self, weights: Option<Part<'_>>, tokens: u32) -> Result<()> {
        let Some(weights) = weights else { return Ok(()) };
        let what = format!("weights of a token ({} 32-bit floats)", self.topk);
        check_width(&what, weights.width, 4 * u64::from(self.topk))?;
        weights.check("weights", tokens.into())
    }

    /// `out` has the parts of rows.
    pub(crate) fn check_row_buffers(&self, out: &[PartMut<'_>], rows: u64) -> Result<()> {
        let width = out.iter().map(|p| p.width).sum();
        check_width("buffers for a row", width, self.row_nbytes.into())?;
        out.iter().try_for_each(|part| part.check("buffers for rows", rows))
    }

    pub(crate) fn check_answers(&self, answers: &Part<'_>, rows: u64) -> Result<()> {
        check_width("bytes of an answer", answers.width, self.back_nbytes())?;
        answers.check("answers", rows)
    }

    pub(crate) fn check_answer_buffer(&self, out: &PartMut<'_>, rows: u64) -> Result<()> {
        check_width("buffer for an answer", out.width, self.back_nbytes())?;
        out.check("buffer for answers", rows)
    }

    pub(crate) fn check_sums(&self, out: &PartMut<'_>, float: Float, tokens: u32) -> Result<()> {
        let nbytes = u64::from(self.back.elements) * float.nbytes();
        check_width("buffer for a sum", out.width, nbytes)?;
        out.check("buffer for sums", tokens.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_timeout_does_not_wrap() {
        assert_eq!(nanos(Duration::from_micros(7)), 7000);
        assert_eq!(nanos(Duration::from_nanos(u64::MAX) + Duration::from_nanos(1)), u64::MAX);
    }
}
