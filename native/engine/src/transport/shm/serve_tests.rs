//! Links of two domains, poll by poll.

use std::{sync::Arc, time::Duration};

use super::ShmDomain;
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, RailKeys, RegionKey, TransportKind},
    domain::{
        Admit, Completion, Count, Data, Domain, DomainError, LinkId, LocalAddr, MessageRoom, Quiet,
        Seq, Token, WorkRequest,
    },
    memory::{Backing, RegionMemory},
    time::Time,
    wake::Waker,
};

struct NoRoom;

impl MessageRoom for NoRoom {
    fn admit(&self, _: usize) -> Admit {
        Admit::Wait
    }
}

fn domain() -> (ShmDomain, EngineAddress) {
    let id = EngineId(std::array::from_fn(|_| fastrand::u8(..)));
    let waker = Waker::default();
    let mut domain =
        ShmDomain::open(TransportKind::Shm, id, &EngineConfig::default(), &waker).unwrap();
    let address = EngineAddress { id, name: String::new(), endpoints: vec![domain.endpoint()] };
    domain.announce(&address);
    (domain, address)
}

fn link_up(out: &[Completion]) -> Option<LinkId> {
    out.iter().find_map(|c| match c {
        Completion::LinkUp { link, .. } => Some(*link),
        _ => None,
    })
}

/// Two domains that are joined by one link.
struct Pair {
    a: ShmDomain,
    b: ShmDomain,
    of_a: Vec<Completion>,
    of_b: Vec<Completion>,
    /// What each calls the link.
    mine: LinkId,
    theirs: LinkId,
    now: Time,
}

impl Pair {
    fn new() -> Self {
        let ((a, _), (b, there)) = (domain(), domain());
        let (of_a, of_b, now) = (Vec::new(), Vec::new(), Time(1));
        let mut pair = Self { a, b, of_a, of_b, mine: 0, theirs: 0, now };
        pair.a.connect(now, &there, 0).unwrap();
        loop {
            pair.poll_a();
            pair.poll_b();
            if let (Some(mine), Some(theirs)) = (link_up(&pair.of_a), link_up(&pair.of_b)) {
                return Self { mine, theirs, ..pair };
            }
        }
    }

    fn poll_a(&mut self) {
        self.now = self.now.after(Duration::from_millis(1));
        self.a.poll(self.now, &NoRoom, &mut self.of_a);
    }

    fn poll_b(&mut self) {
        self.now = self.now.after(Duration::from_millis(1));
        self.b.poll(self.now, &NoRoom, &mut self.of_b);
    }
}

#[test]
fn ic_4_a_count_that_comes_after_its_link_has_ended_is_no_success() {
    let mut pair = Pair::new();
    let count = |imm| WorkRequest::Count(Count { imm, n: 1 });
    let token = |slot| Token { slot, ..Token::default() };
    pair.b.post(pair.theirs, token(1), &count(1)).unwrap();
    // As when its socket is broken: `b` has yet to learn of it.
    let cause = DomainError::LinkDown("its connection was reset".into());
    pair.a.fail(pair.mine, cause, &mut pair.of_a);
    pair.b.post(pair.theirs, token(2), &count(2)).unwrap();
    for _ in 0..3 {
        pair.poll_a();
        pair.poll_b();
    }
    let Pair { of_a, of_b, .. } = pair;
    let counted: Vec<u32> = of_a
        .iter()
        .filter_map(|c| match c {
            Completion::Count(count) => Some(count.imm),
            _ => None,
        })
        .collect();
    assert_eq!(counted, [1]);
    let failed = of_b.iter().any(|c| {
        matches!(c, Completion::Done { token, result: Err(e), .. } if token.slot == 2 && e.is_loss())
    });
    assert!(failed, "{of_b:?}");
}

#[test]
fn mr_1_memory_is_quiet_when_a_peer_that_leaves_has_ended_its_copies_and_not_before() {
    const N: usize = 64 << 20;
    let mut pair = Pair::new();
    let (from, mut memory) = (vec![1u8; N], vec![0u8; N]);
    let key = RegionKey { index: 0, rkey: 7 };
    let (base, len) = (memory.as_mut_ptr() as usize, N as u64);
    let region = RegionMemory::new(key, base, len, Backing::Foreign, None);
    pair.b.register(&Arc::new(region), None).unwrap();
    let data = Data {
        local: LocalAddr(from.as_ptr() as usize),
        local_region: 0,
        local_seq: Seq::at(0),
        remote: key,
        remote_keys: RailKeys::default(),
        remote_seq: Seq::at(0),
        page_len: len,
        pages: 1,
    };
    let write = WorkRequest::Write { data, count: None };
    pair.a.post(pair.mine, Token::default(), &write).unwrap();
    while pair.a.link(pair.mine).unwrap().jobs.is_empty() {
        pair.poll_b();
        pair.poll_a();
    }
    // From here on `a` copies, and says nothing of it before it is polled again.
    pair.a.disconnect(pair.mine, "enough");
    let is_down = |out: &[Completion]| out.iter().any(|c| matches!(c, Completion::LinkDown { .. }));
    let is_quiet =
        |out: &[Completion]| out.iter().any(|c| matches!(c, Completion::RegionQuiet { .. }));
    while !is_down(&pair.of_b) {
        pair.poll_b();
    }
    assert_eq!(pair.b.deregister(key.index), Quiet::Later);
    for _ in 0..10 {
        pair.poll_b();
    }
    assert!(!is_quiet(&pair.of_b), "the copy may go on");
    while !is_quiet(&pair.of_b) {
        pair.poll_a();
        pair.poll_b();
    }
    memory.fill(2);
    std::thread::sleep(Duration::from_millis(20));
    assert!(memory.iter().all(|byte| *byte == 2));
    assert!(is_down(&pair.of_a));
}
