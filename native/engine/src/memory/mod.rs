//! Memory that the engine reads and writes: allocations, registrations, mappings and copies.

mod alloc;
mod copy;
pub mod device;
pub mod file;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod headroom;
mod huge;
mod node;
mod recent_writes;
mod region;
mod region_indices;
mod routine;
mod routine_choice;

pub use alloc::Allocation;
pub use copy::Copier;
pub(crate) use huge::{map_shared, populate};
pub(crate) use node::node_of;
pub use region::{Backing, Keep, RegionMemory};
pub(crate) use region::{RegionBook, FIRST_INTERNAL_INDEX};
pub(crate) use region_indices::{RegionIndex, RegionIndices};
