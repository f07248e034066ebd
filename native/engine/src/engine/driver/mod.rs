//! Threads and sleeping: who drives the group when.

mod baton;
mod cell;
mod share;
mod sleep;
mod worker;

pub(crate) use cell::{Cell, Command, Core, Guard};
pub(crate) use worker::Worker;
