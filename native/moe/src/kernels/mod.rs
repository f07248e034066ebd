//! What a device does with rows. Here the device is the CPU: the reference for what GPUs run, and
//! the way itself where there is none.

mod float;
mod reduce;
mod rows;

pub use float::Float;
pub(crate) use reduce::{add, store};
pub use reduce::{weighted_sum, Answers};
pub use rows::{Part, PartMut};
