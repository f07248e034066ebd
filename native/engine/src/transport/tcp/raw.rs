//! Unsafe code of the tcp transport: passing memory to the kernel by address.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::page_cursor::PageCursor;

/// Memory ranges for one system call. The caller of `push` guarantees that a range may be read or
/// written until the call ends: a registered region, or a buffer of the stream.
pub(super) struct IoVecs {
    list: smallvec::SmallVec<[libc::iovec; 8]>,
    bytes: u64,
}

impl IoVecs {
    pub fn new() -> Self {
        Self { list: smallvec::SmallVec::new(), bytes: 0 }
    }

    pub fn push(&mut self, addr: usize, len: usize) {
        self.list.push(libc::iovec { iov_base: addr as *mut _, iov_len: len });
        self.bytes += len as u64;
    }

    /// Bytes of all ranges.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn len(&self) -> usize {
        self.list.len()
    }

    fn message(&self) -> libc::msghdr {
        // SAFETY: all zero is a valid msghdr: no name, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.list.as_ptr().cast_mut();
        message.msg_iovlen = self.list.len() as _;
        message
    }
}

fn result(n: isize) -> Result<usize, Errno> {
    usize::try_from(n)
        .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

/// A single range goes by the cheaper call that takes no list, as in [`receive`].
pub(super) fn send(socket: BorrowedFd<'_>, iov: &IoVecs) -> Result<usize, Errno> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    if let [one] = iov.list.as_slice() {
        // SAFETY: the range may be read (see `IoVecs`).
        return result(unsafe { libc::send(socket.as_raw_fd(), one.iov_base, one.iov_len, flags) });
    }
    let message = iov.message();
    // SAFETY: the message points to `iov`, whose ranges may be read (see `IoVecs`).
    result(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) })
}

pub(super) fn receive(socket: BorrowedFd<'_>, iov: &IoVecs) -> Result<usize, Errno> {
    let flags = libc::MSG_DONTWAIT;
    if let [one] = iov.list.as_slice() {
        // SAFETY: the range may be written (see `IoVecs`).
        return result(unsafe { libc::recv(socket.as_raw_fd(), one.iov_base, one.iov_len, flags) });
    }
    let mut message = iov.message();
    // SAFETY: the message points to `iov`, whose ranges may be written (see `IoVecs`).
    result(unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) })
}

/// Appends the cursor's bytes to `out`.
pub(super) fn gather(cursor: &PageCursor, out: &mut Vec<u8>) {
    let left = cursor.left() as usize;
    out.reserve(left);
    cursor.peek(usize::MAX, left as u64, |addr, n| {
        let at = out.len();
        // SAFETY: the cursor's memory is kept registered by the request; `peek` yields at most
        // `left` bytes, for which there is room.
        unsafe {
            std::ptr::copy_nonoverlapping(addr as *const u8, out.as_mut_ptr().add(at), n);
            out.set_len(at + n);
        }
    });
}

/// Copies `bytes` into the cursor's pages as far as there is room; returns the number copied.
pub(super) fn scatter(cursor: &PageCursor, bytes: &[u8]) -> usize {
    let mut at = 0;
    cursor.peek(usize::MAX, bytes.len() as u64, |addr, n| {
        // SAFETY: the cursor keeps its region registered, or the request keeps the local side of a
        // read; `peek` yields at most `bytes.len()` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes[at..].as_ptr(), addr as *mut u8, n) };
        at += n;
    });
    at
}
