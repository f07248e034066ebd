//! Which NICs an engine drives, and where the threads that drive them run.

use std::path::Path;

use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

use crate::{
    api::{NicConfig, MAX_RAILS},
    domain::DomainError,
    topology::{cpus_near, matches_glob, pairing_for, Location, PciAddress, Rules, Topology},
};

const SYSFS: &str = "/sys";

/// The rails, in order, of the devices that a transport can open: those that the user named, or
/// those nearest to the memory that the engine serves.
pub(crate) fn choose(usable: &[String], config: &NicConfig) -> Result<Vec<String>, DomainError> {
    let most = config.max_rails.clamp(1, MAX_RAILS);
    if config.names.is_empty() {
        let topology = Topology::read(Path::new(SYSFS)).map_err(DomainError::Unavailable)?;
        let location = match &config.gpu {
            Some(gpu) => Location::Gpu(gpu_address(&topology, gpu)?),
            None => Location::Host,
        };
        let rules = Rules::parse(config.rules.as_deref().unwrap_or_default())
            .map_err(DomainError::Unavailable)?;
        let chosen = pairing_for(&topology, location, usable, most, &rules);
        return chosen.map_err(DomainError::Unavailable);
    }
    let mut chosen: Vec<String> = Vec::new();
    for name in &config.names {
        let found: Vec<_> = usable.iter().filter(|d| matches_glob(name, d)).collect();
        if found.is_empty() {
            return Err(DomainError::Unavailable(format!(
                "no usable device matches {name:?}; there are: {}",
                if usable.is_empty() { "none".to_owned() } else { usable.join(", ") }
            )));
        }
        for device in found {
            if !chosen.contains(device) {
                chosen.push(device.clone());
            }
        }
    }
    chosen.truncate(most);
    Ok(chosen)
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

    fn named(names: &[&str]) -> NicConfig {
        NicConfig { names: names.iter().map(|n| n.to_string()).collect(), ..Default::default() }
    }

    #[test]
    fn names_keep_their_order_and_must_match() {
        let there = ["mlx5_0", "mlx5_1", "mlx5_10", "rxe0"].map(String::from);
        assert_eq!(
            choose(&there, &named(&["rxe0", "mlx5_1*"])).unwrap(),
            ["rxe0", "mlx5_1", "mlx5_10"]
        );
        let two = NicConfig { max_rails: 2, ..named(&["*"]) };
        assert_eq!(choose(&there, &two).unwrap(), ["mlx5_0", "mlx5_1"]);
        let error = choose(&there, &named(&["bnxt*"])).unwrap_err().to_string();
        assert!(error.contains("\"bnxt*\"") && error.contains("mlx5_0, mlx5_1"), "{error}");
    }

    #[test]
    fn a_thread_comes_back_from_near_a_device() {
        let before = sched_getaffinity(None).unwrap();
        drop(Near::devices(&["no such device".into()]));
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
