//! Operations of one peer that wait for room, by priority.

use std::collections::VecDeque;

use super::{slices::BoundOp, TransferKey};
use crate::{api::Priority, time::Time};

pub(super) struct Waiting {
    pub key: TransferKey,
    pub op: BoundOp,
    /// Since when it is the first of its priority; `NEVER` until it is.
    pub since: Time,
}

#[derive(Default)]
pub(super) struct Backlog([VecDeque<Waiting>; 3]);

impl Backlog {
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(VecDeque::is_empty)
    }

    /// Whether anything waits with this priority.
    pub fn waits(&self, priority: Priority) -> bool {
        !self.0[priority as usize].is_empty()
    }

    pub fn len(&self) -> usize {
        self.0.iter().map(VecDeque::len).sum()
    }

    /// Whether work of this priority has to queue up: behind its own kind, or behind what is more urgent.
    #[inline]
    pub fn holds_up(&self, priority: Priority) -> bool {
        self.0[..=priority as usize].iter().any(|q| !q.is_empty())
    }

    pub fn push_back(&mut self, priority: Priority, waiting: Waiting) {
        self.0[priority as usize].push_back(waiting);
    }

    pub fn push_front(&mut self, priority: Priority, waiting: Waiting) {
        self.0[priority as usize].push_front(waiting);
    }

    pub fn pop(&mut self, priority: Priority) -> Option<Waiting> {
        self.0[priority as usize].pop_front()
    }

    /// Takes out what belongs to a transfer; how many operations that was.
    pub fn remove(&mut self, key: TransferKey) -> usize {
        let before = self.len();
        self.0.iter_mut().for_each(|q| q.retain(|w| w.key != key));
        before - self.len()
    }

    /// Takes out everything.
    pub fn take(&mut self) -> impl Iterator<Item = TransferKey> {
        std::mem::take(&mut self.0).into_iter().flatten().map(|w| w.key)
    }
}
