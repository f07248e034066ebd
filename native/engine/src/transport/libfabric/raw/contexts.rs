//! Contexts that identify operations to the library.

use std::{ffi::c_void, ptr::null_mut};

use fabric_sys::libfabric as fi;

/// Scratch space of operations, one for each that may be under way; its index identifies it.
pub(in super::super) struct Contexts(Box<[std::cell::UnsafeCell<fi::Context2>]>);

// SAFETY: the library alone writes to the cells; this code uses only their addresses.
unsafe impl Send for Contexts {}

impl Contexts {
    pub fn new(n: usize) -> Self {
        let blank = || fi::Context2 { internal: [null_mut(); 8] };
        Self((0..n).map(|_| std::cell::UnsafeCell::new(blank())).collect())
    }

    pub fn at(&self, i: u32) -> *mut c_void {
        self.0[i as usize].get().cast()
    }

    /// The index of a context.
    pub fn index(&self, context: *mut c_void) -> Option<u32> {
        let offset = (context as usize).checked_sub(self.0.as_ptr() as usize)?;
        let size = size_of::<fi::Context2>();
        let i = offset / size;
        (offset.is_multiple_of(size) && i < self.0.len()).then_some(i as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_distinguished_from_other_addresses() {
        let contexts = Contexts::new(3);
        for i in 0..3 {
            assert_eq!(contexts.index(contexts.at(i)), Some(i));
        }
        let end = contexts.at(2) as usize + size_of::<fi::Context2>();
        assert_eq!(contexts.index(null_mut()), None);
        assert_eq!(contexts.index(end as *mut c_void), None);
        assert_eq!(contexts.index((end - 1) as *mut c_void), None);
    }
}
