//! Simulated links on a virtual clock: seeded and replayable. The engine above is the real one; only time and
//! the wire are made up.
//!
//! Two ends of a link know of each other only by what travels. What is on its way lands as long as the end it
//! comes to is up, whatever became of the end that sent it; each end learns of a loss in its own time.

mod apertures;
mod clock;
mod config;
mod domain;
mod fault;
mod free;
mod land;
mod node;
mod trace;
mod wire;

pub(crate) use clock::Clock;
pub use config::SimConfig;
pub use domain::SimDomain;
pub use fault::Fault;
pub(crate) use free::mix;
pub use free::Choice;
pub(crate) use node::{ByName, Node, Port};
pub(crate) use trace::Trace;
pub use trace::{Traced, Work};
pub(crate) use wire::World;
