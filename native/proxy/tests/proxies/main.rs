//! Ranks that send each other tokens and atomics through their proxies: simulated, threads,
//! processes.

mod device;
mod processes;
mod simulated;
mod threads;
