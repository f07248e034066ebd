//! Memory that a device and its proxy share. All unsafe code of this crate is here.
#![allow(unsafe_code)]

use std::{any::Any, ptr::NonNull, sync::Arc};

use crate::sync::atomic::AtomicU64;

/// One command. The highest bit of each word is the lap in which it was written; see
/// [`fifo`](crate::fifo).
#[derive(Debug)]
#[repr(C, align(16))]
pub struct Slot(pub(crate) [AtomicU64; 2]);

/// State that pushers read and write; placed near them.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct PusherSide {
    /// Number of commands that have taken a slot.
    pub(crate) claimed: AtomicU64,
    /// The last value of [`Completed`] that a pusher read; it may be old.
    pub(crate) completed_seen: AtomicU64,
}

/// State that the proxy writes and pushers read; placed near the pushers where the proxy can write.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Completed(pub(crate) AtomicU64);

/// The three parts of a FIFO in caller-allocated memory, initially zero.
#[derive(Debug)]
pub struct Parts {
    /// In host memory; `capacity` slots.
    pub slots: NonNull<Slot>,
    /// A power of two.
    pub capacity: u32,
    pub pushers: NonNull<PusherSide>,
    pub completed: NonNull<Completed>,
}

/// The memory of one FIFO.
pub struct Area {
    parts: Parts,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: all pointees are atomics, which `_keep` keeps alive.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl std::fmt::Debug for Area {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Area({} slots)", self.parts.capacity)
    }
}

struct Owned {
    slots: Box<[Slot]>,
    pushers: PusherSide,
    completed: Completed,
}

impl Area {
    /// Memory of this process.
    pub fn allocate(capacity: u32) -> Self {
        let slot = |_| Slot([AtomicU64::new(0), AtomicU64::new(0)]);
        let owned = Arc::new(Owned {
            slots: (0..capacity).map(slot).collect(),
            pushers: PusherSide { claimed: AtomicU64::new(0), completed_seen: AtomicU64::new(0) },
            completed: Completed(AtomicU64::new(0)),
        });
        let parts = Parts {
            slots: NonNull::from(&*owned.slots).cast(),
            capacity,
            pushers: NonNull::from(&owned.pushers),
            completed: NonNull::from(&owned.completed),
        };
        // SAFETY: the parts lie in `owned`, which is kept and only changed through atomics.
        unsafe { Self::over(parts, owned) }
    }

    /// Memory that a device reaches.
    ///
    /// # Safety
    /// The parts must be zero now, stay valid as long as `keep` lives, and belong to one area. Only
    /// the ends of its FIFO and devices that follow the protocol of [`fifo`](crate::fifo) may write
    /// to them.
    pub unsafe fn over(parts: Parts, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { parts, _keep: keep }
    }

    /// The addresses, for kernels.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    pub(crate) fn capacity(&self) -> u64 {
        u64::from(self.parts.capacity)
    }

    #[inline]
    pub(crate) fn slot(&self, index: u64) -> &[AtomicU64; 2] {
        let place = index as usize & (self.parts.capacity as usize - 1);
        // SAFETY: the index is below the capacity, a power of two; the memory is kept.
        unsafe { &self.parts.slots.add(place).as_ref().0 }
    }

    #[inline]
    pub(crate) fn pushers(&self) -> &PusherSide {
        // SAFETY: the memory is kept.
        unsafe { self.parts.pushers.as_ref() }
    }

    #[inline]
    pub(crate) fn completed(&self) -> &AtomicU64 {
        // SAFETY: the memory is kept.
        unsafe { &self.parts.completed.as_ref().0 }
    }
}

/// The atomic words of a rank: its device reads them, all its proxy threads add to them.
#[derive(Clone)]
pub struct AtomicWords {
    first: NonNull<std::sync::atomic::AtomicU64>,
    len: usize,
    _keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: all pointees are atomics, which `_keep` keeps alive.
unsafe impl Send for AtomicWords {}
// SAFETY: as above.
unsafe impl Sync for AtomicWords {}

impl std::fmt::Debug for AtomicWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AtomicWords({})", self.len)
    }
}

impl AtomicWords {
    /// `len` words of zero, in memory of this process.
    pub fn allocate(len: usize) -> Self {
        let words: Arc<[std::sync::atomic::AtomicU64]> =
            (0..len).map(|_| std::sync::atomic::AtomicU64::new(0)).collect();
        let first = NonNull::from(&*words).cast();
        Self { first, len, _keep: Arc::new(words) }
    }

    /// Words that a device reads, such as pinned host memory.
    ///
    /// # Safety
    /// `len` words from `first` must stay valid as long as `keep` lives, and be accessed atomically
    /// only.
    pub unsafe fn over(
        first: NonNull<std::sync::atomic::AtomicU64>,
        len: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { first, len, _keep: keep }
    }
}

impl std::ops::Deref for AtomicWords {
    type Target = [std::sync::atomic::AtomicU64];

    #[inline]
    fn deref(&self) -> &Self::Target {
        // SAFETY: as many atomics lie there, and are kept.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

const _: () = assert!(cfg!(loom) || std::mem::size_of::<Slot>() == 16);
