//! Peers that break the protocol of shm links.

use std::{
    os::fd::AsFd,
    sync::{atomic::Ordering::SeqCst, Arc},
    time::Duration,
};

use smallvec::smallvec;

use super::{
    control_plane::MAX_CONTROL_MESSAGES,
    control_socket::{Frame, MAX_PENDING_REPLIES},
    layout,
    link_tests::{is_down, NoRoom, Pair, KEY},
    ShmDomain, Stage,
};
use crate::{
    api::RegionKey,
    domain::Domain,
    memory::{Allocation, Backing, RegionMemory},
    transport::staged::ControlChannel,
};

/// A peer can make this process hold replies with a descriptor each, so requests of a peer that
/// reads no replies are not read.
#[test]
fn a_peer_that_reads_no_replies_cannot_exhaust_descriptors() {
    let mut pair = Pair::new();
    let memory = Arc::new(Allocation::new(4096).unwrap());
    let (base, backing) =
        (memory.base(), Backing::Owned { allocation: Arc::clone(&memory), offset: 0 });
    pair.b.register(&Arc::new(RegionMemory::new(KEY, base, 4096, backing, None)), None).unwrap();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (before, frame) = (descriptors(), Frame::Resolve(KEY).encode());
    let slot = ShmDomain::slot(pair.own_link);
    let (mut asked, mut count_refused) = (0, 0);
    while count_refused < 50 {
        match rustix::io::write(pair.a.links[slot].control.fd().as_fd(), &frame) {
            Ok(_) => (asked, count_refused) = (asked + 1, 0),
            Err(rustix::io::Errno::AGAIN) => count_refused += 1,
            Err(e) => panic!("{e}"),
        }
        pair.poll_b();
        // Other tests of this process open descriptors as well.
        assert!(descriptors() < before + 4 * MAX_PENDING_REPLIES, "after {asked} questions");
        assert!(asked < 100_000, "its requests are read forever");
    }
    assert!(asked > MAX_PENDING_REPLIES);
    // Once it reads, each request has its answer.
    let mut answers = 0;
    while answers < asked {
        while let Some((bytes, fds)) = pair.a.links[slot].control.receive().unwrap() {
            assert!(matches!(Frame::decode(&bytes), Ok(Frame::Mapped { .. })));
            assert_eq!(fds.len(), 1);
            answers += 1;
        }
        pair.poll_b();
    }
    assert_eq!(answers, asked);
}

#[test]
fn rs_4_a_peer_with_a_corrupt_ring_is_lost_and_keeps_no_engine_awake() {
    let mut pair = Pair::new();
    let slot = ShmDomain::slot(pair.own_link);
    let Stage::Up(outbound) = &pair.a.links[slot].stage else { panic!("no link") };
    // `a` keeps its end of the connection open.
    let head = layout::MESSAGE_RING.head;
    outbound.outbox.u64_at(head).store(u64::MAX, SeqCst);
    let sleeps = (0..50).any(|_| {
        pair.now = pair.now.after(Duration::from_millis(1));
        !pair.b.poll(pair.now, &NoRoom, &mut pair.from_b) && pair.b.arm()
    });
    assert!(is_down(&pair.from_b));
    assert!(sleeps);
}

/// Each mapping stays until its owner revokes it.
#[test]
fn a_peer_cannot_have_memory_mapped_that_was_not_asked_for() {
    let mut pair = Pair::new();
    let memory = Allocation::new(4096).unwrap();
    let key = RegionKey { index: 9, rkey: 1 };
    let (len, allocation_len) = (4096, 4096);
    let frame = Frame::Mapped { key, len, allocation: 1, allocation_len, offset: 0 };
    let fd = memory.fd().try_clone_to_owned().unwrap();
    pair.a.link(pair.own_link).unwrap().send(&frame, smallvec![fd]).unwrap();
    for _ in 0..3 {
        pair.poll_b();
    }
    let Pair { mut b, peer_link, from_b, .. } = pair;
    assert!(b.link(peer_link).is_none_or(|link| link.imports.get(key).is_none()));
    assert!(is_down(&from_b), "it breaks the protocol");
}

#[test]
fn a_peer_that_revokes_forever_and_reads_no_answers_is_bounded() {
    let mut pair = Pair::new();
    let frame = Frame::Revoke { index: 5 }.encode();
    let slot = ShmDomain::slot(pair.own_link);
    let mut sent = 0;
    while !is_down(&pair.from_b) {
        match rustix::io::write(pair.a.links[slot].control.fd().as_fd(), &frame) {
            Ok(_) => sent += 1,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::PIPE) => pair.poll_b(),
            Err(e) => panic!("{e}"),
        }
        assert!(sent < 100_000, "its revocations are answered forever");
    }
}

#[test]
fn rs_4_control_messages_of_one_peer_end_no_link_of_another() {
    let mut pair = Pair::new();
    let other = pair.peer_link + 1;
    pair.b.control_messages.extend((0..MAX_CONTROL_MESSAGES).map(|_| (other, Vec::new())));
    pair.a.send_control(pair.own_link, b"honest".to_vec());
    pair.poll_b();
    assert!(!is_down(&pair.from_b));
    let taken = std::iter::from_fn(|| pair.b.receive_control());
    assert_eq!(taken.last(), Some((pair.peer_link, b"honest".to_vec())));
    // Its own link ends.
    pair.b.link(pair.peer_link).unwrap().control_messages = MAX_CONTROL_MESSAGES;
    pair.a.send_control(pair.own_link, b"one more".to_vec());
    pair.poll_b();
    assert!(is_down(&pair.from_b));
}
