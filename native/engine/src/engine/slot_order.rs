//! The order in which an engine allocates counters: a random first slot, and a random first
//! generation for each slot. A peer can't guess counters that it was not given (IC-2).

use sha2::{Digest, Sha256};

use crate::{
    api::{FIRST_ALLOCATED_SLOT, SLOTS},
    EngineError,
};

/// Slots that can be allocated.
pub(super) const ALLOCATED: u32 = SLOTS - FIRST_ALLOCATED_SLOT;

/// 27 bits that peers can't know: slot and generation.
pub(super) struct SlotOrder {
    /// The offset of the first slot; later slots follow and wrap around.
    pub start: u32,
    key: [u8; 32],
}

impl SlotOrder {
    pub fn random() -> Result<Self, EngineError> {
        let (mut start, mut key) = ([0; 4], [0; 32]);
        getrandom::fill(&mut start).and_then(|()| getrandom::fill(&mut key)).map_err(|e| {
            EngineError::Resource {
                call: "getrandom",
                cause: e.to_string(),
                hint: "the system's random source must be readable".into(),
            }
        })?;
        Ok(Self { start: u32::from_le_bytes(start) % ALLOCATED, key })
    }

    /// The first generation of a slot. Plain slots, which users agree on, have none.
    pub fn generation(&self, slot: usize) -> u8 {
        if slot < FIRST_ALLOCATED_SLOT as usize {
            return 0;
        }
        Sha256::new_with_prefix(self.key).chain_update((slot as u64).to_le_bytes()).finalize()[0]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{api::Imm, engine::counters::Counters};

    #[test]
    fn ic_2_counters_are_drawn_at_random_and_each_is_handed_out_once() {
        let refs = |counters: &Counters| -> Vec<u32> {
            (0..3000).map(|_| counters.allocate().unwrap().to_wire()).collect()
        };
        let (a, mut b) =
            (Counters::with_random_slots(0).unwrap(), Counters::with_random_slots(0).unwrap());
        // Allocation wraps around after the last slot.
        b.slot_order.as_mut().unwrap().start = ALLOCATED - 1000;
        let (of_a, of_b) = (refs(&a), refs(&b));
        for mut of in [of_a.clone(), of_b.clone()] {
            assert!(of.iter().all(|raw| Imm::from_wire(*raw).slot() >= FIRST_ALLOCATED_SLOT));
            of.iter_mut().for_each(|raw| *raw = Imm::from_wire(*raw).slot());
            of.sort_unstable();
            of.dedup();
            assert_eq!(of.len(), 3000, "a slot was handed out twice");
        }
        let generations = |of: &[u32]| -> std::collections::HashSet<u8> {
            of.iter().map(|raw| Imm::from_wire(*raw).generation()).collect()
        };
        assert!(generations(&of_a).len() > 200, "they are guessable");
        assert!(of_a.iter().filter(|raw| of_b.contains(raw)).count() < 100);
        let again = (Counters::recording(0), Counters::recording(0));
        assert_eq!(refs(&again.0), refs(&again.1), "simulations are the same each time");
    }
}
