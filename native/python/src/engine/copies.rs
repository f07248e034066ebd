//! Binds a plan's copies to regions: the batch that sends them, the digest of their bytes.

use std::collections::HashMap;

use fabric_engine as fe;
use fabric_plan as plan;
use fe::api::{PageIndices, Pages};
use pyo3::prelude::*;

use super::{
    batch::{Batch, OwnedOp},
    class_arg::ClassArg,
    digest::Digest,
    memory::{Region, RemoteRegion},
};
use crate::errors::{raise, OrRaise};

/// A `fabric_ray.plan.Copy`, by its attributes.
#[derive(FromPyObject)]
pub(super) struct Copy {
    pub(super) src_container: u32,
    src_offset: u64,
    pub(super) dst_container: u32,
    dst_offset: u64,
    pub(super) run: u64,
    loops: Vec<Loop>,
}

#[derive(FromPyObject)]
struct Loop {
    count: u64,
    src_stride: u64,
    dst_stride: u64,
}

impl Copy {
    pub(super) fn rows(&self) -> Vec<plan::Row> {
        let as_loop = |l: &Loop| plan::Loop {
            count: l.count,
            src_stride: l.src_stride,
            dst_stride: l.dst_stride,
        };
        let loops: Vec<plan::Loop> = self.loops.iter().map(as_loop).collect();
        plan::Copy {
            src_container: self.src_container,
            src_offset: self.src_offset,
            dst_container: self.dst_container,
            dst_offset: self.dst_offset,
            run: self.run,
            loops: &loops,
        }
        .rows()
    }

    /// The first byte of the copy's target container in its region.
    fn dst_base(&self, py: Python<'_>, offsets: &[i64]) -> PyResult<u64> {
        let offset = offsets.get(self.dst_container as usize).copied().unwrap_or(-1);
        u64::try_from(offset).map_err(|_| {
            let text = format!("the target has no container {}", self.dst_container);
            raise(py, &fe::EngineError::Invalid(text))
        })
    }
}

/// `runs` pages at `base + offset + i * stride`.
fn pages(py: Python<'_>, runs: u64, base: u64, offset: u64, stride: u64) -> PyResult<Pages> {
    let runs = u32::try_from(runs).map_err(|_| {
        let text = format!("a row has {runs} runs, expected at most 2^32 - 1");
        raise(py, &fe::EngineError::Invalid(text))
    })?;
    let indices = PageIndices::range(0, runs).or_raise(py)?;
    Ok(Pages::new(indices, stride, base.saturating_add(offset)))
}

/// `(runs, source offset, source stride, target offset, target stride)` of each row of a copy.
#[pyfunction]
pub(super) fn copy_rows(copy: Copy) -> Vec<(u64, u64, u64, u64, u64)> {
    let fields = |r: plan::Row| (r.runs, r.src_offset, r.src_stride, r.dst_offset, r.dst_stride);
    copy.rows().into_iter().map(fields).collect()
}

/// The batch that sends copies to one target, and the digest of its bytes.
#[pyfunction]
pub(super) fn bind_copies(
    py: Python<'_>,
    copies: Vec<Copy>,
    sources: HashMap<u32, (ClassArg<'_, Region>, u64)>,
    target: ClassArg<'_, RemoteRegion>,
    offsets: Vec<i64>,
) -> PyResult<(Batch, Digest)> {
    let (mut batch, mut digest) = (Batch::default(), Digest::default());
    for copy in &copies {
        let Some((region, begin)) = sources.get(&copy.src_container) else {
            let text = format!("no source region for container {}", copy.src_container);
            return Err(raise(py, &fe::EngineError::Invalid(text)));
        };
        let base = copy.dst_base(py, &offsets)?;
        for row in copy.rows() {
            let src_pages = pages(py, row.runs, *begin, row.src_offset, row.src_stride)?;
            let dst_pages = pages(py, row.runs, base, row.dst_offset, row.dst_stride)?;
            digest.push(py, copy.run, &region.0, src_pages.clone(), dst_pages.clone())?;
            let (src, dst, imm) = (region.0.clone(), target.0.clone(), None);
            batch.ops.push(if row.runs == 1 {
                let (src_offset, dst_offset) = (src_pages.offset, dst_pages.offset);
                OwnedOp::Write { src, src_offset, dst, dst_offset, len: copy.run, imm }
            } else {
                OwnedOp::WritePages { page_len: copy.run, src, src_pages, dst, dst_pages, imm }
            });
        }
    }
    Ok((batch, digest))
}

/// The receiver's digest of the bytes of copies.
#[pyfunction]
pub(super) fn digest_copies(
    py: Python<'_>,
    copies: Vec<Copy>,
    target: ClassArg<'_, Region>,
    offsets: Vec<i64>,
) -> PyResult<Digest> {
    let mut digest = Digest::default();
    for copy in &copies {
        let base = copy.dst_base(py, &offsets)?;
        for row in copy.rows() {
            let pages = pages(py, row.runs, base, row.dst_offset, row.dst_stride)?;
            digest.push(py, copy.run, &target.0, pages.clone(), pages)?;
        }
    }
    Ok(digest)
}
