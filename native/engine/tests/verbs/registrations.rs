//! What registering and its end cost others, and what keys are good for.

use std::time::{Duration, Instant};

use fabric_engine::{api::EngineConfig, EngineError, TransferEngine};

use crate::world::{config, ends, engine, filled, import, wait, write, Side, LONG};

/// Registers so many bytes, ends that, and tells how long it took.
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
fn rs_4_nobody_is_taken_for_dead_while_it_pins_memory() {
    let big = 400 << 20;
    // Registered and ended once, on this machine.
    let once = pin(&engine(Side::A), big);
    let timeout = (once / 3).clamp(Duration::from_millis(100), Duration::from_millis(400));
    if once < 2 * timeout {
        return eprintln!(
            "skipped: {big} bytes are pinned and let go of in {once:?}, too quick to matter"
        );
    }
    let open = |side| {
        TransferEngine::open(EngineConfig { peer_timeout: timeout, ..config(side) }).unwrap()
    };
    let (a, b) = (open(Side::A), open(Side::B));
    let src = filled(&a, 64, 1);
    let dst = b.alloc(64).unwrap();
    let there = import(&a, &dst.descriptor().to_bytes());
    let counter = b.counter().unwrap();
    assert_eq!(wait(&write(&a, &src, &there, 64, Some(counter.imm()))), Ok(()));
    // Ends with the peer, should it be taken for lost.
    let second = counter.expect(2, &[b.peer(a.address()).unwrap()], LONG).unwrap();
    let longest = pin(&a, big);
    assert_eq!(second.poll(), None, "a was taken for lost while it pinned for {longest:?}");
    assert_eq!(wait(&write(&a, &src, &there, 64, Some(counter.imm()))), Ok(()));
    assert_eq!(wait(&second), Ok(()));
    eprintln!("pinned and unpinned 400 MiB in {longest:?}, with a peer timeout of {timeout:?}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn mr_2_memory_has_another_name_with_each_registration() {
    let (a, b) = (engine(Side::A), engine(Side::B));
    let mut bytes = vec![0u8; 1 << 20];
    let (addr, len) = (bytes.as_mut_ptr() as usize, bytes.len() as u64);
    // SAFETY: the vector outlives the registration, whose end is waited for.
    let first = unsafe { a.register(addr, len, None) }.unwrap();
    let (there, src) = (import(&b, &first.descriptor().to_bytes()), filled(&b, 64, 3));
    assert_eq!(wait(&write(&b, &src, &there, 64, None)), Ok(()));
    first.deregister(LONG).unwrap();
    // SAFETY: as above.
    let second = unsafe { a.register(addr, len, None) }.unwrap();
    let (error, _) = ends(&write(&b, &src, &there, 64, None));
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
        "a NIC that gives a key again would open memory to its old holders"
    );
}
