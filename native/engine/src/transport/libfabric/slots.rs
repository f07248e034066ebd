//! Frame buffers: slots of equal size, registered with the NIC if it needs that.

use std::{alloc, ffi::c_void, ptr::null_mut};

use super::raw::{Mr, Nic};
use crate::domain::DomainError;

/// Bytes of a slot: one packet of every NIC.
pub(super) const SLOT: usize = 4096;

/// Slots of [`SLOT`] bytes each.
pub(super) struct Slots {
    base: *mut u8,
    n: usize,
    mr: Option<Mr>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Slots {}

impl Drop for Slots {
    fn drop(&mut self) {
        self.mr = None;
        if self.n == 0 {
            return;
        }
        // SAFETY: allocated with this layout in `new`.
        unsafe { alloc::dealloc(self.base, Self::layout(self.n)) };
    }
}

impl Slots {
    fn layout(n: usize) -> alloc::Layout {
        // The alignment is a power of two, and the size is bounded by the queue's.
        alloc::Layout::from_size_align(n.max(1) * SLOT, 4096)
            .unwrap_or_else(|_| unreachable!("slots of a bounded queue"))
    }

    pub fn new(nic: &Nic, n: usize, key: u64) -> Result<Self, DomainError> {
        let layout = Self::layout(n);
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        if base.is_null() {
            alloc::handle_alloc_error(layout);
        }
        let mut slots = Self { base, n, mr: None };
        // SAFETY: the memory lives as long as `slots`, which drops the registration first.
        slots.mr = Some(unsafe { nic.register(base as usize, (n * SLOT) as u64, key) }?);
        Ok(slots)
    }

    pub fn addr(&self, i: usize) -> usize {
        assert!(i < self.n, "slot {i} of {}", self.n);
        self.base as usize + i * SLOT
    }

    pub fn desc(&self) -> *mut c_void {
        self.mr.as_ref().map_or(null_mut(), Mr::desc)
    }

    pub fn key(&self) -> u64 {
        self.mr.as_ref().map_or(0, |mr| mr.key)
    }

    /// Takes all slots out.
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self { base: null_mut(), n: 0, mr: None })
    }

    /// Ends the registration; the memory stays.
    pub fn unregister(&mut self) {
        self.mr = None;
    }

    /// The first `len` bytes of a slot that is not posted.
    pub fn bytes(&self, i: usize, len: usize) -> &[u8] {
        // SAFETY: inside the allocation and initialised; the caller holds a slot that the NIC has
        // returned, so there is no writer.
        unsafe { std::slice::from_raw_parts(self.addr(i) as *const u8, len.min(SLOT)) }
    }

    /// A slot to fill, which is not posted.
    pub fn fill(&mut self, i: usize) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.addr(i) as *mut u8, SLOT) }
    }
}
