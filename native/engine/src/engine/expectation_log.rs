//! Ended expectations, for the flight recorder.

use super::counters::Expectation;
use crate::{
    api::Imm,
    flight::{Cursor, ExpectationRecord, Histogram, Records, Ring},
    sync::Mutex,
    time::Time,
    EngineError,
};

/// The latest expectations, and how long those that were met waited.
#[derive(Debug, Default)]
pub(crate) struct ExpectationLog {
    on: bool,
    entries: Mutex<LogEntries>,
}

#[derive(Debug, Default)]
struct LogEntries {
    ring: Ring<ExpectationRecord>,
    wait_times: Histogram,
}

impl ExpectationLog {
    /// Keeps the latest `records` expectations; none for 0.
    pub fn new(records: usize) -> Self {
        let entries = LogEntries { ring: Ring::new(records), wait_times: Histogram::default() };
        Self { on: records > 0, entries: Mutex::new(entries) }
    }

    #[inline]
    pub fn is_on(&self) -> bool {
        self.on
    }

    pub(super) fn record(&self, imm: Imm, e: &Expectation, now: Time, error: Option<&EngineError>) {
        let Some(span) = e.span.filter(|_| self.on) else { return };
        // A poll reports the time of the arrival, which may be before the expectation began.
        let now = now.max(e.begun);
        let failure = error.map(|e| e.to_string().into_boxed_str());
        let mut entries = self.entries.lock();
        if failure.is_none() {
            entries.wait_times.add(now.nanos_since(e.begun), 1);
        }
        let (imm, counts) = (imm.to_wire(), u32::try_from(e.n).unwrap_or(u32::MAX));
        let (begun, notified) = (e.begun, now);
        entries.ring.push(ExpectationRecord { imm, counts, span, begun, notified, failure });
    }

    pub fn read(&self, since: Cursor, out: &mut Records) {
        let entries = self.entries.lock();
        out.expectations.extend(entries.ring.since(since.expectations).cloned());
        out.missed += entries.ring.oldest().saturating_sub(since.expectations);
        out.cursor.expectations = entries.ring.written();
    }

    /// The wait times of expectations that were met.
    pub fn wait_times(&self) -> Histogram {
        self.entries.lock().wait_times
    }
}
