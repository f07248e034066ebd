//! Intersections along one dimension, and the boxes their products make.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::cuts::{Cuts, CutsTable};
use crate::placer::Dims;

/// `count` ranges of `len` elements at equal distances, in indices of both local dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StridedRange {
    pub src: u64,
    pub dst: u64,
    pub len: u64,
    pub count: u64,
    pub src_step: u64,
    pub dst_step: u64,
}

/// The part that one source coordinate contributes along the dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub coord: u32,
    /// Elements in all ranges.
    pub len: u64,
    pub ranges: SmallVec<[StridedRange; 1]>,
}

/// The intersection of one target coordinate with all source coordinates, along one dimension.
#[derive(Debug)]
pub(crate) struct DimOverlap {
    pub shares: Vec<Share>,
    /// Elements covered.
    pub len: u64,
}

/// Query of one dimension: the source elements that a target coordinate needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DimQuery {
    pub source: u32,
    pub target: u32,
    pub coord: u32,
    /// Target index minus source index of the same element.
    pub shift: i128,
    /// The part of the source leaf that counts, in its own indices.
    pub clip: (u64, u64),
}

fn overlap(cuts: &CutsTable, q: DimQuery) -> DimOverlap {
    let (source, target): (&Cuts, &Cuts) = (cuts.get(q.source), cuts.get(q.target));
    let mut pieces: Vec<(u32, u64, u64, u64)> = Vec::new();
    for segment in target.of(q.coord) {
        let lo = (i128::from(segment.start) - q.shift).max(i128::from(q.clip.0));
        let hi = (i128::from(segment.start) + i128::from(segment.len) - q.shift)
            .min(i128::from(q.clip.1));
        let (Ok(mut at), Ok(hi)) = (u64::try_from(lo), u64::try_from(hi)) else { continue };
        let first = source.by_start.partition_point(|s| s.start + s.len <= at);
        for s in &source.by_start[first..] {
            if s.start >= hi || at >= hi {
                break;
            }
            at = at.max(s.start);
            let len = hi.min(s.start + s.len) - at;
            let ahead = i128::from(at) + q.shift - i128::from(segment.start);
            let dst = segment.local + ahead as u64;
            pieces.push((s.coord, dst, s.local + (at - s.start), len));
            at += len;
        }
    }
    pieces.sort_unstable();
    let mut shares: Vec<Share> = Vec::new();
    let mut covered = 0;
    for (coord, dst, src, len) in pieces {
        covered += len;
        if shares.last().is_none_or(|s| s.coord != coord) {
            shares.push(Share { coord, len: 0, ranges: SmallVec::new() });
        }
        if let Some(share) = shares.last_mut() {
            share.len += len;
            extend(&mut share.ranges, src, dst, len);
        }
    }
    DimOverlap { shares, len: covered }
}

/// Extends the last range, repeats it once more, or starts a new one.
fn extend(ranges: &mut SmallVec<[StridedRange; 1]>, src: u64, dst: u64, len: u64) {
    if let Some(last) = ranges.last_mut() {
        if last.count == 1 && last.src + last.len == src && last.dst + last.len == dst {
            last.len += len;
            return;
        }
        if last.len == len && src > last.src {
            let step = (src - last.src, dst - last.dst);
            let n = last.count;
            if n == 1 {
                (last.count, last.src_step, last.dst_step) = (2, step.0, step.1);
                return;
            }
            if step == (n * last.src_step, n * last.dst_step) {
                last.count += 1;
                return;
            }
        }
    }
    ranges.push(StridedRange { src, dst, len, count: 1, src_step: 0, dst_step: 0 });
}

/// Memoised query results; a model has few distinct queries.
#[derive(Debug, Default)]
pub(crate) struct Overlaps {
    ids: FxHashMap<DimQuery, u32>,
    known: Vec<DimOverlap>,
}

impl Overlaps {
    pub fn resolve(&mut self, cuts: &CutsTable, query: DimQuery) -> u32 {
        let known = &mut self.known;
        *self.ids.entry(query).or_insert_with_key(|q| {
            known.push(overlap(cuts, *q));
            known.len() as u32 - 1
        })
    }

    pub fn get(&self, id: u32) -> &DimOverlap {
        &self.known[id as usize]
    }
}

/// Visits every combination of one share per dimension, last dimension fastest.
pub(crate) fn products<'a, E>(
    dims: &[&'a DimOverlap],
    mut visit: impl FnMut(&[&'a Share]) -> Result<(), E>,
) -> Result<(), E> {
    if dims.iter().any(|d| d.shares.is_empty()) {
        return Ok(());
    }
    let mut at: Dims<usize> = SmallVec::from_elem(0, dims.len());
    let mut shares: Dims<&Share> = dims.iter().map(|d| &d.shares[0]).collect();
    loop {
        visit(&shares)?;
        let mut d = dims.len();
        loop {
            if d == 0 {
                return Ok(());
            }
            d -= 1;
            at[d] += 1;
            if at[d] < dims[d].shares.len() {
                shares[d] = &dims[d].shares[at[d]];
                break;
            }
            at[d] = 0;
            shares[d] = &dims[d].shares[0];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuts::Cut;

    #[test]
    fn a_strided_source_is_one_stretch_with_a_count() {
        let mut cuts = CutsTable::default();
        let source = cuts.intern(16, vec![Cut::Strided { ways: 2, factor: 4 }]).unwrap();
        let target = cuts.intern(16, vec![]).unwrap();
        let query = DimQuery { source, target, coord: 0, shift: 0, clip: (0, 16) };
        let found = overlap(&cuts, query);
        let range =
            |src, dst| StridedRange { src, dst, len: 2, count: 4, src_step: 2, dst_step: 4 };
        assert_eq!(found.len, 16);
        assert_eq!(found.shares[0].ranges.as_slice(), &[range(0, 0)]);
        assert_eq!(found.shares[1].ranges.as_slice(), &[range(0, 2)]);
    }

    #[test]
    fn shifts_and_clips_keep_to_the_source() {
        let mut cuts = CutsTable::default();
        let source = cuts.intern(8, vec![Cut::Chunk { ways: 2 }]).unwrap();
        let target = cuts.intern(10, vec![]).unwrap();
        // Source element 0 is target element 3; only source elements 1 to 6 count.
        let query = DimQuery { source, target, coord: 0, shift: 3, clip: (1, 6) };
        let found = overlap(&cuts, query);
        assert_eq!(found.len, 5);
        let first = found.shares[0].ranges[0];
        assert_eq!((first.src, first.dst, first.len), (1, 4, 3));
    }
}
