//! Completion queues.

use std::sync::Arc;

use fabric_sys::ibverbs as sys;

use super::{device::Device, raw::Cq};
use crate::domain::DomainError;

/// Completion queues, each with room for several links. A link reserves room before its queue pairs
/// are created, so no queue can overflow.
#[derive(Debug, Default)]
pub(super) struct CqPool {
    all: Vec<PooledCq>,
}

#[derive(Debug)]
struct PooledCq {
    cq: Arc<Cq>,
    taken: u32,
    /// Entries of closed links whose last completions may still be in the queue.
    draining: u32,
}

/// A link's reservation in a completion queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct CqSlot {
    pool_index: usize,
    n: u32,
}

impl CqPool {
    pub fn reserve(&mut self, device: &Device) -> Result<(CqSlot, Arc<Cq>), DomainError> {
        let n = device.completions_per_link();
        let found = self.all.iter().position(|s| s.cq.capacity() - s.taken >= n);
        let pool_index = match found {
            Some(i) => i,
            None => {
                let last = self.all.last().map_or(0, |s| s.cq.capacity());
                let size = (4 * n).max(last * 2).min(1 << 16).min(device.limits.max_cqe).max(n);
                let cq = Cq::new(&device.channel, size)?;
                self.all.push(PooledCq { cq, taken: 0, draining: 0 });
                self.all.len() - 1
            }
        };
        let s = &mut self.all[pool_index];
        s.taken += n;
        Ok((CqSlot { pool_index, n }, Arc::clone(&s.cq)))
    }

    /// Gives a reservation back after the link's queue pairs were destroyed. Its completions may
    /// still be in the queue, so the room is free once the queue has been drained.
    pub fn release(&mut self, cq_slot: CqSlot) {
        self.all[cq_slot.pool_index].draining += cq_slot.n;
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Takes completions of one queue; returns their number.
    #[inline]
    pub fn poll(&mut self, pool_index: usize, into: &mut [sys::Wc]) -> usize {
        let s = &mut self.all[pool_index];
        let n = s.cq.poll(into);
        if n < into.len() && s.draining > 0 {
            s.taken -= std::mem::take(&mut s.draining);
        }
        n
    }

    pub fn notify(&self) {
        self.all.iter().for_each(|s| s.cq.notify());
    }
}
