//! A mapping of a peer's region, for direct stores by devices of this process.

use std::{
    any::Any,
    fmt,
    sync::{
        atomic::{AtomicUsize, Ordering::SeqCst},
        Arc,
    },
};

use crate::{locks::Mutex, process::ProcessLocal};

/// Keeps a peer's memory mapped.
pub(crate) type KeepAlive = Arc<dyn Any + Send + Sync>;

/// A peer's region as this process has mapped it, while its owner permits stores.
///
/// A device that stores holds a [`StoreGuard`] from before its first store until after its last
/// one. The owner's memory is not quiesced while a guard exists. No guard is given once the owner
/// has revoked the region or the connection to it has ended (MR-1).
pub struct PeerMapping {
    base: usize,
    len: u64,
    /// Keeps the memory mapped; the cause once the mapping is closed.
    memory: ProcessLocal<Mutex<Result<KeepAlive, String>>>,
    active_stores: AtomicUsize,
    /// Wakes the thread that waits for the last guard. It may be called under any lock.
    on_guard_dropped: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for PeerMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (state, n) = (if self.is_open() { "open" } else { "closed" }, self.active_stores());
        write!(f, "PeerMapping({} bytes, {state}, {n} active stores)", self.len)
    }
}

impl PeerMapping {
    /// Maps `len` bytes at `base`, which `memory` keeps mapped.
    pub(crate) fn new(
        base: usize,
        len: u64,
        memory: KeepAlive,
        on_guard_dropped: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            base,
            len,
            memory: ProcessLocal::new(Mutex::new(Ok(memory))),
            active_stores: AtomicUsize::new(0),
            on_guard_dropped: Box::new(on_guard_dropped),
        })
    }

    /// The length of the region, bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Permits a device to store; `None` once the mapping is closed, and in a forked child.
    pub fn begin_stores(self: &Arc<Self>) -> Option<StoreGuard> {
        let memory = self.memory.get().ok()?.lock();
        let memory = Some(Arc::clone(memory.as_ref().ok()?));
        self.active_stores.fetch_add(1, SeqCst);
        Some(StoreGuard { mapping: Arc::clone(self), memory })
    }

    pub fn is_open(&self) -> bool {
        self.memory.get().is_ok_and(|memory| memory.lock().is_ok())
    }

    /// Why no device may store any more; `None` while the mapping is open.
    pub fn closed_by(&self) -> Option<String> {
        match self.memory.get() {
            Ok(memory) => memory.lock().as_ref().err().cloned(),
            Err(e) => Some(e.to_string()),
        }
    }

    /// Admits no further store; stores that have begun continue. Only the first cause counts.
    pub(crate) fn close(&self, cause: &str) {
        let Ok(memory) = self.memory.get() else { return };
        let mut memory = memory.lock();
        if memory.is_err() {
            return;
        }
        let before = std::mem::replace(&mut *memory, Err(cause.into()));
        drop(memory);
        drop(before);
    }

    pub(crate) fn active_stores(&self) -> usize {
        self.active_stores.load(SeqCst)
    }
}

/// Keeps a [`PeerMapping`] usable. Drop it once no store is under way and none follows.
#[derive(Debug)]
pub struct StoreGuard {
    mapping: Arc<PeerMapping>,
    memory: Option<KeepAlive>,
}

impl StoreGuard {
    /// The address of `len` bytes from `offset` of the region; `None` if they don't lie inside
    /// (MR-3).
    pub fn address(&self, offset: u64, len: u64) -> Option<usize> {
        let end = offset.checked_add(len)?;
        (end <= self.mapping.len).then(|| self.mapping.base + offset as usize)
    }
}

impl Drop for StoreGuard {
    fn drop(&mut self) {
        self.memory = None;
        self.mapping.active_stores.fetch_sub(1, SeqCst);
        (self.mapping.on_guard_dropped)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mr_1_a_guard_keeps_its_memory_and_none_begins_after_the_end() {
        let (memory, told) = (Arc::new([0u8; 64]), Arc::new(AtomicUsize::new(0)));
        let tell = Arc::clone(&told);
        let left = move || {
            tell.fetch_add(1, SeqCst);
        };
        let mapping =
            PeerMapping::new(memory.as_ptr() as usize, 64, Arc::clone(&memory) as KeepAlive, left);
        let (one, other) = (mapping.begin_stores().unwrap(), mapping.begin_stores().unwrap());
        mapping.close("it ended");
        mapping.close("it was closed before");
        assert!(mapping.begin_stores().is_none() && !mapping.is_open());
        assert_eq!(mapping.closed_by().as_deref(), Some("it ended"));
        drop(one);
        assert_eq!(
            (mapping.active_stores(), Arc::strong_count(&memory), told.load(SeqCst)),
            (1, 2, 1)
        );
        drop(other);
        assert_eq!(
            (mapping.active_stores(), Arc::strong_count(&memory), told.load(SeqCst)),
            (0, 1, 2)
        );
    }

    #[test]
    fn mr_3_no_address_lies_outside() {
        let mapping = PeerMapping::new(4096, 64, Arc::new(()), || {});
        let guard = mapping.begin_stores().unwrap();
        assert_eq!(guard.address(16, 48), Some(4112));
        for (offset, len) in [(16, 49), (65, 0), (u64::MAX, 2)] {
            assert_eq!(guard.address(offset, len), None);
        }
    }
}
