//! Makes a trainer's steps from the copies of a plan.

use std::collections::BTreeMap;

use fabric_plan::{Copy, Plan, Result};

use crate::push::{Step, Write};

/// A step without its writes, and the source containers that it sends.
#[derive(Clone, Debug, Default)]
pub struct Division {
    pub containers: Vec<u32>,
    pub step: Step,
}

/// The steps of a source rank. Rollouts are numbered by their index on the target side. Each
/// trainer begins with another rollout. Steps without writes are left out.
///
/// # Errors
/// The plan has no such source rank.
pub fn steps_of(plan: &Plan, rank: u32, divisions: &[Division]) -> Result<Vec<Step>> {
    let mut step_of = vec![usize::MAX; plan.source().containers.len()];
    for (number, division) in divisions.iter().enumerate() {
        for container in &division.containers {
            if let Some(step) = step_of.get_mut(*container as usize) {
                *step = number;
            }
        }
    }
    let mut writes: Vec<BTreeMap<u32, Write>> = vec![BTreeMap::new(); divisions.len()];
    plan.for_each_copy(rank, |rollout, copy: Copy<'_>| {
        let Some(writes) = writes.get_mut(step_of[copy.src_container as usize]) else { return };
        let write = writes.entry(rollout).or_insert(Write { rollout, requests: 0, bytes: 0 });
        write.bytes += copy.bytes();
        write.requests += copy.pages();
    })?;
    let mut rollouts: Vec<u32> = writes.iter().flat_map(|w| w.keys().copied()).collect();
    rollouts.sort_unstable();
    rollouts.dedup();
    let first = rollouts.get(rank as usize % rollouts.len().max(1)).copied().unwrap_or(0);
    let mut kept = vec![0];
    let mut steps = Vec::new();
    for (division, writes) in divisions.iter().zip(writes) {
        if !writes.is_empty() {
            let (before, from): (Vec<_>, Vec<_>) =
                writes.into_values().partition(|w| w.rollout < first);
            let writes = [from, before].concat();
            let after = kept[division.step.after.min(kept.len() - 1)];
            steps.push(Step { writes, after, ..division.step.clone() });
        }
        kept.push(steps.len());
    }
    Ok(steps)
}
