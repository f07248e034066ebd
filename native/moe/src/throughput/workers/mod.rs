//! Executors of jobs: this thread, or kernels.

pub mod device;
mod prompt;

pub use prompt::Prompt;
