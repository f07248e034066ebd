//! From `fabric_ray.EngineConfig` to the engine's configuration.

use std::{net::IpAddr, time::Duration};

use fabric_engine as fe;
use fe::api::{EngineConfig, NicConfig, Ports, Requirement, Spin, Spray, TransportKind};
use pyo3::prelude::*;

use super::seconds;
use crate::errors::{raise, OrRaise};

/// A `fabric_ray.EngineConfig`, by its attributes.
#[derive(FromPyObject)]
pub(super) struct Settings {
    name: String,
    transports: Vec<String>,
    require: Option<String>,
    token: Option<Vec<u8>>,
    bind: Vec<String>,
    ports: Option<(u16, u16)>,
    tcp_streams: usize,
    spin_us: Option<u64>,
    copy_threads: Option<usize>,
    inline_bytes: u64,
    stage_foreign: bool,
    peer_timeout: f64,
    op_timeout: f64,
    heal: bool,
    rail_window: u64,
    receive_window: u64,
    records: usize,
    nics: Vec<String>,
    max_rails: usize,
    spray: String,
    gpu: Option<String>,
    rail_rules: Option<String>,
    gid_index: Option<u8>,
    pkey_index: u16,
    service_level: u8,
    traffic_class: u8,
    libfabric_provider: Option<String>,
}

impl Settings {
    pub(super) fn engine_config(self, py: Python<'_>) -> PyResult<EngineConfig> {
        let defaults = EngineConfig::default();
        let transports = self.transports.iter().map(|name| transport(py, name));
        let require = self.require.map(|name| requirement(py, &name));
        let ports = self.ports.map(|(first, last)| Ports::new(first, last));
        Ok(EngineConfig {
            name: self.name,
            transports: transports.collect::<PyResult<_>>()?,
            require: require.transpose()?,
            token: self.token,
            bind: self.bind.iter().map(|a| address(py, a)).collect::<PyResult<_>>()?,
            ports: ports.transpose().or_raise(py)?,
            tcp_streams: self.tcp_streams,
            spin: self.spin_us.map_or(Spin::Always, |us| Spin::For(Duration::from_micros(us))),
            copy_threads: self.copy_threads.unwrap_or(defaults.copy_threads),
            inline_bytes: self.inline_bytes,
            stage_foreign: self.stage_foreign,
            peer_timeout: seconds(py, Some(self.peer_timeout), Duration::ZERO)?,
            op_timeout: seconds(py, Some(self.op_timeout), Duration::ZERO)?,
            heal: self.heal,
            rail_window: self.rail_window,
            receive_window: self.receive_window,
            records: self.records,
            nics: NicConfig {
                names: self.nics,
                max_rails: self.max_rails,
                spray: match self.spray.as_str() {
                    "round_robin" => Spray::RoundRobin,
                    "random" => Spray::Random(0),
                    _ => Spray::Adaptive,
                },
                gpu: self.gpu,
                rules: self.rail_rules,
                gid_index: self.gid_index,
                pkey_index: self.pkey_index,
                service_level: self.service_level,
                traffic_class: self.traffic_class,
                provider: self.libfabric_provider,
                shuffle: None,
            },
        })
    }
}

fn transport(py: Python<'_>, name: &str) -> PyResult<TransportKind> {
    name.parse().or_raise(py)
}

fn requirement(py: Python<'_>, name: &str) -> PyResult<Requirement> {
    match name {
        "rdma" => Ok(Requirement::Rdma),
        name => Ok(Requirement::Transport(transport(py, name)?)),
    }
}

fn address(py: Python<'_>, text: &str) -> PyResult<IpAddr> {
    text.parse().map_err(|e| {
        let text = format!("bind address {text:?}: {e}");
        raise(py, &fe::EngineError::Invalid(text))
    })
}
