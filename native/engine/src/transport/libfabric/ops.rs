//! Operations under way, and the contexts that the library holds for them.

use std::collections::HashMap;

use slab::Slab;

use super::{raw::Contexts, read_buffers::ReadBuffer};
use crate::{
    api::RegionKey,
    domain::{Count, DomainError, LinkId, Token},
};

/// No region: the transport's own memory.
pub(super) const NO_REGION: u32 = u32::MAX;

/// The operation that uses a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContextUse {
    Free,
    /// A chunk of an operation.
    Op(u32),
    /// A frame of a link, by its number, in the transmit slot of the context.
    Frame(LinkId, u32),
    /// A handshake fragment, in the transmit slot of the context.
    HandshakeFragment,
    /// A chunk or frame whose link is closed.
    Orphan,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub used_for: ContextUse,
    /// The local region that it uses.
    pub region: u32,
    /// Index of the peer's address.
    pub address: usize,
    /// Bytes.
    pub len: u32,
    /// Whether its bytes come from the peer.
    pub is_read: bool,
}

/// An operation: complete when all its chunks are.
pub(super) struct Op {
    pub link: LinkId,
    pub token: Token,
    /// Chunks posted and not complete, and chunks not posted yet.
    pub left: u32,
    pub imms: u32,
    pub error: Option<DomainError>,
    /// Sent after all bytes are readable, for writes that do not count once per page.
    pub then: Option<Count>,
    /// The range that it touches at the peer, for queries.
    pub access: Option<(RegionKey, u64, u64)>,
    /// Whether a fence of the peer waits for it.
    pub fenced: bool,
}

/// Contexts: receive slots first, then transmit slots, then chunks.
pub(super) struct ContextTable {
    pub contexts: Contexts,
    pub receives: u32,
    pub slots: u32,
    flights: Vec<InFlight>,
    free_slots: Vec<u32>,
    free: Vec<u32>,
    pub ops: Slab<Op>,
    /// Buffers of reads, by context, where the provider needs them.
    pub buffers: HashMap<u32, ReadBuffer>,
}

const IDLE: InFlight = InFlight {
    used_for: ContextUse::Free,
    region: NO_REGION,
    address: usize::MAX,
    len: 0,
    is_read: false,
};

impl ContextTable {
    pub fn new(receives: u32, slots: u32, chunks: u32) -> Self {
        let n = receives + slots + chunks;
        Self {
            contexts: Contexts::new(n as usize),
            receives,
            slots,
            flights: vec![IDLE; n as usize],
            free_slots: (receives..receives + slots).rev().collect(),
            free: (receives + slots..n).rev().collect(),
            ops: Slab::with_capacity(chunks as usize),
            buffers: HashMap::new(),
        }
    }

    /// Chunks that can be posted now.
    #[inline]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    pub fn capacity(&self) -> usize {
        self.flights.len() - (self.receives + self.slots) as usize
    }

    pub fn take_chunk(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Takes a transmit slot; its context determines the slot.
    pub fn take_slot(&mut self) -> Option<u32> {
        self.free_slots.pop()
    }

    #[inline]
    pub fn slot_of(&self, context: u32) -> usize {
        (context - self.receives) as usize
    }

    #[inline]
    pub fn launch(&mut self, context: u32, flight: InFlight) {
        self.flights[context as usize] = flight;
    }

    /// Takes a context back; returns what it was used for.
    #[inline]
    pub fn land(&mut self, context: u32) -> InFlight {
        let flight = std::mem::replace(&mut self.flights[context as usize], IDLE);
        if flight.used_for != ContextUse::Free {
            self.give_back(context);
        }
        flight
    }

    /// The local region that a context uses.
    pub fn region(&self, context: u32) -> u32 {
        self.flights[context as usize].region
    }

    /// Destinations of transfers whose link is closed, one per transfer.
    pub fn orphans(&self) -> impl Iterator<Item = usize> + '_ {
        self.flights.iter().filter(|f| f.used_for == ContextUse::Orphan).map(|f| f.address)
    }

    /// Whether transfers of closed links may still access region memory (MR-1).
    pub fn touches_memory(&self, address: usize) -> bool {
        let mut lost = self.flights.iter().filter(|f| f.used_for == ContextUse::Orphan);
        lost.any(|f| f.address == address && f.region != NO_REGION)
    }

    /// Chunks that one link may have under way, so that a hung peer does not stop others (RS-4).
    #[inline]
    pub fn share(&self) -> usize {
        (self.capacity() / 4).max(32).min(self.capacity())
    }

    /// Transmit slots that hold handshake fragments.
    pub fn handshake_slots(&self) -> usize {
        let slots = self.receives as usize..(self.receives + self.slots) as usize;
        self.flights[slots].iter().filter(|f| f.used_for == ContextUse::HandshakeFragment).count()
    }

    /// Transmit slots that one link may hold.
    #[inline]
    pub fn slot_share(&self) -> usize {
        (self.slots as usize / 4).max(1)
    }

    /// Returns a context that was taken and not used.
    #[inline]
    pub fn give_back(&mut self, context: u32) {
        match context < self.receives + self.slots {
            true => self.free_slots.push(context),
            false => self.free.push(context),
        }
    }

    pub fn flights(&mut self) -> impl Iterator<Item = &mut InFlight> {
        self.flights.iter_mut().filter(|f| f.used_for != ContextUse::Free)
    }

    /// Whether the library holds a transfer to an address.
    pub fn uses_address(&self, address: usize) -> bool {
        self.flights.iter().any(|f| f.used_for != ContextUse::Free && f.address == address)
    }

    /// Whether the library holds a read from an address.
    pub fn reads_from(&self, address: usize) -> bool {
        self.flights.iter().any(|f| f.is_read && f.address == address)
    }

    /// Whether the library holds a read.
    pub fn reads(&self) -> bool {
        self.flights.iter().any(|f| f.is_read)
    }

    /// Whether the library holds anything besides receives.
    pub fn is_busy(&self) -> bool {
        self.flights.iter().any(|f| f.used_for != ContextUse::Free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_reused() {
        let mut t = ContextTable::new(4, 2, 3);
        assert_eq!((t.room(), t.capacity()), (3, 3));
        let (slot, chunk) = (t.take_slot().unwrap(), t.take_chunk().unwrap());
        assert!(t.slot_of(slot) < 2 && chunk >= 6);
        t.launch(slot, InFlight { used_for: ContextUse::HandshakeFragment, ..IDLE });
        t.launch(chunk, InFlight { used_for: ContextUse::Op(0), address: 7, ..IDLE });
        assert!(t.is_busy() && t.uses_address(7) && !t.uses_address(8));
        assert_eq!(t.land(chunk).used_for, ContextUse::Op(0));
        // A second completion of the same context changes nothing.
        assert_eq!(t.land(chunk).used_for, ContextUse::Free);
        t.land(slot);
        assert_eq!((t.room(), t.is_busy()), (3, false));
        assert!(t.take_slot().is_some() && t.take_slot().is_some() && t.take_slot().is_none());
    }
}
