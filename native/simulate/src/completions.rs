//! Collects the keys of operations that have completed.

use std::sync::{
    atomic::{AtomicBool, Ordering::SeqCst},
    Mutex, PoisonError,
};

use fabric_engine::Notify;

#[derive(Default)]
pub(crate) struct Completions {
    any: AtomicBool,
    keys: Mutex<Vec<u64>>,
}

impl Completions {
    pub fn is_empty(&self) -> bool {
        !self.any.load(SeqCst)
    }

    pub fn take(&self) -> Vec<u64> {
        self.any.store(false, SeqCst);
        std::mem::take(&mut *self.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Notify for Completions {
    fn notify(&self, key: u64) {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).push(key);
        self.any.store(true, SeqCst);
    }
}

/// Encodes an operation as a completion key.
pub(crate) struct OperationKey;

impl OperationKey {
    const BITS: u32 = 24;
    /// Upper bound of the number of trainers.
    pub const TRAINERS: usize = 1 << 15;
    /// Upper bound of the number of steps of a trainer, and of writes of a step.
    pub const STEPS: usize = 1 << Self::BITS;
    const ROLLOUT: u64 = 1 << 63;

    pub fn rollout(rank: usize) -> u64 {
        Self::ROLLOUT | rank as u64
    }

    pub fn write(trainer: usize, step: usize, index: usize) -> u64 {
        ((trainer as u64) << (2 * Self::BITS)) | ((step as u64) << Self::BITS) | index as u64
    }

    /// Trainer, step and write index; or `Err` with a rollout.
    pub fn parts(key: u64) -> Result<(usize, usize, usize), usize> {
        if key & Self::ROLLOUT != 0 {
            return Err((key ^ Self::ROLLOUT) as usize);
        }
        let part = |shift: u32| (key >> shift) as usize & ((1 << Self::BITS) - 1);
        Ok(((key >> (2 * Self::BITS)) as usize, part(Self::BITS), part(0)))
    }
}
