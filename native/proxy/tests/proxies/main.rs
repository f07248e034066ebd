//! Ranks that send one another tokens and atomics by their proxies: in the simulator, by threads, by processes.

mod device;
mod processes;
mod simulated;
mod threads;
