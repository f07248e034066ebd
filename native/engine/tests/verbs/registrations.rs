//! What registering and its end cost others, and what keys are good for.

use std::time::{Duration, Instant};

use fabric_engine::{api::EngineConfig, TransferEngine};

use crate::world::{config, engine, filled, import, wait, write, Side, LONG};

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_nobody_is_taken_for_dead_while_it_pins_memory() {
    let timeout = Duration::from_millis(400);
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
    let (mut longest, start) = (Duration::ZERO, Instant::now());
    while longest < 2 * timeout && start.elapsed() < 10 * timeout {
        let (mut bytes, begun) = (vec![0u8; 400 << 20], Instant::now());
        // SAFETY: the vector outlives the registration, whose end is waited for.
        let region =
            unsafe { a.register(bytes.as_mut_ptr() as usize, bytes.len() as u64, None) }.unwrap();
        region.deregister(LONG).unwrap();
        longest = longest.max(begun.elapsed());
    }
    assert_eq!(second.poll(), None, "a was taken for lost while it pinned for {longest:?}");
    assert_eq!(wait(&write(&a, &src, &there, 64, Some(counter.imm()))), Ok(()));
    assert_eq!(wait(&second), Ok(()));
    eprintln!("pinned and unpinned 400 MiB in {longest:?}, with a peer timeout of {timeout:?}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn mr_2_memory_has_another_name_with_each_registration() {
    let a = engine(Side::A);
    let mut bytes = vec![0u8; 1 << 20];
    let (addr, len) = (bytes.as_mut_ptr() as usize, bytes.len() as u64);
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
