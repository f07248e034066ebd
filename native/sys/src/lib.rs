//! Tables of the libraries that are opened at run time.
//!
//! Nothing here is linked: a machine without the library builds, imports and runs, and learns in
//! words what is missing. Types are laid out as the library's C headers lay them out (asserted by
//! tests); meaning, ownership and safe use belong to the transports.

pub mod cuda;
pub mod gdrapi;
pub mod ibverbs;
pub mod libfabric;
mod open;
mod signals;

pub use open::{Library, OpenError};
pub use signals::keep_signals;
