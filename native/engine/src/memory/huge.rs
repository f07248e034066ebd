//! Shared memory in huge pages: copies from and to it meet fewer page walks.

use std::{os::fd::BorrowedFd, ptr};

use rustix::{fs, io::Result, mm};

/// A huge page, bytes.
pub(crate) const HUGE: usize = 2 << 20;

/// Maps `len` bytes from the start of `fd`, for reading and writing. Where they hold a huge page, they begin
/// at a multiple of one: elsewhere no page table can point to it.
pub(crate) fn map_shared(fd: BorrowedFd<'_>, len: usize) -> Result<usize> {
    let prot = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
    let whole = len.checked_next_multiple_of(rustix::param::page_size());
    let Some((whole, room)) =
        whole.and_then(|n| Some((n, n.checked_add(HUGE)?))).filter(|_| len >= HUGE)
    else {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { mm::mmap(ptr::null_mut(), len, prot, mm::MapFlags::SHARED, fd, 0) }?;
        return Ok(base as usize);
    };
    // Addresses alone, of which those before and after are given back.
    let flags = mm::MapFlags::PRIVATE | mm::MapFlags::NORESERVE;
    // SAFETY: as above.
    let start =
        unsafe { mm::mmap_anonymous(ptr::null_mut(), room, mm::ProtFlags::empty(), flags) }?;
    let start = start as usize;
    let base = start.next_multiple_of(HUGE);
    let end = base + whole;
    let flags = mm::MapFlags::SHARED | mm::MapFlags::FIXED;
    // SAFETY: it takes the place of addresses that were reserved above and that nobody else knows.
    let mapped = unsafe { mm::mmap(base as *mut _, len, prot, flags, fd, 0) };
    let (before, after) = match mapped {
        Ok(_) => (base - start, start + room - end),
        Err(_) => (room, 0),
    };
    for (at, n) in [(start, before), (end, after)] {
        if n > 0 {
            // SAFETY: what is left of the reservation.
            let _ = unsafe { mm::munmap(at as *mut _, n) };
        }
    }
    mapped.map(|_| base)
}

/// Backs `len` bytes of a fresh memfd with real memory, mapped at `addr` by [`map_shared`]: huge pages while the system
/// has them to give, also where `shmem_enabled` gives none to others. Only whole ones, so that no memory is wasted.
pub(crate) fn back(fd: BorrowedFd<'_>, addr: usize, len: usize) -> Result<()> {
    let whole = len / HUGE * HUGE;
    // SAFETY: advice on whole pages of a live mapping; it changes no byte.
    let _ = unsafe { mm::madvise(addr as *mut _, whole, mm::Advice::LinuxHugepage) };
    // A huge page is made around any page that is there, ten times faster than of 512 that are mapped, and than
    // filling the page table with those.
    let page = rustix::param::page_size() as u64;
    let seeds = (0..whole as u64).step_by(HUGE);
    let seed = |at| fs::fallocate(fd, fs::FallocateFlags::empty(), at, page);
    if seeds.map(seed).all(|seeded| seeded.is_ok()) {
        // SAFETY: the advice adds pages to a live mapping and changes no byte of it. It fails where the kernel is older
        // than 6.1 or memory is in small pieces: then these are what it gets.
        unsafe { libc::madvise(addr as *mut _, whole, libc::MADV_COLLAPSE) };
    }
    populate(addr, len)
}

/// Makes `len` bytes at `addr` present and writable in this process's page tables.
pub(crate) fn populate(addr: usize, len: usize) -> Result<()> {
    // SAFETY: the advice fills page tables of a live mapping and changes no byte of it.
    unsafe { mm::madvise(addr as *mut _, len, mm::Advice::LinuxPopulateWrite) }
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
            back(fd.as_fd(), maps[0], len).unwrap();
            populate(maps[1], len).unwrap();
            // SAFETY: both mappings are of `len` bytes and live until below; no reference outlives a statement.
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
