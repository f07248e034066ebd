//! GPU memory: where it lies, who can be given it, how it is copied, words that both sides watch.

mod driver;
mod async_copy;
mod location;
mod nature;
mod pinned;
mod word;

pub(crate) use driver::Driver;
pub(crate) use async_copy::{copy_now, AsyncCopier, CopyRange, PendingCopy};
pub use location::{locate, CudaKind, CudaRange, Dmabuf, Location};
pub(crate) use nature::Nature;
pub(crate) use pinned::Pinned;
pub use word::DeviceWord;
