//! The stages of one trainer. Copies, the GPU and the processor each do one step after the other, beside each
//! other; a step begins when there is memory for it.

use crate::push::{Network, Step, Write};

/// Why a step began when it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    Start,
    /// The step before it was copied.
    Copied,
    /// This step was sent.
    Sent(usize),
    /// This trainer was the last to have made a lower group ready.
    Group(usize),
}

/// When each part of a step ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub cause: Cause,
    pub begun: u64,
    pub copied: u64,
    /// When the GPU began with it.
    pub preparing: u64,
    pub prepared: u64,
    /// When the processor began with it.
    pub submitting: u64,
    pub submitted: u64,
    /// When the write was submitted that was the last to end.
    pub last: u64,
    pub sent: u64,
}

pub(crate) struct Pipeline<'p> {
    pub steps: &'p [Step],
    /// Of those that have begun.
    pub times: Vec<Times>,
    /// Writes of each that are not over.
    left: Vec<usize>,
    /// So many steps, and all before them, are sent.
    sent: usize,
    /// The next write: its step, its place there and when it is submitted.
    at: (usize, usize, u64),
}

impl<'p> Pipeline<'p> {
    pub fn new(steps: &'p [Step]) -> Self {
        let left = steps.iter().map(|s| s.writes.len()).collect();
        Self { steps, times: Vec::new(), left, sent: 0, at: (0, 0, 0) }
    }

    /// Begins the next step, if it may begin.
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

    /// When the next write of a step that has begun is submitted.
    pub fn next(&mut self, network: &Network) -> Option<u64> {
        while self.steps.get(self.at.0).is_some_and(|s| s.writes.len() <= self.at.1) {
            self.at = (self.at.0 + 1, 0, 0);
        }
        let (step, place, before) = self.at;
        let times = self.times.get(step)?;
        let before = if place == 0 { times.submitting } else { before };
        Some(before + network.posts())
    }

    /// Takes the write that is submitted at this time: with its step and place.
    pub fn take(&mut self, at: u64, network: &Network) -> (usize, usize, Write) {
        let (step, place, _) = self.at;
        let write = self.steps[step].writes[place];
        // What it posts first is on its way while it posts the rest.
        self.at = (step, place + 1, at - network.posts() + network.submits(&write));
        (step, place, write)
    }

    /// A write is over. Whether steps can begin now that couldn't before.
    pub fn over(&mut self, now: u64, step: usize, place: usize, network: &Network) -> bool {
        self.left[step] -= 1;
        if self.left[step] > 0 {
            return false;
        }
        let before = &self.steps[step].writes[..place];
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
