//! The domains: one folder per kind of link.

pub mod null;
pub mod shm;
pub mod sim;
pub mod tcp;

pub(crate) mod handshake;
mod listener;

use std::sync::{Arc, OnceLock, Weak};

use crate::{
    api::{EngineConfig, EngineId, TransportKind},
    domain::{Domain, DomainError},
    engine::Shared,
};

/// How a domain's helper threads tell that something is there to be polled.
#[derive(Clone, Default)]
pub(crate) struct Waker(Arc<OnceLock<Weak<Shared>>>);

impl Waker {
    pub fn set(&self, shared: &Arc<Shared>) {
        let _ = self.0.set(Arc::downgrade(shared));
    }

    pub fn wake(&self) {
        if let Some(shared) = self.0.get().and_then(Weak::upgrade) {
            shared.cell.kick();
        }
    }
}

pub(crate) fn open(
    kind: TransportKind,
    id: EngineId,
    config: &EngineConfig,
    waker: &Waker,
) -> Result<Box<dyn Domain>, DomainError> {
    match kind {
        TransportKind::Shm => Ok(Box::new(shm::ShmDomain::open(id, config, waker)?)),
        TransportKind::Tcp => Ok(Box::new(tcp::TcpDomain::open(id, config)?)),
        TransportKind::Null => Ok(Box::new(null::NullDomain::default())),
        TransportKind::Sim => {
            Err(DomainError::Unavailable("simulated links exist only inside a simulation".into()))
        }
    }
}

/// Why no RDMA transport can be used, device by device.
pub(crate) fn rdma_rejections() -> String {
    let devices: Vec<String> = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .flatten()
        .map(|d| d.file_name().to_string_lossy().into_owned())
        .collect();
    let this_build = "this build has no verbs or libfabric transport";
    match devices.is_empty() {
        true => format!("no RDMA device on this machine (/sys/class/infiniband); {this_build}"),
        false => format!("{}: {this_build}", devices.join(", ")),
    }
}
