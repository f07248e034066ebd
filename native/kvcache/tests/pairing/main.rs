//! Which bytes go where between two instances' caches.

mod bytes;
mod caches;
mod counts;
mod layouts;
mod refusals;
mod replay;
mod requests;
mod sizes;
mod spread;
mod stages;
