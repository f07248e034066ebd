//! Handshakes of two domains, polled step by step.

use std::sync::Arc;

use super::{TcpDomain, HOT_TIME};
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, RegionKey},
    domain::{
        Admit, Completion, Count, Data, Domain, LinkId, LocalAddr, MessageRoom, Seq, Token,
        WorkRequest,
    },
    memory::{Backing, RegionMemory},
    time::Time,
};

/// Large enough for a bulk stream.
const PAGE: usize = 16 << 10;
const KEY: RegionKey = RegionKey { index: 0, rkey: 7 };

struct TestMessageRoom;

impl MessageRoom for TestMessageRoom {
    fn admit(&self, _: usize) -> Admit {
        Admit::Take
    }
}

fn domain(id: u8) -> (TcpDomain, EngineAddress) {
    let id = EngineId([id; 16]);
    let mut domain = TcpDomain::open(id, &EngineConfig::default()).unwrap();
    let address = EngineAddress { id, name: String::new(), endpoints: vec![domain.endpoint()] };
    domain.announce(&address);
    (domain, address)
}

/// Polls at times so far apart that no stream is hot.
fn poll(domain: &mut TcpDomain, now: &mut Time, out: &mut Vec<Completion>) {
    *now = now.after(HOT_TIME * 2);
    domain.poll(*now, &TestMessageRoom, out);
}

/// Connects `a` to `b` until `b` is ready and `a` is about to be. Returns the link at `b`.
fn half_way(a: &mut TcpDomain, b: &mut TcpDomain, b_address: &EngineAddress) -> (LinkId, Time) {
    let (mut now, mut of_a, mut of_b) = (Time(1), Vec::new(), Vec::new());
    a.connect(now, b_address, 0).unwrap();
    loop {
        poll(a, &mut now, &mut of_a);
        assert!(of_a.is_empty());
        poll(b, &mut now, &mut of_b);
        if let Some(Completion::LinkUp { link, .. }) = of_b.first() {
            return (*link, now);
        }
    }
}

#[test]
fn ic_4_frames_that_arrive_with_the_last_handshake_message_are_kept() {
    let ((mut a, _), (mut b, b_address)) = (domain(1), domain(2));
    let (mut memory, mut source) = (vec![0u8; 4 * PAGE], vec![7u8; 4 * PAGE]);
    let (base, len) = (memory.as_mut_ptr() as usize, memory.len() as u64);
    let region = RegionMemory::new(KEY, base, len, Backing::Foreign, None);
    a.register(&Arc::new(region), None).unwrap();

    let (link, mut now) = half_way(&mut a, &mut b, &b_address);
    let mut of_a = Vec::new();
    // The acceptor is ready first, and its frames follow its last handshake message on every
    // stream.
    for i in 0..4 {
        let data = Data {
            local: LocalAddr(source.as_mut_ptr() as usize),
            local_region: 0,
            local_seq: Seq::at(0),
            remote: KEY,
            remote_keys: Default::default(),
            remote_seq: Seq::at(u64::from(i) * PAGE as u64),
            page_len: PAGE as u64,
            pages: 1,
        };
        let count = Some(Count { imm: i, n: 1 });
        let token = Token { slot: i, ..Token::default() };
        b.post(link, token, &WorkRequest::Write { data, count }).unwrap();
    }
    b.flush();
    for _ in 0..100 {
        poll(&mut a, &mut now, &mut of_a);
        if a.arm() {
            break;
        }
    }
    let counted = of_a.iter().filter(|c| matches!(c, Completion::Count(_))).count();
    assert_eq!(counted, 4);
    assert!(memory == source);
}

#[test]
fn ic_4_a_message_is_not_reported_before_its_link() {
    let ((mut a, _), (mut b, b_address)) = (domain(1), domain(2));
    let (link, mut now) = half_way(&mut a, &mut b, &b_address);
    b.post(link, Token::default(), &WorkRequest::Send((*b"hello").into())).unwrap();
    b.flush();
    let mut of_a = Vec::new();
    for _ in 0..3 {
        poll(&mut a, &mut now, &mut of_a);
    }
    let [Completion::LinkUp { .. }, Completion::Message { message, .. }] = &of_a[..] else {
        panic!("{of_a:?}");
    };
    assert_eq!(&message[..], b"hello");
}
