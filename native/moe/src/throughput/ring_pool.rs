//! The rings of a channel, kept over eras: their counts only grow.

use std::collections::HashMap;

use super::{
    commands::Commands,
    machine::Traffic,
    reader::Reader,
    ring::{Inbound, Outbound, RingLayout},
};

/// By the word that the partner moves.
#[derive(Debug, Default)]
pub struct RingPool {
    outbound: HashMap<u64, Outbound>,
    inbound: HashMap<u64, Inbound>,
    /// Traffic of dropped rings.
    before: Traffic,
}

impl RingPool {
    pub fn outbound(&mut self, layout: RingLayout) -> Outbound {
        let mut ring = self.outbound.remove(&layout.word).unwrap_or_else(|| Outbound::new(layout));
        ring.layout = layout;
        ring
    }

    /// A ring on which slots of earlier eras may arrive; these are ignored (IC-6).
    pub fn inbound(&mut self, layout: RingLayout, is_first: bool) -> Reader {
        let mut ring = self.inbound.remove(&layout.word).unwrap_or_else(|| Inbound::new(layout));
        (ring.layout, ring.fresh) = (layout, is_first);
        Reader::new(ring)
    }

    pub fn put(&mut self, ring: Outbound) {
        self.outbound.insert(ring.layout.word, ring);
    }

    pub fn put_back(&mut self, reader: Reader) {
        self.inbound.insert(reader.ring.layout.word, reader.ring);
    }

    /// Gives back what was read, of which nothing is in use any more.
    pub fn give_back(&mut self, here: &[bool], commands: &mut Commands) {
        for ring in self.inbound.values_mut().filter(|r| here[r.layout.partner as usize]) {
            ring.credit(ring.taken, 1, true, commands);
        }
    }

    /// Removes the rings of a rank: they begin anew with its next incarnation.
    pub fn forget(&mut self, rank: u32, node: impl Fn(u32) -> bool) {
        let its: Vec<u64> = self
            .outbound
            .values()
            .filter(|r| r.layout.partner == rank)
            .map(|r| r.layout.word)
            .collect();
        for word in its {
            let Some(ring) = self.outbound.remove(&word) else { continue };
            ring.count(&node, &mut self.before);
        }
        self.inbound.retain(|_, ring| ring.layout.partner != rank);
    }

    /// Adds what was sent over rings that are here; `near` says which ranks are on this rank's
    /// node.
    pub fn count(&self, near: &impl Fn(u32) -> bool, all: &mut Traffic) {
        all.add(&self.before);
        self.outbound.values().for_each(|ring| ring.count(near, all));
    }
}
