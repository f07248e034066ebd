//! The table: a file in shared memory, and this engine's slot in it.
//!
//! System calls read and write the table; it is not mapped. A mapping would raise SIGBUS if another
//! process truncated the file, and a read every 10 ms needs no mapping.
//!
//! The holder of a slot's lock owns the slot, and the kernel releases the lock when its holder
//! dies. Nothing else is locked, so no process waits for another.
//!
//! **Q-1** A process unlinks a file only while it holds the locks of all its slots and the name is
//! this file's. **Q-2** A process that has taken a slot checks after that whether the name is still
//! this file's, and starts again if not. So no process stays in a file without a name while others
//! use a new one: the unlinking process either finds the slot taken, or is done before the check.

use std::{
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{FileType, Mode, OFlags, Stat},
    io::Errno,
};

use super::{
    raw::{self, ForkPrivateFd},
    record::{all, header, slot_range, Record, SlotContent, SIZE, SLOT, SLOTS},
};
use crate::domain::DomainError;

/// Pause between attempts, while another process leaves or makes the table.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Table {
    path: PathBuf,
    file: ForkPrivateFd,
    slot: usize,
    record: Option<Record>,
    image: Box<[u8; SIZE]>,
}

/// Why an attempt failed.
enum AttemptError {
    /// Another process left or made the table at the same time.
    Moved(&'static str),
    Failed(DomainError),
}

impl From<DomainError> for AttemptError {
    fn from(e: DomainError) -> Self {
        Self::Failed(e)
    }
}

fn failed(call: &'static str) -> impl FnOnce(Errno) -> AttemptError {
    move |e| AttemptError::Failed(DomainError::io(call)(e))
}

impl Table {
    /// Takes a slot in the table of this name, and makes the table if there is none. With one
    /// attempt it never sleeps.
    pub fn join(path: &Path, attempts: u32) -> Result<Self, DomainError> {
        let mut why = "";
        for attempt in 0..attempts {
            if attempt > 0 {
                std::thread::sleep(RETRY_PAUSE);
            }
            match Self::attempt(path) {
                Ok(table) => return Ok(table),
                Err(AttemptError::Moved(w)) => why = w,
                Err(AttemptError::Failed(e)) => return Err(e),
            }
        }
        Err(DomainError::Unavailable(format!("{}: {why}", path.display())))
    }

    fn attempt(path: &Path) -> Result<Self, AttemptError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::RUSR | Mode::WUSR)
            .map_err(failed("open of the table"))?;
        let stat = rustix::fs::fstat(&fd).map_err(failed("fstat"))?;
        check_owner(path, &stat)?;
        // Before any lock: a child that forks meanwhile must not keep the lock.
        let file = ForkPrivateFd::new(fd).map_err(failed("too many tables"))?;
        let fd = file.fd().ok_or(AttemptError::Moved("the process has forked"))?;
        if stat.st_size == 0 {
            // Other processes that find it empty write the same, and no slot is touched.
            rustix::fs::ftruncate(fd, SIZE as u64).map_err(failed("ftruncate"))?;
            rustix::io::pwrite(fd, &header(), 0).map_err(failed("pwrite"))?;
        }
        let mut image = Box::new([0; SIZE]);
        if read(fd, &mut image).is_err() {
            return Err(replace(path, fd));
        }
        let mut slot = None;
        for i in 0..SLOTS {
            if raw::try_lock(fd, slot_range(i)).map_err(failed("fcntl(F_OFD_SETLK)"))? {
                slot = Some(i);
                break;
            }
        }
        let slot = slot.ok_or(AttemptError::Moved("all its slots are taken"))?;
        if !is_named(path, fd) {
            return Err(AttemptError::Moved("it is replaced repeatedly"));
        }
        let table = Self { path: path.into(), file, slot, record: None, image };
        // Clears the record of a dead engine.
        table.put(&[0; SLOT])?;
        Ok(table)
    }

    /// Whether this process joined; false in a forked child.
    #[cfg(test)]
    pub fn is_ours(&self) -> bool {
        self.file.fd().is_some()
    }

    fn fd(&self) -> Result<BorrowedFd<'_>, DomainError> {
        self.file.fd().ok_or_else(|| DomainError::Stale("the process has forked".into()))
    }

    pub fn write(&mut self, record: Record) -> Result<(), DomainError> {
        self.put(&record.encode())?;
        self.record = Some(record);
        Ok(())
    }

    fn put(&self, bytes: &[u8; SLOT]) -> Result<(), DomainError> {
        let n = rustix::io::pwrite(self.fd()?, bytes, slot_range(self.slot).start)
            .map_err(DomainError::io("pwrite"))?;
        match n == SLOT {
            true => Ok(()),
            false => Err(DomainError::Unavailable("the table can't be written".into())),
        }
    }

    /// Reads the table for `found`.
    pub fn read(&mut self) -> Result<(), DomainError> {
        let fd =
            self.file.fd().ok_or_else(|| DomainError::Stale("the process has forked".into()))?;
        read(fd, &mut self.image)
    }

    pub fn found(&self) -> impl Iterator<Item = (usize, SlotContent)> + '_ {
        let (slots, _) = self.image[SLOT..].as_chunks::<SLOT>();
        let own = self.slot;
        let all = slots.iter().map(SlotContent::decode).enumerate();
        all.filter(move |(slot, _)| *slot != own)
    }

    /// Whether a live process holds this slot; true if that is unknown.
    pub fn is_held(&self, slot: usize) -> bool {
        self.file.fd().is_none_or(|fd| raw::is_locked(fd, slot_range(slot)).unwrap_or(true))
    }

    /// Whether the name is still this table's.
    pub fn is_named(&self) -> bool {
        self.file.fd().is_some_and(|fd| is_named(&self.path, fd))
    }

    #[cfg(test)]
    pub fn slot(&self) -> usize {
        self.slot
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // A forked child has neither the slot nor the descriptor.
        let Some(fd) = self.file.fd() else { return };
        if self.record.is_some() {
            let _ = self.put(&[0; SLOT]);
        }
        // In this order: when several processes leave at once, the last one finds all slots free.
        if raw::unlock(fd, slot_range(self.slot)).is_ok() && raw::try_lock(fd, all()) == Ok(true) {
            unlink(&self.path, fd);
        }
    }
}

fn check_owner(path: &Path, stat: &Stat) -> Result<(), DomainError> {
    let user = rustix::process::geteuid().as_raw();
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if is_file && stat.st_uid == user && stat.st_mode & 0o077 == 0 {
        return Ok(());
    }
    let why = format!("{} isn't a file of this user alone; remove it", path.display());
    Err(DomainError::Unavailable(why))
}

fn read(fd: BorrowedFd<'_>, image: &mut [u8; SIZE]) -> Result<(), DomainError> {
    let n = rustix::io::pread(fd, &mut image[..], 0).map_err(DomainError::io("pread"))?;
    let why = match n == SIZE {
        true if image[..SLOT] == header() => return Ok(()),
        true => "its table is of another version, or damaged",
        false => "its table was cut short",
    };
    Err(DomainError::Unavailable(why.into()))
}

/// Removes an unusable table if no process uses it, so that the next attempt makes a new one.
fn replace(path: &Path, fd: BorrowedFd<'_>) -> AttemptError {
    match raw::try_lock(fd, all()) {
        Ok(true) => {
            unlink(path, fd);
            AttemptError::Moved("its table is damaged repeatedly")
        }
        Ok(false) => AttemptError::Moved("its table is damaged or of another version, and in use"),
        Err(e) => failed("fcntl(F_OFD_SETLK)")(e),
    }
}

/// The caller holds the locks of all slots.
fn unlink(path: &Path, fd: BorrowedFd<'_>) {
    if is_named(path, fd) {
        let _ = rustix::fs::unlink(path);
    }
}

fn is_named(path: &Path, fd: BorrowedFd<'_>) -> bool {
    let named = rustix::fs::lstat(path).map(|s| (s.st_dev, s.st_ino));
    let here = rustix::fs::fstat(fd).map(|s| (s.st_dev, s.st_ino));
    named.is_ok() && named == here
}
