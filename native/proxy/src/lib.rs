//! Expert parallelism's host proxies: a device says in 128 bits what is to be sent, and a thread of the host sends it
//! through a [`TransferEngine`](fabric_engine::TransferEngine) and keeps the order that the device relies on, whatever
//! the NIC promises (uccl-ep §3).
//!
//! From the device down: [`command`] in a [`fifo`]; [`symmetric`] memory, where an address is a rank and an offset;
//! [`tag`]s, which say what arrived; [`order`], which says at the receiver what may be applied.
#![deny(unsafe_code)]

pub mod command;
mod error;
pub mod fifo;
pub mod order;
pub mod raw;
pub mod symmetric;
mod sync;
mod tag;
mod wake;

pub use error::{ProxyError, Result};
pub use tag::EPOCHS;
pub use wake::Bed;
