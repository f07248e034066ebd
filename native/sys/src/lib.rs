//! Function tables of libraries that are opened at run time.
//!
//! Nothing is linked: a machine without a library builds, imports and runs, and errors name what is
//! missing. Types have the layout of the C headers (asserted by tests); meaning, ownership and safe
//! use are up to the transports.

pub mod cuda;
pub mod gdrapi;
pub mod ibverbs;
pub mod libfabric;
mod open;
mod process;
mod signals;

pub use open::{Library, OpenError};
pub use process::{count_forks, forks, PerProcess};
pub use signals::keep_signals;
