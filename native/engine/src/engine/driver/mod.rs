//! The threads that drive the group, and how they sleep.

mod group_driver;
mod combining_lock;
mod parker;
mod share;
mod worker;

pub(crate) use group_driver::{GroupDriver, Command, Core, Guard};
pub(crate) use worker::Worker;
