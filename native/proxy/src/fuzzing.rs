//! Entry points of fuzzers: everything that reads bytes of a device or a peer. Each returns for any
//! input and asserts its properties.

use fabric_engine::api::{Imm, TAG_BITS};

use crate::{
    command::{Command, LAP},
    order::OrderEntry,
    tag::Tag,
    RankDescriptor,
};

/// A command, an atomic, a tag, a descriptor: each is refused, or encodes to the same value again.
pub fn commands(bytes: &[u8]) {
    if let Ok(descriptor) = RankDescriptor::from_bytes(bytes) {
        assert_eq!(RankDescriptor::from_bytes(&descriptor.to_bytes()), Ok(descriptor));
    }
    for sixteen in bytes.chunks_exact(16) {
        let all = u128::from_le_bytes(sixteen.try_into().expect("16 bytes"));
        let words = [all as u64, (all >> 64) as u64];
        if let Ok(command) = Command::decode(words) {
            assert_eq!(command.encode(), Ok([words[0] & !LAP, words[1] & !LAP]));
        }
        if let Ok(entry) = OrderEntry::from_bytes(all.to_le_bytes()) {
            assert_eq!(entry.to_bytes(), all.to_le_bytes());
        }
        let value = all as u32 & ((1 << TAG_BITS) - 1);
        assert_eq!(Ok(Tag::of(value).imm()), Imm::tagged(value));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{fs, path::Path};

    use proptest::prelude::*;

    use super::*;
    use crate::command::{Add, Scope};

    const SEEDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/seeds/commands");

    fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        let add = Add { slot: 9, value: -3, ordered: true };
        let write = Command::Write {
            rank: 1023,
            channel: 31,
            from: 16,
            to: 1 << 35,
            len: 14_336,
            add: None,
        };
        let beside =
            Command::Write { rank: 2, channel: 0, from: 0, to: 0, len: 16, add: Some(add) };
        let atomic = Command::Atomic { rank: 7, channel: 3, add: Add { value: i64::MIN, ..add } };
        let drain = Command::Drain { up_to: Some(77) };
        let barrier = Command::Barrier { scope: Scope::Rail, channel: 5 };
        let bytes = |c: Command| {
            c.encode().expect("a command").iter().flat_map(|w| w.to_le_bytes()).collect()
        };
        let descriptor = RankDescriptor { rank: 3, incarnation: 2, threads: Vec::new() };
        vec![
            ("write", bytes(write)),
            ("write_atomic", bytes(beside)),
            ("atomic", bytes(atomic)),
            ("drain", bytes(drain)),
            ("barrier", bytes(barrier)),
            (
                "entry",
                OrderEntry { slot: 4, value: 5, ordered: false, writes: 6 }.to_bytes().into(),
            ),
            ("descriptor", descriptor.to_bytes()),
        ]
    }

    /// With `FABRIC_RAY_SEEDS=1`, writes the seeds again.
    #[test]
    fn seeds_are_what_is_encoded_today() {
        for (name, bytes) in seeds() {
            let path = Path::new(SEEDS).join(name);
            if std::env::var_os("FABRIC_RAY_SEEDS").is_some() {
                fs::write(&path, &bytes).unwrap();
            }
            assert_eq!(fs::read(&path).unwrap(), bytes, "{name}");
            commands(&bytes);
        }
    }

    proptest! {
        #[test]
        fn changed_seeds_are_refused_or_safe(
            which in 0usize..7,
            at: prop::sample::Index,
            byte: u8,
            tail in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut bytes = seeds().swap_remove(which).1;
            let at = at.index(bytes.len());
            bytes[at] = byte;
            bytes.extend(tail);
            commands(&bytes);
        }
    }
}
