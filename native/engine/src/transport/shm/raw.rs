//! Unsafe code of the shm transport: shared mappings and other processes' memory.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicU32, AtomicU64},
};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    mm,
};

use super::ring::{Slot, Tail};
use crate::{domain::DomainError, memory};

/// A shared mapping of a memfd whose size can't change.
#[derive(Debug)]
pub(super) struct Map {
    base: usize,
    len: usize,
}

impl Map {
    /// Creates `len` bytes of zeroed shared memory (a multiple of the page size), and its
    /// descriptor.
    pub fn create(len: usize) -> Result<(Self, OwnedFd), DomainError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(c"fabric-ray-link", flags)
            .map_err(DomainError::io("memfd_create"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(DomainError::io("ftruncate"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(DomainError::io("fcntl(F_ADD_SEALS)"))?;
        Ok((Self::attach(fd.as_fd(), len)?, fd))
    }

    /// Maps a peer's memory. It must be sealed against shrinking, or the peer could kill this
    /// process with a SIGBUS.
    pub fn import(fd: BorrowedFd<'_>, len: usize) -> Result<Self, DomainError> {
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        let size = rustix::fs::fstat(fd).map_err(DomainError::io("fstat"))?.st_size as u64;
        if !seals.contains(SealFlags::SHRINK) || size < len as u64 {
            return Err(DomainError::Handshake(
                "the peer's shared memory is too small or not sealed".into(),
            ));
        }
        // Mappings of hugetlb files have other lengths than requested.
        let kind = rustix::fs::fstatfs(fd).map_err(DomainError::io("fstatfs"))?.f_type;
        if kind == libc::HUGETLBFS_MAGIC {
            return Err(DomainError::Handshake(
                "the peer's shared memory is a hugetlbfs file".into(),
            ));
        }
        Self::attach(fd, len)
    }

    fn attach(fd: BorrowedFd<'_>, len: usize) -> Result<Self, DomainError> {
        let base = memory::map_shared(fd, len).map_err(DomainError::io("mmap"))?;
        Ok(Self { base, len })
    }

    pub fn base(&self) -> usize {
        self.base
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// `n` consecutive values of a type at `offset`.
    ///
    /// # Safety
    /// `T` must be valid for any bytes and consist of atomics, because a peer writes here.
    unsafe fn view<T>(&self, offset: usize, n: usize) -> &[T] {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + n * size_of::<T>() <= self.len);
        // SAFETY: in bounds and aligned as asserted; lives as long as the mapping.
        unsafe { std::slice::from_raw_parts((self.base + offset) as *const T, n) }
    }

    pub fn u32_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: an atomic, valid for any bytes.
        unsafe { &self.view(offset, 1)[0] }
    }

    pub fn u64_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an atomic, valid for any bytes.
        unsafe { &self.view(offset, 1)[0] }
    }

    /// A word that peers signal through.
    #[cfg(not(loom))]
    pub fn shared_word(&self, offset: usize) -> &AtomicU32 {
        self.u32_at(offset)
    }

    #[cfg(not(loom))]
    pub fn slots(&self, offset: usize, n: usize) -> &[Slot] {
        // SAFETY: a slot is two atomics.
        unsafe { self.view(offset, n) }
    }

    #[cfg(not(loom))]
    pub fn tail(&self, offset: usize) -> &Tail {
        // SAFETY: a tail is made of atomics.
        unsafe { &self.view(offset, 1)[0] }
    }

    #[cfg(loom)]
    pub fn shared_word(&self, _: usize) -> &loom::sync::atomic::AtomicU32 {
        unreachable!("loom checks protocols in ordinary memory")
    }

    #[cfg(loom)]
    pub fn slots(&self, _: usize, _: usize) -> &[Slot] {
        unreachable!("loom checks protocols in ordinary memory")
    }

    #[cfg(loom)]
    pub fn tail(&self, _: usize) -> &Tail {
        unreachable!("loom checks protocols in ordinary memory")
    }

    /// Copies out of the shared memory. A peer that writes at the same time damages only its own
    /// message.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(offset + out.len() <= self.len);
        let from = (self.base + offset) as *const u8;
        // SAFETY: in bounds as asserted; `out` is a local buffer, so they don't overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        let to = (self.base + offset) as *mut u8;
        // SAFETY: in bounds as asserted; `bytes` is not in this mapping.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`; all views borrow from `self`.
        let _ = unsafe { mm::munmap(self.base as *mut _, self.len) };
    }
}

/// A range of memory in this or another process.
pub(super) type IoRange = libc::iovec;

pub(super) fn io_range(addr: usize, len: usize) -> IoRange {
    IoRange { iov_base: addr as *mut _, iov_len: len }
}

/// Direction of a copy between this process and another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Out,
    In,
}

/// Lets processes of the same user access this one's memory where Yama allows only its parent
/// (`kernel.yama.ptrace_scope` 1, as on desktop distributions). The processes are unknown in
/// advance, and Yama accepts one name at a time, so any is allowed.
pub(super) fn admit_peers() {
    const ANY: libc::c_ulong = libc::c_ulong::MAX;
    // SAFETY: takes two numbers. Without Yama it fails, and isn't needed.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, ANY) };
}

/// Copies all bytes of `local` to or from `remote` in process `pid` (process_vm_writev,
/// process_vm_readv). Both lists have the same number of bytes, in at most IOV_MAX ranges each.
/// # Safety
/// The local ranges must be memory that may be read or written now.
pub(super) unsafe fn process_vm_copy(
    pid: i32,
    direction: Direction,
    local: &mut [IoRange],
    remote: &mut [IoRange],
) -> Result<(), Errno> {
    let (mut local, mut remote) = (local, remote);
    while !local.is_empty() {
        let (l, ln) = (local.as_ptr(), local.len() as libc::c_ulong);
        let (r, rn) = (remote.as_ptr(), remote.len() as libc::c_ulong);
        // SAFETY: the lists are valid; the local memory is valid by this function's contract, and
        // the kernel checks the remote.
        let n = unsafe {
            match direction {
                Direction::Out => libc::process_vm_writev(pid, l, ln, r, rn, 0),
                Direction::In => libc::process_vm_readv(pid, l, ln, r, rn, 0),
            }
        };
        if n <= 0 {
            return Err(match n {
                0 => Errno::FAULT,
                _ => Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO),
            });
        }
        local = advance(local, n as usize);
        remote = advance(remote, n as usize);
    }
    Ok(())
}

/// Drops the first `n` bytes of a list.
fn advance(mut pieces: &mut [IoRange], mut n: usize) -> &mut [IoRange] {
    while let Some(first) = pieces.first_mut() {
        if first.iov_len > n {
            first.iov_base = (first.iov_base as usize + n) as *mut _;
            first.iov_len -= n;
            break;
        }
        n -= first.iov_len;
        pieces = &mut pieces[1..];
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_copied_in_both_directions_in_many_ranges() {
        let pid = std::process::id() as i32;
        let src: Vec<u8> = (0..5000).map(|i| i as u8).collect();
        for direction in [Direction::Out, Direction::In] {
            let mut dst = vec![0u8; 5000];
            let cut = |base: usize, sizes: &[usize]| -> Vec<IoRange> {
                let mut at = base;
                sizes
                    .iter()
                    .map(|n| {
                        at += n;
                        io_range(at - n, *n)
                    })
                    .collect()
            };
            let mut a = cut(src.as_ptr() as usize, &[1, 2999, 2000]);
            let mut b = cut(dst.as_mut_ptr() as usize, &[2500, 2500]);
            let (local, remote) = match direction {
                Direction::Out => (&mut a, &mut b),
                Direction::In => (&mut b, &mut a),
            };
            // SAFETY: all ranges lie in the two vectors.
            unsafe { process_vm_copy(pid, direction, local, remote) }.unwrap();
            assert_eq!(src, dst);
        }
        let (mut a, mut b) = ([io_range(src.as_ptr() as usize, 8)], [io_range(8, 8)]);
        // SAFETY: the local range lies in a vector; the remote one does not exist.
        let result = unsafe { process_vm_copy(pid, Direction::Out, &mut a, &mut b) };
        assert_eq!(result, Err(Errno::FAULT));
    }

    #[test]
    fn unsealed_memory_is_refused() {
        let fd = rustix::fs::memfd_create(c"t", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(matches!(Map::import(fd.as_fd(), 4096), Err(DomainError::Handshake(_))));
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        // It uses no huge page unless touched.
        if let Ok(fd) = rustix::fs::memfd_create(c"t", flags) {
            rustix::fs::ftruncate(&fd, 4 << 20).unwrap();
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
            let e = Map::import(fd.as_fd(), (2 << 20) + 4096).unwrap_err();
            assert!(e.to_string().contains("hugetlbfs"), "{e}");
        }
        let (_map, fd) = Map::create(4096).unwrap();
        assert!(Map::import(fd.as_fd(), 8192).is_err());
        assert!(Map::import(fd.as_fd(), 4096).is_ok());
    }
}
