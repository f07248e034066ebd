//! Operations under way, and the contexts that the library has in its hands for them.

use slab::Slab;

use super::raw::Contexts;
use crate::{
    api::RegionKey,
    domain::{Count, DomainError, LinkId, Token},
};

/// No region: bytes of the domain's own.
pub(super) const NO_REGION: u32 = u32::MAX;

/// What a context is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Free,
    /// A piece of an operation.
    Op(u32),
    /// A frame of a link, by its number there, in the transmit slot that goes with the context.
    Frame(LinkId, u32),
    /// A handshake's piece, in the transmit slot of the same number.
    HandshakeMessage,
    /// A piece of an operation whose link is gone.
    Orphan,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub what: Use,
    /// The local region whose bytes it uses.
    pub region: u32,
    /// The place of the peer's address.
    pub address: usize,
    /// Bytes.
    pub len: u32,
}

/// An operation: done when all its pieces are.
pub(super) struct Op {
    pub link: LinkId,
    pub token: Token,
    /// Pieces posted and not over, and pieces not posted yet.
    pub left: u32,
    pub imms: u32,
    pub error: Option<DomainError>,
    /// To be sent when every byte is there: writes that count otherwise than one for each page.
    pub then: Option<Count>,
    /// What it touches at the peer, to be asked about.
    pub access: Option<(RegionKey, u64, u64)>,
    /// The peer's fence waits for it.
    pub fenced: bool,
}

/// Contexts: receive slots first, then transmit slots, then pieces of operations.
pub(super) struct Table {
    pub contexts: Contexts,
    pub receives: u32,
    pub slots: u32,
    flights: Vec<InFlight>,
    free_slots: Vec<u32>,
    free: Vec<u32>,
    pub ops: Slab<Op>,
}

const IDLE: InFlight = InFlight { what: Use::Free, region: NO_REGION, address: usize::MAX, len: 0 };

impl Table {
    pub fn new(receives: u32, slots: u32, pieces: u32) -> Self {
        let n = receives + slots + pieces;
        Self {
            contexts: Contexts::new(n as usize),
            receives,
            slots,
            flights: vec![IDLE; n as usize],
            free_slots: (receives..receives + slots).rev().collect(),
            free: (receives + slots..n).rev().collect(),
            ops: Slab::with_capacity(pieces as usize),
        }
    }

    /// Pieces that can be posted now.
    #[inline]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    pub fn capacity(&self) -> usize {
        self.flights.len() - (self.receives + self.slots) as usize
    }

    pub fn take_piece(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// A transmit slot: its context, which also says which slot it is.
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

    /// A context is ours again; what it was used for.
    #[inline]
    pub fn land(&mut self, context: u32) -> InFlight {
        let flight = std::mem::replace(&mut self.flights[context as usize], IDLE);
        if flight.what != Use::Free {
            self.give_back(context);
        }
        flight
    }

    /// The local region whose bytes a context is used for.
    pub fn region(&self, context: u32) -> u32 {
        self.flights[context as usize].region
    }

    /// Where what lost its link is still under way to, once for each.
    pub fn orphans(&self) -> impl Iterator<Item = usize> + '_ {
        self.flights.iter().filter(|f| f.what == Use::Orphan).map(|f| f.address)
    }

    /// Whether what lost its link may still read or fill the memory of regions (MR-1).
    pub fn touches_memory(&self, address: usize) -> bool {
        let mut lost = self.flights.iter().filter(|f| f.what == Use::Orphan);
        lost.any(|f| f.address == address && f.region != NO_REGION)
    }

    /// Pieces that one link may have under way: one peer that hangs must not stop the others (RS-4).
    #[inline]
    pub fn share(&self) -> usize {
        (self.capacity() / 4).max(32).min(self.capacity())
    }

    /// Transmit slots that letters hold.
    pub fn letters(&self) -> usize {
        let slots = self.receives as usize..(self.receives + self.slots) as usize;
        self.flights[slots].iter().filter(|f| f.what == Use::HandshakeMessage).count()
    }

    /// Transmit slots that one link may hold.
    #[inline]
    pub fn slot_share(&self) -> usize {
        (self.slots as usize / 4).max(1)
    }

    /// A context that was taken and not used.
    #[inline]
    pub fn give_back(&mut self, context: u32) {
        match context < self.receives + self.slots {
            true => self.free_slots.push(context),
            false => self.free.push(context),
        }
    }

    pub fn flights(&mut self) -> impl Iterator<Item = &mut InFlight> {
        self.flights.iter_mut().filter(|f| f.what != Use::Free)
    }

    /// Whether the library still holds anything towards an address.
    pub fn uses_address(&self, address: usize) -> bool {
        self.flights.iter().any(|f| f.what != Use::Free && f.address == address)
    }

    /// Whether anything but receives is in the library's hands.
    pub fn is_busy(&self) -> bool {
        self.flights.iter().any(|f| f.what != Use::Free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_go_round() {
        let mut t = Table::new(4, 2, 3);
        assert_eq!((t.room(), t.capacity()), (3, 3));
        let (slot, piece) = (t.take_slot().unwrap(), t.take_piece().unwrap());
        assert!(t.slot_of(slot) < 2 && piece >= 6);
        t.launch(slot, InFlight { what: Use::HandshakeMessage, ..IDLE });
        t.launch(piece, InFlight { what: Use::Op(0), address: 7, ..IDLE });
        assert!(t.is_busy() && t.uses_address(7) && !t.uses_address(8));
        assert_eq!(t.land(piece).what, Use::Op(0));
        // A completion that the library reports twice changes nothing.
        assert_eq!(t.land(piece).what, Use::Free);
        t.land(slot);
        assert_eq!((t.room(), t.is_busy()), (3, false));
        assert!(t.take_slot().is_some() && t.take_slot().is_some() && t.take_slot().is_none());
    }
}
