//! Allocates indices of regions. Indices are positions in tables of all domains, so they are
//! reused.

use std::{collections::VecDeque, sync::Arc};

use super::FIRST_INTERNAL_INDEX;
use crate::locks::Mutex;

/// Freed indices that are kept before the oldest is reused. Work inside this process that names the
/// earlier region is over by then. A peer's old key is stale, because each region has a new random
/// key (MR-2).
const MIN_REUSE_QUEUE: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct RegionIndices {
    state: Mutex<IndexPool>,
}

#[derive(Debug, Default)]
struct IndexPool {
    /// The first index that was never used.
    fresh: u32,
    resting: VecDeque<u32>,
}

impl RegionIndices {
    /// Allocates an index below [`FIRST_INTERNAL_INDEX`]; `None` if all are in use.
    pub fn take(self: &Arc<Self>) -> Option<RegionIndex> {
        let mut state = self.state.lock();
        let rested = (state.resting.len() > MIN_REUSE_QUEUE || state.fresh >= FIRST_INTERNAL_INDEX)
            .then(|| state.resting.pop_front())
            .flatten();
        let index = match rested {
            Some(index) => index,
            None if state.fresh >= FIRST_INTERNAL_INDEX => return None,
            None => {
                state.fresh += 1;
                state.fresh - 1
            }
        };
        Some(RegionIndex { index, of: Arc::clone(self) })
    }

    /// Marks all indices below as used.
    #[cfg(test)]
    pub fn begin_at(&self, fresh: u32) {
        self.state.lock().fresh = fresh;
    }
}

/// The index of one region. Dropping it frees the index.
#[derive(Debug)]
pub(crate) struct RegionIndex {
    index: u32,
    of: Arc<RegionIndices>,
}

impl RegionIndex {
    pub fn get(&self) -> u32 {
        self.index
    }
}

impl Drop for RegionIndex {
    fn drop(&mut self) {
        self.of.state.lock().resting.push_back(self.index);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn indices_rest_and_are_used_again() {
        let indices = Arc::new(RegionIndices::default());
        let lasting = indices.take().unwrap();
        let mut last = lasting.get();
        for _ in 0..10 * MIN_REUSE_QUEUE {
            let index = indices.take().unwrap().get();
            assert!(index != last && index != lasting.get());
            last = index;
        }
        assert_eq!(indices.state.lock().fresh as usize, MIN_REUSE_QUEUE + 2);
    }

    #[test]
    fn the_last_index_is_given_to_one_at_a_time() {
        let indices = Arc::new(RegionIndices::default());
        indices.begin_at(FIRST_INTERNAL_INDEX - 1);
        let last = indices.take().unwrap();
        assert!(indices.take().is_none());
        drop(last);
        assert_eq!(indices.take().unwrap().get(), FIRST_INTERNAL_INDEX - 1);
    }
}
