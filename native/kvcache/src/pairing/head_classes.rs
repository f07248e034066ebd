//! Chooses the source rank where several hold the same heads.

use std::collections::BTreeMap;
use std::ops::Range;

use super::compare::held_heads;
use crate::layout::CacheGroup;

/// Heads that the same source ranks hold. A target rank takes all of them from one of these ranks.
#[derive(Debug)]
pub(super) struct HeadClass {
    /// Ranks that hold these heads, ascending.
    sources: Box<[u32]>,
    /// Ranks that need some of them, ascending.
    targets: Box<[u32]>,
    /// For each tensor the heads, as ranges in order.
    pub heads: Vec<(usize, Range<u32>)>,
}

impl HeadClass {
    /// The rank that sends these heads to a target rank; `None` if the target needs none of them.
    ///
    /// Neighbours among those that need them take neighbours among those that hold them, so no
    /// source rank serves two more targets than another. The salt turns the ring.
    pub fn source(&self, target: u32, salt: u64) -> Option<u32> {
        let place = self.targets.binary_search(&target).ok()? as u64;
        let holders = self.sources.len() as u64;
        let turned = (place % holders + mix_salt(salt) % holders) % holders;
        Some(self.sources[turned as usize])
    }
}

/// Groups the heads by their holders. Tensors are in the same order on all ranks.
pub(super) fn classes(source: &[CacheGroup], target: &[CacheGroup]) -> Vec<HeadClass> {
    let mut by_holders: BTreeMap<Vec<u32>, Vec<(usize, Range<u32>)>> = BTreeMap::new();
    for tensor in 0..source[0].tensors.len() {
        let held: Vec<Range<u32>> = source.iter().map(|r| held_heads(&r.tensors[tensor])).collect();
        let mut cuts: Vec<u32> = held.iter().flat_map(|h| [h.start, h.end]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        for cut in cuts.windows(2) {
            let holders: Vec<u32> =
                (0..).zip(&held).filter(|(_, h)| h.contains(&cut[0])).map(|(r, _)| r).collect();
            by_holders.entry(holders).or_default().push((tensor, cut[0]..cut[1]));
        }
    }
    let class = |(sources, heads): (Vec<u32>, Vec<(usize, Range<u32>)>)| {
        let needs = |rank: &CacheGroup| {
            heads.iter().any(|(t, h)| !common(&held_heads(&rank.tensors[*t]), h).is_empty())
        };
        let targets = (0..).zip(target).filter(|(_, rank)| needs(rank)).map(|(r, _)| r).collect();
        HeadClass { sources: sources.into(), targets, heads }
    };
    by_holders.into_iter().map(class).collect()
}

pub(super) fn common(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// The finaliser of SplitMix64: salts that are counted up or that share low bits still turn evenly.
fn mix_salt(salt: u64) -> u64 {
    let z = (salt ^ (salt >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
