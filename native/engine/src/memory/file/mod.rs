//! Files as memory: opened once, read and written by offset, never mapped. A full disk or a file
//! that another process truncated is then an error of one call; with a mapping it would end the
//! process.

mod lengthen;
mod pool;
mod queue;
mod raw;
mod ring;
#[cfg(all(test, not(loom)))]
mod tests;
mod work;

use std::{
    fs::{File, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

pub(crate) use queue::{FileBackend, FileQueue};
use rustix::{fs::OFlags, io::Errno};
pub(crate) use work::FileWork;

use crate::{EngineError, Result};

/// Characters of a path that errors show: its end says most.
const MAX_SHOWN_CHARS: usize = 160;
/// Times a file is opened again because another process removed it meanwhile.
const MAX_REOPENS: usize = 16;

/// Options of a file that becomes a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Start of the region in the file, bytes.
    pub offset: u64,
    /// Bytes of the region; all from `offset` on if `None`.
    pub len: Option<u64>,
    /// Make the file if there is none, and lengthen it to the region's end. The new bytes are
    /// zeroes that take no room on the disk until they are written, except for the last block.
    pub create: bool,
    pub writable: bool,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { offset: 0, len: None, create: false, writable: true }
    }
}

/// An open file that regions lie in.
#[derive(Debug)]
pub struct FileMemory {
    file: File,
    /// Device and inode.
    id: (u64, u64),
    path: PathBuf,
    writable: bool,
}

impl PartialEq for FileMemory {
    fn eq(&self, other: &Self) -> bool {
        self.file.as_raw_fd() == other.file.as_raw_fd()
    }
}

impl Eq for FileMemory {}

impl FileMemory {
    /// Opens a file and returns it with the bytes of its region.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] for what is no file, or too short for the region;
    /// [`EngineError::Resource`] where the system refuses.
    pub fn open(path: &Path, options: FileOptions) -> Result<(Self, u64)> {
        for _ in 0..MAX_REOPENS {
            if let Some(opened) = Self::open_once(path, options)? {
                return Ok(opened);
            }
        }
        let why = "another process removed the file at each attempt to create it";
        Err(EngineError::Invalid(format!("{}: {why}", path.display())))
    }

    /// `None` if another process removed the file after it was opened here.
    fn open_once(path: &Path, options: FileOptions) -> Result<Option<(Self, u64)>> {
        let FileOptions { offset, len, create, writable } = options;
        let invalid = |why: String| EngineError::Invalid(format!("{}: {why}", path.display()));
        if create && !writable {
            return Err(invalid("a file that is made must be writable".into()));
        }
        let end = offset.checked_add(len.unwrap_or(0)).filter(|end| *end <= 1 << 56);
        let Some(end) = end else {
            let len = len.unwrap_or(0);
            return Err(invalid(format!("{len} bytes from offset {offset} pass the largest file")));
        };
        let nothing = || invalid("a region of zero bytes can't be registered; name nbytes".into());
        // Nothing is made that would be refused.
        if len == Some(0) || (create && len.is_none() && !path.exists()) {
            return Err(nothing());
        }
        let mut open = OpenOptions::new();
        // A pipe without a writer must not keep the caller.
        open.read(true).write(writable).custom_flags(OFlags::NONBLOCK.bits() as i32);
        let opened = match create && len.is_some() {
            true => lengthen::open_or_create(path, &open),
            false => open.open(path).map(|file| (file, false)),
        };
        let (file, created) = opened.map_err(|e| failed("open", path, &e))?;
        let meta = file.metadata().map_err(|e| failed("fstat", path, &e))?;
        let disk = meta.file_type().is_block_device();
        if !meta.is_file() && !disk {
            return Err(invalid("neither a file nor a disk".into()));
        }
        let flags = rustix::fs::fcntl_getfl(&file);
        flags
            .and_then(|flags| rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK))
            .map_err(|e| EngineError::resource("fcntl", e))?;
        let there = match disk {
            true => end,
            false => meta.len(),
        };
        if there < end && !create {
            return Err(invalid(format!(
                "it has {there} bytes, the region ends at {end}; with create it is lengthened"
            )));
        }
        let len = len.unwrap_or(there.saturating_sub(offset));
        if len == 0 {
            return Err(nothing());
        }
        if there < end && !lengthen::lengthen(&file, path, created, end)? {
            return Ok(None);
        }
        let id = match disk {
            true => (meta.rdev(), u64::MAX),
            false => (meta.dev(), meta.ino()),
        };
        Ok(Some((Self { file, id, path: path.to_owned(), writable }, len)))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same for all that opened this file, by whatever path.
    pub(crate) fn id(&self) -> (u64, u64) {
        self.id
    }

    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns when what was written is on the disk and not only in the page cache.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| failed("fdatasync", &self.path, &e))
    }

    fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// As errors name it.
    pub(crate) fn name(&self) -> String {
        let path = self.path.to_string_lossy();
        let n = path.chars().count();
        match n > MAX_SHOWN_CHARS {
            true => format!("...{}", path.chars().skip(n - MAX_SHOWN_CHARS).collect::<String>()),
            false => path.into_owned(),
        }
    }
}

fn failed(call: &'static str, path: &Path, e: &std::io::Error) -> EngineError {
    let cause = format!("{}: {e}", path.display());
    let hint = match e.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::NOSPC | Errno::DQUOT) => "free space on its disk",
        Some(Errno::NOENT) => "the file must exist, or with create its directory",
        Some(Errno::MFILE) => "raise the open-file limit of this process (ulimit -n)",
        Some(Errno::AGAIN) => "another process holds a lock (flock) on it; end that lock",
        Some(Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP) => {
            "its file system has neither fallocate nor flock; lengthen it first (truncate -s)"
        }
        Some(Errno::FBIG) => "raise the limit on the size of files (ulimit -f)",
        _ => "the path must lead to a file that this process may open so",
    };
    EngineError::Resource { call, cause, hint: hint.into() }
}
