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

    use rustix::thread::{membarrier, MembarrierCommand};

    static FREE: OnceLock<bool> = OnceLock::new();

    /// Call before either side is used.
    pub(crate) fn prepare() {
        FREE.get_or_init(|| membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok());
    }

    #[inline]
    pub(crate) fn light() {
        match FREE.get() {
            Some(true) => compiler_fence(SeqCst),
            _ => fence(SeqCst),
        }
    }

    pub(crate) fn heavy() {
        fence(SeqCst);
        if FREE.get() == Some(&true) {
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
