//! The unsafe half of the tcp transport: handing memory to the kernel by address.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::place::Walk;

/// Stretches of memory for one system call. Whoever adds one vouches that it may be read or written
/// until the call is over: a region that is registered, or a buffer of the stream's.
pub(super) struct IoVecs {
    list: smallvec::SmallVec<[libc::iovec; 8]>,
}

impl IoVecs {
    pub fn new() -> Self {
        Self { list: smallvec::SmallVec::new() }
    }

    pub fn push(&mut self, addr: usize, len: usize) {
        self.list.push(libc::iovec { iov_base: addr as *mut _, iov_len: len });
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

pub(super) fn send(socket: BorrowedFd<'_>, iov: &IoVecs) -> Result<usize, Errno> {
    let message = iov.message();
    // SAFETY: the message points to `iov`, whose stretches may be read (see `IoVecs`).
    result(unsafe {
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    })
}

pub(super) fn receive(socket: BorrowedFd<'_>, iov: &IoVecs) -> Result<usize, Errno> {
    let mut message = iov.message();
    // SAFETY: the message points to `iov`, whose stretches may be written (see `IoVecs`).
    result(unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })
}

/// Copies the walk's bytes to `out`; returns how many. They must fit.
pub(super) fn gather(walk: &Walk, out: &mut [u8]) -> usize {
    let mut at = 0;
    walk.peek(usize::MAX, out.len() as u64, |addr, n| {
        // SAFETY: the walk is over memory that the request keeps registered; `peek` yields at most
        // `out.len()` bytes.
        unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, out[at..].as_mut_ptr(), n) };
        at += n;
    });
    at
}

/// Copies as many of `bytes` as the walk has room for; returns how many.
pub(super) fn scatter(walk: &Walk, bytes: &[u8]) -> usize {
    let mut at = 0;
    walk.peek(usize::MAX, bytes.len() as u64, |addr, n| {
        // SAFETY: the walk is over a region that it keeps registered, or over the local side of a
        // read that the request keeps; `peek` yields at most `bytes.len()` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes[at..].as_ptr(), addr as *mut u8, n) };
        at += n;
    });
    at
}
