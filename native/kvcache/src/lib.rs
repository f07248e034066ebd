//! KV cache transfer: which bytes of which pages go where, and the protocol that moves them.
//!
//! [`layout`] describes one rank's cache, [`pairing`] the copies between two instances; both are
//! pure. [`Decoder`] and [`Prefiller`] are the two ends of the protocol, on engines of any kind;
//! [`wire`] has its messages.
#![forbid(unsafe_code)]

mod decode;
mod events;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod layout;
pub mod pairing;
mod parts;
mod prefill;
mod table;
mod terms;
mod timer;
pub mod wire;

pub use decode::{Decoder, Event, Pull};
pub use prefill::{JobEvent, JobRequest, LayerTimes, Prefiller, Timeline};
pub use terms::{Cause, LocalRank, Terms};
