//! The high-throughput exchange: its sums against those made in one place in the same order.

mod grouped;
mod incarnations;
mod late;
mod machines;
mod nodes;
mod processes;
