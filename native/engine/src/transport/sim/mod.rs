//! Simulated links on a virtual clock: seeded and replayable. The engine is the real one; only time
//! and the network are simulated.
//!
//! The two ends of a link communicate only by deliveries. A delivery lands as long as the receiving
//! end is up, even if the sending end is down. Each end learns of a loss at its own time.

mod clock;
mod config;
mod domain;
mod fault;
mod free_schedule;
mod land;
mod node;
mod peer_mappings;
mod trace;
mod wire;

pub(crate) use clock::Clock;
pub use config::SimConfig;
pub use domain::SimDomain;
pub use fault::Fault;
pub(crate) use free_schedule::mix;
pub use free_schedule::NextEvent;
pub(crate) use node::{ByName, Node, Port};
pub(crate) use trace::Trace;
pub use trace::{TracedWork, Work};
pub(crate) use wire::World;
