//! The state of a run that is checked, and the checks of counters.

use std::fmt;

use fabric_engine::{Counter, EngineError, Handle};

use crate::{case::Ns, memory::Memory};

/// A promise of the engine that was broken.
#[derive(Clone, Debug, PartialEq)]
pub struct Violation {
    pub promise: &'static str,
    pub at: Ns,
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} ns: {}", self.promise, self.at, self.what)
    }
}

pub type Checked = Result<(), Violation>;

pub fn broken(promise: &'static str, at: Ns, what: impl Into<String>) -> Checked {
    Err(Violation { promise, at, what: what.into() })
}

/// One logical write. It is counted once, and has bytes unless it is a bare count.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    pub incarnation: usize,
    pub landing: Option<usize>,
    /// The generation of a counter that counts it.
    pub count: Option<usize>,
}

/// One generation of a counter, in one incarnation of a node.
#[derive(Debug)]
pub struct Count {
    pub incarnation: usize,
    pub counter: Option<Counter>,
    pub units: Vec<Unit>,
    /// Units of transfers that have succeeded, and of those that have failed.
    pub succeeded: u64,
    pub failed: u64,
    /// Arrivals that met expectations have claimed.
    pub taken: u64,
    /// When an expectation last failed.
    pub given_up: Option<Ns>,
    seen: u64,
}

impl Count {
    pub fn new(incarnation: usize, counter: Counter) -> Self {
        let (units, counter) = (Vec::new(), Some(counter));
        Self {
            incarnation,
            counter,
            units,
            succeeded: 0,
            failed: 0,
            taken: 0,
            given_up: None,
            seen: 0,
        }
    }

    /// Checks the count; called after every step.
    pub fn check(&mut self, now: Ns, memory: &mut Memory) -> Checked {
        let Some(counter) = &self.counter else { return Ok(()) };
        let arrived = counter.arrived();
        if arrived < self.succeeded {
            let what = format!("{} writes succeeded, {arrived} are counted", self.succeeded);
            return broken("IC-4", now, what);
        }
        if arrived == self.seen {
            return Ok(());
        }
        if arrived < self.seen {
            return broken("IC-1", now, format!("a counter fell from {} to {arrived}", self.seen));
        }
        self.seen = arrived;
        let posted = self.units.len() as u64;
        if arrived > posted {
            return broken("IC-3", now, format!("{arrived} counted of {posted} writes"));
        }
        let is_whole = |u: &&Unit| u.landing.is_none_or(|l| memory.is_whole(l));
        let whole = self.units.iter().filter(is_whole).count() as u64;
        if arrived > whole {
            return broken("IC-2", now, format!("{arrived} counted, {whole} writes are readable"));
        }
        if arrived == posted {
            // A user that waited for all of them may reuse the memory (MR-1).
            let landings = self.units.iter().filter_map(|u| u.landing);
            landings.for_each(|l| memory.end_landing(l));
        }
        Ok(())
    }

    /// Checks the final count, when nothing is under way.
    pub fn check_end(&self, now: Ns) -> Checked {
        let Some(counter) = &self.counter else { return Ok(()) };
        let arrived = counter.arrived();
        let posted = self.units.len() as u64;
        if self.succeeded == posted && arrived != posted {
            return broken("IC-3", now, format!("{arrived} counted of {posted} that succeeded"));
        }
        if counter.unclaimed() != arrived - self.taken {
            let (unclaimed, taken) = (counter.unclaimed(), self.taken);
            let what = format!("{arrived} counted, {taken} taken, {unclaimed} left");
            return broken("IC-5", now, what);
        }
        Ok(())
    }
}

/// A request, and what is known of it.
#[derive(Debug)]
pub struct Transfer {
    pub handle: Handle,
    /// The incarnation that submitted it.
    pub incarnation: usize,
    /// The incarnations that it is addressed to.
    pub to: Vec<usize>,
    pub since: Ns,
    pub deadline: Ns,
    pub units: Vec<Unit>,
    /// Local memory that it sends from.
    pub sources: Vec<(u64, u64)>,
    /// Local memory that it reads into, and what must be there then.
    pub targets: Vec<(u64, Vec<u8>)>,
    pub message: Option<usize>,
    /// Must fail as stale: its key is of an earlier incarnation.
    pub old_key: bool,
    pub pinned: bool,
    /// Has a deadline of its own.
    pub hurried: bool,
    pub over: bool,
}

/// Whether memory is reusable after this result: the transfer does not continue.
pub fn is_quiesced(result: &Result<(), EngineError>) -> bool {
    !matches!(result, Err(EngineError::Timeout { quiesced: false, .. }))
}

/// An expectation.
#[derive(Debug)]
pub struct Wait {
    pub handle: Handle,
    pub count: usize,
    pub n: u32,
    /// The incarnation that is named as writer.
    pub writer: Option<usize>,
    pub since: Ns,
    pub deadline: Ns,
    pub over: bool,
}
