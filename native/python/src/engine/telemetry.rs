//! Metrics and records as plain values; `fabric_ray.engine.observability` gives them their names.

use fabric_engine::{
    api::{EngineId, Priority},
    flight::{ExpectationRecord, PathEvent, TransferRecord},
    flight::{Histogram, Metrics, PeerMetrics, RailMetrics, RailTally, Records, StageTimes},
    Time,
};
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use super::values::hex;

/// Nanoseconds; `None` for what has not happened.
fn moment(at: Time) -> Option<u64> {
    (at != Time::NEVER).then_some(at.0)
}

fn class(priority: Priority) -> &'static str {
    match priority {
        Priority::Latency => "latency",
        Priority::Bulk => "bulk",
        Priority::Background => "background",
    }
}

fn id(id: &EngineId) -> String {
    hex(&id.0)
}

/// `(counts by power of two of nanoseconds, nanoseconds of all)`
fn histogram(h: &Histogram) -> (Vec<u64>, u64) {
    (h.buckets.to_vec(), h.total)
}

pub(super) fn metrics(py: Python<'_>, m: Metrics) -> PyResult<Bound<'_, PyDict>> {
    let d = PyDict::new(py);
    d.set_item("counted", m.counted)?;
    d.set_item("ghosts", m.ghosts)?;
    d.set_item("regions", m.regions)?;
    d.set_item("retiring", m.retiring)?;
    d.set_item("going_on", m.going_on)?;
    d.set_item("expected", histogram(&m.expected))?;
    d.set_item("rails", list(py, &m.rails, |r| rail(py, r))?)?;
    d.set_item("peers", list(py, &m.peers, |p| peer(py, p))?)?;
    Ok(d)
}

fn list<'py, T, P: IntoPyObject<'py>>(
    py: Python<'py>,
    items: &[T],
    of: impl Fn(&T) -> PyResult<P>,
) -> PyResult<Bound<'py, PyList>> {
    let items: Vec<P> = items.iter().map(of).collect::<PyResult<_>>()?;
    PyList::new(py, items)
}

/// `(transport, device, window, under_way, [(class, queue, post, wire, deliver), ...])`
fn rail<'py>(py: Python<'py>, r: &RailMetrics) -> PyResult<Bound<'py, PyTuple>> {
    let used = |s: &StageTimes| s.queue.count() + s.wire.count() > 0;
    let classes = Priority::ALL.into_iter().map(|p| (p, &r.stages[p as usize]));
    let stages = classes.filter(|(_, s)| used(s)).map(|(p, s)| {
        let StageTimes { queue, post, wire, deliver } = s;
        (class(p), histogram(queue), histogram(post), histogram(wire), histogram(deliver))
    });
    let stages: Vec<_> = stages.collect();
    (r.transport.name(), r.device.as_str(), r.window, r.under_way, stages).into_pyobject(py)
}

/// `(id, name, state, transport or None, links, waiting, under_way, waits, rails)`, of each rail
/// `(rail, excluded, [(class, slices, bytes, again, failed), ...])`
fn peer<'py>(py: Python<'py>, p: &PeerMetrics) -> PyResult<Bound<'py, PyTuple>> {
    let classes = |r: &RailTally| -> Vec<_> {
        let each = Priority::ALL.into_iter().map(|p| (class(p), r.classes[p as usize]));
        let used = each.filter(|(_, t)| t.slices + t.failed > 0);
        used.map(|(class, t)| (class, t.slices, t.bytes, t.again, t.failed)).collect()
    };
    let rails = p.tally.rails.iter().enumerate();
    let rails: Vec<_> = rails.map(|(i, r)| (i, r.excluded, classes(r))).collect();
    let waits: Vec<_> =
        Priority::ALL.into_iter().map(|c| (class(c), p.tally.waits[c as usize])).collect();
    let transport = p.transport.map(|t| t.name());
    (id(&p.id), p.name.as_str(), p.state, transport, p.links, p.waiting, p.under_way, waits, rails)
        .into_pyobject(py)
}

pub(super) fn records(py: Python<'_>, r: Records) -> PyResult<Bound<'_, PyDict>> {
    let d = PyDict::new(py);
    let c = r.cursor;
    d.set_item("cursor", (c.transfers, c.arrivals, c.expectations, c.events))?;
    d.set_item("missed", r.missed)?;
    let peers: Vec<_> = r.peers.iter().map(|(i, name)| (id(i), name.as_str())).collect();
    d.set_item("peers", peers)?;
    let rails: Vec<_> = r.rails.iter().map(|(t, device)| (t.name(), device.as_str())).collect();
    d.set_item("rails", rails)?;
    d.set_item("transfers", list(py, &r.transfers, |t| transfer(py, t))?)?;
    let arrivals: Vec<_> = r.arrivals.iter().map(|a| (a.at.0, a.rail, a.imm, a.counts)).collect();
    d.set_item("arrivals", arrivals)?;
    d.set_item("expectations", list(py, &r.expectations, |e| expected(py, e))?)?;
    d.set_item("events", list(py, &r.events, |e| event(py, e))?)?;
    Ok(d)
}

fn transfer<'py>(py: Python<'py>, t: &TransferRecord) -> PyResult<Bound<'py, PyTuple>> {
    let m = &t.times;
    let times =
        (m.queued.0, moment(m.posted), moment(m.all_posted), moment(m.wire), moment(m.notified));
    let parts: Vec<_> = t.parts.iter().map(|p| (p.peer, p.imm, p.counts, p.bytes)).collect();
    let how = (t.slices, t.again, t.waits, t.rails, t.over, t.weight);
    let named = (t.id, t.op, class(t.priority), t.span.0);
    (named, times, parts, t.parts_lost, how, t.failure.as_deref()).into_pyobject(py)
}

fn expected<'py>(py: Python<'py>, e: &ExpectationRecord) -> PyResult<Bound<'py, PyTuple>> {
    (e.imm, e.counts, e.span.0, e.begun.0, e.notified.0, e.failure.as_deref()).into_pyobject(py)
}

fn event<'py>(py: Python<'py>, e: &PathEvent) -> PyResult<Bound<'py, PyTuple>> {
    (e.at.0, e.kind.name(), e.peer, e.rail, &*e.cause).into_pyobject(py)
}
