//! The rings of a channel, kept over eras: their counts only grow.

use std::collections::HashMap;

use super::{
    commands::Commands,
    machine::Traffic,
    reader::Reader,
    ring::{Inbound, Outbound, Place},
};

/// By the word that the partner moves.
#[derive(Debug, Default)]
pub struct RingPool {
    outbound: HashMap<u64, Outbound>,
    inbound: HashMap<u64, Inbound>,
    /// What was sent over rings that are no more.
    before: Traffic,
}

impl RingPool {
    pub fn outbound(&mut self, place: Place) -> Outbound {
        let mut ring = self.outbound.remove(&place.word).unwrap_or_else(|| Outbound::new(place));
        ring.place = place;
        ring
    }

    /// A ring on which slots of earlier eras may arrive; these are ignored (IC-6).
    pub fn inbound(&mut self, place: Place, is_first: bool) -> Reader {
        let mut ring = self.inbound.remove(&place.word).unwrap_or_else(|| Inbound::new(place));
        (ring.place, ring.fresh) = (place, is_first);
        Reader::new(ring)
    }

    pub fn put(&mut self, ring: Outbound) {
        self.outbound.insert(ring.place.word, ring);
    }

    pub fn put_back(&mut self, reader: Reader) {
        self.inbound.insert(reader.ring.place.word, reader.ring);
    }

    /// Gives back what was read, of which nothing is in use any more.
    pub fn give_back(&mut self, here: &[bool], commands: &mut Commands) {
        for ring in self.inbound.values_mut().filter(|r| here[r.place.partner as usize]) {
            ring.credit(ring.taken, 1, true, commands);
        }
    }

    /// Removes the rings of a rank: they begin anew with its next incarnation.
    pub fn forget(&mut self, rank: u32, node: impl Fn(u32) -> bool) {
        let its: Vec<u64> = self
            .outbound
            .values()
            .filter(|r| r.place.partner == rank)
            .map(|r| r.place.word)
            .collect();
        for word in its {
            let Some(ring) = self.outbound.remove(&word) else { continue };
            ring.count(&node, &mut self.before);
        }
        self.inbound.retain(|_, ring| ring.place.partner != rank);
    }

    /// Adds what was sent over rings that are here; `near` says which ranks are on this rank's
    /// node.
    pub fn count(&self, near: &impl Fn(u32) -> bool, all: &mut Traffic) {
        all.add(&self.before);
        self.outbound.values().for_each(|ring| ring.count(near, all));
    }
}
