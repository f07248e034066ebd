//! Regions' indices: places in the tables of all domains, so few, and used again.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;

use super::HIDDEN;

/// So many indices rest before the first of them is used again: what is still said of an earlier region under way inside
/// this process is over by then. Peers are told apart from it by the key, which is drawn anew for each region (MR-2).
const REST: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct RegionIndices {
    state: Mutex<IndexPool>,
}

#[derive(Debug, Default)]
struct IndexPool {
    /// All from here on have never been used.
    fresh: u32,
    resting: VecDeque<u32>,
}

impl RegionIndices {
    /// An index that no region has; `None` when all are taken: those from [`HIDDEN`] on are transports' own.
    pub fn take(self: &Arc<Self>) -> Option<RegionIndex> {
        let mut state = self.state.lock();
        let rested = (state.resting.len() > REST || state.fresh >= HIDDEN)
            .then(|| state.resting.pop_front())
            .flatten();
        let index = match rested {
            Some(index) => index,
            None if state.fresh >= HIDDEN => return None,
            None => {
                state.fresh += 1;
                state.fresh - 1
            }
        };
        Some(RegionIndex { index, of: Arc::clone(self) })
    }

    /// As if all before had been taken.
    #[cfg(test)]
    pub fn begin_at(&self, fresh: u32) {
        self.state.lock().fresh = fresh;
    }
}

/// The index of one region, which rests when this is dropped.
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
        for _ in 0..10 * REST {
            let index = indices.take().unwrap().get();
            assert!(index != last && index != lasting.get());
            last = index;
        }
        assert_eq!(indices.state.lock().fresh as usize, REST + 2);
    }

    #[test]
    fn the_last_index_is_given_to_one_at_a_time() {
        let indices = Arc::new(RegionIndices::default());
        indices.begin_at(HIDDEN - 1);
        let last = indices.take().unwrap();
        assert!(indices.take().is_none());
        drop(last);
        assert_eq!(indices.take().unwrap().get(), HIDDEN - 1);
    }
}
