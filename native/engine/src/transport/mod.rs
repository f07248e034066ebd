//! Implementations of `Domain`: one folder per transport.

mod cuda_ipc;
mod file;
pub mod libfabric;
pub mod null;
pub mod shm;
pub mod sim;
pub mod tcp;
pub mod verbs;

pub(crate) mod handshake;
mod listener;
pub(crate) mod log_limit;
pub(crate) mod nic;
pub(crate) mod nics;
mod sockets;
pub(crate) mod staged;

use std::sync::Arc;

use staged::Staged;

use crate::{
    api::{EngineConfig, EngineId, TransportKind},
    domain::{Domain, DomainError},
    memory::file::FileQueue,
    wake::Waker,
    EngineError,
};

/// Derives the handshake key of a token ([`handshake`]), for other channels that prove the same
/// token.
///
/// # Errors
/// [`EngineError::Resource`] if Argon2 cannot allocate its 19 MiB.
pub fn stretched_token(token: &[u8]) -> Result<[u8; 32], EngineError> {
    handshake::stretched(token).map_err(|e| EngineError::Resource {
        call: "argon2",
        cause: e.to_string(),
        hint: "the token's key briefly takes 19 MiB".into(),
    })
}

/// Opens the domains of one kind, one for each NIC that the engine drives. Libraries and their
/// providers initialise here; the process's signal handlers stay unchanged.
pub(crate) fn open(
    kind: TransportKind,
    id: EngineId,
    config: &EngineConfig,
    with: (&Waker, &Arc<FileQueue>),
) -> Result<Vec<Box<dyn Domain>>, DomainError> {
    fabric_sys::keep_signals(|| open_one(kind, id, config, with))
}

fn open_one(
    kind: TransportKind,
    id: EngineId,
    config: &EngineConfig,
    (waker, files): (&Waker, &Arc<FileQueue>),
) -> Result<Vec<Box<dyn Domain>>, DomainError> {
    let one: Box<dyn Domain> = match kind {
        TransportKind::Shm => {
            Box::new(Staged::new(shm::ShmDomain::open(kind, id, config, waker)?, files))
        }
        TransportKind::Tcp => Box::new(Staged::new(tcp::TcpDomain::open(id, config)?, files)),
        TransportKind::Null => Box::new(null::NullDomain::default()),
        TransportKind::Verbs => return verbs::open(id, config),
        TransportKind::Libfabric => return libfabric::open(id, config),
        TransportKind::CudaIpc => Box::new(Staged::new(cuda_ipc::open(id, config, waker)?, files)),
        TransportKind::File => Box::new(file::FileDomain::new(files)),
        TransportKind::Sim => {
            let why = "simulated links exist only inside a simulation";
            return Err(DomainError::Unavailable(why.into()));
        }
        TransportKind::Unknown(number) => {
            let why = format!("this build has no transport number {number}");
            return Err(DomainError::Unavailable(why));
        }
    };
    Ok(vec![one])
}
