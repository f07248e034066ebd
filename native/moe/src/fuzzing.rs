//! What a fuzzer calls: everything that reads bytes of a peer's. It must return, however odd its input, and holds
//! what it says as assertions.

use crate::{card::Card, throughput};

/// Cards of either mode: refused, or what encodes to the same.
pub fn cards(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), throughput::Card::sealed(bytes)] {
        if let Ok(card) = throughput::Card::from_bytes(&bytes) {
            drop(card.spec.check());
            assert_eq!(throughput::Card::from_bytes(&card.to_bytes()), Ok(card));
        }
    }
    for bytes in [bytes.to_vec(), Card::sealed(bytes)] {
        if let Ok(card) = Card::from_bytes(&bytes) {
            drop(card.shape.check());
            assert_eq!(Card::from_bytes(&card.to_bytes()), Ok(card));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig};
    use proptest::prelude::*;

    use super::*;
    use crate::{kernels::Float, AllToAll, Back, Shape};

    fn card() -> Vec<u8> {
        let back = Back { elements: 8, float: Float::Bf16 };
        let shape = Shape {
            ranks: 3,
            experts: 6,
            topk: 2,
            max_tokens: 4,
            row_nbytes: 16,
            back,
            private_rows: 1,
            shared_rows: None,
        };
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        AllToAll::new(Arc::clone(&engine), shape, 1).unwrap().card(None).unwrap()
    }

    #[test]
    fn a_card_says_what_it_was_made_of() {
        let bytes = card();
        let card = Card::from_bytes(&bytes).unwrap();
        assert_eq!((card.rank, card.grants.len()), (1, 3));
        assert!(card.grants[1].is_none() && card.grants[2].is_some());
        cards(&bytes);
    }

    proptest! {
        #[test]
        fn odd_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            cards(&bytes);
        }

        #[test]
        fn a_changed_card_is_refused_or_another_card(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            end in any::<prop::sample::Index>(),
        ) {
            let mut bytes = card();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            cards(&bytes);
            cards(&bytes[..end.index(bytes.len())]);
        }
    }
}
