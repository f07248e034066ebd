//! Row kernels on the CPU: the reference for the GPU kernels, and the implementation without GPU.

mod float;
mod reduce;
mod rows;

pub use float::Float;
pub(crate) use reduce::{add, store};
pub use reduce::{weighted_sum, Answers};
pub use rows::{Part, PartMut};
