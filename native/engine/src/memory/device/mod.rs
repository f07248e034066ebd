//! GPU memory: its location, its kind, copies, and words that both sides watch.

mod async_copy;
mod driver;
mod location;
mod memory_kind;
mod pinned;
mod word;

pub(crate) use async_copy::{copy_now, AsyncCopier, CopyRange, PendingCopy};
pub(crate) use driver::Driver;
pub use location::{locate, CudaKind, CudaRange, Dmabuf, Location};
pub(crate) use memory_kind::MemoryKind;
pub(crate) use pinned::Pinned;
pub use word::DeviceWord;
