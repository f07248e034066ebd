//! Completion queues.

use std::sync::Arc;

use fabric_sys::ibverbs as sys;

use super::{device::Device, raw::Cq};
use crate::domain::DomainError;

/// Completion queues, each with room for several links. A link reserves room before its queue pairs
/// are created, so no queue can overflow.
#[derive(Debug, Default)]
pub(super) struct Shelves {
    all: Vec<Shelf>,
}

#[derive(Debug)]
struct Shelf {
    cq: Arc<Cq>,
    taken: u32,
    /// Entries of closed links whose last completions may still be in the queue.
    leaving: u32,
}

/// A link's reservation in a completion queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    shelf: usize,
    n: u32,
}

impl Shelves {
    pub fn seat(&mut self, device: &Device) -> Result<(Seat, Arc<Cq>), DomainError> {
        let n = device.completions_per_link();
        let found = self.all.iter().position(|s| s.cq.capacity() - s.taken >= n);
        let shelf = match found {
            Some(i) => i,
            None => {
                let last = self.all.last().map_or(0, |s| s.cq.capacity());
                let size = (4 * n).max(last * 2).min(1 << 16).min(device.limits.max_cqe).max(n);
                let cq = Cq::new(&device.channel, size)?;
                self.all.push(Shelf { cq, taken: 0, leaving: 0 });
                self.all.len() - 1
            }
        };
        let s = &mut self.all[shelf];
        s.taken += n;
        Ok((Seat { shelf, n }, Arc::clone(&s.cq)))
    }

    /// Gives a reservation back after the link's queue pairs were destroyed. Its completions may
    /// still be in the queue, so the room is free once the queue has been drained.
    pub fn leave(&mut self, seat: Seat) {
        self.all[seat.shelf].leaving += seat.n;
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Takes completions of one queue; returns their number.
    #[inline]
    pub fn poll(&mut self, shelf: usize, into: &mut [sys::Wc]) -> usize {
        let s = &mut self.all[shelf];
        let n = s.cq.poll(into);
        if n < into.len() && s.leaving > 0 {
            s.taken -= std::mem::take(&mut s.leaving);
        }
        n
    }

    pub fn notify(&self) {
        self.all.iter().for_each(|s| s.cq.notify());
    }
}
