//! Threads and sleeping: who drives the group when.

mod cell;
mod combining_lock;
mod parker;
mod share;
mod worker;

pub(crate) use cell::{Cell, Command, Core, Guard};
pub(crate) use worker::Worker;
