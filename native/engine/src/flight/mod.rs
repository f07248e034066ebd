//! The flight recorder: the latest records of each kind, durations by stage, and counts by peer.
//! These are plain values; the recording caller gives the time.
//!
//! `docs/design/flight.md` says what each moment means and how both ends of a transfer are joined.

mod histogram;
mod metrics;
mod records;
mod ring;
mod tally;

pub use histogram::{Histogram, BUCKETS};
pub use metrics::{Metrics, PeerMetrics, RailMetrics};
pub use records::{
    Arrival, Cursor, EventKind, ExpectationRecord, Part, PathEvent, Records, StageTimes,
    TransferRecord, TransferTimes,
};
pub(crate) use ring::Ring;
pub use tally::{PeerTally, RailTally, Tally};
