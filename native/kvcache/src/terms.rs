//! Limits of a session, and the causes with which requests end.

use std::{sync::Arc, time::Duration};

use fabric_engine::{EngineError, Region, TransferEngine};

use crate::{
    layout::{CacheGroup, CacheLayout},
    wire::RefusalReason,
};

/// One rank of this process.
#[derive(Clone, Debug)]
pub struct LocalRank {
    /// Rank within the instance.
    pub rank: u32,
    pub engine: Arc<TransferEngine>,
    /// The buffers of its layout, in order.
    pub buffers: Vec<Region>,
    /// Slots of [`Terms::tail_nbytes`] each; only those of the lowest rank of the process are used.
    pub tail: Option<Region>,
}

/// The limits that one side enforces on the other.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Interval of a decoder's beats.
    pub beat: Duration,
    /// Timeout of a silent peer. After it the session and all its requests end.
    pub silence: Duration,
    /// The longest message that is accepted, bytes.
    pub max_message: usize,
    /// Bytes of the tail that follows the last page; 0 for none.
    pub tail_nbytes: u64,
    /// Most payload bytes of all requests of a prefiller; requests beyond it are refused.
    pub max_payloads: u64,
}

impl Default for Terms {
    fn default() -> Self {
        let (beat, silence) = (Duration::from_millis(500), Duration::from_secs(5));
        Self { beat, silence, max_message: 1 << 20, tail_nbytes: 0, max_payloads: 1 << 28 }
    }
}

impl Terms {
    /// Messages that this program holds at a time; further ones wait at their senders.
    pub(crate) const MESSAGES: u32 = 64;

    pub(crate) fn check(&self) -> Result<(), EngineError> {
        if self.beat < Duration::from_millis(1) || self.beat > Duration::from_secs(3600) {
            let what = format!("beats {:?} apart; choose 1 ms to 1 hour", self.beat);
            return Err(EngineError::Invalid(what));
        }
        if self.silence < self.beat * 2 {
            return Err(EngineError::Invalid(format!(
                "silence of {:?} ends a session whose beats are {:?} apart; allow two beats at least",
                self.silence, self.beat
            )));
        }
        if self.max_message < 4096 || self.max_message > 1 << 28 {
            return Err(EngineError::Invalid(format!(
                "messages of at most {} bytes; choose 4096 to 2^28",
                self.max_message
            )));
        }
        if self.max_payloads < self.max_message as u64 {
            return Err(EngineError::Invalid(format!(
                "payloads of at most {} bytes in all, and messages of {}: one request must fit; raise max_payloads, or \
                 lower max_message",
                self.max_payloads, self.max_message
            )));
        }
        Ok(())
    }

    /// The number of unanswered beats after which a peer counts as silent.
    pub(crate) fn silent_beats(&self) -> u32 {
        let beats = self.silence.as_millis().div_ceil(self.beat.as_millis().max(1));
        // Twice as many are counted.
        beats.min(u128::from(u32::MAX / 2)) as u32
    }
}

/// Why a request ended without its pages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    #[error("the request was cancelled")]
    Cancelled,
    /// The other side was lost; another prefiller may be asked.
    #[error("{0}")]
    Lost(String),
    #[error("{0}")]
    TimedOut(String),
    /// The prefiller refused it before it began. `elsewhere`: the request is valid, and another
    /// prefiller may accept it.
    #[error("{why}")]
    Refused { why: String, elsewhere: bool, reason: RefusalReason },
    #[error("the prefiller gave up: {0}")]
    Failed(String),
    #[error("this end is closed")]
    Closed,
}

impl Cause {
    pub(crate) fn of(error: &EngineError) -> Self {
        match error {
            EngineError::Timeout { .. } => Self::TimedOut(error.to_string()),
            EngineError::Closed | EngineError::Draining => Self::Closed,
            EngineError::Invalid(_) | EngineError::OutOfBounds { .. } => Self::Refused {
                why: error.to_string(),
                elsewhere: false,
                reason: RefusalReason::Other,
            },
            _ => Self::Lost(error.to_string()),
        }
    }
}

/// The groups of some ranks, with the pages that all of them have.
pub(crate) fn common_groups<'a>(
    layouts: &'a [CacheLayout],
    ranks: impl Iterator<Item = u32>,
) -> Vec<CacheGroup> {
    let of = |rank: u32| layouts.get(rank as usize).map(|layout: &'a _| &layout.groups);
    let ranks: Vec<&Vec<CacheGroup>> = ranks.filter_map(of).collect();
    let mut groups = ranks.first().copied().cloned().unwrap_or_default();
    for (g, group) in groups.iter_mut().enumerate() {
        let pages = ranks.iter().filter_map(|groups| groups.get(g)).map(|group| group.pages);
        group.pages = pages.min().unwrap_or(group.pages);
    }
    groups
}

/// The parts of an instance that are in one process, checked against its layouts.
pub(crate) fn check_local(
    layouts: &[CacheLayout],
    local: &[LocalRank],
    terms: &Terms,
) -> Result<(), EngineError> {
    terms.check()?;
    let invalid = |what: String| Err(EngineError::Invalid(what));
    if local.is_empty() {
        return invalid("at least one local rank is required".into());
    }
    for (i, layout) in layouts.iter().enumerate() {
        layout.check().or_else(|e| invalid(format!("layout of rank {i}: {e}")))?;
    }
    for (i, rank) in local.iter().enumerate() {
        if i > 0 && rank.rank <= local[i - 1].rank {
            return invalid("ranks of one process are given in rising order, each once".into());
        }
        let Some(layout) = layouts.get(rank.rank as usize) else {
            return invalid(format!("rank {} of {} layouts", rank.rank, layouts.len()));
        };
        let have: Vec<u64> = rank.buffers.iter().map(Region::len).collect();
        if have != layout.buffers {
            return invalid(format!(
                "rank {} has buffers of {have:?} bytes, its layout says {:?}",
                rank.rank, layout.buffers
            ));
        }
    }
    let tail = local[0].tail.as_ref().map_or(0, Region::len);
    if tail < terms.tail_nbytes {
        return invalid(format!(
            "rank {} has {tail} bytes for tails of {} bytes; register one slot at least",
            local[0].rank, terms.tail_nbytes
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_silence_is_many_beats() {
        let terms = |silence, beat| Terms { silence, beat, ..Terms::default() };
        let beat = Duration::from_millis(3);
        assert_eq!(terms(beat * 5 / 2, beat).silent_beats(), 3);
        // 2^32 beats, and all that a duration holds.
        for silence in [beat * (1 << 31) * 2, Duration::MAX] {
            let terms = terms(silence, beat);
            terms.check().unwrap();
            assert_eq!(terms.silent_beats(), u32::MAX / 2);
        }
    }
}
