//! Divides a tensor into disjoint boxes, each with the source leaves that hold it.
//!
//! A *region* is a box of a tensor that a set of source leaves all hold in full. Leaves cut alike
//! form one *class*: their shards are the same boxes, so each shard has the union of their holders.

use crate::error::{PlanError, Result};
use crate::layout::Evaluated;
use crate::placer::Dims;

/// Maximum number of regions of a tensor whose source slices overlap.
const MAX_CELLS: usize = 1 << 20;

/// A half-open box, one interval per dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub lo: Dims<u64>,
    pub hi: Dims<u64>,
}

impl Bounds {
    fn overlaps(&self, other: &Bounds) -> bool {
        (0..self.lo.len()).all(|d| self.lo[d] < other.hi[d] && other.lo[d] < self.hi[d])
    }

    fn contains(&self, other: &Bounds) -> bool {
        (0..self.lo.len()).all(|d| self.lo[d] <= other.lo[d] && other.hi[d] <= self.hi[d])
    }

    pub fn describe(&self) -> String {
        let sides: Vec<String> =
            self.lo.iter().zip(&self.hi).map(|(lo, hi)| format!("{lo}:{hi}")).collect();
        format!("[{}]", sides.join(", "))
    }
}

#[derive(Debug)]
pub(crate) struct Region {
    pub bounds: Bounds,
    /// Source leaves, grouped by how they cut the region.
    pub classes: Vec<Vec<u32>>,
}

/// The regions of one tensor, sorted along the dimension with the most distinct starts.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    pub regions: Vec<Region>,
    along: usize,
    longest: u64,
}

impl Regions {
    /// Indices of the regions that may overlap a box, ascending.
    pub fn near(&self, bounds: &Bounds) -> impl Iterator<Item = usize> + '_ {
        let (mut first, mut last) = (0, self.regions.len());
        if let (Some(&lo), Some(&hi)) = (bounds.lo.get(self.along), bounds.hi.get(self.along)) {
            let from = lo.saturating_sub(self.longest);
            first = self.regions.partition_point(|r| r.bounds.lo[self.along] < from);
            last = self.regions.partition_point(|r| r.bounds.lo[self.along] < hi);
        }
        let bounds = bounds.clone();
        (first..last).filter(move |&r| self.regions[r].bounds.overlaps(&bounds))
    }
}

/// The regions of every source tensor.
pub(crate) fn index(source: &Evaluated<'_>) -> Result<Vec<Regions>> {
    let mut by_tensor: Vec<Vec<u32>> = vec![Vec::new(); source.side.tensors.len()];
    for (leaf, l) in source.leaves.iter().enumerate() {
        by_tensor[l.tensor as usize].push(leaf as u32);
    }
    by_tensor
        .into_iter()
        .enumerate()
        .map(|(tensor, leaves)| {
            of_tensor(source, leaves).ok_or_else(|| {
                PlanError::too_large(
                    format!("source tensor `{}`", source.side.tensors[tensor].name),
                    "the number of boxes its overlapping slices cut",
                    MAX_CELLS.to_string(),
                )
            })
        })
        .collect()
}

fn of_tensor(source: &Evaluated<'_>, leaves: Vec<u32>) -> Option<Regions> {
    let mut boxes: Vec<(Bounds, Vec<u32>)> = Vec::new();
    let mut sorted: Vec<(Bounds, u32)> =
        leaves.into_iter().map(|l| (bounds_of(source, l), l)).collect();
    let Some(ndim) = sorted.first().map(|(b, _)| b.lo.len()) else {
        return Some(Regions::default());
    };
    let along = (0..ndim)
        .rev()
        .max_by_key(|&d| {
            let mut starts: Vec<u64> = sorted.iter().map(|(b, _)| b.lo[d]).collect();
            starts.sort_unstable();
            starts.dedup();
            starts.len()
        })
        .unwrap_or(0);
    sorted.sort_by(|(a, x), (b, y)| {
        (a.lo.get(along), &a.lo, &a.hi, x).cmp(&(b.lo.get(along), &b.lo, &b.hi, y))
    });
    for (bounds, leaf) in sorted {
        match boxes.last_mut() {
            Some((same, leaves)) if *same == bounds => leaves.push(leaf),
            _ => boxes.push((bounds, vec![leaf])),
        }
    }
    if !disjoint(&boxes, along) {
        boxes = cells(&boxes, ndim)?;
        boxes.sort_by(|(a, _), (b, _)| (a.lo.get(along), &a.lo).cmp(&(b.lo.get(along), &b.lo)));
    }
    let longest = boxes
        .iter()
        .filter_map(|(b, _)| Some(b.hi.get(along)? - b.lo.get(along)?))
        .max()
        .unwrap_or(0);
    let regions = boxes
        .into_iter()
        .map(|(bounds, leaves)| Region { bounds, classes: classes(source, leaves) })
        .collect();
    Some(Regions { regions, along, longest })
}

fn bounds_of(source: &Evaluated<'_>, leaf: u32) -> Bounds {
    let leaf = &source.leaves[leaf as usize];
    let hi = leaf.origin.iter().zip(&leaf.size).map(|(o, n)| o + n).collect();
    Bounds { lo: leaf.origin.clone(), hi }
}

/// Boxes are sorted along `along`, so only neighbours whose intervals meet can overlap.
fn disjoint(boxes: &[(Bounds, Vec<u32>)], along: usize) -> bool {
    boxes.iter().enumerate().all(|(i, (a, _))| {
        boxes[i + 1..]
            .iter()
            .take_while(|(b, _)| a.hi.get(along) > b.lo.get(along))
            .all(|(b, _)| !a.overlaps(b))
    })
}

/// Cuts overlapping boxes along each other's faces.
fn cells(boxes: &[(Bounds, Vec<u32>)], ndim: usize) -> Option<Vec<(Bounds, Vec<u32>)>> {
    let faces: Vec<Vec<u64>> = (0..ndim)
        .map(|d| {
            let mut at: Vec<u64> = boxes.iter().flat_map(|(b, _)| [b.lo[d], b.hi[d]]).collect();
            at.sort_unstable();
            at.dedup();
            at
        })
        .collect();
    let count = faces.iter().try_fold(1usize, |n, f| n.checked_mul(f.len() - 1))?;
    if count.checked_mul(boxes.len())? > MAX_CELLS {
        return None;
    }
    let mut cells = Vec::new();
    for mut index in 0..count {
        let mut bounds = Bounds { lo: Dims::new(), hi: Dims::new() };
        for at in &faces {
            let step = index % (at.len() - 1);
            index /= at.len() - 1;
            bounds.lo.push(at[step]);
            bounds.hi.push(at[step + 1]);
        }
        let holders: Vec<u32> = boxes
            .iter()
            .filter(|(b, _)| b.contains(&bounds))
            .flat_map(|(_, leaves)| leaves.iter().copied())
            .collect();
        if !holders.is_empty() {
            cells.push((bounds, holders));
        }
    }
    Some(cells)
}

fn classes(source: &Evaluated<'_>, mut leaves: Vec<u32>) -> Vec<Vec<u32>> {
    leaves.sort_unstable();
    let mut classes: Vec<Vec<u32>> = Vec::new();
    for leaf in leaves {
        let same = |class: &Vec<u32>| {
            let (a, b) = (&source.leaves[class[0] as usize], &source.leaves[leaf as usize]);
            a.cuts == b.cuts && a.origin == b.origin
        };
        match classes.iter_mut().find(|c| same(c)) {
            Some(class) => class.push(leaf),
            None => classes.push(vec![leaf]),
        }
    }
    classes
}
