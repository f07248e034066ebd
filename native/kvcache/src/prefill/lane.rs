//! Passes of the model, one after another, and how far the first of them is.

use std::{collections::VecDeque, sync::Arc};

use super::{job::Job, Inner};

/// Passes that have begun and aren't through all layers.
#[derive(Default)]
pub(super) struct Lane {
    passes: VecDeque<Pass>,
    /// Layers of the first pass that are done.
    layer: usize,
}

/// What one pass computes: requests, and how many of their tokens are there after it.
type Pass = Arc<[(Arc<Job>, u64)]>;

impl Lane {
    pub fn begin(&mut self, requests: Vec<(Arc<Job>, u64)>) {
        self.passes.push_back(requests.into());
    }

    /// One layer is done; which, and of what.
    fn step(&mut self, layers: usize) -> Option<(usize, Pass)> {
        let pass = Arc::clone(self.passes.front()?);
        let layer = self.layer;
        self.layer += 1;
        if self.layer == layers {
            self.layer = 0;
            self.passes.pop_front();
        }
        Some((layer, pass))
    }
}

impl Inner {
    pub(super) fn advance(self: &Arc<Self>, layers: u64) {
        for _ in 0..layers {
            let Some((layer, pass)) = self.lane.lock().step(self.steps.len()) else {
                tracing::error!("a layer is done of a pass that nobody began: nothing is sent");
                return;
            };
            for (job, done) in pass.iter() {
                self.push(job, layer, *done);
            }
        }
    }
}
