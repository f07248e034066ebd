//! Plain values that users hold or send to peers.

mod address;
mod config;
mod descriptor;
mod envelope;
pub(crate) use envelope::{Envelope, Versions, WIRE};
mod imm;
mod pages;
mod ports;
mod priority;
mod segment;
mod span;
mod transport;

pub use address::{Endpoint, EngineAddress, EngineId};
pub use config::{EngineConfig, NicConfig, Requirement, Spin, Spray, MAX_RAILS};
pub(crate) use descriptor::check_range;
pub use descriptor::{CounterRef, RailKey, RailKeys, RegionDescriptor, RegionKey};
pub(crate) use imm::SLOTS;
pub use imm::{Imm, FIRST_ALLOCATED_SLOT, TAG_BITS};
pub use pages::{IndexList, PageIndices, Pages};
pub use ports::Ports;
pub use priority::Priority;
pub(crate) use segment::{check_parts, cut, PartRange};
pub use segment::{PartLocation, SegmentDescriptor, SegmentPart, MAX_PARTS};
pub use span::Span;
pub use transport::TransportKind;
