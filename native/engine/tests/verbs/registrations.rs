//! Effects of registration and deregistration on other work, and the validity of keys.

use std::time::{Duration, Instant};

use fabric_engine::{api::EngineConfig, EngineError, TransferEngine};

use crate::world::{config, ends, engine, filled, import, wait, write, Side, LONG};

/// Registers and deregisters `bytes`; returns how long that took.
fn pin(engine: &TransferEngine, bytes: usize) -> Duration {
    let (mut memory, begun) = (vec![0u8; bytes], Instant::now());
    // SAFETY: the vector outlives the registration, whose end is waited for.
    let region = unsafe { engine.register(memory.as_mut_ptr() as usize, bytes as u64, None) };
    region.unwrap().deregister(LONG).unwrap();
    begun.elapsed()
}

#[test]
#[ignore = "needs RDMA devices"]
fn mr_1_a_large_region_ends_also_after_its_engine() {
    let a = engine(Side::A);
    let region = a.alloc(128 << 20).unwrap();
    a.close();
    region.deregister(LONG).unwrap();
    assert_eq!(a.stats().retiring, 0);
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_a_peer_that_pins_memory_is_not_taken_for_dead() {
    let big = 400 << 20;
    // Duration of one registration and deregistration on this machine.
    let once = pin(&engine(Side::A), big);
    let timeout = (once / 3).clamp(Duration::from_millis(100), Duration::from_millis(400));
    if once < 2 * timeout {
        return eprintln!(
            "skipped: {big} bytes are pinned and unpinned in {once:?}, too quick to matter"
        );
    }
    let open = |side| {
        TransferEngine::open(EngineConfig { peer_timeout: timeout, ..config(side) }).unwrap()
    };
    let (a, b) = (open(Side::A), open(Side::B));
    let src = filled(&a, 64, 1);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst.descriptor().to_bytes());
    let counter = b.counter().unwrap();
    assert_eq!(wait(&write(&a, &src, &imported, 64, Some(counter.imm()))), Ok(()));
    // Ends if the peer is reported lost.
    let second = counter.expect(2, &[b.peer(a.address()).unwrap()], LONG).unwrap();
    let longest = pin(&a, big);
    assert_eq!(second.poll(), None, "a was taken for lost while it pinned for {longest:?}");
    assert_eq!(wait(&write(&a, &src, &imported, 64, Some(counter.imm()))), Ok(()));
    assert_eq!(wait(&second), Ok(()));
    eprintln!("pinned and unpinned 400 MiB in {longest:?}, with a peer timeout of {timeout:?}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn mr_2_each_registration_has_a_new_key() {
    let (a, b) = (engine(Side::A), engine(Side::B));
    let mut bytes = vec![0u8; 1 << 20];
    let (addr, len) = (bytes.as_mut_ptr() as usize, bytes.len() as u64);
    // SAFETY: the vector outlives the registration, whose end is waited for.
    let first = unsafe { a.register(addr, len, None) }.unwrap();
    let (imported, src) = (import(&b, &first.descriptor().to_bytes()), filled(&b, 64, 3));
    assert_eq!(wait(&write(&b, &src, &imported, 64, None)), Ok(()));
    first.deregister(LONG).unwrap();
    // SAFETY: as above.
    let second = unsafe { a.register(addr, len, None) }.unwrap();
    let (error, _) = ends(&write(&b, &src, &imported, 64, None));
    assert!(matches!(error, EngineError::Stale { .. }), "{error}");
    second.deregister(LONG).unwrap();
    let mut names: Vec<u64> = (0..16)
        .map(|_| {
            // SAFETY: the vector outlives the registration, whose end is waited for.
            let region = unsafe { a.register(addr, len, None) }.unwrap();
            let name = region.descriptor().rail_keys.as_slice()[0].base;
            region.deregister(LONG).unwrap();
            name
        })
        .collect();
    assert!(names.iter().all(|n| n & 0x3FFF_FFFF == addr as u64 & 0x3FFF_FFFF), "{names:x?}");
    names.sort_unstable();
    names.dedup();
    assert_eq!(
        names.len(),
        16,
        "a NIC that reuses a key would expose memory to the previous holders of the key"
    );
}
