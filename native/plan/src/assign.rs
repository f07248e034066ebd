//! Chooses the sending rank of every box, or of its parts, where several ranks hold the box.
//!
//! Boxes with one holder are counted first; the rest follow from the most constrained to the
//! freest, large before small, each to its least loaded holders. The order depends on nothing but
//! the two sides, so every host decides alike.

use std::cmp::Reverse;

use rustc_hash::FxHashSet;

use crate::balance::{choose, grain, parts, share_out, Candidate};
use crate::error::{PlanError, Result};
use crate::layout::HeldLeaf;
use crate::matching::{LeafRegion, Matcher};
use crate::overlap::Share;
use crate::replicas::Section;

const SPLIT: u32 = 1 << 31;

/// One decision's place in the list of choices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decision {
    target: u32,
    leaf: u32,
    region: u32,
    pub class: u32,
    first: u64,
}

/// One holder's part of a box that was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Index among the box's holders.
    pub holder: u32,
    pub dim: u32,
    /// Elements along `dim`, from the start of the box.
    pub lo: u64,
    pub hi: u64,
}

/// The ranks that send a box.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Senders<'a> {
    One(u32),
    Parts(&'a [Part]),
}

#[derive(Debug, Default)]
pub(crate) struct Assignment {
    /// Sorted by target, leaf and region.
    decisions: Vec<Decision>,
    choices: Vec<u32>,
    splits: Vec<(u32, u32)>,
    parts: Vec<Part>,
    /// Section, and first rank of a group of it, in which a sender was chosen: its replicas may
    /// differ.
    chosen: FxHashSet<(u32, u32)>,
    /// Bytes each source rank (dense) sends.
    pub loads: Vec<u64>,
}

impl Assignment {
    pub fn decision(&self, target: u32, leaf_region: LeafRegion) -> Option<Decision> {
        let key = (target, leaf_region.to.leaf, leaf_region.region);
        let found =
            self.decisions.binary_search_by_key(&key, |d| (d.target, d.leaf, d.region)).ok()?;
        Some(self.decisions[found])
    }

    pub fn senders(&self, decision: Decision, nth_box: u64) -> Senders<'_> {
        let choice = self.choices[(decision.first + nth_box) as usize];
        if choice & SPLIT == 0 {
            return Senders::One(choice);
        }
        let (first, count) = self.splits[(choice & !SPLIT) as usize];
        Senders::Parts(&self.parts[first as usize..(first + count) as usize])
    }

    /// No box of this group of a section had a choice.
    pub fn is_fixed(&self, section: usize, group: &[u32]) -> bool {
        !self.chosen.contains(&(section as u32, group[0]))
    }
}

/// Pairs of ranks that exchange data already; not tracked above [`LinkedPairs::MAX_PAIRS`].
struct LinkedPairs {
    bits: Vec<u64>,
    targets: usize,
}

impl LinkedPairs {
    const MAX_PAIRS: usize = 1 << 31;

    fn new(sources: usize, targets: usize) -> Self {
        let pairs = sources.saturating_mul(targets);
        let words = if pairs > Self::MAX_PAIRS { 0 } else { pairs.div_ceil(64) };
        LinkedPairs { bits: vec![0; words], targets }
    }

    fn slot(&self, source: u32, target: u32) -> (usize, u64) {
        let pair = source as usize * self.targets + target as usize;
        (pair / 64, 1 << (pair % 64))
    }

    fn get(&self, source: u32, target: u32) -> bool {
        let (word, bit) = self.slot(source, target);
        self.bits.get(word).is_some_and(|w| w & bit != 0)
    }

    fn set(&mut self, source: u32, target: u32) {
        let (word, bit) = self.slot(source, target);
        if let Some(w) = self.bits.get_mut(word) {
            *w |= bit;
        }
    }
}

/// A leaf and region for which the sender has to be chosen.
struct PendingDecision {
    target: u32,
    leaf_region: LeafRegion,
    holders: u32,
    bytes: u64,
}

struct Assigner<'m, 's> {
    matcher: &'m mut Matcher<'s>,
    done: Assignment,
    linked_pairs: LinkedPairs,
    holders: Vec<HeldLeaf>,
    grain: u64,
}

pub(crate) fn assign(
    matcher: &mut Matcher<'_>,
    sections: &[Section],
    min_split_bytes: u64,
) -> Result<Assignment> {
    let (sources, targets) = (matcher.source.held.len(), matcher.target.held.len());
    let mut assigner = Assigner {
        matcher,
        done: Assignment { loads: vec![0; sources], ..Assignment::default() },
        linked_pairs: LinkedPairs::new(sources, targets),
        holders: Vec::new(),
        grain: 1,
    };
    let mut items = assigner.count_fixed(sections)?;
    let flexible: u64 = items.iter().map(|i| i.bytes).sum();
    let total = flexible + assigner.done.loads.iter().sum::<u64>();
    assigner.grain = grain(total, sources, min_split_bytes);
    items.sort_by_key(|i| {
        (i.holders, Reverse(i.bytes), i.leaf_region.to.leaf, i.leaf_region.region, i.target)
    });
    for item in &items {
        assigner.decide(item)?;
    }
    let mut done = assigner.done;
    done.decisions.sort_unstable_by_key(|d| (d.target, d.leaf, d.region));
    Ok(done)
}

impl Assigner<'_, '_> {
    /// Adds the loads of boxes with one holder; returns the others.
    fn count_fixed(&mut self, sections: &[Section]) -> Result<Vec<PendingDecision>> {
        let mut items = Vec::new();
        let mut total = 0u64;
        for (s, section) in sections.iter().enumerate() {
            for group in &section.groups {
                let before = items.len();
                for &container in &section.containers {
                    let count = self.matcher.target.held_in(group[0], container).len();
                    for nth in 0..count {
                        self.count(group, (container, nth), &mut total, &mut items)?;
                    }
                }
                if items.len() > before {
                    self.done.chosen.insert((s as u32, group[0]));
                }
            }
        }
        Ok(items)
    }

    /// Counts what all ranks of a group hold as the `nth` leaf of a container.
    fn count(
        &mut self,
        group: &[u32],
        (container, nth): (u32, usize),
        total: &mut u64,
        items: &mut Vec<PendingDecision>,
    ) -> Result<()> {
        let to = self.matcher.target.held_in(group[0], container)[nth];
        // Every load is part of this sum, so once it fits none can overflow.
        *total = self
            .matcher
            .elements(to)
            .checked_mul(self.matcher.target.itemsize(to.leaf) * group.len() as u64)
            .and_then(|bytes| bytes.checked_add(*total))
            .ok_or_else(|| {
                PlanError::too_large("target side", "its bytes over all ranks", "2^64")
            })?;
        for leaf_region in self.matcher.leaf_regions(to)? {
            if self.matcher.is_fixed(leaf_region) {
                self.add_fixed(leaf_region, group)?;
                continue;
            }
            let (bytes, holders) = self.measure(leaf_region);
            for &target in group {
                let to = self.matcher.target.held_in(target, container)[nth];
                items.push(PendingDecision {
                    target,
                    leaf_region: LeafRegion { to, ..leaf_region },
                    holders,
                    bytes,
                });
            }
        }
        Ok(())
    }

    fn add_fixed(&mut self, leaf_region: LeafRegion, group: &[u32]) -> Result<()> {
        let overlap = self.matcher.overlap(leaf_region, 0);
        let (matcher, holders) = (&*self.matcher, &mut self.holders);
        let (loads, linked_pairs) = (&mut self.done.loads, &mut self.linked_pairs);
        let itemsize = matcher.target.itemsize(leaf_region.to.leaf);
        let class = &matcher.classes(leaf_region)[0];
        matcher.boxes(&overlap, |shares| {
            matcher.holders(class, shares, holders);
            let Some(&holder) = holders.first() else {
                return Err(matcher.no_holder(leaf_region, 0, shares));
            };
            let rank = matcher.source.rank_of(holder);
            loads[rank as usize] += volume(shares) * itemsize * group.len() as u64;
            for &target in group {
                linked_pairs.set(rank, target);
            }
            Ok(())
        })
    }

    /// Bytes of the overlap, and how many ranks hold a box of it.
    fn measure(&mut self, leaf_region: LeafRegion) -> (u64, u32) {
        let overlap = self.matcher.overlap(leaf_region, 0);
        let bytes =
            self.matcher.volume(&overlap) * self.matcher.target.itemsize(leaf_region.to.leaf);
        let source = &self.matcher.source;
        let replicas = |leaf: &u32| {
            source.mesh_maps[source.leaves[*leaf as usize].mesh_map as usize].replicas.len() as u32
        };
        let holders = self.matcher.classes(leaf_region).iter().flatten().map(replicas).sum();
        (bytes, holders)
    }

    fn decide(&mut self, item: &PendingDecision) -> Result<()> {
        let class = self.choose_class(item)?;
        let overlap = self.matcher.overlap(item.leaf_region, class);
        self.done.decisions.push(Decision {
            target: item.target,
            leaf: item.leaf_region.to.leaf,
            region: item.leaf_region.region,
            class: class as u32,
            first: self.done.choices.len() as u64,
        });
        let matcher = &*self.matcher;
        let holders = &mut self.holders;
        let (done, linked_pairs, grain) = (&mut self.done, &mut self.linked_pairs, self.grain);
        let itemsize = matcher.target.itemsize(item.leaf_region.to.leaf);
        let mut candidates: Vec<Candidate> = Vec::new();
        matcher.boxes(&overlap, |shares| {
            matcher.holders(&matcher.classes(item.leaf_region)[class], shares, holders);
            if holders.is_empty() {
                return Err(matcher.no_holder(item.leaf_region, class, shares));
            }
            candidates.clear();
            candidates.extend(holders.iter().map(|&h| {
                let rank = matcher.source.rank_of(h);
                Candidate {
                    load: done.loads[rank as usize],
                    linked_pairs: linked_pairs.get(rank, item.target),
                }
            }));
            let bytes = volume(shares) * itemsize;
            let mut send = |holder: usize, bytes: u64| {
                let rank = matcher.source.rank_of(holders[holder]);
                done.loads[rank as usize] += bytes;
                linked_pairs.set(rank, item.target);
            };
            let turn = item.target as usize;
            let split = if candidates.len() > 1 { cut(shares, bytes, grain) } else { None };
            let Some((dim, rows, count)) = split else {
                let chosen = choose(&candidates, grain, turn);
                send(chosen, bytes);
                done.choices.push(chosen as u32);
                return Ok(());
            };
            let first = done.parts.len() as u32;
            let mut given = 0;
            for (holder, share) in share_out(&mut candidates, bytes, count, grain, turn) {
                let row =
                    |part: u64| (u128::from(rows) * u128::from(part) / u128::from(count)) as u64;
                let (lo, hi) = (row(given), row(given + share));
                given += share;
                send(holder, bytes / rows * (hi - lo));
                done.parts.push(Part { holder: holder as u32, dim: dim as u32, lo, hi });
            }
            done.choices.push(SPLIT | done.splits.len() as u32);
            done.splits.push((first, done.parts.len() as u32 - first));
            Ok(())
        })
    }

    /// Of the ways in which the source cuts a region, the one with the lowest maximum sender load.
    fn choose_class(&mut self, item: &PendingDecision) -> Result<usize> {
        let classes = self.matcher.classes(item.leaf_region).len();
        let mut best = (u64::MAX, 0);
        for class in 0..classes {
            if classes == 1 {
                break;
            }
            let overlap = self.matcher.overlap(item.leaf_region, class);
            let (matcher, holders) = (&*self.matcher, &mut self.holders);
            let itemsize = matcher.target.itemsize(item.leaf_region.to.leaf);
            let mut worst = 0;
            matcher.boxes(&overlap, |shares| {
                matcher.holders(&matcher.classes(item.leaf_region)[class], shares, holders);
                let load = |h: &HeldLeaf| self.done.loads[matcher.source.rank_of(*h) as usize];
                let least = holders.iter().map(load).min();
                let bytes = volume(shares) * itemsize;
                worst = worst.max(least.map_or(u64::MAX, |l| l.saturating_add(bytes)));
                Ok(())
            })?;
            if worst < best.0 {
                best = (worst, class);
            }
        }
        Ok(best.1)
    }
}

fn volume(shares: &[&Share]) -> u64 {
    shares.iter().map(|s| s.len).product()
}

/// The dimension to cut a box along, its length and the number of parts, if cutting pays.
///
/// The outermost dimension long enough keeps the runs of the parts longest.
fn cut(shares: &[&Share], bytes: u64, grain: u64) -> Option<(usize, u64, u64)> {
    let dense: Vec<(usize, u64)> = shares
        .iter()
        .enumerate()
        .filter(|(_, s)| matches!(s.ranges.as_slice(), [one] if one.count == 1))
        .map(|(d, s)| (d, s.len))
        .collect();
    let wanted = parts(bytes, grain, u64::MAX);
    let longest = dense.iter().copied().max_by_key(|&(d, len)| (len, Reverse(d)))?;
    let (dim, rows) = dense.into_iter().find(|d| d.1 >= wanted).unwrap_or(longest);
    let count = parts(bytes, grain, rows);
    (count > 1).then_some((dim, rows, count))
}
