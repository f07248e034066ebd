//! Entry points of fuzzers: everything that reads a peer's bytes. Each returns for any input and
//! asserts its properties.

use crate::{
    exchange::blocks::{read_routes, read_slot_offer},
    kernels::Float,
    rank_descriptor::{RankDescriptor, FORMAT},
    throughput, AnswerFormat, Shape,
};

/// Of the exchange whose blocks are read.
const SHAPE: Shape = Shape {
    ranks: 3,
    experts: 6,
    topk: 2,
    max_tokens: 4,
    row_nbytes: 16,
    back: AnswerFormat { elements: 8, float: Float::Bf16 },
    private_rows: 1,
    shared_rows: Some(8),
};

/// Descriptors of either mode: each is refused, or encodes to the same value again.
pub fn descriptors(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), throughput::rank_descriptor::FORMAT.seal(bytes)] {
        if let Ok(descriptor) = throughput::RankDescriptor::from_bytes(&bytes) {
            drop(descriptor.spec.check());
            assert_eq!(
                throughput::RankDescriptor::from_bytes(&descriptor.to_bytes()),
                Ok(descriptor)
            );
        }
    }
    for bytes in [bytes.to_vec(), FORMAT.seal(bytes)] {
        if let Ok(descriptor) = RankDescriptor::from_bytes(&bytes) {
            drop(descriptor.shape.check());
            assert_eq!(RankDescriptor::from_bytes(&descriptor.to_bytes()), Ok(descriptor));
        }
    }
}

/// Routes and slot offers that peers write into this rank's memory: accepted values lie inside it
/// (MR-3).
pub fn blocks(bytes: &[u8]) {
    let (words, _) = bytes.as_chunks::<4>();
    let words: Vec<u32> = words.iter().map(|w| u32::from_le_bytes(*w)).collect();
    let word = |i: usize| words.get(i).copied().unwrap_or(0);
    if let Ok(routes) = read_routes(&SHAPE, (word(0), word(2)), &words) {
        assert!(routes.rows <= SHAPE.pair_rows());
        assert!(routes.first + routes.rows <= SHAPE.out_rows());
        assert!(routes.counts.iter().all(|n| *n <= SHAPE.max_tokens));
    }
    if let Ok((place, rows)) = read_slot_offer(&SHAPE, word(0), 3, &words) {
        assert!((1..=3).contains(&rows) && place + rows <= SHAPE.shared_rows());
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, sync::Arc};

    use fabric_engine::{
        api::{EngineConfig, EngineId},
        simulation::SimNet,
        transport::sim::SimConfig,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::{
        exchange::blocks::{routes_words, slot_offer_words},
        throughput::Spec,
        AllToAll,
    };

    fn descriptor() -> Vec<u8> {
        let shape = Shape { shared_rows: None, ..SHAPE };
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        AllToAll::new(Arc::clone(&engine), shape, 1).unwrap().descriptor(None).unwrap()
    }

    #[test]
    fn a_descriptor_decodes_to_what_was_encoded() {
        let bytes = descriptor();
        let descriptor = RankDescriptor::from_bytes(&bytes).unwrap();
        assert_eq!((descriptor.rank, descriptor.exports.len()), (1, 3));
        assert!(descriptor.exports[1].is_none() && descriptor.exports[2].is_some());
        descriptors(&bytes);
    }

    fn throughput_descriptor() -> Vec<u8> {
        let spec = Spec {
            shape: SHAPE,
            ranks_per_node: 1,
            channels: 2,
            chunk: 4,
            ring_chunks: 2,
            threads: 1,
        };
        throughput::RankDescriptor {
            spec,
            incarnation: 1,
            events: vec![2, 3, 4],
            engine: EngineId([9; 16]),
            proxy: vec![7; 40],
        }
        .to_bytes()
    }

    type Inputs = Vec<(&'static str, Vec<u8>)>;
    type Target = (&'static str, fn(&[u8]), Inputs);

    /// Valid inputs, by target.
    fn valid_inputs() -> [Target; 2] {
        let bytes = |words: Vec<u32>| words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let whole =
            vec![("low_latency", descriptor()), ("high_throughput", throughput_descriptor())];
        let written = vec![
            ("routes", bytes(routes_words((7, 3), 9, 2, &[2, 1]))),
            ("grant", bytes(slot_offer_words(7, 2, 3))),
        ];
        [("descriptors", descriptors, whole), ("blocks", blocks, written)]
    }

    /// Replays the seeds. `FABRIC_RAY_SEEDS=1` writes the valid ones again.
    #[test]
    fn seeds_have_the_current_format_and_hold() {
        for (target, run, inputs) in valid_inputs() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
            if std::env::var_os("FABRIC_RAY_SEEDS").is_some() {
                fs::create_dir_all(&folder).unwrap();
                for (name, bytes) in &inputs {
                    fs::write(folder.join(name), bytes).unwrap();
                }
            }
            // Keys and names of engines are random: only the version and the length are compared.
            for (name, bytes) in inputs {
                let kept = fs::read(folder.join(name)).unwrap_or_default();
                let why = "is of another format; write the seeds anew as their README says";
                assert!(kept.len().abs_diff(bytes.len()) < 64, "{target}/{name} {why}");
                assert_eq!(kept.get(..4), bytes.get(..4), "{target}/{name} {why}");
            }
            for file in fs::read_dir(folder).unwrap() {
                run(&fs::read(file.unwrap().path()).unwrap());
            }
        }
        let kept = |name| {
            fs::read(
                Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/descriptors").join(name),
            )
        };
        assert!(RankDescriptor::from_bytes(&kept("low_latency").unwrap()).is_ok());
        assert!(throughput::RankDescriptor::from_bytes(&kept("high_throughput").unwrap()).is_ok());
    }

    proptest! {
        #[test]
        fn odd_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            descriptors(&bytes);
        }

        #[test]
        fn a_changed_descriptor_is_refused_or_decodes_to_another(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            end in any::<prop::sample::Index>(),
        ) {
            let mut bytes = descriptor();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            descriptors(&bytes);
            descriptors(&bytes[..end.index(bytes.len())]);
        }
    }
}
