//! Expert parallelism's host proxies: a device says in 128 bits what is to be sent, and a thread of the host sends it
//! through a [`TransferEngine`](fabric_engine::TransferEngine) and keeps the order that the device relies on, whatever
//! the NIC promises (uccl-ep §3).
//!
//! From the device down: a [`command`] in a [`fifo`]; a [`Proxy`], whose threads each drive an [`Executor`]; [`symmetric`]
//! memory, where an address is a rank and an offset; [`order`], which says at the receiver what may be applied.
#![deny(unsafe_code)]

mod alive;
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
pub mod order;
mod peer;
mod proxy;
pub mod raw;
mod rounds;
mod sending;
pub mod symmetric;
mod sync;
mod tag;
mod wake;

pub use alive::Alive;
pub use config::Config;
pub use descriptor::{RankDescriptor, ThreadDescriptor};
pub use error::{ProxyError, Result};
pub use executor::{Common, Event, Executor, Membership, OnEvent};
pub use proxy::{DeviceMemory, Engines, Proxy};
pub use tag::EPOCHS;
pub use wake::Bed;
