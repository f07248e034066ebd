//! CPUs for the thread that drives a set of rails.

use std::collections::BTreeSet;

use super::{Nic, Topology};

/// The CPUs near these rails that this process may run on.
///
/// Empty if nothing is known, or no near CPU is allowed; the thread should then not be bound.
pub fn cpus_near(topology: &Topology, nics: &[String]) -> Vec<usize> {
    cpus_near_within(topology, nics, &allowed())
}

/// Like [`cpus_near`], for a given set of allowed CPUs.
///
/// For rails of several nodes: the node with the most rails, then the node of the first rail.
pub fn cpus_near_within(topology: &Topology, nics: &[String], allowed: &[usize]) -> Vec<usize> {
    let found: Vec<&Nic> = nics.iter().filter_map(|name| topology.nic(name)).collect();
    let nodes: Vec<u32> = found.iter().filter_map(|n| n.numa).collect();
    let votes = |node: u32| nodes.iter().filter(|n| **n == node).count();
    let mut node: Option<u32> = None;
    for candidate in &nodes {
        if node.is_none_or(|best| votes(*candidate) > votes(best)) {
            node = Some(*candidate);
        }
    }
    let listed = topology.nodes.iter().find(|n| Some(n.id) == node && !n.cpus.is_empty());
    // A guest may know a device's CPUs but not its node, and a container the number of a node that
    // its sysfs doesn't list.
    let own = || found.iter().find(|n| n.numa == node).map(|n| &n.cpus);
    let chosen = listed.map(|n| &n.cpus).or_else(own);
    let allowed: BTreeSet<usize> = allowed.iter().copied().collect();
    chosen.into_iter().flatten().copied().filter(|cpu| allowed.contains(cpu)).collect()
}

/// The CPUs that this process may run on.
pub(super) fn allowed() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// Parses a CPU list as the kernel writes it: `0-47,96-143`.
pub(super) fn parse_cpus(list: &str) -> Vec<usize> {
    // No machine has more CPUs; bounds the time spent on a damaged file.
    const MAX_CPUS: usize = 1 << 16;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse::<usize>().ok()?);
        Some(first..last.saturating_add(1).min(MAX_CPUS))
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_cpus("0-2,8,10-11\n"), [0, 1, 2, 8, 10, 11]);
        assert!(parse_cpus("").is_empty());
        assert!(parse_cpus("3-1").is_empty());
        assert_eq!(parse_cpus("x,4"), [4]);
        assert_eq!(parse_cpus("0-99999999999").len(), 1 << 16);
    }

    #[test]
    fn this_process_has_allowed_cpus() {
        assert!(!allowed().is_empty());
    }
}
