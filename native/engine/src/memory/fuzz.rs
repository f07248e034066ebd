//! Fuzzes lookups of regions: registered, granted to one peer, deregistered, registered again under
//! the same index.

use std::sync::Arc;

use super::{Backing, RegionBook, RegionMemory, FIRST_INTERNAL_INDEX};
use crate::{
    api::{EngineId, RegionKey},
    error::DomainError,
};

/// Distance between regions, bytes; every region is shorter.
const REGION_DISTANCE: usize = 1 << 20;

/// Whether a peer may reach it follows from the last registration of its number alone (MR-2, MR-3).
pub fn peer_names(bytes: &[u8]) {
    let mut book = RegionBook::default();
    // Of each number: its key, its bytes, the one peer that may.
    let mut known: [Option<(u64, u64, Option<EngineId>)>; 8] = [None; 8];
    for (step, input) in bytes.chunks_exact(6).enumerate() {
        let &[what, number, peer, key, offset, len] = input else { return };
        let at = usize::from(number % 8);
        let index = (at as u32 % 4) | if at < 4 { 0 } else { FIRST_INTERNAL_INDEX };
        let base = (at + 1) * REGION_DISTANCE;
        let (offset, len) = (u64::from(offset), u64::from(len));
        let peer = EngineId([peer % 3; 16]);
        match what % 4 {
            0 => {
                let key = RegionKey { index, rkey: step as u64 };
                let only = (peer.0[0] > 0).then_some(peer);
                let memory = RegionMemory::new(key, base, len, Backing::Foreign, None);
                let from = Arc::new(RegionMemory::new(key, base, len, Backing::Foreign, None));
                book.insert(&Arc::new(memory.granted(from, only)));
                known[at] = Some((key.rkey, len, only));
            }
            1 => {
                assert_eq!(book.remove(index).is_some(), known[at].is_some());
                known[at] = None;
            }
            _ => {
                let offset = if what > 250 { u64::MAX - offset } else { offset };
                let rkey = known[at].map_or(0, |(rkey, ..)| rkey).wrapping_add(u64::from(key % 2));
                let found = book.resolve(peer, RegionKey { index, rkey }, offset, len);
                match known[at] {
                    Some((right, size, only)) if right == rkey => {
                        let may = only.is_none() || only == Some(peer);
                        let inside = offset.checked_add(len).is_some_and(|end| end <= size);
                        match (may, inside) {
                            (true, true) => assert_eq!(found, Ok(base + offset as usize)),
                            _ => assert!(matches!(found, Err(DomainError::Refused(_)))),
                        }
                    }
                    _ => assert!(matches!(found, Err(DomainError::Stale(_)))),
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let registered = [0, 2, 0, 0, 0, 64];
    let granted = [0, 2, 1, 0, 0, 64];
    let asks = |peer, key, offset, len| [2, 2, peer, key, offset, len];
    vec![
        ("inside", [registered, asks(1, 0, 0, 64), asks(2, 0, 60, 4)].concat()),
        ("outside", [registered, asks(1, 0, 60, 5), [254, 2, 1, 0, 0, 9]].concat()),
        ("granted", [granted, asks(1, 0, 0, 64), asks(2, 0, 0, 64)].concat()),
        ("gone", [granted, asks(1, 0, 0, 4), [1, 2, 0, 0, 0, 0], asks(1, 0, 0, 4)].concat()),
        ("again", [granted, registered, asks(2, 0, 0, 4), asks(2, 1, 0, 4)].concat()),
    ]
}
