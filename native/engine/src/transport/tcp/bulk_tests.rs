//! Bulk writes: their streams, and when they are acknowledged.

use super::{
    protocol::MIN_PART,
    throttle_tests::{joined, joined_with, End, BYTES, KEY},
    Role,
};
use crate::{
    domain::{Data, Domain, LocalAddr, Post, Seq, Token, WorkRequest},
    time::Time,
};

/// Posts a write that is long enough for a bulk stream.
pub(super) fn post(end: &mut End, slot: u32) {
    post_bytes(end, slot, BYTES);
}

fn post_bytes(end: &mut End, slot: u32, bytes: u64) {
    let data = Data {
        local: LocalAddr(end.memory.as_mut_ptr() as usize),
        local_region: 0,
        local_seq: Seq::at(0),
        remote: KEY,
        remote_keys: Default::default(),
        remote_seq: Seq::at(0),
        page_len: bytes,
        pages: 1,
    };
    let token = Token { slot, ..Token::default() };
    let write = WorkRequest::Write { data, count: None };
    assert_eq!(end.domain.post(end.link, token, &write).unwrap(), Post::Queued);
    end.domain.flush();
}

/// Writes that each stream of a link has carried out.
fn executed(end: &End) -> Vec<u64> {
    let of_link = end.domain.sockets.iter().filter(|(_, s)| matches!(s.role, Role::Link(_)));
    of_link.map(|(_, s)| s.stream.executed).filter(|n| *n > 0).collect()
}

fn receive(end: &mut End, writes: u64, now: &mut Time) {
    while executed(end).iter().sum::<u64>() < writes {
        end.poll(now);
    }
}

#[test]
fn successive_writes_use_one_stream_and_concurrent_ones_all() {
    let (mut a, mut b, mut now) = joined();
    for slot in 0..4 {
        post(&mut a, slot);
        while a.done() <= slot as usize {
            b.poll(&mut now);
            a.poll(&mut now);
        }
    }
    assert_eq!(executed(&b), [4]);
    post(&mut a, 4);
    post(&mut a, 5);
    receive(&mut b, 6, &mut now);
    assert_eq!(executed(&b), [5, 1]);
}

#[test]
fn parts_of_a_write_go_to_the_streams_with_the_least_to_send() {
    let (mut a, mut b, mut now) = joined_with(3, 2 * MIN_PART);
    post(&mut a, 0);
    post_bytes(&mut a, 1, 2 * MIN_PART);
    while a.done() < 2 {
        b.poll(&mut now);
        a.poll(&mut now);
    }
    assert_eq!(executed(&b), [1, 1, 1]);
}

#[test]
fn a_write_is_acknowledged_before_more_bytes_are_received() {
    let (mut a, mut b, mut now) = joined();
    post(&mut a, 0);
    receive(&mut b, 1, &mut now);
    // On the other stream, then on the same: more bytes are there in each of the next polls.
    post(&mut a, 1);
    post(&mut a, 2);
    b.poll(&mut now);
    a.poll(&mut now);
    assert!(a.done() >= 1, "the first write waits for its acknowledgement");
}
