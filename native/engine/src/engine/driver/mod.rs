//! The threads that drive the group, and how they sleep.

mod cell;
mod combining_lock;
mod parker;
mod share;
mod worker;

pub(crate) use cell::{Cell, Command, Core, Guard};
pub(crate) use worker::Worker;
