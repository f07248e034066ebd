//! Expert parallelism: every rank sends its tokens to the ranks that host their experts, and gets
//! back the experts' answers, weighted and summed (fabric-lib §6).
//!
//! From pure to stateful: [`Shape`] (agreed on by all ranks), [`memory`] (the layout of each rank's
//! part of the symmetric memory), [`routes`] (the destination of each row), [`kernels`] (the
//! device's work on rows; here, a CPU), and [`AllToAll`], the exchange: a state machine that
//! completions of the engine drive. Only calls that say so block, so it also runs in the
//! simulator.
//!
//! [`throughput`] is the mode for many tokens on several nodes.

#![forbid(unsafe_code)]

mod checks;
pub mod device;
mod exchange;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod kernels;
pub mod memory;
mod phase;
pub mod rank_descriptor;
pub mod routes;
mod shape;
pub mod throughput;
mod waiting_signals;

pub use exchange::{AllToAll, Dispatched, LostPeer, MessageKind};
pub use shape::{AnswerFormat, Shape};
