//! Host proxies of expert parallelism (uccl-ep §3). A device pushes 128-bit commands. A host thread
//! executes them through a [`TransferEngine`](fabric_engine::TransferEngine), and keeps the order
//! that the device relies on, whatever order the NIC delivers in.
//!
//! From the device down: a [`command`] in a [`fifo`]; a [`Proxy`], whose threads each drive an
//! [`Executor`]; [`symmetric`] memory, where an address is a rank and an offset; [`order`], which
//! restores the order of atomics at the receiver.
#![deny(unsafe_code)]

mod barrier;
pub mod command;
mod config;
mod descriptor;
mod error;
mod executor;
pub mod fifo;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod inbox;
mod liveness;
pub mod order;
mod parker;
mod peer;
mod proxy;
pub mod raw;
mod send_channel;
pub mod symmetric;
mod sync;
mod tag;

pub use config::Config;
pub use descriptor::{RankDescriptor, ThreadDescriptor};
pub use error::{ProxyError, Result};
pub use executor::{Event, Executor, Membership, OnEvent, SharedState};
pub use liveness::Liveness;
pub use parker::Parker;
pub use proxy::{DeviceMemory, Engines, Proxy};
pub use tag::EPOCHS;
