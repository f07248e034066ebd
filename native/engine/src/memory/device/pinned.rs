//! Staging memory: shared with peers on this host, pinned for the copy engine where there is one.

use std::sync::Arc;

use super::{driver::Driver, Location};
use crate::{error::DomainError, memory::Allocation};

/// An allocation that is pinned from the first copy of GPU memory on.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub allocation: Arc<Allocation>,
    state: PinState,
}

#[derive(Debug)]
enum PinState {
    /// No GPU has used it.
    Unused,
    Pinned(&'static Driver, i32),
    /// The driver refused, or another part of this process has pinned it.
    NotOurs,
}

impl Pinned {
    pub fn new(len: u64) -> Result<Self, DomainError> {
        let allocation = Allocation::new(len).map_err(|e| DomainError::Unavailable(e.to_string()));
        Ok(Self { allocation: Arc::new(allocation?), state: PinState::Unused })
    }

    pub fn base(&self) -> usize {
        self.allocation.base()
    }

    /// Pins it before a copy to or from GPU memory; other memory needs no pin. It is then pinned
    /// for all GPUs. Unpinned memory works as well, only slower, so that failing to pin is a
    /// warning.
    pub fn pin_for(&mut self, location: &Location) {
        if matches!(self.state, PinState::Unused) {
            if let Some((range, driver)) = location.cuda().zip(Driver::in_use()) {
                self.pin(driver, range.device);
            }
        }
    }

    fn pin(&mut self, driver: &'static Driver, device: i32) {
        self.state = match driver.pin(device, self.base(), self.allocation.len() as usize) {
            Ok(true) => PinState::Pinned(driver, device),
            Ok(false) => PinState::NotOurs,
            Err(error) => {
                tracing::warn!(%error, "staging memory is not pinned: copies are slow");
                PinState::NotOurs
            }
        };
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let PinState::Pinned(driver, device) = self.state {
            if let Err(error) = driver.unpin(device, self.base()) {
                tracing::debug!(%error, "staging memory stays pinned");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, ffi::c_void};

    use fabric_sys::cuda as sys;

    use super::*;

    thread_local! {
        /// Addresses that any part of the process has pinned.
        static PINNED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    }

    extern "C" fn register(addr: *mut c_void, _: usize, _: u32) -> sys::Result {
        PINNED.with_borrow_mut(|pinned| match pinned.contains(&(addr as usize)) {
            true => sys::ERROR_HOST_MEMORY_ALREADY_REGISTERED,
            false => {
                pinned.push(addr as usize);
                sys::SUCCESS
            }
        })
    }

    extern "C" fn unregister(addr: *mut c_void) -> sys::Result {
        PINNED.with_borrow_mut(|pinned| pinned.retain(|at| *at != addr as usize));
        sys::SUCCESS
    }

    #[test]
    fn what_another_part_of_the_process_has_pinned_stays_pinned() {
        let driver = Driver::of_contexts(1, |table| {
            (table.host_register, table.host_unregister) = (register, unregister);
        });
        let mut ours = Pinned::new(4096).unwrap();
        let mut theirs = Pinned::new(4096).unwrap();
        let base = theirs.base();
        register(base as *mut _, 4096, 0);
        for memory in [&mut ours, &mut theirs] {
            memory.pin(driver, 0);
        }
        assert_eq!(PINNED.with_borrow(Vec::clone), [base, ours.base()]);
        drop((ours, theirs));
        assert_eq!(PINNED.take(), [base]);
    }
}
