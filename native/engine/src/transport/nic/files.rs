//! Regions in files, which NICs cannot reach.

use crate::{
    domain::{Data, DomainError},
    memory::device::MemoryKind,
};

/// An error if `data` lies in a file, which has no NIC key.
pub(crate) fn refuse_files(data: &Data) -> Result<(), DomainError> {
    if data.remote.memory_kind() != MemoryKind::File {
        return Ok(());
    }
    Err(DomainError::Refused(
        "the region is a file of the peer's, which NICs can't reach; connect the engines by shm or \
        tcp"
            .into(),
    ))
}
