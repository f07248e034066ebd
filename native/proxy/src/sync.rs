//! Atomics that loom can replace, and a pair of fences of which one side is free.

#[cfg(loom)]
pub(crate) use loom::sync::atomic;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic;

/// Fences for two threads of which at least one must see the other's write. The frequent side calls
/// [`light`] between its write and its read, the rare side [`heavy`]. `membarrier` makes all
/// threads of the process pass a barrier for the rare side. Where it is missing, both sides fence.
#[cfg(not(loom))]
mod fences {
    use std::sync::{
        atomic::{compiler_fence, fence, Ordering::SeqCst},
        OnceLock,
    };

    use fabric_engine::PerProcess;
    use rustix::thread::{membarrier, MembarrierCommand};

    static FREE: PerProcess<OnceLock<bool>> = PerProcess::empty();

    /// Call before either side is used.
    pub(crate) fn prepare() {
        let free = FREE.get_or_default();
        free.get_or_init(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok());
    }

    #[inline]
    fn is_free() -> bool {
        FREE.get().and_then(OnceLock::get) == Some(&true)
    }

    #[inline]
    pub(crate) fn light() {
        match is_free() {
            true => compiler_fence(SeqCst),
            false => fence(SeqCst),
        }
    }

    pub(crate) fn heavy() {
        fence(SeqCst);
        if is_free() {
            // The process is registered, so the call cannot fail.
            let _ = membarrier(MembarrierCommand::PrivateExpedited);
        }
    }
}

#[cfg(loom)]
mod fences {
    use loom::sync::atomic::{fence, Ordering::SeqCst};

    pub(crate) fn prepare() {}

    pub(crate) fn light() {
        fence(SeqCst);
    }

    pub(crate) fn heavy() {
        fence(SeqCst);
    }
}

pub(crate) use fences::{heavy, light, prepare};
