//! Which NICs an engine drives, and where the threads that drive them run.

use std::path::Path;

use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

use crate::{
    api::{NicConfig, MAX_RAILS},
    domain::DomainError,
    topology::{self, cpus_near, pairing_for, Location, PciAddress, Rules, Tier, Topology},
};

const SYSFS: &str = "/sys";

/// The rails, in order, of the devices that a transport can open: those nearest to the memory that
/// the engine serves, for engines whose user has named none.
pub(crate) fn nearest(usable: &[String], config: &NicConfig) -> Result<Vec<String>, DomainError> {
    let topology = Topology::read(Path::new(SYSFS)).map_err(DomainError::Unavailable)?;
    let location = location(&topology, config)?;
    let rules = Rules::parse(config.rules.as_deref().unwrap_or_default())
        .map_err(DomainError::Unavailable)?;
    let most = config.max_rails.clamp(1, MAX_RAILS);
    pairing_for(&topology, location, usable, most, &rules).map_err(DomainError::Unavailable)
}

/// How far devices are from the memory that the engine serves.
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
        return Ok(gpu.place.address);
    }
    let there: Vec<_> = topology.gpus.iter().map(|g| g.place.address.to_string()).collect();
    Err(DomainError::Unavailable(format!(
        "there is no GPU {gpu:?} here; there are: {}",
        if there.is_empty() { "none".to_owned() } else { there.join(", ") }
    )))
}

/// The CPUs near these devices; `None` where it makes no difference.
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

/// While it lives, this thread runs near some devices, so that the memory that it touches first lies
/// there too.
#[derive(Debug)]
pub(crate) struct Near {
    before: Option<CpuSet>,
}

impl Near {
    pub fn devices(devices: &[String]) -> Self {
        let before = cpus(devices).and_then(|near| {
            let before = sched_getaffinity(None).ok()?;
            sched_setaffinity(None, &near).ok().map(|()| before)
        });
        Self { before }
    }
}

impl Drop for Near {
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
    fn a_gpu_that_is_not_there_is_named() {
        let gpu = Some("0000:ff:1f.7".to_owned());
        let config = NicConfig { gpu, ..Default::default() };
        let error = nearest(&["mlx5_0".into()], &config).unwrap_err().to_string();
        assert!(error.contains("there is no GPU \"0000:ff:1f.7\" here"), "{error}");
    }

    #[test]
    fn a_thread_comes_back_from_near_a_device() {
        let before = sched_getaffinity(None).unwrap();
        drop(Near::devices(&["no such device".into()]));
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
