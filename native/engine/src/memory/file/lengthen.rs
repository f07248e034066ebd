//! Creating and lengthening files that other processes create and lengthen at the same time.

use std::{
    fs::{File, OpenOptions},
    io::{ErrorKind, Result as IoResult},
    os::unix::fs::MetadataExt,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    fs::{fallocate, flock, FallocateFlags, FlockOperation},
    io::{retry_on_intr, Errno},
};

use super::failed;
use crate::Result;

/// Longest wait for the lock of another process. Engines hold it for two system calls.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_INTERVAL: Duration = Duration::from_millis(1);

/// Opens a file, or creates it; true if this call created it.
pub(super) fn open_or_create(path: &Path, options: &OpenOptions) -> IoResult<(File, bool)> {
    match options.clone().create_new(true).open(path) {
        Ok(file) => Ok((file, true)),
        // A symbolic link to a file that doesn't exist is such a path too.
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {
            options.clone().create(true).open(path).map(|file| (file, false))
        }
        Err(e) => Err(e),
    }
}

/// Lengthens a file to at least `end` bytes and never shortens it. A file that this engine
/// `created` is removed if that fails. False if another process removed the file meanwhile.
pub(super) fn lengthen(file: &File, path: &Path, created: bool, end: u64) -> Result<bool> {
    let size = || file.metadata().map(|m| m.len()).map_err(|e| failed("fstat", path, &e));
    // Its creator may remove an empty file. Where there is no lock, it doesn't.
    let lock = match created || size()? == 0 {
        true => FileLock::take(file).ok(),
        false => None,
    };
    if lock.is_some() && !created && !leads_to(std::fs::metadata(path), file) {
        return Ok(false);
    }
    let result = match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), end - 1, 1)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => truncate_up(file, path, lock.as_ref(), end),
        done => done.map_err(|e| failed("fallocate", path, &e.into())),
    };
    let is_unused = || lock.is_some() && size().is_ok_and(|size| size == 0);
    if result.is_err() && created && is_unused() && leads_to(path.symlink_metadata(), file) {
        let _ = std::fs::remove_file(path);
    }
    result.map(|()| true)
}

/// For file systems without `fallocate`. `ftruncate` shortens a file that another process has
/// lengthened since its size was read, so both happen under a lock.
fn truncate_up(file: &File, path: &Path, lock: Option<&FileLock>, end: u64) -> Result<()> {
    let _own = match lock {
        Some(_) => None,
        None => Some(FileLock::take(file).map_err(|e| failed("flock", path, &e.into()))?),
    };
    let lengthened = file.metadata().and_then(|meta| match meta.len() < end {
        true => file.set_len(end),
        false => Ok(()),
    });
    lengthened.map_err(|e| failed("ftruncate", path, &e))
}

/// Whether this is still the metadata of an open file.
fn leads_to(meta: IoResult<std::fs::Metadata>, file: &File) -> bool {
    let id = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
    meta.is_ok_and(|meta| file.metadata().is_ok_and(|own| id(own) == id(meta)))
}

/// An exclusive lock on an open file.
struct FileLock<'a>(&'a File);

impl<'a> FileLock<'a> {
    fn take(file: &'a File) -> std::result::Result<Self, Errno> {
        let start = Instant::now();
        loop {
            match flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self(file)),
                Err(Errno::AGAIN) if start.elapsed() < LOCK_TIMEOUT => {
                    std::thread::sleep(LOCK_INTERVAL);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl Drop for FileLock<'_> {
    fn drop(&mut self) {
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}
