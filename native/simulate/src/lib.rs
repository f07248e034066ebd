//! Simulates a weight push on a virtual clock. Preparation times are given; transfers run through
//! the real engines and their groups, over simulated NICs.
//!
//! [`push`] has input and result, [`planned`] makes steps of a plan, [`pipeline`] is one trainer's
//! state machine, [`run`] drives trainers and network, and [`path`] finds the critical path.
#![forbid(unsafe_code)]

mod completions;
mod path;
mod pipeline;
mod planned;
mod push;
mod run;

pub use planned::{steps_of, Division};
pub use push::{Network, Outcome, Push, PushError, Stage, Step, Write, STAGES};
pub use run::simulate;
