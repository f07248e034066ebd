//! A record of each work request, for measurements.

use std::collections::HashMap;

use super::{
    node::{LinkEnd, Port},
    wire::World,
};
use crate::{
    api::EngineId,
    domain::{Completion, LinkId, Token, WorkRequest},
};

/// Kind of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Work {
    Write,
    Read,
    /// A count without bytes.
    Count,
    Message,
}

/// A posted work request. Times are virtual nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct TracedWork {
    pub engine: EngineId,
    pub rail: u8,
    pub work: Work,
    pub bytes: u64,
    /// Offset of its first byte in the peer's region; the same when it is sent again.
    pub offset: u64,
    pub posted: u64,
    /// When its sender was notified, and whether it succeeded; `None` while it is under way.
    pub ended: Option<(u64, bool)>,
}

/// Recorded by [`crate::simulation::SimNet::trace`].
#[derive(Default)]
pub(crate) struct Trace {
    done: Vec<TracedWork>,
    open: HashMap<(Port, LinkId, Token), TracedWork>,
}

impl Trace {
    pub fn posted(&mut self, now: u64, port: Port, link: LinkId, token: Token, wr: &WorkRequest) {
        let (work, data) = match wr {
            WorkRequest::Write { data, .. } => (Work::Write, Some(data)),
            WorkRequest::Read { data } => (Work::Read, Some(data)),
            WorkRequest::Count(_) => (Work::Count, None),
            WorkRequest::Send(_) => (Work::Message, None),
            WorkRequest::Prepare { .. } => return,
        };
        let traced = TracedWork {
            engine: port.engine,
            rail: port.rail,
            work,
            bytes: data.map_or(0, |d| d.bytes()),
            offset: data.map_or(0, |d| d.remote_seq.nth(0)),
            posted: now,
            ended: None,
        };
        self.open.insert((port, link, token), traced);
    }

    /// The sender of a work request is notified.
    pub fn notified(&mut self, now: u64, port: Port, completion: &Completion) {
        let Completion::Done { link, token, result } = completion else { return };
        if let Some(mut traced) = self.open.remove(&(port, *link, *token)) {
            traced.ended = Some((now, result.is_ok()));
            self.done.push(traced);
        }
    }

    /// Takes the work requests that have ended since the last call.
    pub fn take(&mut self) -> Vec<TracedWork> {
        std::mem::take(&mut self.done)
    }

    /// The work requests under way.
    pub fn open(&self) -> impl Iterator<Item = TracedWork> + '_ {
        self.open.values().copied()
    }
}

impl World {
    pub(crate) fn trace_posted(&mut self, (port, link): LinkEnd, token: Token, wr: &WorkRequest) {
        let now = self.now();
        if let Some(trace) = &mut self.trace {
            trace.posted(now, port, link, token, wr);
        }
    }

    pub(crate) fn trace_notified(&mut self, port: Port, completions: &[Completion]) {
        let now = self.now();
        if let Some(trace) = &mut self.trace {
            completions.iter().for_each(|c| trace.notified(now, port, c));
        }
    }
}
