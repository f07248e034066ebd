use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{fs::MemfdFlags, io::Errno, mm};

use super::{headroom::headroom, huge};
use crate::{EngineError, Result};

/// Size from which on free memory is checked first, bytes.
const HEADROOM_CHECK_BYTES: u64 = 64 << 20;

/// Memory that peers on this host can map: a sealed-size memfd, mapped here, freed with the last
/// reference. It has no name in any file system, so that nothing is left behind by `kill -9`.
#[derive(Debug)]
pub struct Allocation {
    id: u64,
    fd: OwnedFd,
    base: usize,
    len: usize,
}

impl Allocation {
    /// `len` bytes of zeroes, rounded up to pages, backed by real memory now rather than at first
    /// touch: running out is an error here, not a SIGBUS later.
    pub fn new(len: u64) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let page = rustix::param::page_size() as u64;
        let rounded = len
            .max(1)
            .checked_next_multiple_of(page)
            .filter(|n| *n <= isize::MAX as u64)
            .ok_or_else(|| EngineError::Invalid(format!("{len} bytes are more than can exist")))?;
        let fail = |call| move |e: Errno| allocation_failed(call, e, rounded);
        if rounded >= HEADROOM_CHECK_BYTES && rounded > headroom() {
            return Err(fail("memfd_create")(Errno::NOMEM));
        }
        let fd = rustix::fs::memfd_create(
            c"fabric-ray",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )
        .map_err(fail("memfd_create"))?;
        rustix::fs::ftruncate(&fd, rounded).map_err(fail("ftruncate"))?;
        // A peer that holds the descriptor must not be able to shrink it under us.
        use rustix::fs::SealFlags;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(fail("fcntl(F_ADD_SEALS)"))?;
        let len = rounded as usize;
        let base = huge::map_shared(fd.as_fd(), len).map_err(fail("mmap"))?;
        let allocation = Self { id: NEXT.fetch_add(1, Ordering::Relaxed), fd, base, len };
        huge::allocate_memfd(allocation.fd(), base, len)
            .or_else(|e| match e {
                // Kernels before 5.14 don't know the advice.
                Errno::INVAL => rustix::fs::fallocate(
                    &allocation.fd,
                    rustix::fs::FallocateFlags::empty(),
                    0,
                    rounded,
                ),
                e => Err(e),
            })
            .map_err(fail("madvise(MADV_POPULATE_WRITE)"))?;
        Ok(allocation)
    }

    /// Unique among the allocations of this process.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn base(&self) -> usize {
        self.base
    }

    pub fn len(&self) -> u64 {
        self.len as u64
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`; regions hold this allocation by reference
        // count, so that no registered region points into it any more.
        let _ = unsafe { mm::munmap(self.base as *mut _, self.len) };
    }
}

fn allocation_failed(call: &'static str, errno: Errno, len: u64) -> EngineError {
    match errno {
        Errno::NOMEM | Errno::NOSPC | Errno::FAULT => EngineError::Resource {
            call,
            cause: format!("{errno} for {len} bytes of shared memory"),
            hint: "free memory, ask for less, or raise the memory limit of this container".into(),
        },
        e => EngineError::resource(call, e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_cannot_exist_are_refused() {
        for len in [u64::MAX, 1 << 63, isize::MAX as u64 + 1] {
            assert!(matches!(Allocation::new(len), Err(EngineError::Invalid(_))));
        }
        assert!(matches!(Allocation::new(1 << 60), Err(EngineError::Resource { .. })));
    }

    #[test]
    fn more_than_the_machine_has_is_an_error_and_no_killer_comes() {
        let e = Allocation::new(headroom().saturating_mul(2)).unwrap_err();
        assert!(e.to_string().contains("free memory, ask for less"), "{e}");
    }

    #[test]
    fn a_peer_cannot_shrink_it() {
        let a = Allocation::new(10_000).unwrap();
        assert_eq!(a.len() % 4096, 0);
        assert_eq!(rustix::fs::ftruncate(a.fd(), 0), Err(Errno::PERM));
    }
}
