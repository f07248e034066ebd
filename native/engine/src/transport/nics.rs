//! The NICs of an engine, and the CPUs of their threads.

use std::path::Path;

use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

use crate::{
    api::{NicConfig, MAX_RAILS},
    domain::DomainError,
    topology::{self, cpus_near, pairing_for, Location, PciAddress, Rules, Tier, Topology},
};

const SYSFS: &str = "/sys";

/// Usable devices nearest to the memory that the engine serves, in the order of the rails. For
/// configurations that name no devices.
pub(crate) fn nearest(usable: &[String], config: &NicConfig) -> Result<Vec<String>, DomainError> {
    let topology = Topology::read(Path::new(SYSFS)).map_err(DomainError::Unavailable)?;
    let location = location(&topology, config)?;
    let rules = Rules::parse(config.rules.as_deref().unwrap_or_default())
        .map_err(DomainError::Unavailable)?;
    let most = config.max_rails.clamp(1, MAX_RAILS);
    pairing_for(&topology, location, usable, most, &rules).map_err(DomainError::Unavailable)
}

/// The distance of devices from the memory that the engine serves.
pub(crate) fn tiers(devices: &[String], config: &NicConfig) -> Vec<Tier> {
    let Ok(topology) = Topology::read(Path::new(SYSFS)) else { return Vec::new() };
    let location = location(&topology, config);
    location.map_or(Vec::new(), |location| topology::tiers(&topology, location, devices))
}

fn location(topology: &Topology, config: &NicConfig) -> Result<Location, DomainError> {
    match &config.gpu {
        Some(gpu) => Ok(Location::Gpu(gpu_address(topology, gpu)?)),
        None => Ok(Location::Host),
    }
}

fn gpu_address(topology: &Topology, gpu: &str) -> Result<PciAddress, DomainError> {
    if let Some(gpu) = topology.gpu(gpu) {
        return Ok(gpu.pci.address);
    }
    let there: Vec<_> = topology.gpus.iter().map(|g| g.pci.address.to_string()).collect();
    Err(DomainError::Unavailable(format!(
        "there is no GPU {gpu:?} here; there are: {}",
        if there.is_empty() { "none".to_owned() } else { there.join(", ") }
    )))
}

/// The CPUs near these devices; `None` if any CPU will do.
pub(crate) fn cpus(devices: &[String]) -> Option<CpuSet> {
    if devices.is_empty() {
        return None;
    }
    let near = cpus_near(&Topology::read(Path::new(SYSFS)).ok()?, devices);
    let mut set = CpuSet::new();
    for cpu in near.into_iter().filter(|cpu| *cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    (set.count() > 0).then_some(set)
}

/// Restricts the current thread to CPUs near some devices while it lives, so that memory that the
/// thread touches first is allocated there.
#[derive(Debug)]
pub(crate) struct AffinityGuard {
    before: Option<CpuSet>,
}

impl AffinityGuard {
    pub fn near(devices: &[String]) -> Self {
        let before = cpus(devices).and_then(|near| {
            let before = sched_getaffinity(None).ok()?;
            sched_setaffinity(None, &near).ok().map(|()| before)
        });
        Self { before }
    }
}

impl Drop for AffinityGuard {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = sched_setaffinity(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_gpu_is_named() {
        let gpu = Some("0000:ff:1f.7".to_owned());
        let config = NicConfig { gpu, ..Default::default() };
        let error = nearest(&["mlx5_0".into()], &config).unwrap_err().to_string();
        assert!(error.contains("there is no GPU \"0000:ff:1f.7\" here"), "{error}");
    }

    #[test]
    fn the_affinity_guard_restores_the_cpus() {
        let before = sched_getaffinity(None).unwrap();
        drop(AffinityGuard::near(&["no such device".into()]));
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
