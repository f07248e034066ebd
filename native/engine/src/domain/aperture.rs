//! A peer's memory that devices of this process store to by themselves, without a work request.

use std::{
    any::Any,
    fmt,
    sync::{
        atomic::{AtomicUsize, Ordering::SeqCst},
        Arc,
    },
};

use parking_lot::Mutex;

use crate::process::ProcessLocal;

/// What keeps a peer's memory where an aperture shows it.
pub(crate) type Held = Arc<dyn Any + Send + Sync>;

/// Where stores to a peer's region go, for as long as its owner lets them.
///
/// A device that stores has a [`Stay`] from before the first store until after the last one. The owner's memory is not quiet
/// while there is one, and none begins once the owner has taken the region back, or the connection to it has ended (MR-1).
pub struct Aperture {
    base: usize,
    len: u64,
    /// What is mapped, and in use; once it was shut, why.
    held: ProcessLocal<Mutex<Result<Held, String>>>,
    stays: AtomicUsize,
    /// Wakes the thread that checks whether the last stay is over. May be called under any lock.
    left: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Aperture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (state, stays) = (if self.is_open() { "open" } else { "shut" }, self.stays());
        write!(f, "Aperture({} bytes, {state}, {stays} stays)", self.len)
    }
}

impl Aperture {
    /// `len` bytes at `base`, which are there for as long as `held` is.
    pub(crate) fn new(
        base: usize,
        len: u64,
        held: Held,
        left: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            base,
            len,
            held: ProcessLocal::new(Mutex::new(Ok(held))),
            stays: AtomicUsize::new(0),
            left: Box::new(left),
        })
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Begins to store; `None` if that is over for good, and in a child by fork.
    pub fn enter(self: &Arc<Self>) -> Option<Stay> {
        let held = self.held.get().ok()?.lock();
        let held = Some(Arc::clone(held.as_ref().ok()?));
        self.stays.fetch_add(1, SeqCst);
        Some(Stay { aperture: Arc::clone(self), held })
    }

    pub fn is_open(&self) -> bool {
        self.held.get().is_ok_and(|held| held.lock().is_ok())
    }

    /// Why no device may store there any more; `None` while one may.
    pub fn shut_by(&self) -> Option<String> {
        match self.held.get() {
            Ok(held) => held.lock().as_ref().err().cloned(),
            Err(e) => Some(e.to_string()),
        }
    }

    /// Admits no further stay; stays that have begun go on. The first cause is kept.
    pub(crate) fn shut(&self, cause: &str) {
        let Ok(held) = self.held.get() else { return };
        let mut held = held.lock();
        let was =
            if held.is_ok() { std::mem::replace(&mut *held, Err(cause.into())) } else { return };
        drop(held);
        drop(was);
    }

    pub(crate) fn stays(&self) -> usize {
        self.stays.load(SeqCst)
    }
}

/// Stores to a peer's region may be under way. To be dropped when none is, and none follows.
#[derive(Debug)]
pub struct Stay {
    aperture: Arc<Aperture>,
    held: Option<Held>,
}

impl Stay {
    /// The address of `len` bytes from `offset` of the region; `None` if they don't lie inside (MR-3).
    pub fn address(&self, offset: u64, len: u64) -> Option<usize> {
        let end = offset.checked_add(len)?;
        (end <= self.aperture.len).then(|| self.aperture.base + offset as usize)
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.held = None;
        self.aperture.stays.fetch_sub(1, SeqCst);
        (self.aperture.left)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mr_1_a_stay_keeps_its_memory_and_none_begins_after_the_end() {
        let (memory, told) = (Arc::new([0u8; 64]), Arc::new(AtomicUsize::new(0)));
        let tell = Arc::clone(&told);
        let left = move || {
            tell.fetch_add(1, SeqCst);
        };
        let aperture =
            Aperture::new(memory.as_ptr() as usize, 64, Arc::clone(&memory) as Held, left);
        let (one, other) = (aperture.enter().unwrap(), aperture.enter().unwrap());
        aperture.shut("it ended");
        aperture.shut("it was shut before");
        assert!(aperture.enter().is_none() && !aperture.is_open());
        assert_eq!(aperture.shut_by().as_deref(), Some("it ended"));
        drop(one);
        assert_eq!((aperture.stays(), Arc::strong_count(&memory), told.load(SeqCst)), (1, 2, 1));
        drop(other);
        assert_eq!((aperture.stays(), Arc::strong_count(&memory), told.load(SeqCst)), (0, 1, 2));
    }

    #[test]
    fn mr_3_no_address_lies_outside() {
        let aperture = Aperture::new(4096, 64, Arc::new(()), || {});
        let stay = aperture.enter().unwrap();
        assert_eq!(stay.address(16, 48), Some(4112));
        for (offset, len) in [(16, 49), (65, 0), (u64::MAX, 2)] {
            assert_eq!(stay.address(offset, len), None);
        }
    }
}
