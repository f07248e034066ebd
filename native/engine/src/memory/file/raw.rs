//! The calls that move bytes between files and memory.

use io_uring::{opcode, squeue::Entry, types::Fd, IoUring, Probe};
use rustix::io::Errno;

use super::work::{FileWork, RemainingRange};

/// The system moves at most 2 GiB by one call.
const MAX_CALL_BYTES: usize = 1 << 30;

/// One pread or pwrite.
///
/// # Safety
/// The memory of `rest` must stay allocated until this returns.
pub(super) unsafe fn move_some(work: &FileWork, rest: RemainingRange) -> Result<usize, Errno> {
    let (fd, n, at) = (work.file.fd(), rest.len.min(MAX_CALL_BYTES), rest.at as libc::off_t);
    // SAFETY: the caller's memory; the work keeps the file open.
    let moved = unsafe {
        match work.inward {
            true => libc::pwrite(fd, rest.addr as *const _, n, at),
            false => libc::pread(fd, rest.addr as *mut _, n, at),
        }
    };
    usize::try_from(moved).map_err(|_| {
        let e = std::io::Error::last_os_error();
        Errno::from_raw_os_error(e.raw_os_error().unwrap_or(libc::EIO))
    })
}

/// A ring whose kernel reads and writes by offset.
pub(super) fn open_ring(entries: u32) -> std::io::Result<IoUring> {
    let ring = IoUring::builder().dontfork().build(entries)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    match probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::Write::CODE) {
        true => Ok(ring),
        false => Err(std::io::Error::other("this kernel's io_uring doesn't read and write")),
    }
}

/// The request for `rest` of a piece of work.
pub(super) fn entry(work: &FileWork, rest: RemainingRange, tag: u64) -> Entry {
    let (fd, n) = (Fd(work.file.fd()), rest.len.min(MAX_CALL_BYTES) as u32);
    let entry = match work.inward {
        true => opcode::Write::new(fd, rest.addr as *const _, n).offset(rest.at).build(),
        false => opcode::Read::new(fd, rest.addr as *mut _, n).offset(rest.at).build(),
    };
    entry.user_data(tag)
}

/// The request that ends when `fd`, an eventfd, is written to.
pub(super) fn poll_eventfd(fd: i32, word: &mut u64, tag: u64) -> Entry {
    let word = std::ptr::from_mut(word).cast();
    opcode::Read::new(Fd(fd), word, 8).build().user_data(tag)
}

/// Queues a request; false if the queue is full.
///
/// # Safety
/// The file and the memory that it names must stay until it has been completed.
pub(super) unsafe fn push(ring: &mut IoUring, entry: &Entry) -> bool {
    // SAFETY: the caller's.
    unsafe { ring.submission().push(entry) }.is_ok()
}
