//! The native engine: one-sided pushes and counted completion over any link.
//!
//! Layers, from top to bottom, each with its own vocabulary: `engine` (requests, counters,
//! handles), `group` (slices, routes; a state machine without I/O), `domain` (the seam: work
//! requests, completions), `transport` (shm, tcp, sim). `driver` has the threads.

pub mod api;
pub mod domain;
mod engine;
mod error;
pub mod flight;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod group;
pub mod locks;
pub mod memory;
mod process;
pub mod simulation;
mod sync;
mod time;
pub mod topology;
pub mod transport;
mod wake;

pub use domain::{PeerMapping, StoreGuard};
pub use engine::{
    BatchObserver, Counter, Delivery, Expect, Explanation, Grant, Handle, Local, Notify, Op,
    Outcome, Path, Peer, PeerGroup, PeerTransport, Quiescence, Rail, Region, Remote, RemoteRegion,
    RemoteSegment, ScatterDst, Segment, SegmentPiece, Stats, Submit, TransferEngine, Transports,
    Watcher,
};
pub use error::{EngineError, LostLink, Result};
pub use group::TransportVerdict;
pub use memory::file::FileOptions;
pub use process::{PerProcess, ProcessLocal};
pub use time::Time;
