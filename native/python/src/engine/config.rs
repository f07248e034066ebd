//! From the keywords of `fabric_ray.EngineConfig` to the engine's configuration.

use std::net::IpAddr;

use fabric_engine as fe;
use fe::api::{NicConfig, Requirement, Spray, TransportKind};
use pyo3::prelude::*;

use crate::errors::{raise, OrRaise};

/// The fields of `fabric_ray.EngineConfig` about NICs, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(super) struct Nics {
    names: Vec<String>,
    max_rails: usize,
    spray: String,
    gpu: Option<String>,
    rules: Option<String>,
    gid_index: Option<u8>,
    pkey_index: u16,
    service_level: u8,
    traffic_class: u8,
    provider: Option<String>,
}

impl From<Nics> for NicConfig {
    fn from(n: Nics) -> Self {
        let Nics { names, max_rails, gpu, rules, gid_index, pkey_index, .. } = n;
        let Nics { spray, service_level, traffic_class, provider, .. } = n;
        Self {
            names,
            max_rails,
            spray: match spray.as_str() {
                "round_robin" => Spray::RoundRobin,
                "random" => Spray::Random(0),
                _ => Spray::Adaptive,
            },
            gpu,
            rules,
            gid_index,
            pkey_index,
            service_level,
            traffic_class,
            provider,
            shuffle: None,
        }
    }
}

pub(super) fn transport(py: Python<'_>, name: &str) -> PyResult<TransportKind> {
    name.parse().or_raise(py)
}

pub(super) fn requirement(py: Python<'_>, name: &str) -> PyResult<Requirement> {
    match name {
        "rdma" => Ok(Requirement::Rdma),
        name => Ok(Requirement::Transport(transport(py, name)?)),
    }
}

pub(super) fn address(py: Python<'_>, text: &str) -> PyResult<IpAddr> {
    text.parse().map_err(|e| {
        let text = format!("bind address {text:?}: {e}");
        raise(py, &fe::EngineError::Invalid(text))
    })
}
