//! Registrations of whole allocations, shared by all the regions that lie in them: an allocator
//! serves many tensors from one segment, and a NIC pays for each registration, not for its length.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use super::CudaRange;

/// What each segment was registered as, for as long as a region in it uses that.
///
/// A region keeps its tensor, so the allocator can't give the segment back while one is registered;
/// once none is, the entry is dead, and another allocation at the same address starts anew.
#[derive(Debug)]
pub struct Segments<T> {
    known: HashMap<(i32, u64, u64), Weak<T>>,
}

impl<T> Default for Segments<T> {
    fn default() -> Self {
        Self { known: HashMap::new() }
    }
}

impl<T> Segments<T> {
    /// The registration of the segment around a range; `make` is given the segment's start and bytes
    /// if there is none.
    pub fn share<E>(
        &mut self,
        range: &CudaRange,
        make: impl FnOnce(u64, u64) -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let (base, len) = range.segment();
        let key = (range.device, base, len);
        if let Some(known) = self.known.get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let made = Arc::new(make(base, len)?);
        self.known.retain(|_, t| t.strong_count() > 0);
        self.known.insert(key, Arc::downgrade(&made));
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::device::CudaKind;

    #[test]
    fn a_segment_is_made_once_while_it_is_used_and_anew_after() {
        let range = |device| CudaRange {
            device,
            pci: String::new(),
            base: 2 << 20,
            len: 20 << 20,
            kind: CudaKind::Malloc,
        };
        let mut segments = Segments::default();
        let mut made = 0;
        let mut share = |device| {
            segments.share::<()>(&range(device), |base, len| {
                made += 1;
                Ok((made, base, len))
            })
        };
        let (first, second) = (share(0).unwrap(), share(0).unwrap());
        assert_eq!((*first, *second), ((1, 2 << 20, 20 << 20), (1, 2 << 20, 20 << 20)));
        assert_eq!(share(1).unwrap().0, 2, "another device's is another one");
        drop(first);
        assert_eq!(share(0).unwrap().0, 1);
        drop(second);
        assert_eq!(share(0).unwrap().0, 3);
    }
}
