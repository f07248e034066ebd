//! The table: a file in shared memory, and a place in it.
//!
//! It is read and written by calls and not mapped: a mapping would end this process by a signal if
//! somebody cut the file short, and a look every 10 ms needs no mapping.
//!
//! Whoever holds the lock of a slot has that slot, and the kernel ends the lock with its holder.
//! Nothing else is locked, so nobody waits for anybody.
//!
//! **Q-1** A file is unlinked only by one who holds the locks of all its slots at once and has seen
//! that the name is this file's. **Q-2** Who has taken a slot looks after that whether the name is
//! still this file's, and starts anew if it isn't. So nobody stays in a file that has no name while
//! others meet in a new one: who unlinks either finds the slot taken, or is done before the look.

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
    raw::{self, Private},
    record::{all, header, place, Found, Record, SIZE, SLOT, SLOTS},
};
use crate::domain::DomainError;

/// Before another attempt, where somebody was in the middle of leaving or of making the table.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Table {
    path: PathBuf,
    file: Private,
    slot: usize,
    record: Option<Record>,
    image: Box<[u8; SIZE]>,
}

/// Why an attempt came to nothing.
enum Missed {
    /// Somebody left or made the table at the same time.
    Moved(&'static str),
    Failed(DomainError),
}

impl From<DomainError> for Missed {
    fn from(e: DomainError) -> Self {
        Self::Failed(e)
    }
}

fn failed(call: &'static str) -> impl FnOnce(Errno) -> Missed {
    move |e| Missed::Failed(DomainError::io(call)(e))
}

impl Table {
    /// Takes a place in the table of this name, which is made if there is none. With one attempt it
    /// never sleeps.
    pub fn join(path: &Path, attempts: u32) -> Result<Self, DomainError> {
        let mut why = "";
        for attempt in 0..attempts {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
            }
            match Self::attempt(path) {
                Ok(table) => return Ok(table),
                Err(Missed::Moved(w)) => why = w,
                Err(Missed::Failed(e)) => return Err(e),
            }
        }
        Err(DomainError::Unavailable(format!("{}: {why}", path.display())))
    }

    fn attempt(path: &Path) -> Result<Self, Missed> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::RUSR | Mode::WUSR)
            .map_err(failed("open of the table"))?;
        let stat = rustix::fs::fstat(&fd).map_err(failed("fstat"))?;
        check_owner(path, &stat)?;
        // Before any lock: a child that is made meanwhile mustn't keep it.
        let file = Private::new(fd).map_err(failed("too many tables"))?;
        let fd = file.fd().ok_or(Missed::Moved("the process has forked"))?;
        if stat.st_size == 0 {
            // Whoever else finds it empty does the same, and no slot is touched.
            rustix::fs::ftruncate(fd, SIZE as u64).map_err(failed("ftruncate"))?;
            rustix::io::pwrite(fd, &header(), 0).map_err(failed("pwrite"))?;
        }
        let mut image = Box::new([0; SIZE]);
        if read(fd, &mut image).is_err() {
            return Err(replace(path, fd));
        }
        let mut slot = None;
        for i in 0..SLOTS {
            if raw::try_lock(fd, place(i)).map_err(failed("fcntl(F_OFD_SETLK)"))? {
                slot = Some(i);
                break;
            }
        }
        let slot = slot.ok_or(Missed::Moved("all its places are taken"))?;
        if !is_named(path, fd) {
            return Err(Missed::Moved("it is made anew again and again"));
        }
        let table = Self { path: path.into(), file, slot, record: None, image };
        // What a dead one left.
        table.put(&[0; SLOT])?;
        Ok(table)
    }

    /// Whether this process is the one that joined. A child by fork isn't.
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
        let n = rustix::io::pwrite(self.fd()?, bytes, place(self.slot).start)
            .map_err(DomainError::io("pwrite"))?;
        match n == SLOT {
            true => Ok(()),
            false => Err(DomainError::Unavailable("the table can't be written".into())),
        }
    }

    /// Reads it anew; what stands in the slots of others is `found` then.
    pub fn read(&mut self) -> Result<(), DomainError> {
        let fd =
            self.file.fd().ok_or_else(|| DomainError::Stale("the process has forked".into()))?;
        read(fd, &mut self.image)
    }

    pub fn found(&self) -> impl Iterator<Item = (usize, Found)> + '_ {
        let (slots, _) = self.image[SLOT..].as_chunks::<SLOT>();
        let own = self.slot;
        let all = slots.iter().map(Found::decode).enumerate();
        all.filter(move |(slot, _)| *slot != own)
    }

    /// Whether somebody else lives who has this slot; yes, if it can't be told.
    pub fn is_held(&self, slot: usize) -> bool {
        self.file.fd().is_none_or(|fd| raw::is_locked(fd, place(slot)).unwrap_or(true))
    }

    /// Whether those who come will find this table under its name.
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
        // A child has neither the place nor the descriptor.
        let Some(fd) = self.file.fd() else { return };
        if self.record.is_some() {
            let _ = self.put(&[0; SLOT]);
        }
        // In this order, so that of several who leave at once the last one finds all free.
        if raw::unlock(fd, place(self.slot)).is_ok() && raw::try_lock(fd, all()) == Ok(true) {
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

/// The table is of no use. If nobody uses it either, it is removed, and the next attempt makes a new one.
fn replace(path: &Path, fd: BorrowedFd<'_>) -> Missed {
    match raw::try_lock(fd, all()) {
        Ok(true) => {
            unlink(path, fd);
            Missed::Moved("its table is damaged again and again")
        }
        Ok(false) => Missed::Moved("its table is damaged or of another version, and in use"),
        Err(e) => failed("fcntl(F_OFD_SETLK)")(e),
    }
}

/// For one who holds the locks of all slots.
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
