//! GPU memory between processes of one host. The transport uses the links of shm, maps the owner's
//! allocations by CUDA IPC, and copies with the copy engine.
//!
//! Memory that cannot be exported (mapped piecewise, or from a pool) is staged.

use super::shm::ShmDomain;
use crate::{
    api::{EngineConfig, EngineId, Requirement, TransportKind},
    domain::DomainError,
    memory::device::Driver,
    wake::Waker,
};

/// Opens the transport. It starts CUDA only if the configuration names the transport, because a
/// process that has started CUDA cannot use it after a fork.
pub(super) fn open(
    id: EngineId,
    config: &EngineConfig,
    waker: &Waker,
) -> Result<ShmDomain, DomainError> {
    let kind = TransportKind::CudaIpc;
    let required = config.require == Some(Requirement::Transport(kind));
    if config.transports.contains(&kind) || required {
        Driver::open()?;
    } else if Driver::in_use().is_none() {
        return Err(DomainError::Unavailable(
            "this process does not use CUDA yet; use it before the engine opens, or name cuda_ipc \
             among the transports"
                .into(),
        ));
    }
    ShmDomain::open(kind, id, config, waker)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rs_2_without_cuda_the_error_names_the_cause() {
        if Driver::in_use().is_some() || std::path::Path::new("/dev/nvidiactl").exists() {
            return;
        }
        let open = |config| {
            let id = EngineId([0; 16]);
            open(id, &config, &Waker::default()).map(drop).unwrap_err().to_string()
        };
        let silent = open(EngineConfig::default());
        assert!(silent.contains("name cuda_ipc"), "{silent}");
        let transports = vec![TransportKind::CudaIpc];
        let asked = open(EngineConfig { transports, ..EngineConfig::default() });
        assert!(asked.contains("libcuda") || asked.contains("cuInit"), "{asked}");
    }
}
