//! Executes a plan on byte slices: the reference for everything that moves bytes for real.

use std::collections::HashMap;

use crate::error::{PlanError, Result, Role};
use crate::plan::{Copy, LinkTotal, Plan};

/// A rank's container: `(rank, index of the container in its side)`.
pub type BufferKey = (u32, u32);

/// Copies every byte of the plan and returns how many there were.
///
/// Buffers start at the container's first byte. All are checked before the first is written.
///
/// # Errors
/// [`PlanError::Buffer`] when a buffer the plan reads or writes is missing or too short.
pub fn apply(
    plan: &Plan,
    sources: &HashMap<BufferKey, &[u8]>,
    targets: &mut HashMap<BufferKey, &mut [u8]>,
) -> Result<u64> {
    for LinkTotal { src, dst, .. } in plan.links() {
        for copy in plan.on_link(src, dst) {
            let (src_span, dst_span) = copy.spans();
            let have = sources.get(&(src, copy.src_container)).map_or(0, |b| b.len() as u64);
            check(plan, Role::Source, src, copy.src_container, have, copy.src_offset + src_span)?;
            let have = targets.get(&(dst, copy.dst_container)).map_or(0, |b| b.len() as u64);
            check(plan, Role::Target, dst, copy.dst_container, have, copy.dst_offset + dst_span)?;
        }
    }
    let mut bytes = 0;
    for LinkTotal { src, dst, .. } in plan.links() {
        for copy in plan.on_link(src, dst) {
            let from = sources.get(&(src, copy.src_container));
            let to = targets.get_mut(&(dst, copy.dst_container));
            if let (Some(from), Some(to)) = (from, to) {
                run(&copy, from, to);
                bytes += copy.bytes();
            }
        }
    }
    Ok(bytes)
}

fn check(
    plan: &Plan,
    role: Role,
    rank: u32,
    container: u32,
    found: u64,
    needed: u64,
) -> Result<()> {
    if needed <= found {
        return Ok(());
    }
    let side = if role == Role::Source { &plan.source } else { &plan.target };
    let container = side.containers[container as usize].name.clone();
    Err(PlanError::Buffer { role, container, rank, found, needed })
}

fn run(copy: &Copy<'_>, from: &[u8], to: &mut [u8]) {
    let len = copy.run as usize;
    for row in copy.rows() {
        for i in 0..row.runs {
            let src = (row.src_offset + i * row.src_stride) as usize;
            let dst = (row.dst_offset + i * row.dst_stride) as usize;
            to[dst..dst + len].copy_from_slice(&from[src..src + len]);
        }
    }
}
