//! What the engines of one host share of one NIC (TENT §3.3.2).
//!
//! Each engine writes what it has under way or waiting into a table in shared memory, reads what the
//! others wrote, and computes its own window by [`divide`]; nobody is in charge. A part of an engine
//! that dies goes to the others, whatever killed it and wherever: its place in the table is a lock
//! that the kernel ends.
//!
//! - Those who want less than one smallest slice say nothing: everyone may have that much.
//! - The table is looked at every [`LOOK`] while there is something to say, and not at all otherwise:
//!   a write and a read of some kilobytes, about a microsecond each. All other calls are arithmetic.
//! - Without a table, for whatever reason, an engine has the whole window, and the log says so once.

mod others;
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

use others::Others;
use record::Record;
use table::Table;

use crate::{
    api::Priority,
    domain::DomainError,
    group::policy::{
        classes::ByClass,
        divide::{divide, Party, LEAST},
    },
    time::Time,
};

/// How often the table is looked at.
pub(crate) const LOOK: Duration = Duration::from_millis(10);
/// Who wants something writes at least so often, that it isn't taken for one who hangs.
const BEAT: Duration = Duration::from_millis(250);
/// How often it is checked that the table still has its name.
const TEND: Duration = Duration::from_secs(1);
/// How long after the table was lost, or couldn't be joined, it is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// A millisecond lies between them.
const ATTEMPTS: u32 = 20;
/// Memory that all processes of a host see, and that is gone when it is switched off.
const PLACE: &str = "/dev/shm";

/// One engine's part of one NIC.
#[derive(Debug)]
pub(crate) struct HostShare {
    device: String,
    path: PathBuf,
    weight: u32,
    id: u64,
    beat: u64,
    table: Option<Table>,
    others: Others,
    /// What was last said to be wanted, and the most since the last look.
    latest: ByClass,
    peak: ByClass,
    /// What the others know.
    told: ByClass,
    look_at: Time,
    beat_at: Time,
    tend_at: Time,
    join_at: Time,
    /// The parts of a window of so many bytes.
    divided: (u64, ByClass),
    warned: bool,
}

impl HostShare {
    /// Joins those of this user who use `device`. `weight` is 1 for all by default; who has 2 gets twice
    /// as much as who has 1.
    pub fn join(device: &str, weight: u32) -> Self {
        Self::join_in(Path::new(PLACE), device, weight)
    }

    fn join_in(place: &Path, device: &str, weight: u32) -> Self {
        let mut share = Self {
            device: device.into(),
            path: place.join(file_name(device)),
            weight,
            id: fastrand::u64(1..),
            beat: 0,
            table: None,
            others: Others::new(),
            latest: ByClass::default(),
            peak: ByClass::default(),
            told: ByClass::default(),
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

    /// What this engine has under way on the NIC, and what waits for it. To be called whenever the
    /// engine is driven; the others learn of it within [`LOOK`].
    #[inline]
    pub fn publish(&mut self, now: Time, demand: ByClass) {
        self.latest = demand;
        self.peak = self.peak.max(demand);
        if now >= self.look_at && (matters(self.peak) || self.told != ByClass::default()) {
            self.look(now);
        }
    }

    /// How much of `window` this engine may have under way of a class and those above it. It changes
    /// with a look only.
    #[inline]
    pub fn window(&mut self, window: u64, class: Priority) -> u64 {
        if self.divided.0 != window {
            self.divide(window);
        }
        self.divided.1.of(class)
    }

    /// When `publish` is to be called though nothing has changed.
    pub fn next_timer(&self) -> Time {
        match self.told == ByClass::default() {
            true => Time::NEVER,
            // That it is over, or that it goes on.
            false if !matters(self.latest) => self.look_at,
            false => self.beat_at.max(self.look_at),
        }
    }

    #[cold]
    fn look(&mut self, now: Time) {
        self.look_at = now.after(LOOK);
        let wanted = if matters(self.peak) { self.peak } else { ByClass::default() };
        self.peak = self.latest;
        if let Err(e) = self.exchange(now, wanted) {
            self.warn(&e);
            self.table = None;
            self.told = ByClass::default();
            self.join_at = now.after(AGAIN);
        }
        self.divide(self.divided.0);
    }

    fn exchange(&mut self, now: Time, wanted: ByClass) -> Result<(), DomainError> {
        let table = match &mut self.table {
            Some(table) => table,
            None if now < self.join_at => return Ok(()),
            None => {
                self.others = Others::new();
                self.tend_at = now.after(TEND);
                // The engine's lock is held: one attempt, without a pause.
                self.table.insert(Table::join(&self.path, 1)?)
            }
        };
        if wanted != self.told || now >= self.beat_at {
            self.beat += 1;
            let party = Party { weight: self.weight, demand: wanted };
            table.write(Record { id: self.id, beat: self.beat, party })?;
            self.told = wanted;
            self.beat_at = now.after(BEAT);
        }
        if now >= self.tend_at {
            self.tend_at = now.after(TEND);
            if !table.is_named() {
                return Err(DomainError::Unavailable("its table was removed".into()));
            }
        }
        table.read()?;
        self.others.see(now, table.found(), |slot| table.is_held(slot));
        Ok(())
    }

    fn divide(&mut self, window: u64) {
        let windows = match self.table {
            Some(_) => {
                let own = Party { weight: self.weight, demand: self.told };
                divide(window, own, self.others.parties())
            }
            None => ByClass::all(window),
        };
        self.divided = (window, windows);
    }

    fn warn(&mut self, cause: &DomainError) {
        if !std::mem::replace(&mut self.warned, true) {
            let device = &self.device;
            tracing::warn!(%device, %cause, "a NIC is used without regard to other processes");
        }
    }
}

/// Less needn't be said.
fn matters(demand: ByClass) -> bool {
    demand.total() >= LEAST
}

/// One file for each device and user. Names of devices are not trusted to be names of files.
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
