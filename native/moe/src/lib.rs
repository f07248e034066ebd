//! Expert parallelism: every rank sends each of its tokens to the ranks that host its experts, and gets the experts'
//! answers back, weighted and summed (fabric-lib §6).
//!
//! From pure to stateful: [`Shape`] (what all ranks agree on), [`memory`] (what lies where in each rank's part of
//! the symmetric memory), [`routes`] (which row goes where), [`kernels`] (what a device does with rows; here, a CPU),
//! and [`AllToAll`], the exchange itself: a state machine that completions of the engine drive. Nothing in it blocks
//! but the calls that say so, so that it runs in the simulator as it does over links.
//!
//! [`throughput`] is the mode for many tokens on many nodes.

#![forbid(unsafe_code)]

pub mod card;
pub mod device;
mod exchange;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod kernels;
pub mod memory;
pub mod routes;
mod shape;
pub mod throughput;

pub use exchange::{AllToAll, Dispatched, Lost, Stage};
pub use shape::{Back, Shape};
