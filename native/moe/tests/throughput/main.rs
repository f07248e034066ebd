//! The high-throughput exchange: its sums against those made in one place in the same order.

mod grouped;
mod late;
mod lives;
mod machines;
mod nodes;
mod processes;
