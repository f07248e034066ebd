//! Memory that the engine reads and writes: allocations, registrations, mappings and copies.

mod alloc;
mod routine_choice;
mod copy;
pub mod device;
pub mod file;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod headroom;
mod recent_writes;
mod huge;
mod region_indices;
mod node;
mod region;
mod routine;

pub use alloc::Allocation;
pub use copy::Copier;
pub(crate) use huge::{map_shared, populate};
pub(crate) use region_indices::{RegionIndex, RegionIndices};
pub(crate) use node::node_of;
pub use region::{Backing, Keep, RegionMemory};
pub(crate) use region::{RegionBook, HIDDEN};
