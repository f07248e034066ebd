//! Turns boxes and their senders into strided copies.

use smallvec::SmallVec;

use crate::assign::{Assignment, Part, Senders};
use crate::coalesce::{coalesce, RawCopy};
use crate::error::Result;
use crate::layout::HeldLeaf;
use crate::matching::Matcher;
use crate::overlap::{Share, StridedRange};
use crate::placer::Dims;
use crate::shape::{Loop, Shape};

/// The copies into one target rank, per dense source rank.
#[derive(Debug, Default)]
pub(crate) struct Buckets {
    copies: Vec<Vec<RawCopy>>,
    touched: Vec<u32>,
}

impl Buckets {
    pub fn new(sources: usize) -> Self {
        Buckets { copies: vec![Vec::new(); sources], touched: Vec::new() }
    }

    fn push(&mut self, source: u32, copy: RawCopy) {
        let bucket = &mut self.copies[source as usize];
        if bucket.is_empty() {
            self.touched.push(source);
        }
        bucket.push(copy);
    }

    /// Empties the buckets in order of source, coalesced.
    pub fn drain(&mut self, mut take: impl FnMut(u32, &[RawCopy]) -> Result<()>) -> Result<()> {
        self.touched.sort_unstable();
        for source in self.touched.drain(..) {
            let bucket = &mut self.copies[source as usize];
            coalesce(bucket);
            take(source, bucket)?;
            bucket.clear();
        }
        Ok(())
    }
}

/// Fills the buckets with what a target rank (dense) receives in one container.
pub(crate) fn emit(
    matcher: &mut Matcher<'_>,
    assignment: &Assignment,
    (target, container): (u32, u32),
    buckets: &mut Buckets,
) -> Result<()> {
    let mut holders = Vec::new();
    for nth in 0..matcher.target.held_in(target, container).len() {
        let to = matcher.target.held_in(target, container)[nth];
        for leaf_region in matcher.leaf_regions(to)? {
            let decision = assignment.decision(target, leaf_region);
            let class = decision.map_or(0, |d| d.class as usize);
            let overlap = matcher.overlap(leaf_region, class);
            let matcher = &*matcher;
            let mut nth_box = 0;
            matcher.boxes(&overlap, |shares| {
                matcher.holders(&matcher.classes(leaf_region)[class], shares, &mut holders);
                let mut send = |holder: u32, part: Option<&Part>| {
                    if let Some(&from) = holders.get(holder as usize) {
                        let copies = strided(matcher, from, to, shares, part);
                        let source = matcher.source.rank_of(from);
                        copies.into_iter().for_each(|c| buckets.push(source, c));
                    }
                };
                match decision.map(|d| assignment.senders(d, nth_box)) {
                    None => send(0, None),
                    Some(Senders::One(holder)) => send(holder, None),
                    Some(Senders::Parts(parts)) => {
                        parts.iter().for_each(|p| send(p.holder, Some(p)));
                    }
                }
                nth_box += 1;
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// One copy per combination of ranges; almost always one.
fn strided(
    matcher: &Matcher<'_>,
    from: HeldLeaf,
    to: HeldLeaf,
    shares: &[&Share],
    part: Option<&Part>,
) -> SmallVec<[RawCopy; 1]> {
    let mut copies = SmallVec::new();
    let (Some((src_base, src_strides)), Some((dst_base, dst_strides))) =
        (matcher.source.placed(from), matcher.target.placed(to))
    else {
        return copies;
    };
    let mut at: Dims<usize> = SmallVec::from_elem(0, shares.len());
    let run = matcher.target.itemsize(to.leaf);
    'copies: loop {
        let mut loops: SmallVec<[Loop; 8]> = SmallVec::new();
        let (mut src_offset, mut dst_offset) = (src_base, dst_base);
        for (d, share) in shares.iter().enumerate() {
            let (src_stride, dst_stride) = (src_strides[d], dst_strides[d]);
            let s = narrowed(share.ranges[at[d]], d, part);
            src_offset += s.src * src_stride;
            dst_offset += s.dst * dst_stride;
            loops.push(Loop { count: s.len, src_stride, dst_stride });
            if s.count > 1 {
                loops.push(Loop {
                    count: s.count,
                    src_stride: s.src_step * src_stride,
                    dst_stride: s.dst_step * dst_stride,
                });
            }
        }
        copies.push(RawCopy {
            src_container: matcher.source.leaves[from.leaf as usize].container,
            dst_container: matcher.target.leaves[to.leaf as usize].container,
            src_offset,
            dst_offset,
            shape: Shape::new(run, &mut loops),
        });
        for d in (0..shares.len()).rev() {
            at[d] += 1;
            if at[d] < shares[d].ranges.len() {
                continue 'copies;
            }
            at[d] = 0;
        }
        return copies;
    }
}

fn narrowed(range: StridedRange, dim: usize, part: Option<&Part>) -> StridedRange {
    match part {
        Some(p) if p.dim as usize == dim => {
            StridedRange { src: range.src + p.lo, dst: range.dst + p.lo, len: p.hi - p.lo, ..range }
        }
        _ => range,
    }
}
