//! Atomics that loom can replace, and a pair of fences of which one side is free.

#[cfg(loom)]
pub(crate) use loom::sync::atomic;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic;

/// For two sides of which at least one must see what the other wrote: the frequent side calls [`light`] between
/// its write and its look, the rare side [`heavy`]. The system has all threads of the process pass a barrier on behalf
/// of the rare side, so that the frequent one executes none; where it can't, both fence.
#[cfg(not(loom))]
mod fences {
    use std::sync::{
        atomic::{compiler_fence, fence, Ordering::SeqCst},
        OnceLock,
    };

    use rustix::thread::{membarrier, MembarrierCommand};

    static FREE: OnceLock<bool> = OnceLock::new();

    /// To be called before either side is used.
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
            // It was registered, and has no other way to fail.
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
