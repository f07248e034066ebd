//! Plans the copies between two sides.

use crate::assign::assign;
use crate::emit::{emit, Buckets};
use crate::error::{PlanError, Result, Role};
use crate::matching::Matcher;
use crate::model::{Options, Side};
use crate::plan::Plan;
use crate::replicas::sections;
use crate::store::{Store, MAX_COPIES};

/// Plans the copies that fill every target container from the source containers.
///
/// Every box of every target container is sent exactly once. The result depends on the arguments
/// only, so hosts that hold equal sides hold equal plans.
///
/// # Errors
/// Any [`PlanError`] but `Decode`, `Buffer` and `UnknownRank`.
pub fn plan(source: Side, target: Side, options: Options) -> Result<Plan> {
    source.check(Role::Source)?;
    target.check(Role::Target)?;
    let mut store = Store::default();
    let mut matcher = Matcher::new(&source, &target, options)?;
    let sections = sections(&matcher.target);
    let assignment = assign(&mut matcher, &sections, options.min_split_bytes)?;
    let mut buckets = Buckets::new(source.ranks.len());
    let mut copies = vec![0u64; source.ranks.len()];
    for (s, section) in sections.iter().enumerate() {
        for group in &section.groups {
            // Replicas share their copies unless a sender was chosen for each of them.
            let together = if assignment.is_fixed(s, group) { group.len() } else { 1 };
            for ranks in group.chunks(together) {
                for &container in &section.containers {
                    emit(&mut matcher, &assignment, (ranks[0], container), &mut buckets)?;
                }
                buckets.drain(|src, list| {
                    let program = store.program(list)?;
                    ranks.iter().for_each(|&dst| store.link(src, dst, program));
                    copies[src as usize] += (list.len() * ranks.len()) as u64;
                    if copies[src as usize] <= MAX_COPIES {
                        return Ok(());
                    }
                    let subject = format!("source rank {}", source.ranks[src as usize]);
                    Err(PlanError::too_large(subject, "its number of copies", "2^28"))
                })?;
            }
        }
    }
    drop(matcher);
    Ok(store.finish(source, target, options))
}
