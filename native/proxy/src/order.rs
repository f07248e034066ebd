//! Restores order at the receiver from arrivals in any order (uccl-ep §3.3). Pure.
//!
//! Writes and atomics of one sender on one channel are numbered by *epochs*. An epoch consists of
//! the writes since the last atomic and the atomic that ends it. A write's tag names its epoch, and
//! the atomic carries the number of writes. So a later write never stands in for a missing one.
//!
//! - **OR-1 fence.** An atomic is applied when all writes of its epoch have been counted, in any order.
//! - **OR-2 order.** An ordered atomic is applied after all earlier atomics of its channel; its fence
//!   then covers all writes before it. Unordered atomics don't wait for each other.
//! - **OR-3 once.** Every atomic is applied once.
//! - **OR-4 bounded.** At most [`EPOCHS`] epochs of a channel are in flight. A sender reuses an epoch's
//!   number only after the receiver's credit. So numbers may wrap around.
//!
//! A violation of these rules is an error of the sender, and names it.

use crate::tag::EPOCHS;

/// Epochs that one credit returns.
pub const CREDIT: u64 = EPOCHS / 4;
/// Bytes of an atomic in the control ring.
pub(crate) const ENTRY: u64 = 16;

/// An atomic on the wire: 16 bytes, little-endian. Bits 0-11 slot, 12 ordered, 32-63 number of
/// writes of its epoch; then the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderEntry {
    pub slot: u16,
    pub value: i64,
    pub ordered: bool,
    /// Writes of its epoch.
    pub writes: u32,
}

impl OrderEntry {
    pub(crate) fn to_bytes(self) -> [u8; ENTRY as usize] {
        let head =
            u64::from(self.slot) | u64::from(self.ordered) << 12 | u64::from(self.writes) << 32;
        (u128::from(head) | u128::from(self.value as u64) << 64).to_le_bytes()
    }

    pub(crate) fn from_bytes(bytes: [u8; ENTRY as usize]) -> Result<Self, OrderError> {
        let all = u128::from_le_bytes(bytes);
        let (head, value) = (all as u64, (all >> 64) as i64);
        if head >> 13 & 0x7ffff != 0 {
            return Err(OrderError::Garbled);
        }
        let (slot, ordered) = (head as u16 & 0xfff, head >> 12 & 1 == 1);
        Ok(Self { slot, value, ordered, writes: (head >> 32) as u32 })
    }
}

/// A sender's violation of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    #[error("it sent two atomics in epoch {0}")]
    Twice(u8),
    #[error("it counted {counted} writes of epoch {epoch}, which had {writes}")]
    TooMany { epoch: u8, counted: u32, writes: u32 },
    #[error("it returned more epochs than it received")]
    Credits,
    #[error("it sent an invalid atomic")]
    Garbled,
    #[error("it sent notice {0}, which there isn't")]
    Notice(u8),
    #[error("it sent an atomic for slot {slot}, which is out of range [0, {slots})")]
    Slot { slot: u16, slots: usize },
}

#[derive(Clone, Copy, Debug, Default)]
struct Epoch {
    counted: u32,
    entry: Option<OrderEntry>,
    /// Applied before its predecessors; only unordered atomics are.
    applied: bool,
}

impl Epoch {
    fn is_full(&self) -> bool {
        self.entry.is_some_and(|e| e.writes == self.counted)
    }
}

/// One sender's channel at the receiver.
#[derive(Clone, Debug)]
pub struct Channel {
    epochs: [Epoch; EPOCHS as usize],
    /// The oldest epoch that hasn't ended.
    oldest: u64,
    /// Ended epochs that haven't been returned.
    freed: u64,
}

impl Default for Channel {
    fn default() -> Self {
        Self { epochs: [Epoch::default(); EPOCHS as usize], oldest: 0, freed: 0 }
    }
}

impl Channel {
    /// Records `n` arrived writes of an epoch, and passes atomics that are due to `apply`.
    ///
    /// # Errors
    /// [`OrderError::TooMany`].
    pub fn on_write(
        &mut self,
        epoch: u8,
        n: u32,
        apply: impl FnMut(OrderEntry),
    ) -> Result<(), OrderError> {
        let e = &mut self.epochs[usize::from(epoch) % EPOCHS as usize];
        e.counted = e.counted.saturating_add(n);
        self.settle(epoch, apply)
    }

    /// Records the arrival of an epoch's atomic.
    ///
    /// # Errors
    /// [`OrderError::Twice`], [`OrderError::TooMany`].
    pub fn ended(
        &mut self,
        epoch: u8,
        entry: OrderEntry,
        apply: impl FnMut(OrderEntry),
    ) -> Result<(), OrderError> {
        let e = &mut self.epochs[usize::from(epoch) % EPOCHS as usize];
        if e.entry.replace(entry).is_some() {
            return Err(OrderError::Twice(epoch));
        }
        self.settle(epoch, apply)
    }

    /// Credits to send to the sender now.
    pub fn credits(&mut self) -> u64 {
        let credits = self.freed / CREDIT;
        self.freed %= CREDIT;
        credits
    }

    fn settle(&mut self, epoch: u8, mut apply: impl FnMut(OrderEntry)) -> Result<(), OrderError> {
        let e = &mut self.epochs[usize::from(epoch) % EPOCHS as usize];
        let Some(entry) = e.entry else { return Ok(()) };
        if e.counted > entry.writes {
            let (counted, writes) = (e.counted, entry.writes);
            return Err(OrderError::TooMany { epoch, counted, writes });
        }
        if e.is_full() && !entry.ordered && !e.applied {
            e.applied = true;
            apply(entry);
        }
        loop {
            let e = &mut self.epochs[(self.oldest % EPOCHS) as usize];
            if !e.is_full() {
                return Ok(());
            }
            let Epoch { entry, applied, .. } = std::mem::take(e);
            self.oldest += 1;
            self.freed += 1;
            if let Some(entry) = entry.filter(|_| !applied) {
                apply(entry);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
