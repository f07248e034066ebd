//! The engine over the transports of one host, and the topology of hosts.

mod apertures;
mod closing;
mod each;
mod files;
mod flight;
mod segments;
mod staging;
mod topology;
mod wakeups;
