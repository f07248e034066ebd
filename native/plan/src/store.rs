//! Collects the copies of all links and stores equal lists once.

use std::hash::Hasher;

use rustc_hash::FxHashMap;
use twox_hash::XxHash3_64;

use crate::coalesce::RawCopy;
use crate::error::{PlanError, Result};
use crate::model::{Options, Side};
use crate::plan::{Columns, Link, Plan, Program, ShapeEntry};
use crate::shape::{Loop, Shape};

/// Most copies of one source rank over all its links, and most copies kept in all.
pub(crate) const MAX_COPIES: u64 = 1 << 28;

#[derive(Debug, Default)]
pub(crate) struct Store {
    loops: Vec<Loop>,
    shapes: Vec<ShapeEntry>,
    shape_ids: FxHashMap<Shape, u32>,
    columns: Columns,
    programs: Vec<Program>,
    by_hash: FxHashMap<u64, Vec<u32>>,
    links: Vec<Link>,
}

impl Store {
    /// Keeps a list of copies and returns its id; an equal list has the same id.
    pub fn program(&mut self, copies: &[RawCopy]) -> Result<u32> {
        let first = self.columns.shape.len();
        if (first + copies.len()) as u64 > MAX_COPIES {
            return Err(PlanError::too_large("plan", "the number of copies", "2^28"));
        }
        let (mut bytes, mut pages) = (0u64, 0u64);
        let mut hash = XxHash3_64::new();
        for copy in copies {
            let shape = self.shape(&copy.shape);
            let repeats: u64 = copy.shape.loops.iter().map(|l| l.count).product();
            bytes += repeats * copy.shape.run;
            pages += repeats;
            self.columns.src_container.push(copy.src_container);
            self.columns.dst_container.push(copy.dst_container);
            self.columns.src_offset.push(copy.src_offset);
            self.columns.dst_offset.push(copy.dst_offset);
            self.columns.shape.push(shape);
            hash.write(&copy.src_container.to_le_bytes());
            hash.write(&copy.dst_container.to_le_bytes());
            hash.write(&copy.src_offset.to_le_bytes());
            hash.write(&copy.dst_offset.to_le_bytes());
            hash.write(&shape.to_le_bytes());
        }
        let alike = self.by_hash.entry(hash.finish()).or_default();
        for &id in alike.iter() {
            let known = self.programs[id as usize];
            if self.columns.equal(known.first as usize, known.end as usize, first) {
                self.columns.truncate(first);
                return Ok(id);
            }
        }
        let id = self.programs.len() as u32;
        alike.push(id);
        let (first, end) = (first as u32, self.columns.shape.len() as u32);
        self.programs.push(Program { first, end, bytes, pages });
        Ok(id)
    }

    pub fn link(&mut self, src: u32, dst: u32, program: u32) {
        self.links.push(Link { src, dst, program });
    }

    fn shape(&mut self, shape: &Shape) -> u32 {
        if let Some(&id) = self.shape_ids.get(shape) {
            return id;
        }
        let id = self.shapes.len() as u32;
        let (first_loop, loops) = (self.loops.len() as u32, shape.loops.len() as u32);
        self.loops.extend_from_slice(&shape.loops);
        self.shapes.push(ShapeEntry { run: shape.run, first_loop, loops });
        self.shape_ids.insert(shape.clone(), id);
        id
    }

    pub fn finish(mut self, source: Side, target: Side, options: Options) -> Plan {
        self.links.sort_unstable_by_key(|l| (l.src, l.dst, l.program));
        self.columns.shrink();
        Plan {
            source,
            target,
            options,
            loops: self.loops,
            shapes: self.shapes,
            columns: self.columns,
            programs: self.programs,
            links: self.links,
        }
    }
}

impl Columns {
    /// `[a..end)` equals the same number of copies from `b` on, which are the last ones.
    fn equal(&self, a: usize, end: usize, b: usize) -> bool {
        self.shape.len() - b == end - a
            && self.shape[a..end] == self.shape[b..]
            && self.src_container[a..end] == self.src_container[b..]
            && self.dst_container[a..end] == self.dst_container[b..]
            && self.src_offset[a..end] == self.src_offset[b..]
            && self.dst_offset[a..end] == self.dst_offset[b..]
    }

    fn truncate(&mut self, len: usize) {
        self.src_container.truncate(len);
        self.dst_container.truncate(len);
        self.src_offset.truncate(len);
        self.dst_offset.truncate(len);
        self.shape.truncate(len);
    }

    fn shrink(&mut self) {
        self.src_container.shrink_to_fit();
        self.dst_container.shrink_to_fit();
        self.src_offset.shrink_to_fit();
        self.dst_offset.shrink_to_fit();
        self.shape.shrink_to_fit();
    }
}
