//! The records of the flight recorder.

use super::Histogram;
use crate::{
    api::{EngineId, Priority, Span, TransportKind},
    time::Time,
};

/// The times at which a transfer changed its state; [`Time::NEVER`] for states that it has not
/// reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferTimes {
    /// The request reached the engine.
    pub queued: Time,
    /// The first work request was posted to a link.
    pub posted: Time,
    /// The last work request was posted to a link.
    pub all_posted: Time,
    /// The last work request was acknowledged.
    pub wire: Time,
    /// The completion was reported.
    pub notified: Time,
}

impl TransferTimes {
    pub(crate) fn queued(now: Time) -> Self {
        let never = Time::NEVER;
        Self { queued: now, posted: never, all_posted: never, wire: never, notified: never }
    }
}

/// The part of a transfer to one counter of a peer, or to a peer without a count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Index in [`Records::peers`].
    pub peer: u32,
    /// The counter there, and how many writes it is to count; 0 where nothing counts.
    pub imm: u32,
    pub counts: u32,
    pub bytes: u64,
}

/// One request of this engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferRecord {
    /// Drawn in the order in which requests were opened.
    pub id: u64,
    pub op: &'static str,
    pub priority: Priority,
    pub span: Span,
    pub times: TransferTimes,
    /// The parts by peer and rail; of many, only the latest.
    pub parts: Vec<Part>,
    /// Parts that are no longer known.
    pub parts_lost: u32,
    /// Work requests posted, and how many of them were sent before.
    pub slices: u32,
    pub again: u32,
    /// Number of times that it found no room in a window.
    pub waits: u32,
    /// One bit for each rail that carried some of it.
    pub rails: u32,
    /// Nothing of it is under way.
    pub over: bool,
    /// Number of transfers that this sample represents.
    pub weight: u32,
    /// Why it failed.
    pub failure: Option<Box<str>>,
}

/// Writes that this engine counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    pub at: Time,
    pub rail: u8,
    /// The counter, with its generation, and how many writes.
    pub imm: u32,
    pub counts: u32,
}

/// An ended expectation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectationRecord {
    pub imm: u32,
    pub counts: u32,
    pub span: Span,
    pub begun: Time,
    pub notified: Time,
    pub failure: Option<Box<str>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    LinkUp,
    LinkDown,
    /// A link that finished nothing while others went on.
    Stalled,
    PeerLost,
}

impl EventKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::LinkUp => "link up",
            Self::LinkDown => "link down",
            Self::Stalled => "stalled",
            Self::PeerLost => "peer lost",
        }
    }
}

/// An event of the path to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathEvent {
    pub at: Time,
    pub kind: EventKind,
    /// Index in [`Records::peers`].
    pub peer: u32,
    pub rail: Option<u8>,
    pub cause: Box<str>,
}

/// The times of the stages of transfers whose last slice one rail carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// From the request to its first work request.
    pub queue: Histogram,
    /// From the first work request to the last.
    pub post: Histogram,
    /// Of one work request, until it was acknowledged.
    pub wire: Histogram,
    /// From the last acknowledgement until the waiter was notified.
    pub deliver: Histogram,
}

/// A position in the records: the numbers of the next records to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    pub transfers: u64,
    pub arrivals: u64,
    pub expectations: u64,
    pub events: u64,
}

/// The records of an engine.
#[derive(Clone, Debug, Default)]
pub struct Records {
    /// To be given when asking again.
    pub cursor: Cursor,
    /// Records that were written over before they were read.
    pub missed: u64,
    pub peers: Vec<(EngineId, String)>,
    pub rails: Vec<(TransportKind, String)>,
    /// The ended transfers, then those in flight.
    pub transfers: Vec<TransferRecord>,
    pub arrivals: Vec<Arrival>,
    pub expectations: Vec<ExpectationRecord>,
    pub events: Vec<PathEvent>,
}
