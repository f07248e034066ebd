//! The threads that drive the group, and how they sleep.

mod caller_wait;
mod combining_lock;
mod group_driver;
mod heartbeats;
mod parker;
mod share;
mod state;
mod waiters;
#[cfg(all(test, not(loom)))]
mod waiting_tests;
mod worker;

pub(crate) use group_driver::{GroupDriver, Guard};
pub(crate) use state::{Command, Core};
pub(crate) use waiters::Dependent;
pub(crate) use worker::Worker;
