//! A weight push on a virtual clock: what trainers do before they send is given as times, what is sent goes
//! through the real engines and their groups, over simulated NICs.
//!
//! [`push`] is the vocabulary, [`planned`] makes steps of a plan, [`pipeline`] one trainer's stages, a pure state machine; [`run`] drives trainers
//! and network, [`path`] says afterwards what the time went to.
#![forbid(unsafe_code)]

mod ended;
mod path;
mod pipeline;
mod planned;
mod push;
mod run;

pub use planned::{steps_of, Division};
pub use push::{Network, Outcome, Problem, Push, Stage, Step, Write, STAGES};
pub use run::simulate;
