//! Passes of the model, in order, and the progress of the first.
//!
//! Layers are counted by a word that only grows, over all passes. A pass has the counts after the
//! word's value at its begin, one per layer. So a count for a pass that was not begun, or a late
//! count, is never taken for another pass's (IC-2).

use std::{collections::VecDeque, sync::Arc};

use fabric_engine::{EngineError, Result, Time};

use super::{job::Job, Inner};
use crate::{
    terms::Cause,
    wire::{reason, RequestState},
};

/// Passes with counts that were not seen yet.
#[derive(Default)]
pub(super) struct PassQueue {
    passes: VecDeque<Pass>,
    /// The last count whose layer was sent.
    seen: u64,
    /// The last count that was announced.
    announced: u64,
    /// When the last count of a sent layer was made.
    made: Time,
}

struct Pass {
    /// The layers of the pass have the counts `after + 1` to `end`.
    after: u64,
    end: u64,
    requests: Requests,
}

/// The work of one pass: requests, and how many of their tokens are computed after it.
type Requests = Arc<[(Arc<Job>, u64)]>;

impl PassQueue {
    /// Begins a pass of `layers` layers when the word has the value `after`. An unfinished earlier
    /// pass ends there; its requests are returned, because the rest of their layers will not be
    /// counted (RS-1).
    fn begin(
        &mut self,
        after: u64,
        layers: u64,
        requests: Vec<(Arc<Job>, u64)>,
    ) -> Result<Option<Requests>> {
        let last = self.passes.back_mut();
        let least = last.as_ref().map_or(self.seen, |last| last.after.max(self.seen));
        let end = after.checked_add(layers).filter(|_| after >= least);
        let end = end.ok_or_else(|| {
            EngineError::Invalid(format!(
                "a pass begins when {after} layers are counted, and {least} are by now: counts only grow"
            ))
        })?;
        let cut = last.filter(|last| last.end > after).map(|last| {
            last.end = after;
            Arc::clone(&last.requests)
        });
        self.passes.push_back(Pass { after, end, requests: requests.into() });
        Ok(cut)
    }

    /// The next layer among the counts up to `to`, and its requests; `None` if none is left.
    fn step(&mut self, to: u64) -> Option<(usize, Requests)> {
        while self.seen < to {
            let Some(pass) = self.passes.front() else {
                self.skip_uncounted(to);
                continue;
            };
            if pass.end <= self.seen {
                self.passes.pop_front();
            } else if pass.after > self.seen {
                let next = pass.after.min(to);
                self.skip_uncounted(next);
            } else {
                let found = ((self.seen - pass.after) as usize, Arc::clone(&pass.requests));
                self.seen += 1;
                return Some(found);
            }
        }
        self.passes.retain(|pass| pass.end > self.seen);
        None
    }

    fn skip_uncounted(&mut self, to: u64) {
        let (from, count) = (self.seen, to - self.seen);
        tracing::error!(
            from,
            count,
            "layers of a pass that was not begun are counted: nothing is sent"
        );
        self.seen = to;
    }
}

impl Inner {
    pub(super) fn counted(&self) -> u64 {
        self.pass_queue.lock().announced
    }

    /// Records that the watched word is about to have this value.
    pub(super) fn mark(&self, count: u64) {
        self.counts.made(count, self.control().now());
    }

    /// Counts `layers` more layers.
    pub(super) fn advance(self: &Arc<Self>, layers: u64) {
        let count = {
            let mut pass_queue = self.pass_queue.lock();
            pass_queue.announced = pass_queue.announced.saturating_add(layers);
            pass_queue.announced
        };
        self.advance_to(count);
    }

    pub(super) fn begin(
        self: &Arc<Self>,
        after: u64,
        requests: Vec<(Arc<Job>, u64)>,
    ) -> Result<()> {
        let cut = self.pass_queue.lock().begin(after, self.steps.len() as u64, requests)?;
        for (job, _) in cut.iter().flat_map(|requests| requests.iter()) {
            let why = "a pass that computes it was given up in the middle: another began";
            self.stop(job, RequestState::Failed(reason(why)), Some(Cause::Failed(why.into())));
        }
        Ok(())
    }

    /// Sends the layers up to this value of the word.
    pub(super) fn advance_to(self: &Arc<Self>, count: u64) {
        loop {
            let next = {
                let mut pass_queue = self.pass_queue.lock();
                pass_queue.announced = pass_queue.announced.max(count);
                let Some(next) = pass_queue.step(count) else { return };
                pass_queue.made =
                    self.counts.take(pass_queue.seen, pass_queue.made, self.control().now());
                (next, pass_queue.made)
            };
            let ((layer, requests), made) = next;
            for (job, done) in requests.iter() {
                self.push(job, layer, *done, made);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layers that counts up to `to` are found to be of.
    fn layers(pass_queue: &mut PassQueue, to: u64) -> Vec<usize> {
        std::iter::from_fn(|| pass_queue.step(to).map(|(layer, _)| layer)).collect()
    }

    #[test]
    fn counts_of_a_pass_that_was_not_begun_are_no_other_passes() {
        let mut pass_queue = PassQueue::default();
        // Three layers were counted without a begin, and are seen after the next pass has begun.
        assert!(pass_queue.begin(3, 3, Vec::new()).unwrap().is_none());
        assert_eq!(layers(&mut pass_queue, 4), [0]);
        assert_eq!(layers(&mut pass_queue, 6), [1, 2]);
        assert!(pass_queue.passes.is_empty());
        // The same, seen before; and a word that was set to anything.
        assert_eq!(layers(&mut pass_queue, 9), []);
        assert_eq!(layers(&mut pass_queue, u64::MAX - 10), []);
        assert!(pass_queue.begin(u64::MAX - 2, 3, Vec::new()).is_err());
        assert!(pass_queue.begin(u64::MAX - 10, 3, Vec::new()).unwrap().is_none());
        assert_eq!(layers(&mut pass_queue, u64::MAX - 9), [0]);
    }

    #[test]
    fn a_pass_that_another_follows_in_the_middle_has_no_further_layers() {
        let mut pass_queue = PassQueue::default();
        pass_queue.begin(0, 3, Vec::new()).unwrap();
        assert!(pass_queue.begin(2, 3, Vec::new()).unwrap().is_some());
        assert_eq!(layers(&mut pass_queue, 5), [0, 1, 0, 1, 2]);
        // Announced ahead, it takes nothing from the one before.
        pass_queue.begin(5, 3, Vec::new()).unwrap();
        assert!(pass_queue.begin(8, 3, Vec::new()).unwrap().is_none());
        assert!(pass_queue.begin(7, 3, Vec::new()).is_err(), "counts only grow");
        assert_eq!(layers(&mut pass_queue, 11), [0, 1, 2, 0, 1, 2]);
    }
}
