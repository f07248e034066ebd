//! The stages of one trainer. Copies, the GPU and the processor work in parallel, each on one step
//! at a time. A step begins when there is memory for it.

use crate::push::{Network, Step, Write};

/// The event that let a step begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    Start,
    /// The previous step was copied.
    Copied,
    /// This step was sent.
    Sent(usize),
    /// This trainer was the last to make a lower group ready.
    Group(usize),
}

/// The end of each part of a step, in ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub cause: Cause,
    pub begun: u64,
    pub copied: u64,
    /// The GPU began with the step.
    pub preparing: u64,
    pub prepared: u64,
    /// The processor began to submit the step.
    pub submitting: u64,
    pub submitted: u64,
    /// Submission of the write that ended last.
    pub last: u64,
    pub sent: u64,
}

pub(crate) struct Pipeline<'p> {
    pub steps: &'p [Step],
    /// Times of the steps that have begun.
    pub times: Vec<Times>,
    /// Writes of each step that have not ended.
    left: Vec<usize>,
    /// Number of leading steps that are sent.
    sent: usize,
    /// The next write: its step, its index in the step, and the end of the submission before it.
    at: (usize, usize, u64),
}

impl<'p> Pipeline<'p> {
    pub fn new(steps: &'p [Step]) -> Self {
        let left = steps.iter().map(|s| s.writes.len()).collect();
        Self { steps, times: Vec::new(), left, sent: 0, at: (0, 0, 0) }
    }

    /// Begins the next step, if its memory and its group allow it.
    pub fn begin(&mut self, now: u64, open: u32, cause: Cause, network: &Network) -> Option<Times> {
        let number = self.times.len();
        let step = self.steps.get(number)?;
        if step.after > self.sent || step.group > open {
            return None;
        }
        let free = |of: fn(&Times) -> u64| self.times.last().map_or(0, of);
        let begun = now.max(free(|t| t.copied));
        let copied = begun + step.ready[0];
        let preparing = copied.max(free(|t| t.prepared));
        let prepared = preparing + step.ready[1..].iter().sum::<u64>();
        let submitting = prepared.max(free(|t| t.submitted));
        let submitted = submitting + step.writes.iter().map(|w| network.submits(w)).sum::<u64>();
        let cause = if begun > now { Cause::Copied } else { cause };
        let (last, sent) = (submitted, submitted);
        self.times.push(Times {
            cause,
            begun,
            copied,
            preparing,
            prepared,
            submitting,
            submitted,
            last,
            sent,
        });
        self.times.last().copied()
    }

    /// Time at which the next write of a begun step is submitted.
    pub fn next(&mut self, network: &Network) -> Option<u64> {
        while self.steps.get(self.at.0).is_some_and(|s| s.writes.len() <= self.at.1) {
            self.at = (self.at.0 + 1, 0, 0);
        }
        let (step, index, before) = self.at;
        let times = self.times.get(step)?;
        let before = if index == 0 { times.submitting } else { before };
        Some(before + network.posts())
    }

    /// Takes the write that is submitted at `at`, with its step and index.
    pub fn take(&mut self, at: u64, network: &Network) -> (usize, usize, Write) {
        let (step, index, _) = self.at;
        let write = self.steps[step].writes[index];
        // Requests posted first are on the wire while the rest are posted.
        self.at = (step, index + 1, at - network.posts() + network.submits(&write));
        (step, index, write)
    }

    /// Records the end of a write. Returns whether further steps may begin.
    pub fn on_write_done(
        &mut self,
        now: u64,
        step: usize,
        index: usize,
        network: &Network,
    ) -> bool {
        self.left[step] -= 1;
        if self.left[step] > 0 {
            return false;
        }
        let before = &self.steps[step].writes[..index];
        let times = &mut self.times[step];
        let before = before.iter().map(|w| network.submits(w)).sum::<u64>();
        times.last = times.submitting + before + network.posts();
        times.sent = now;
        let before = self.sent;
        while self.left.get(self.sent) == Some(&0) && self.sent < self.times.len() {
            self.sent += 1;
        }
        self.sent > before
    }
}
