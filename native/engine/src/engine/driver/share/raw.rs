//! The unsafe half: file locks that end with the process, and descriptors that a forked child must
//! not keep.

use std::{
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{
        atomic::{
            AtomicI32,
            Ordering::{AcqRel, Relaxed, Release},
        },
        Once,
    },
};

use rustix::io::Errno;

use crate::process::ProcessLocal;

/// Locks belong to the open file, not to the process: two engines of one process have one each. The
/// kernel releases them when the last descriptor is closed, thus also when the process dies,
/// whatever ends it and in whatever PID namespace it is.
fn lock(fd: BorrowedFd<'_>, command: i32, kind: i32, at: Range<u64>) -> Result<i32, Errno> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: at.start as libc::off_t,
        l_len: (at.end - at.start) as libc::off_t,
        l_pid: 0,
    };
    // SAFETY: the commands used here take a `flock`, which outlives the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(i32::from(lock.l_type)),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// False if another open file has a lock there.
pub(super) fn try_lock(fd: BorrowedFd<'_>, at: Range<u64>) -> Result<bool, Errno> {
    match lock(fd, libc::F_OFD_SETLK, libc::F_WRLCK, at) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(e) => Err(e),
    }
}

pub(super) fn unlock(fd: BorrowedFd<'_>, at: Range<u64>) -> Result<(), Errno> {
    lock(fd, libc::F_OFD_SETLK, libc::F_UNLCK, at).map(drop)
}

/// Whether another open file has a lock there.
pub(super) fn is_locked(fd: BorrowedFd<'_>, at: Range<u64>) -> Result<bool, Errno> {
    Ok(lock(fd, libc::F_OFD_GETLK, libc::F_WRLCK, at)? != libc::F_UNLCK)
}

const NONE: i32 = -1;
/// Descriptors that a forked child closes. An array of atomics: a forked child may not wait for a
/// lock that a thread of its parent held.
static PRIVATE: [AtomicI32; 512] = [const { AtomicI32::new(NONE) }; 512];

/// A descriptor that a forked child doesn't keep, because it would keep the locks too.
#[derive(Debug)]
pub(super) struct ForkPrivateFd {
    fd: ProcessLocal<OwnedFd>,
    entry: usize,
}

impl ForkPrivateFd {
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the handler only uses atomics and closes, which is safe in a forked child.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        let free =
            |e: &AtomicI32| e.compare_exchange(NONE, fd.as_raw_fd(), AcqRel, Relaxed).is_ok();
        let entry = PRIVATE.iter().position(free).ok_or(Errno::MFILE)?;
        Ok(Self { fd: ProcessLocal::new(fd), entry })
    }

    /// `None` in a forked child: there it is closed, and its number may be another file's.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.get().ok().map(AsFd::as_fd)
    }
}

impl Drop for ForkPrivateFd {
    fn drop(&mut self) {
        if self.fd.get().is_ok() {
            PRIVATE[self.entry].store(NONE, Release);
        }
    }
}

extern "C" fn in_child() {
    for entry in &PRIVATE {
        let fd = entry.swap(NONE, AcqRel);
        if fd != NONE {
            // SAFETY: this number is the child's copy of the parent's descriptor, and
            // `ForkPrivateFd::fd` returns it to no caller in this process.
            unsafe { libc::close(fd) };
        }
    }
}
