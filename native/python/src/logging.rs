//! Passes the engine's log events to Python's logger `fabric_ray.native`.
//!
//! Events come from threads that hold the engine's lock, and a waiter for that lock may hold the
//! GIL. So an event is queued, and one thread, which starts with the first event, logs them.

use std::{
    collections::VecDeque,
    fmt::{self, Write},
};

use fabric_engine::{
    locks::{Condvar, Mutex},
    PerProcess,
};
use pyo3::{prelude::*, types::PyDict};
use tracing::{
    field::{Field, Visit},
    span, Event, Level, Metadata, Subscriber,
};

use crate::attach::attached;

const LOGGER: &str = "fabric_ray.native";
/// Records that may wait; further ones are dropped and counted.
const MAX_WAITING_RECORDS: usize = 1000;

struct Record {
    level: u8,
    text: String,
    fields: Vec<(&'static str, String)>,
}

#[derive(Default)]
struct RecordQueue {
    records: VecDeque<Record>,
    dropped: usize,
    /// Whether a thread serves the queue.
    served: bool,
}

static RECORDS: PerProcess<(Mutex<RecordQueue>, Condvar)> = PerProcess::empty();

/// From now on the engine's events reach Python.
pub fn install() {
    // Another subscriber serves as well.
    let _ = tracing::subscriber::set_global_default(PythonSubscriber);
}

struct PythonSubscriber;

impl Subscriber for PythonSubscriber {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = FormattedEvent::default();
        event.record(&mut line);
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            _ => 20,
        };
        push(Record { level, text: line.message + &line.text, fields: line.fields });
    }

    // The engine has no spans.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// `message; name: value; ...`, and the same by name.
#[derive(Default)]
struct FormattedEvent {
    message: String,
    text: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for FormattedEvent {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string can't fail.
        match field.name() {
            "message" => _ = write!(self.message, "{value:?}"),
            name => {
                let value = format!("{value:?}");
                _ = write!(self.text, "; {name}: {value}");
                self.fields.push((name, value));
            }
        }
    }
}

fn push(record: Record) {
    let (queue, queued) = RECORDS.get_or_default();
    let mut w = queue.lock();
    if w.records.len() >= MAX_WAITING_RECORDS {
        w.dropped += 1;
        return;
    }
    w.records.push_back(record);
    if !w.served {
        let serve = move || serve(queue, queued);
        // Without a thread they wait for the next event.
        w.served = std::thread::Builder::new().name("fabric-log".into()).spawn(serve).is_ok();
    }
    drop(w);
    queued.notify_one();
}

fn serve(queue: &Mutex<RecordQueue>, queued: &Condvar) {
    loop {
        let (record, dropped) = {
            let mut w = queue.lock();
            loop {
                match w.records.pop_front() {
                    Some(record) => break (record, std::mem::take(&mut w.dropped)),
                    None => queued.wait(&mut w),
                }
            }
        };
        // The interpreter has ended: there is no receiver.
        attached(|py| {
            if let Err(e) = hand_over(py, &record, dropped) {
                e.write_unraisable(py, None);
            }
        });
    }
}

fn hand_over(py: Python<'_>, record: &Record, dropped: usize) -> PyResult<()> {
    let logger = PyModule::import(py, "logging")?.call_method1("getLogger", (LOGGER,))?;
    if dropped > 0 {
        let text = format!("{dropped} records were dropped: too many at once");
        logger.call_method1("log", (30, "%s", text))?;
    }
    // Handlers that write structured logs find the fields at the record's `fabric`.
    let fields = PyDict::new(py);
    record.fields.iter().try_for_each(|(name, value)| fields.set_item(name, value))?;
    let extra = PyDict::new(py);
    extra.set_item("fabric", fields)?;
    let kwargs = PyDict::new(py);
    kwargs.set_item("extra", extra)?;
    logger.call_method("log", (record.level, "%s", &record.text), Some(&kwargs)).map(drop)
}
