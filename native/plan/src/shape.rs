//! The form of a strided copy: a contiguous run and the loops that repeat it.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// Most loops a copy may have: two per dimension of a tensor.
pub const MAX_LOOPS: usize = 2 * crate::model::MAX_DIMS;

/// One level of repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Loop {
    pub count: u64,
    /// Bytes from one repetition to the next.
    pub src_stride: u64,
    pub dst_stride: u64,
}

/// Bytes that are contiguous on both sides, and how often they repeat.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub run: u64,
    /// Outermost first; every count is at least 2.
    pub loops: SmallVec<[Loop; 2]>,
}

impl Shape {
    /// A single run.
    pub fn run(run: u64) -> Shape {
        Shape { run, loops: SmallVec::new() }
    }

    /// `loops` may come in any order; the result has the longest run and the fewest loops.
    pub fn new(run: u64, loops: &mut SmallVec<[Loop; 8]>) -> Shape {
        loops.retain(|l| l.count > 1);
        loops.sort_unstable_by_key(|l| (l.dst_stride, l.src_stride));
        let mut shape = Shape::run(run);
        for &l in loops.iter() {
            shape.wrap(l);
        }
        shape.loops.reverse();
        shape
    }

    /// Repeats the shape built so far, loops innermost first.
    fn wrap(&mut self, l: Loop) {
        match self.loops.last_mut() {
            None if (l.src_stride, l.dst_stride) == (self.run, self.run) => self.run *= l.count,
            Some(inner)
                if l.src_stride == inner.src_stride.wrapping_mul(inner.count)
                    && l.dst_stride == inner.dst_stride.wrapping_mul(inner.count) =>
            {
                inner.count *= l.count;
            }
            _ => self.loops.push(l),
        }
    }

    /// The same shape from another run length, merged anew.
    pub fn with_run(&self, run: u64) -> Shape {
        let mut shape = Shape::run(run);
        for &l in self.loops.iter().rev() {
            shape.wrap(l);
        }
        shape.loops.reverse();
        shape
    }

    /// The same shape inside one more, outermost loop.
    pub fn repeated(&self, outer: Loop) -> Shape {
        let mut shape = Shape::run(self.run);
        for &l in self.loops.iter().rev().chain([&outer]) {
            shape.wrap(l);
        }
        shape.loops.reverse();
        shape
    }
}
