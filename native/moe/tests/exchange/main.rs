//! Exchanges over real links and in the simulator, against sums made without any.

mod kernels;
mod links;
mod model;
mod posted;
mod schedules;
mod stalls;
