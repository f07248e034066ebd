//! Files, which no NIC reaches.

use crate::{
    domain::{Data, DomainError},
    memory::device::Nature,
};

/// Why there is no key for `data`, if it is that a file has none.
pub(crate) fn refuse_files(data: &Data) -> Result<(), DomainError> {
    if data.remote.nature() != Nature::File {
        return Ok(());
    }
    Err(DomainError::Refused(
        "the region is a file of the peer's, which NICs don't reach: let the two engines meet over \
         shm or tcp"
            .into(),
    ))
}
