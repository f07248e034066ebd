//! Shared memory in huge pages, which need fewer page walks when copied.

use std::{os::fd::BorrowedFd, ptr};

use rustix::{fs, io::Result, mm};

/// Size of a huge page, bytes.
pub(crate) const HUGE: usize = 2 << 20;
/// Bytes that are turned into huge pages at a time. A killed process ends between two steps, so its
/// peers learn of it (RS-4).
const PART: usize = 128 << 20;

/// Attempts to find free addresses, which another thread's mapping may take first.
const MAX_ATTEMPTS: usize = 16;

/// Maps `len` bytes from the start of `fd`, for reading and writing. If they hold a huge page, they
/// begin at a multiple of one if possible, because page tables need that.
pub(crate) fn map_shared(fd: BorrowedFd<'_>, len: usize) -> Result<usize> {
    let prot = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
    let map = |at: usize, flags| {
        // SAFETY: a fresh mapping that takes the place of none aliases nothing.
        unsafe { mm::mmap(at as *mut _, len, prot, mm::MapFlags::SHARED | flags, fd, 0) }
    };
    // What it is may be longer than what was asked for, and another thread may have mapped in
    // between: nothing is replaced.
    let tries = if len >= HUGE { MAX_ATTEMPTS } else { 0 };
    let begun = (0..tries).find_map(|_| map(room(len)?, mm::MapFlags::FIXED_NOREPLACE).ok());
    let at = begun.map_or_else(|| map(0, mm::MapFlags::empty()), Ok);
    at.map(|at| at as usize)
}

/// Finds an address at a multiple of a huge page where `len` bytes were free a moment ago.
fn room(len: usize) -> Option<usize> {
    let more = len.checked_add(HUGE)?;
    let flags = mm::MapFlags::PRIVATE | mm::MapFlags::NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice, that no other code knows.
    unsafe {
        let at = mm::mmap_anonymous(ptr::null_mut(), more, mm::ProtFlags::empty(), flags).ok()?;
        mm::munmap(at, more).ok()?;
        Some((at as usize).next_multiple_of(HUGE))
    }
}

/// Backs `len` bytes of a new memfd with memory, mapped at `addr` by [`map_shared`]: whole huge
/// pages while the system has some, even if `shmem_enabled` gives none to others.
pub(crate) fn allocate_memfd(fd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<()> {
    let whole = len / HUGE * HUGE;
    // SAFETY: advice on whole pages of a live mapping; it changes no byte.
    let _ = unsafe { mm::madvise(addr as *mut _, whole, mm::Advice::LinuxHugepage) };
    // A huge page is made around any page that is there, ten times faster than of 512 that are
    // mapped, and than filling the page table with those. Which page it is decides on which NUMA
    // node, where memory is interleaved.
    let page = rustix::param::page_size();
    let mut seeds = (0..whole / HUGE).map(|i| (i * HUGE + i * page % HUGE) as u64);
    if seeds.all(|at| fs::fallocate(fd, fs::FallocateFlags::empty(), at, page as u64).is_ok()) {
        // Where it fails, the kernel is older than 6.1 or memory is in small pieces: then these are
        // what it gets.
        let mut parts = (0..whole).step_by(PART).map(|at| (addr + at, PART.min(whole - at)));
        parts.all(|(at, n)| collapse(at, n));
    }
    populate(addr, len)
}

/// Makes `len` bytes at `addr` present and writable in this process's page tables.
pub(crate) fn populate(addr: usize, len: usize) -> Result<()> {
    // SAFETY: the advice fills page tables of a live mapping and changes no byte of it.
    unsafe { mm::madvise(addr as *mut _, len, mm::Advice::LinuxPopulateWrite) }
}

/// Turns the pages of a mapping into huge pages; false if not all.
fn collapse(addr: usize, len: usize) -> bool {
    // SAFETY: the advice adds pages to a live mapping and changes no byte of it.
    unsafe { libc::madvise(addr as *mut _, len, libc::MADV_COLLAPSE) == 0 }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn memory_of_any_size_is_all_zero_and_can_be_written() {
        for len in [1, 4096, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 4096] {
            let fd = fs::memfd_create(c"t", fs::MemfdFlags::CLOEXEC).unwrap();
            fs::ftruncate(&fd, len as u64).unwrap();
            let maps = [map_shared(fd.as_fd(), len).unwrap(), map_shared(fd.as_fd(), len).unwrap()];
            allocate_memfd(fd.as_fd(), maps[0], len).unwrap();
            populate(maps[1], len).unwrap();
            // SAFETY: both mappings are of `len` bytes and live until below; no reference outlives
            // a statement.
            let bytes = |at: usize| unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) };
            assert!(bytes(maps[0]).iter().all(|b| *b == 0));
            bytes(maps[0]).fill(7);
            assert!(bytes(maps[1]).iter().all(|b| *b == 7));
            for at in maps {
                assert!(len < HUGE || at.is_multiple_of(HUGE));
                // SAFETY: mapped above.
                unsafe { mm::munmap(at as *mut _, len) }.unwrap();
            }
        }
    }
}
