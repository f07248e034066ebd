//! Sharing of a NIC among the engines of one host (TENT §3.3.2).
//!
//! Each engine writes its demand, the bytes under way and waiting, into a table in shared memory.
//! It reads the demands of the others and computes its own window with [`divide`]; there is no
//! coordinator. The share of an engine that dies goes to the others, whatever killed it: its slot
//! in the table is a file lock that the kernel releases.
//!
//! - An engine that wants less than one smallest slice writes nothing: that much is always allowed.
//! - The table is read every [`READ_INTERVAL`] while there is demand, and not at all otherwise. That costs a
//!   write and a read of some kilobytes, about a microsecond each. All other calls are arithmetic.
//! - Without a table an engine has the whole window, and logs that once.

mod other_processes;
mod raw;
mod record;
mod table;

#[cfg(test)]
mod processes;
#[cfg(test)]
mod tests;

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use other_processes::OtherProcesses;
use record::Record;
use table::Table;

use crate::{
    api::Priority,
    domain::DomainError,
    group::policy::{
        classes::ByClass,
        divide::{divide, NicSharer, MIN_WINDOW},
    },
    time::Time,
};

/// Interval of reads of the table.
pub(crate) const READ_INTERVAL: Duration = Duration::from_millis(10);
/// Longest interval between writes of an engine with demand; a longer silence looks like a hang.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);
/// Interval of checks that the table still has its name.
const NAME_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of attempts to join, after the table was lost or could not be joined.
const JOIN_INTERVAL: Duration = Duration::from_secs(1);
/// Attempts to join when the engine opens, a millisecond apart.
const ATTEMPTS: u32 = 20;
/// Memory that all processes of a host see; a reboot clears it.
const SHARED_MEMORY_DIR: &str = "/dev/shm";

/// One engine's share of one NIC.
#[derive(Debug)]
pub(crate) struct HostShare {
    device: String,
    path: PathBuf,
    weight: u32,
    id: u64,
    beat: u64,
    table: Option<Table>,
    others: OtherProcesses,
    /// The latest demand, and the maximum since the last read.
    latest: ByClass,
    peak: ByClass,
    /// The demand that the table shows.
    published: ByClass,
    look_at: Time,
    beat_at: Time,
    tend_at: Time,
    join_at: Time,
    /// A window in bytes, and this engine's part of it by class.
    divided: (u64, ByClass),
    warned: bool,
}

impl HostShare {
    /// Joins the engines of this user that use `device`. An engine of weight 2 gets twice the share
    /// of one of weight 1, which is the default.
    pub fn join(device: &str, weight: u32) -> Self {
        Self::join_in(Path::new(SHARED_MEMORY_DIR), device, weight)
    }

    fn join_in(dir: &Path, device: &str, weight: u32) -> Self {
        let mut share = Self {
            device: device.into(),
            path: dir.join(file_name(device)),
            weight,
            id: fastrand::u64(1..),
            beat: 0,
            table: None,
            others: OtherProcesses::new(),
            latest: ByClass::default(),
            peak: ByClass::default(),
            published: ByClass::default(),
            look_at: Time(0),
            beat_at: Time(0),
            tend_at: Time(0),
            join_at: Time(0),
            divided: (0, ByClass::all(0)),
            warned: false,
        };
        match Table::join(&share.path, ATTEMPTS) {
            Ok(table) => share.table = Some(table),
            Err(e) => share.warn(&e),
        }
        share
    }

    /// Sets the bytes of this engine under way on the NIC and waiting for it. Must be called
    /// whenever the engine is driven; the others see the change within [`READ_INTERVAL`].
    #[inline]
    pub fn publish(&mut self, now: Time, demand: ByClass) {
        self.latest = demand;
        self.peak = self.peak.max(demand);
        if now >= self.look_at
            && (is_significant(self.peak) || self.published != ByClass::default())
        {
            self.look(now);
        }
    }

    /// Part of `window` that this engine may use for a class and the classes above it. It
    /// changes only when the table is read.
    #[inline]
    pub fn window(&mut self, window: u64, class: Priority) -> u64 {
        if self.divided.0 != window {
            self.divide(window);
        }
        self.divided.1.of(class)
    }

    /// When `publish` must be called even if nothing has changed.
    pub fn next_timer(&self) -> Time {
        match self.published == ByClass::default() {
            true => Time::NEVER,
            // The end of the demand, or its continuation, must be written.
            false if !is_significant(self.latest) => self.look_at,
            false => self.beat_at.max(self.look_at),
        }
    }

    #[cold]
    fn look(&mut self, now: Time) {
        self.look_at = now.after(READ_INTERVAL);
        let wanted = if is_significant(self.peak) { self.peak } else { ByClass::default() };
        self.peak = self.latest;
        if let Err(e) = self.exchange(now, wanted) {
            self.warn(&e);
            self.table = None;
            self.published = ByClass::default();
            self.join_at = now.after(JOIN_INTERVAL);
        }
        self.divide(self.divided.0);
    }

    fn exchange(&mut self, now: Time, wanted: ByClass) -> Result<(), DomainError> {
        let table = match &mut self.table {
            Some(table) => table,
            None if now < self.join_at => return Ok(()),
            None => {
                self.others = OtherProcesses::new();
                self.tend_at = now.after(NAME_CHECK_INTERVAL);
                // The engine's lock is held: one attempt, without a pause.
                self.table.insert(Table::join(&self.path, 1)?)
            }
        };
        if wanted != self.published || now >= self.beat_at {
            self.beat += 1;
            let sharer = NicSharer { weight: self.weight, demand: wanted };
            table.write(Record { id: self.id, beat: self.beat, sharer })?;
            self.published = wanted;
            self.beat_at = now.after(HEARTBEAT_INTERVAL);
        }
        if now >= self.tend_at {
            self.tend_at = now.after(NAME_CHECK_INTERVAL);
            if !table.is_named() {
                return Err(DomainError::Unavailable("the table was removed".into()));
            }
        }
        table.read()?;
        self.others.update(now, table.found(), |slot| table.is_held(slot));
        Ok(())
    }

    fn divide(&mut self, window: u64) {
        let windows = match self.table {
            Some(_) => {
                let own = NicSharer { weight: self.weight, demand: self.published };
                divide(window, own, self.others.sharers())
            }
            None => ByClass::all(window),
        };
        self.divided = (window, windows);
    }

    fn warn(&mut self, cause: &DomainError) {
        if !std::mem::replace(&mut self.warned, true) {
            let device = &self.device;
            tracing::warn!(%device, %cause, "the NIC's window is not shared with other processes");
        }
    }
}

/// Whether a demand is large enough to be written.
fn is_significant(demand: ByClass) -> bool {
    demand.total() >= MIN_WINDOW
}

/// One file for each device and user. Device names are not trusted as file names.
fn file_name(device: &str) -> String {
    let mut name = format!("fabric-ray-{}-", rustix::process::geteuid().as_raw());
    for byte in device.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => name.push(byte.into()),
            _ => write!(name, "%{byte:02x}").expect("strings take everything"),
        }
    }
    name
}
