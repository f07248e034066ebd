use crate::{
    api::{EngineConfig, EngineId},
    domain::{Domain, DomainError},
};

/// The domains of this kind, one for each NIC.
pub(crate) fn open(
    _id: EngineId,
    _config: &EngineConfig,
) -> Result<Vec<Box<dyn Domain>>, DomainError> {
    Err(DomainError::Unavailable("not yet".into()))
}
