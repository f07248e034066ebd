//! Merges the copies of one link into fewer and longer ones.

use crate::shape::{Loop, Shape, MAX_LOOPS};

/// A copy before it is stored in a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RawCopy {
    pub src_container: u32,
    pub dst_container: u32,
    pub src_offset: u64,
    pub dst_offset: u64,
    pub shape: Shape,
}

/// Maximum number of merge passes; each pass can add one loop level.
const MAX_PASSES: usize = 4;

/// Maximum number of runs into which interleaved copies are split.
const MAX_UNTANGLED: u64 = 4096;

/// Sorts by target container and offset, then merges neighbours that continue or repeat each other.
pub(crate) fn coalesce(copies: &mut Vec<RawCopy>) {
    let key = |c: &RawCopy| (c.dst_container, c.src_container, c.dst_offset);
    if !copies.windows(2).all(|w| key(&w[0]) <= key(&w[1])) {
        copies.sort_by_key(key);
    }
    merge(copies);
    if untangle(copies) {
        merge(copies);
    }
}

fn merge(copies: &mut Vec<RawCopy>) {
    for _ in 0..MAX_PASSES {
        let before = copies.len();
        let mut merged: Vec<RawCopy> = Vec::with_capacity(before);
        for copy in copies.drain(..) {
            let mut next = copy;
            while let Some(last) = merged.pop() {
                match join(&last, &next) {
                    Some(joined) => next = joined,
                    None => {
                        merged.push(last);
                        break;
                    }
                }
            }
            merged.push(next);
        }
        *copies = merged;
        if copies.len() == before {
            return;
        }
    }
}

/// Splits interleaved copies whose runs continue each other into contiguous runs.
fn untangle(copies: &mut Vec<RawCopy>) -> bool {
    let mut changed = false;
    let mut first = 0;
    while first < copies.len() {
        let mut end = first + 1;
        let mut reach = copies[first].dst_end();
        let mut runs = copies[first].runs();
        while let Some(next) = copies.get(end).filter(|c| {
            c.dst_container == copies[first].dst_container
                && c.src_container == copies[first].src_container
                && c.dst_offset < reach
        }) {
            reach = reach.max(next.dst_end());
            runs = runs.saturating_add(next.runs());
            end += 1;
        }
        if end - first > 1 && runs <= MAX_UNTANGLED {
            let pieces = contiguous(&copies[first..end]);
            if (pieces.len() as u64) < runs {
                let count = pieces.len();
                copies.splice(first..end, pieces);
                end = first + count;
                changed = true;
            }
        }
        first = end;
    }
    changed
}

/// The longest contiguous runs that the copies are made of.
fn contiguous(copies: &[RawCopy]) -> Vec<RawCopy> {
    let mut runs: Vec<(u64, u64, u64)> = Vec::new();
    for copy in copies {
        let mut starts = vec![(copy.dst_offset, copy.src_offset)];
        for l in &copy.shape.loops {
            let step = |&(dst, src): &(u64, u64)| {
                (0..l.count).map(move |i| (dst + i * l.dst_stride, src + i * l.src_stride))
            };
            starts = starts.iter().flat_map(step).collect();
        }
        runs.extend(starts.into_iter().map(|(dst, src)| (dst, src, copy.shape.run)));
    }
    runs.sort_unstable();
    let mut pieces: Vec<RawCopy> = Vec::new();
    for (dst_offset, src_offset, run) in runs {
        match pieces.last_mut() {
            Some(p)
                if p.dst_offset + p.shape.run == dst_offset
                    && p.src_offset + p.shape.run == src_offset =>
            {
                p.shape.run += run;
            }
            _ => pieces.push(RawCopy {
                src_offset,
                dst_offset,
                shape: Shape::run(run),
                ..copies[0].clone()
            }),
        }
    }
    pieces
}

impl RawCopy {
    fn runs(&self) -> u64 {
        self.shape.loops.iter().map(|l| l.count).product()
    }

    fn dst_end(&self) -> u64 {
        let reach = |l: &Loop| (l.count - 1) * l.dst_stride;
        self.dst_offset + self.shape.run + self.shape.loops.iter().map(reach).sum::<u64>()
    }
}

fn join(last: &RawCopy, next: &RawCopy) -> Option<RawCopy> {
    if last.src_container != next.src_container || last.dst_container != next.dst_container {
        return None;
    }
    let src = next.src_offset.checked_sub(last.src_offset)?;
    let dst = next.dst_offset.checked_sub(last.dst_offset)?;
    let shape = continued(&last.shape, &next.shape, src, dst)
        .or_else(|| repeated(&last.shape, &next.shape, src, dst))?;
    Some(RawCopy { shape, ..last.clone() })
}

/// The next copy's runs begin where the last one's end.
fn continued(last: &Shape, next: &Shape, src: u64, dst: u64) -> Option<Shape> {
    let adjacent = last.run == src && last.run == dst && last.loops == next.loops;
    adjacent.then(|| last.with_run(last.run + next.run))
}

/// The next copy has the same form at a distance.
fn repeated(last: &Shape, next: &Shape, src: u64, dst: u64) -> Option<Shape> {
    if dst == 0 {
        return None;
    }
    if last == next && last.loops.len() < MAX_LOOPS {
        return Some(last.repeated(Loop { count: 2, src_stride: src, dst_stride: dst }));
    }
    let (outer, inner) = last.loops.split_first()?;
    let again = inner == next.loops.as_slice()
        && last.run == next.run
        && src == outer.src_stride.checked_mul(outer.count)?
        && dst == outer.dst_stride.checked_mul(outer.count)?;
    again.then(|| {
        let mut loops = last.loops.clone();
        loops[0].count += 1;
        Shape { run: last.run, loops }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(src: u64, dst: u64, run: u64) -> RawCopy {
        let shape = Shape::run(run);
        RawCopy { src_container: 0, dst_container: 0, src_offset: src, dst_offset: dst, shape }
    }

    fn merged(mut copies: Vec<RawCopy>) -> Vec<RawCopy> {
        coalesce(&mut copies);
        copies
    }

    #[test]
    fn neighbours_become_one_run() {
        assert_eq!(merged(vec![run(4, 8, 4), run(0, 4, 4), run(8, 12, 2)]), vec![run(0, 4, 10)]);
    }

    #[test]
    fn equal_distances_become_a_loop() {
        let copies = merged((0..12).map(|i| run(10 * i, 100 * i, 4)).collect());
        assert_eq!(copies.len(), 1);
        let l = Loop { count: 12, src_stride: 10, dst_stride: 100 };
        assert_eq!(copies[0].shape.loops.as_slice(), &[l]);
    }

    #[test]
    fn two_levels_of_distance_become_two_loops() {
        let at = |i: u64, j: u64| run(1000 * i + 10 * j, 5000 * i + 20 * j, 4);
        let copies = merged((0..6).flat_map(|i| (0..5).map(move |j| at(i, j))).collect());
        assert_eq!(copies.len(), 1);
        assert_eq!(copies[0].shape.loops.len(), 2);
    }

    #[test]
    fn interleaved_copies_that_continue_each_other_become_one_run() {
        let mut every_other = run(2, 2, 2);
        every_other.shape =
            every_other.shape.repeated(Loop { count: 2, src_stride: 4, dst_stride: 4 });
        assert_eq!(merged(vec![run(0, 0, 2), every_other, run(4, 4, 2)]), vec![run(0, 0, 8)]);
    }

    #[test]
    fn other_containers_and_backward_sources_stay_apart() {
        let mut other = run(4, 4, 4);
        other.src_container = 1;
        assert_eq!(merged(vec![run(0, 0, 4), other]).len(), 2);
        assert_eq!(merged(vec![run(8, 0, 4), run(0, 4, 4)]).len(), 2);
    }
}
