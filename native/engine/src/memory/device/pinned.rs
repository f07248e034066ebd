//! Staging memory: shared with peers on this host, pinned for the copy engine where there is one.

use std::sync::Arc;

use super::driver::Driver;
use crate::{error::DomainError, memory::Allocation};

/// An allocation that is pinned for as long as this lives.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub allocation: Arc<Allocation>,
    pin: Option<(&'static Driver, i32)>,
}

impl Pinned {
    /// `len` bytes, pinned by way of `device` and so for all of them. Unpinned memory works as well,
    /// only slower, so that failing to pin is a warning.
    pub fn new(len: u64, device: Option<i32>) -> Result<Self, DomainError> {
        let allocation =
            Arc::new(Allocation::new(len).map_err(|e| DomainError::Unavailable(e.to_string()))?);
        let mut pinned = Self { allocation, pin: None };
        if let Some((device, driver)) = device.zip(Driver::in_use()) {
            let (base, len) = (pinned.base(), pinned.allocation.len() as usize);
            match driver.pin(device, base, len) {
                Ok(()) => pinned.pin = Some((driver, device)),
                Err(error) => {
                    tracing::warn!(%error, "staging memory is not pinned: copies are slow")
                }
            }
        }
        Ok(pinned)
    }

    pub fn base(&self) -> usize {
        self.allocation.base()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some((driver, device)) = self.pin {
            if let Err(error) = driver.unpin(device, self.base()) {
                tracing::debug!(%error, "staging memory stays pinned");
            }
        }
    }
}
