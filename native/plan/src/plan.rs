//! A finished plan: all copies between source and target ranks.

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result, Role};
use crate::model::{Options, Side};
use crate::shape::Loop;

/// One strided copy from a source rank's container to a target rank's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy<'p> {
    /// Index into the source side's containers.
    pub src_container: u32,
    /// Byte offset in the source rank's container.
    pub src_offset: u64,
    /// Index into the target side's containers.
    pub dst_container: u32,
    /// Byte offset in the target rank's container.
    pub dst_offset: u64,
    /// Bytes that are contiguous on both sides.
    pub run: u64,
    /// Repetitions of the run, outermost first.
    pub loops: &'p [Loop],
}

/// Equally long runs at equal distances on either side, which one paged write can move: run `i` lies
/// at `offset + i * stride` of the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub runs: u64,
    pub src_offset: u64,
    pub src_stride: u64,
    pub dst_offset: u64,
    pub dst_stride: u64,
}

impl Copy<'_> {
    /// The copy as rows: the longest loop becomes runs, the others are unrolled, outermost first.
    /// Offsets saturate, so that those which no container has stay out of bounds.
    pub fn rows(&self) -> Vec<Row> {
        let one = Loop { count: 1, src_stride: 0, dst_stride: 0 };
        // The first of equally long ones.
        let longest = self.loops.iter().rev().max_by_key(|l| l.count).unwrap_or(&one);
        let mut starts = vec![(self.src_offset, self.dst_offset)];
        for l in self.loops.iter().filter(|&l| !std::ptr::eq(l, longest)) {
            let repeated = |(src, dst): (u64, u64)| {
                (0..l.count).map(move |i| {
                    let src = src.saturating_add(i.saturating_mul(l.src_stride));
                    (src, dst.saturating_add(i.saturating_mul(l.dst_stride)))
                })
            };
            starts = starts.into_iter().flat_map(repeated).collect();
        }
        let row = |(src_offset, dst_offset)| Row {
            runs: longest.count,
            src_offset,
            src_stride: longest.src_stride,
            dst_offset,
            dst_stride: longest.dst_stride,
        };
        starts.into_iter().map(row).collect()
    }

    /// Runs in the copy; the receiver's counter counts each.
    pub fn pages(&self) -> u64 {
        self.loops.iter().map(|l| l.count).product()
    }

    pub fn bytes(&self) -> u64 {
        self.pages() * self.run
    }

    /// Bytes from the first to past the last one touched, on the source and on the target.
    pub fn spans(&self) -> (u64, u64) {
        self.loops.iter().fold((self.run, self.run), |(src, dst), l| {
            (src + (l.count - 1) * l.src_stride, dst + (l.count - 1) * l.dst_stride)
        })
    }
}

/// Run length and loops, shared by all copies of that form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ShapeEntry {
    pub run: u64,
    pub first_loop: u32,
    pub loops: u32,
}

/// Copies, one array per field.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Columns {
    pub src_container: Vec<u32>,
    pub dst_container: Vec<u32>,
    pub src_offset: Vec<u64>,
    pub dst_offset: Vec<u64>,
    pub shape: Vec<u32>,
}

/// A list of copies that one or more links carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Program {
    pub first: u32,
    pub end: u32,
    pub bytes: u64,
    pub pages: u64,
}

/// A source rank, a target rank (both dense) and one list of copies between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    pub src: u32,
    pub dst: u32,
    pub program: u32,
}

impl Link {
    pub fn key(&self) -> (u32, u32, u32) {
        (self.src, self.dst, self.program)
    }
}

/// Totals of one source and one target rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkTotal {
    pub src: u32,
    pub dst: u32,
    pub bytes: u64,
    pub pages: u64,
    pub copies: u64,
}

/// All copies from the source containers to the target containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(crate) source: Side,
    pub(crate) target: Side,
    pub(crate) options: Options,
    pub(crate) loops: Vec<Loop>,
    pub(crate) shapes: Vec<ShapeEntry>,
    pub(crate) columns: Columns,
    pub(crate) programs: Vec<Program>,
    /// Sorted by source, target and program; two ranks may share several programs.
    pub(crate) links: Vec<Link>,
}

impl Plan {
    pub fn source(&self) -> &Side {
        &self.source
    }

    pub fn target(&self) -> &Side {
        &self.target
    }

    pub fn options(&self) -> Options {
        self.options
    }

    /// Copies kept in memory; links that carry the same list share it.
    pub fn stored_copies(&self) -> u64 {
        self.columns.shape.len() as u64
    }

    /// Copies over all links.
    pub fn total_copies(&self) -> u64 {
        self.links().map(|l| l.copies).sum()
    }

    /// Every pair of ranks that exchange data, by source, then target.
    pub fn links(&self) -> impl Iterator<Item = LinkTotal> + '_ {
        self.links.chunk_by(|a, b| (a.src, a.dst) == (b.src, b.dst)).map(|l| self.total(l))
    }

    pub fn bytes_on_link(&self, src: u32, dst: u32) -> u64 {
        self.programs_on(src, dst).map(|p| p.bytes).sum()
    }

    /// The copies from one rank to another, most urgent target container first.
    pub fn on_link(&self, src: u32, dst: u32) -> impl Iterator<Item = Copy<'_>> {
        let mut copies: Vec<u32> =
            self.programs_on(src, dst).flat_map(|p| p.first..p.end).collect();
        copies.sort_by_key(|&c| self.columns.dst_container[c as usize]);
        copies.into_iter().map(|c| self.copy(c))
    }

    /// Runs that a target rank receives: the value its counter must reach.
    pub fn expected_pages(&self, dst: u32) -> Result<u64> {
        let dst = self.dense(Role::Target, dst)?;
        let to_it = self.links.iter().filter(|l| l.dst == dst);
        Ok(to_it.map(|l| self.programs[l.program as usize].pages).sum())
    }

    pub(crate) fn copy(&self, index: u32) -> Copy<'_> {
        let i = index as usize;
        let shape = self.shapes[self.columns.shape[i] as usize];
        let loops = shape.first_loop as usize..(shape.first_loop + shape.loops) as usize;
        Copy {
            src_container: self.columns.src_container[i],
            src_offset: self.columns.src_offset[i],
            dst_container: self.columns.dst_container[i],
            dst_offset: self.columns.dst_offset[i],
            run: shape.run,
            loops: &self.loops[loops],
        }
    }

    /// Totals over the links of one pair of ranks.
    fn total(&self, links: &[Link]) -> LinkTotal {
        let mut total = LinkTotal {
            src: self.source.ranks[links[0].src as usize],
            dst: self.target.ranks[links[0].dst as usize],
            bytes: 0,
            pages: 0,
            copies: 0,
        };
        for program in links.iter().map(|l| self.programs[l.program as usize]) {
            total.bytes += program.bytes;
            total.pages += program.pages;
            total.copies += u64::from(program.end - program.first);
        }
        total
    }

    fn programs_on(&self, src: u32, dst: u32) -> impl Iterator<Item = Program> + '_ {
        let pair = self.dense(Role::Source, src).ok().zip(self.dense(Role::Target, dst).ok());
        let links = pair.map_or(&[][..], |pair| {
            let first = self.links.partition_point(|l| (l.src, l.dst) < pair);
            let end = self.links.partition_point(|l| (l.src, l.dst) <= pair);
            &self.links[first..end]
        });
        links.iter().map(|l| self.programs[l.program as usize])
    }

    /// Position of a rank in its side's list.
    pub(crate) fn dense(&self, role: Role, rank: u32) -> Result<u32> {
        let ranks = match role {
            Role::Source => &self.source.ranks,
            Role::Target => &self.target.ranks,
        };
        ranks.iter().position(|&r| r == rank).map(|i| i as u32).ok_or_else(|| {
            let problem = format!("the {role} side of the plan has no such rank");
            PlanError::UnknownRank { role, rank, problem }
        })
    }
}
