//! The two ends of the protocol on real engines and on the simulator.

mod cache;
mod leases;
mod long;
mod plain;
mod schedules;
mod world;
