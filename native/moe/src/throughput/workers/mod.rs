//! Executors of jobs: this thread, or kernels.

mod cpu;
pub mod device;

pub use cpu::CpuWorker;
