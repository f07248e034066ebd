//! Counts of work to one peer.

use crate::api::Priority;

/// Work requests of one class over one rail to one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub slices: u64,
    pub bytes: u64,
    /// Of those, the ones that were sent before.
    pub again: u64,
    pub failed: u64,
}

/// Counts of one rail to one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RailTally {
    pub classes: [Tally; 3],
    /// Number of times a link over this rail was lost or given up.
    pub excluded: u64,
}

/// Counts of one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerTally {
    /// By rail of the engine; rails that it never used may be missing at the end.
    pub rails: Vec<RailTally>,
    /// Operations of each class that found no room in the windows of rails or of the peer.
    pub waits: [u64; 3],
}

impl PeerTally {
    #[inline]
    fn rail(&mut self, rail: usize) -> &mut RailTally {
        if self.rails.len() <= rail {
            self.rails.resize(rail + 1, RailTally::default());
        }
        &mut self.rails[rail]
    }

    #[inline]
    pub(crate) fn posted(
        &mut self,
        rail: usize,
        class: Priority,
        (slices, bytes): (u32, u64),
        again: bool,
    ) {
        let tally = &mut self.rail(rail).classes[class as usize];
        tally.slices += u64::from(slices);
        tally.bytes += bytes;
        tally.again += if again { u64::from(slices) } else { 0 };
    }

    pub(crate) fn failed(&mut self, rail: usize, class: Priority) {
        self.rail(rail).classes[class as usize].failed += 1;
    }

    pub(crate) fn excluded(&mut self, rail: usize) {
        self.rail(rail).excluded += 1;
    }

    pub(crate) fn waited(&mut self, class: Priority) {
        self.waits[class as usize] += 1;
    }
}
