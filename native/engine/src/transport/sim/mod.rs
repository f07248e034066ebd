//! Simulated links on a virtual clock: seeded, unordered, replayable. The engine above is the real
//! one; only time and the wire are made up.

mod domain;
mod net;

pub use domain::SimDomain;
pub use net::{SimConfig, SimNet};
