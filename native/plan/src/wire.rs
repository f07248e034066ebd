//! A plan as bytes: magic, version, length, digest, body.
//!
//! Decoding validates everything. Lists grow as their elements are read and every element takes at
//! least one byte, so memory stays within a small multiple of the input. Then every index, span and
//! total is checked, so that no later arithmetic on the plan overflows.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::error::{PlanError, Result, Role};
use crate::model::{Options, Side};
use crate::plan::{Columns, Link, Plan, Program, ShapeEntry};
use crate::shape::{Loop, MAX_LOOPS};
use crate::store::MAX_COPIES;

const MAGIC: [u8; 8] = *b"fabplan\0";
const VERSION: u16 = 1;
const HEADER: usize = 8 + 2 + 8 + 8;

#[derive(Serialize, Deserialize)]
struct Body {
    source: Side,
    target: Side,
    options: Options,
    shapes: Vec<(u64, Vec<Loop>)>,
    /// Copies per program.
    programs: Vec<u32>,
    /// Differences to the copy before, starting from zero in every program.
    src_container: Vec<i64>,
    dst_container: Vec<i64>,
    src_offset: Vec<i64>,
    dst_offset: Vec<i64>,
    shape: Vec<i64>,
    links: Vec<Link>,
}

impl Plan {
    /// The same bytes for equal plans, on every host.
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = self.body();
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&XxHash3_64::oneshot(&body).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// 64 bits that are equal on every host for equal plans and differ, with near certainty, for
    /// others. Not a defence against forgery.
    pub fn digest(&self) -> u64 {
        XxHash3_64::oneshot(&self.body())
    }

    /// # Errors
    /// [`PlanError::Decode`] unless [`Plan::to_bytes`] of this version wrote the bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Plan> {
        let Some((header, body)) = bytes.split_at_checked(HEADER) else {
            return Err(PlanError::decode(format!(
                "got {} bytes, fewer than the header of a plan",
                bytes.len()
            )));
        };
        if header[..8] != MAGIC {
            return Err(PlanError::decode("the magic number is wrong"));
        }
        let version = u16::from_le_bytes([header[8], header[9]]);
        if version != VERSION {
            return Err(PlanError::decode(format!(
                "got version {version}, expected {VERSION}; run the same release on all hosts"
            )));
        }
        let word = |at: usize| {
            let mut word = [0u8; 8];
            word.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if word(10) != body.len() as u64 {
            return Err(PlanError::decode(format!(
                "the body has {} bytes, the header announces {}",
                body.len(),
                word(10)
            )));
        }
        if word(18) != XxHash3_64::oneshot(body) {
            return Err(PlanError::decode("the digest does not match"));
        }
        Plan::from_body(body)
    }

    fn body(&self) -> Vec<u8> {
        let c = &self.columns;
        let loops = |s: &ShapeEntry| {
            self.loops[s.first_loop as usize..(s.first_loop + s.loops) as usize].to_vec()
        };
        let body = Body {
            source: self.source.clone(),
            target: self.target.clone(),
            options: self.options,
            shapes: self.shapes.iter().map(|s| (s.run, loops(s))).collect(),
            programs: self.programs.iter().map(|p| p.end - p.first).collect(),
            src_container: self.differences(|i| u64::from(c.src_container[i])),
            dst_container: self.differences(|i| u64::from(c.dst_container[i])),
            src_offset: self.differences(|i| c.src_offset[i]),
            dst_offset: self.differences(|i| c.dst_offset[i]),
            shape: self.differences(|i| u64::from(c.shape[i])),
            links: self.links.clone(),
        };
        // The writer is a growing vector and the types hold no maps: encoding has no failure.
        postcard::to_allocvec(&body).unwrap_or_default()
    }

    fn differences(&self, value: impl Fn(usize) -> u64) -> Vec<i64> {
        let mut out = Vec::with_capacity(self.columns.shape.len());
        for program in &self.programs {
            let mut last = 0u64;
            for i in program.first..program.end {
                let next = value(i as usize);
                out.push(next.wrapping_sub(last) as i64);
                last = next;
            }
        }
        out
    }

    /// Reads a body without its header; fuzzing starts here.
    #[doc(hidden)]
    pub fn from_body(bytes: &[u8]) -> Result<Plan> {
        let (body, rest): (Body, &[u8]) =
            postcard::take_from_bytes(bytes).map_err(|e| PlanError::decode(format!("{e}")))?;
        if !rest.is_empty() {
            return Err(PlanError::decode(format!("{} bytes are left over", rest.len())));
        }
        body.source.check(Role::Source)?;
        body.target.check(Role::Target)?;
        body.into_plan()
    }
}

impl Body {
    fn into_plan(self) -> Result<Plan> {
        let count: u64 = self.programs.iter().map(|&n| u64::from(n)).sum();
        let lists = [
            &self.src_container,
            &self.dst_container,
            &self.src_offset,
            &self.dst_offset,
            &self.shape,
        ];
        if count > MAX_COPIES || lists.iter().any(|l| l.len() as u64 != count) {
            return Err(PlanError::decode("the lists of copies differ in length"));
        }
        let mut plan = Plan {
            source: self.source,
            target: self.target,
            options: self.options,
            loops: Vec::new(),
            shapes: Vec::new(),
            columns: Columns {
                src_container: narrow(&self.programs, &self.src_container)?,
                dst_container: narrow(&self.programs, &self.dst_container)?,
                src_offset: summed(&self.programs, &self.src_offset),
                dst_offset: summed(&self.programs, &self.dst_offset),
                shape: narrow(&self.programs, &self.shape)?,
            },
            programs: Vec::new(),
            links: self.links,
        };
        for (run, loops) in self.shapes {
            check_shape(run, &loops)?;
            let (first_loop, count) = (plan.loops.len() as u32, loops.len() as u32);
            plan.loops.extend_from_slice(&loops);
            plan.shapes.push(ShapeEntry { run, first_loop, loops: count });
        }
        let mut first = 0u32;
        for &copies in &self.programs {
            let program = plan.checked_program(first, first + copies)?;
            plan.programs.push(program);
            first += copies;
        }
        plan.check_links()?;
        Ok(plan)
    }
}

impl Plan {
    fn checked_program(&self, first: u32, end: u32) -> Result<Program> {
        let (mut bytes, mut pages) = (0u64, 0u64);
        for i in first..end {
            let at = i as usize;
            let known = (self.columns.src_container[at] as usize) < self.source.containers.len()
                && (self.columns.dst_container[at] as usize) < self.target.containers.len()
                && (self.columns.shape[at] as usize) < self.shapes.len();
            if !known {
                return Err(PlanError::decode(format!("copy {i} has an index out of range")));
            }
            let copy = self.copy(i);
            let (src, dst) = copy.spans();
            let sums = copy
                .src_offset
                .checked_add(src)
                .and(copy.dst_offset.checked_add(dst))
                .and(pages.checked_add(copy.pages()))
                .zip(bytes.checked_add(copy.bytes()));
            let Some((p, b)) = sums else {
                return Err(PlanError::decode(format!("copy {i} exceeds 2^64")));
            };
            (pages, bytes) = (p, b);
        }
        if first == end {
            return Err(PlanError::decode("a link has no copies"));
        }
        Ok(Program { first, end, bytes, pages })
    }

    fn check_links(&self) -> Result<()> {
        let mut total = 0u64;
        let mut copies = 0u64;
        let mut last: Option<Link> = None;
        for &link in &self.links {
            let known = (link.src as usize) < self.source.ranks.len()
                && (link.dst as usize) < self.target.ranks.len()
                && (link.program as usize) < self.programs.len();
            let ascending = last.is_none_or(|l| l.key() < link.key());
            if !known || !ascending {
                return Err(PlanError::decode("links are out of range or out of order"));
            }
            if last.is_none_or(|l| l.src != link.src) {
                copies = 0;
            }
            let program = self.programs[link.program as usize];
            copies += u64::from(program.end - program.first);
            // Every copy has a byte, so pages are bounded by the same sum.
            let Some(sum) = total.checked_add(program.bytes) else {
                return Err(PlanError::decode("the total exceeds 2^64 bytes"));
            };
            if copies > MAX_COPIES {
                return Err(PlanError::decode("a source rank has more than 2^28 copies"));
            }
            (total, last) = (sum, Some(link));
        }
        Ok(())
    }
}

fn check_shape(run: u64, loops: &[Loop]) -> Result<()> {
    let span = |stride: fn(&Loop) -> u64| {
        loops.iter().try_fold(run, |span, l| {
            span.checked_add(stride(l).checked_mul(l.count.checked_sub(1)?)?)
        })
    };
    let sound = run > 0
        && loops.len() <= MAX_LOOPS
        && loops.iter().all(|l| l.count > 1 && l.dst_stride > 0)
        && loops.iter().try_fold(run, |n, l| n.checked_mul(l.count)).is_some()
        && span(|l| l.src_stride).is_some()
        && span(|l| l.dst_stride).is_some();
    match sound {
        true => Ok(()),
        false => Err(PlanError::decode("a copy has an invalid shape")),
    }
}

fn summed(programs: &[u32], differences: &[i64]) -> Vec<u64> {
    let mut out = Vec::with_capacity(differences.len());
    let mut rest = differences;
    for &copies in programs {
        let (mine, others) = rest.split_at(copies as usize);
        let mut last = 0u64;
        for &difference in mine {
            last = last.wrapping_add(difference as u64);
            out.push(last);
        }
        rest = others;
    }
    out
}

fn narrow(programs: &[u32], differences: &[i64]) -> Result<Vec<u32>> {
    summed(programs, differences)
        .into_iter()
        .map(|v| u32::try_from(v).map_err(|_| PlanError::decode("an index exceeds 2^32")))
        .collect()
}
