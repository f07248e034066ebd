//! A peer that hangs (SIGSTOP): its connection stays open, and no error is reported.

use std::{
    io::Write,
    process::Command,
    time::{Duration, Instant},
};

use fabric_engine::{
    api::{PageIndices, Pages},
    EngineError, Local, Op, Remote, RemoteRegion, Submit,
};

use super::{descriptor, engine, Peer, BYTES, PAIR, PAIR_TIMEOUT, SOON};

fn signal(peer: &Peer, signal: &str) {
    let pid = peer.child.id().to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
}

/// Stops all threads of a peer; returns when all are stopped.
pub fn stop(peer: &Peer) {
    signal(peer, "-STOP");
    until_all(peer, 'T');
}

/// Stops a peer while it sleeps, so that it holds none of the library's locks.
pub fn stop_asleep(peer: &Peer) {
    until_all(peer, 'S');
    stop(peer);
}

/// Waits until all threads of a peer are in `state` (the letter in `/proc/<pid>/stat`).
fn until_all(peer: &Peer, state: char) {
    let tasks = format!("/proc/{}/task", peer.child.id());
    let reached = || {
        std::fs::read_dir(&tasks).unwrap().all(|task| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(state))
        })
    };
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < SOON, "not all of its threads reach state {state}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn rs_4_a_hung_peer_does_not_stop_the_others() {
    let Some(a) = engine("tcp") else { return };
    let (mut hung, mut well) = (Peer::start("tcp"), Peer::start("tcp"));
    let lost = a.import(&descriptor(&hung.says("descriptor"))).unwrap();
    let imported = a.import(&descriptor(&well.says("descriptor"))).unwrap();
    let src = a.alloc(BYTES).unwrap();
    let write = |to: &RemoteRegion| {
        let (src, dst) = (Local { region: &src, offset: 0 }, Remote { region: to, offset: 0 });
        a.submit(&[Op::Write { src, dst, len: 64, imm: None }], Submit::default()).unwrap()
    };
    assert_eq!(write(&lost).wait(SOON), Some(Ok(())));
    assert_eq!(write(&imported).wait(SOON), Some(Ok(())));
    stop(&hung);
    // Twice as many pages as the rail's queue holds.
    let pages = Pages::new(PageIndices::range(0, 256).unwrap(), 4096, 0);
    let cut: Vec<_> = (0..8)
        .map(|_| {
            let (src_pages, dst_pages) = (&pages, &pages);
            let op = Op::WritePages {
                page_len: 4096,
                src: &src,
                src_pages,
                dst: &lost,
                dst_pages,
                imm: None,
            };
            a.submit(&[op], Submit::default()).unwrap()
        })
        .collect();
    // Before the peer is known to be lost, and after.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        let asked = Instant::now();
        assert_eq!(write(&imported).wait(SOON), Some(Ok(())));
        assert!(asked.elapsed() < Duration::from_millis(500), "{:?}", asked.elapsed());
        std::thread::sleep(Duration::from_millis(20));
    }
    for handle in &cut {
        let end = handle.wait(SOON);
        assert!(matches!(end, Some(Err(_))), "every operation ends: {end:?}");
    }
}

#[test]
fn mr_1_a_region_that_is_not_quiet_names_the_peer_that_it_waits_for() {
    let Some(a) = engine("tcp") else { return };
    let mut peer = Peer::start("tcp");
    let imported = a.import(&descriptor(&peer.says("descriptor"))).unwrap();
    let src = a.alloc(64).unwrap();
    let op = Op::Write {
        src: Local { region: &src, offset: 0 },
        dst: Remote { region: &imported, offset: 0 },
        len: 64,
        imm: None,
    };
    assert_eq!(a.submit(&[op], Submit::default()).unwrap().wait(SOON), Some(Ok(())));
    stop(&peer);
    // The peer may still be writing to the region.
    let end = src.deregister(Duration::from_millis(300));
    let Err(EngineError::NotQuiesced { cause, .. }) = end else { panic!("{end:?}") };
    assert!(
        cause.contains("of tcp") && cause.contains("to report that no operation is under way"),
        "{cause}"
    );
    signal(&peer, "-CONT");
    assert_eq!(src.deregister(SOON), Ok(()));
}

#[test]
fn rs_4_a_process_that_was_stopped_does_not_take_its_peer_for_dead() {
    if engine("tcp").is_none() {
        return;
    }
    let mut pair = Peer::run("pair", PAIR, "tcp");
    pair.says("ready");
    stop(&pair);
    std::thread::sleep(2 * PAIR_TIMEOUT);
    pair.child.stdin.take().unwrap().write_all(b".").unwrap();
    signal(&pair, "-CONT");
    assert_eq!(pair.says("since"), "None Some(Ok(()))");
}

#[test]
fn mr_1_a_failed_read_lands_no_more_bytes() {
    let Some(a) = engine("tcp") else { return };
    let mut peer = Peer::start("tcp");
    let imported = a.import(&descriptor(&peer.says("descriptor"))).unwrap();
    let dst = a.alloc(BYTES).unwrap();
    let read = || {
        let (dst, src) =
            (Local { region: &dst, offset: 0 }, Remote { region: &imported, offset: 0 });
        a.submit(&[Op::Read { dst, src, len: BYTES }], Submit::default()).unwrap()
    };
    assert_eq!(read().wait(SOON), Some(Ok(())));
    stop(&peer);
    assert!(matches!(read().wait(SOON), Some(Err(_))));
    dst.put(0, &vec![9; BYTES as usize]).unwrap();
    signal(&peer, "-CONT");
    std::thread::sleep(Duration::from_secs(2));
    let now = dst.get(0, BYTES).unwrap();
    let landed = now.iter().filter(|b| **b != 9).count();
    assert_eq!(landed, 0, "bytes that landed after the read had failed");
}
