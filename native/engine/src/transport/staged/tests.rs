//! Two ends over real sockets and shared memory, every byte staged at both.

use std::{collections::HashMap, sync::Arc};

use super::{
    frames::{Frame, Pages},
    ControlChannel, Staged, SLOTS, SLOT_BYTES,
};
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, PageIndices, RailKeys, RegionKey, TransportKind},
    domain::{
        Admit, Completion, Count, Data, Domain, DomainError, LinkId, LocalAddr, MessageRoom, Post,
        RegionRelease, Seq, Token, WorkRequest,
    },
    memory::{
        file::{FileBackend, FileQueue},
        Backing, RegionMemory, FIRST_INTERNAL_INDEX,
    },
    time::Time,
    transport::{shm::ShmDomain, tcp::TcpDomain},
    wake::Waker,
};

struct TestMessageRoom;

impl MessageRoom for TestMessageRoom {
    fn admit(&self, _: usize) -> Admit {
        Admit::Take
    }
}

struct End<D> {
    domain: Staged<D>,
    address: EngineAddress,
    link: Option<LinkId>,
    done: HashMap<u32, Result<(), DomainError>>,
    counts: HashMap<u32, u32>,
    down: Option<DomainError>,
    group_frames: Vec<Vec<u8>>,
}

impl<D: ControlChannel> End<D> {
    fn new(id: EngineId, inner: D) -> Self {
        let mut domain = Staged::new(inner, &FileQueue::new(&Waker::default(), FileBackend::Best));
        domain.stage_all = true;
        let endpoints = vec![domain.endpoint()];
        let address = EngineAddress { id, name: "end".into(), endpoints };
        domain.announce(&address);
        let (link, done, counts, down) = (None, HashMap::new(), HashMap::new(), None);
        Self { domain, address, link, done, counts, down, group_frames: Vec::new() }
    }

    /// Polls once; calls `at_count` at the moment a count is reported.
    fn poll(&mut self, at_count: &mut dyn FnMut(Count)) {
        let mut out = Vec::new();
        self.domain.poll(Time::now(), &TestMessageRoom, &mut out);
        for c in out {
            match c {
                Completion::Done { token, result, .. } => {
                    assert!(self.down.is_none(), "a completion after the link is down");
                    assert!(self.done.insert(token.slot, result).is_none(), "completed twice");
                }
                Completion::Count(count) => {
                    *self.counts.entry(count.imm).or_default() += count.n;
                    at_count(count);
                }
                Completion::LinkUp { link, .. } => self.link = Some(link),
                Completion::LinkDown { cause, .. } => self.down = Some(cause),
                Completion::GroupFrame { frame, .. } => self.group_frames.push(frame),
                _ => {}
            }
        }
    }

    fn post(&mut self, slot: u32, wr: &WorkRequest) {
        let token = Token { slot, ..Token::default() };
        match self.domain.post(self.link.unwrap(), token, wr) {
            Ok(Post::Done) => drop(self.done.insert(slot, Ok(()))),
            Ok(Post::Queued) => {}
            Ok(Post::Full) => panic!("full"),
            Err(e) => drop(self.done.insert(slot, Err(e))),
        }
    }

    fn register(&mut self, index: u32, memory: &[u8]) -> RegionKey {
        let key = RegionKey { index, rkey: 0x1000 + u64::from(index) };
        let (base, len) = (memory.as_ptr() as usize, memory.len() as u64);
        let region = RegionMemory::new(key, base, len, Backing::Foreign, None);
        self.domain.register(&Arc::new(region), None).unwrap();
        key
    }
}

fn tcp(n: u8) -> End<TcpDomain> {
    let id = EngineId([n; 16]);
    End::new(id, TcpDomain::open(id, &EngineConfig::default()).unwrap())
}

fn shm(_: u8) -> End<ShmDomain> {
    let id = EngineId::random().unwrap();
    let config = EngineConfig::default();
    End::new(id, ShmDomain::open(TransportKind::Shm, id, &config, &Waker::default()).unwrap())
}

/// Two ends with a link between them.
fn pair<D: ControlChannel>(end: impl Fn(u8) -> End<D>) -> (End<D>, End<D>) {
    let (mut a, mut b) = (end(1), end(2));
    let peer = b.address.clone();
    a.domain.connect(Time::now(), &peer, 0).unwrap();
    drive(&mut a, &mut b, "a link", |a, b| a.link.is_some() && b.link.is_some());
    (a, b)
}

fn drive<D: ControlChannel>(
    a: &mut End<D>,
    b: &mut End<D>,
    what: &str,
    over: impl Fn(&End<D>, &End<D>) -> bool,
) {
    let start = std::time::Instant::now();
    while !over(a, b) {
        assert!(start.elapsed().as_secs() < 20, "timed out waiting for {what}");
        a.poll(&mut |_| {});
        b.poll(&mut |_| {});
    }
}

fn data(
    (own_memory, local_seq): (&[u8], Seq),
    (key, remote_seq): (RegionKey, Seq),
    page_len: u64,
    n: u32,
) -> Data {
    Data {
        local: LocalAddr(own_memory.as_ptr() as usize),
        local_region: 0,
        local_seq,
        remote: key,
        remote_keys: RailKeys::default(),
        remote_seq,
        page_len,
        pages: n,
    }
}

fn noise(rng: &mut fastrand::Rng, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    rng.fill(&mut bytes);
    bytes
}

/// Pages in some order, in a separate range of the region.
fn ranges(rng: &mut fastrand::Rng, from: u64, stride: u64, pages: u32) -> Seq {
    if rng.bool() {
        return Seq::Strided { offset: from, stride };
    }
    let mut order: Vec<u32> = (0..pages).collect();
    rng.shuffle(&mut order);
    match PageIndices::list(order).unwrap() {
        PageIndices::List(list) => Seq::Indexed { list, from: 0, offset: from, stride },
        PageIndices::Range { .. } => unreachable!("a list was made"),
    }
}

fn moves_bytes<D: ControlChannel>(end: impl Fn(u8) -> End<D>, seed: u64) {
    const SPAN: usize = 7 << 19;
    const JOBS: usize = 6;
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut a, mut b) = pair(end);
    let own_memory = noise(&mut rng, SPAN * JOBS);
    let peer_memory = noise(&mut rng, SPAN * JOBS);
    a.register(0, &own_memory);
    let key = b.register(0, &peer_memory);
    let before = [own_memory.clone(), peer_memory.clone()];

    let mut jobs = Vec::new();
    for slot in 0..JOBS {
        let page_len = [7, 999, 4096, 70_000, SLOT_BYTES, SLOT_BYTES + 5][rng.usize(0..6)];
        let stride = page_len + rng.u64(0..9);
        let pages = rng.u32(1..=(SPAN as u64 / stride).min(1500) as u32);
        let from = (SPAN * slot) as u64;
        let here = ranges(&mut rng, from, stride, pages);
        let there = ranges(&mut rng, from, stride, pages);
        let work = data((&own_memory, here), (key, there), page_len, pages);
        let write = rng.bool();
        let count = rng.bool().then_some(Count { imm: 100 + slot as u32, n: pages });
        let wr = match write {
            true => WorkRequest::Write { data: work.clone(), count },
            false => WorkRequest::Read { data: work.clone() },
        };
        a.post(slot as u32, &wr);
        jobs.push((work, write, count.filter(|_| write)));
    }

    // The expected contents of both sides.
    let mut after = before.clone();
    for (work, write, _) in &jobs {
        for i in 0..work.pages {
            let (l, r) = (work.local_seq.nth(i) as usize, work.remote_seq.nth(i) as usize);
            let n = work.page_len as usize;
            match write {
                true => after[1][r..r + n].copy_from_slice(&before[0][l..l + n]),
                false => after[0][l..l + n].copy_from_slice(&before[1][r..r + n]),
            }
        }
    }
    let expected = after[1].clone();
    let in_place = |count: Count| {
        // IC-2: at the moment of the count all bytes are in place.
        let (work, ..) = &jobs[count.imm as usize - 100];
        for i in 0..work.pages {
            let (r, n) = (work.remote_seq.nth(i) as usize, work.page_len as usize);
            assert!(
                peer_memory[r..r + n] == expected[r..r + n],
                "counted before the bytes were in place"
            );
        }
    };
    let start = std::time::Instant::now();
    let to_count =
        |b: &End<D>| jobs.iter().filter_map(|j| j.2).all(|c| b.counts.contains_key(&c.imm));
    while a.done.len() < JOBS || !to_count(&b) {
        assert!(start.elapsed().as_secs() < 20, "seed {seed} does not end: {:?}", a.done);
        a.poll(&mut |_| {});
        b.poll(&mut { in_place });
    }
    assert!(a.done.values().all(Result::is_ok), "seed {seed}: {:?}", a.done);
    assert!(own_memory == after[0] && peer_memory == after[1], "seed {seed}: wrong bytes");
    for (_, _, count) in &jobs {
        if let Some(c) = count {
            assert_eq!(b.counts[&c.imm], c.n, "seed {seed}: IC-1");
        }
    }
    assert_eq!(b.counts.len(), jobs.iter().filter(|j| j.2.is_some()).count());
    assert!(
        a.domain.jobs.is_empty() && a.domain.chunks.is_empty() && b.domain.window_copies.is_empty()
    );
}

#[test]
fn ic_2_staged_bytes_arrive_and_count_once_over_sockets() {
    (0..8).for_each(|seed| moves_bytes(tcp, seed));
}

#[test]
fn ic_2_staged_bytes_arrive_and_count_once_over_shared_memory() {
    (0..8).for_each(|seed| moves_bytes(shm, seed));
}

#[test]
fn mr_2_and_mr_3_hold_at_the_owner() {
    let (mut a, mut b) = pair(tcp);
    let (own_memory, peer_memory) = (vec![1u8; 4096], vec![0u8; 4096]);
    a.register(0, &own_memory);
    let key = b.register(0, &peer_memory);
    let write = |key, offset| WorkRequest::Write {
        data: data((&own_memory, Seq::at(0)), (key, Seq::at(offset)), 64, 1),
        count: Some(Count { imm: 1, n: 1 }),
    };
    a.post(0, &write(key, 4096 - 63));
    a.post(1, &write(key, u64::MAX - 10));
    a.post(2, &write(RegionKey { rkey: key.rkey + 4, ..key }, 0));
    drive(&mut a, &mut b, "refusals", |a, _| a.done.len() == 3);
    assert!(matches!(&a.done[&0], Err(DomainError::Refused(_))), "{:?}", a.done);
    assert!(matches!(&a.done[&1], Err(DomainError::Refused(_))), "{:?}", a.done);
    assert!(matches!(&a.done[&2], Err(DomainError::Stale(_))), "{:?}", a.done);
    assert_eq!(b.domain.deregister(0), RegionRelease::Now);
    a.post(3, &write(key, 0));
    drive(&mut a, &mut b, "a refusal", |a, _| a.done.len() == 4);
    assert!(matches!(&a.done[&3], Err(DomainError::Stale(_))), "{:?}", a.done);
    assert!(peer_memory == [0; 4096] && b.counts.is_empty());
}

#[test]
fn rs_4_everything_under_way_ends_when_the_peer_leaves() {
    for polls in [0, 1, 3, 10, 100] {
        let (mut a, mut b) = pair(shm);
        let (own_memory, peer_memory) = (vec![1u8; 40 << 20], vec![0u8; 40 << 20]);
        a.register(0, &own_memory);
        let key = b.register(0, &peer_memory);
        for slot in 0..20 {
            let at = u64::from(slot) * (2 << 20);
            let work = data((&own_memory, Seq::at(at)), (key, Seq::at(at)), 2 << 20, 1);
            let count = Some(Count { imm: 1, n: 1 });
            let wr = match slot % 2 {
                0 => WorkRequest::Write { data: work, count },
                _ => WorkRequest::Read { data: work },
            };
            a.post(slot, &wr);
        }
        assert!(
            a.domain.is_staging(a.link.unwrap()),
            "the link must count as staging, not as stalled"
        );
        for _ in 0..polls {
            a.poll(&mut |_| {});
            b.poll(&mut |_| {});
        }
        b.domain.close();
        let start = std::time::Instant::now();
        while a.down.is_none() {
            assert!(start.elapsed().as_secs() < 5, "the loss is not noticed");
            a.poll(&mut |_| {});
        }
        assert_eq!(a.done.len(), 20);
        assert!(a.link.is_none_or(|link| !a.domain.is_staging(link)));
        assert!(a.domain.jobs.is_empty() && a.domain.chunks.is_empty());
        assert!(a.domain.link_states.is_empty());
        assert_eq!(a.domain.own.as_ref().map(|o| o.idle()), Some(usize::from(SLOTS)));
    }
}

/// The group sees the end of a link after other reports of the same poll, and may post in between.
#[test]
fn rs_4_nothing_starts_on_a_link_whose_end_is_reported() {
    fn late<D: ControlChannel>(end: impl Fn(u8) -> End<D>) {
        let (mut a, mut b) = pair(end);
        let (own_memory, peer_memory) = (vec![1; 64], vec![0; 64]);
        a.register(0, &own_memory);
        let key = b.register(0, &peer_memory);
        b.domain.close();
        drive(&mut a, &mut b, "its end", |a, _| a.down.is_some());
        let at = Seq::Strided { offset: 0, stride: 64 };
        let data = data((&own_memory, at.clone()), (key, at), 64, 1);
        a.post(0, &WorkRequest::Write { data, count: None });
        assert!(matches!(a.done.get(&0), Some(Err(DomainError::LinkDown(_)))), "{:?}", a.done);
        assert!(a.domain.is_idle());
    }
    late(tcp);
    late(shm);
}

#[test]
fn group_frames_pass_without_staging() {
    fn one<D: ControlChannel>(end: impl Fn(u8) -> End<D>) {
        let (mut a, mut b) = pair(end);
        a.domain.send_group_frame(a.link.unwrap(), vec![7; 9]);
        drive(&mut a, &mut b, "a group frame", |_, b| b.group_frames == [vec![7; 9]]);
    }
    one(tcp);
    one(shm);
}

#[test]
fn a_window_is_released_when_its_peer_has_left() {
    fn leaves<D: ControlChannel>(end: impl Fn(u8) -> End<D>) {
        let (mut a, mut b) = pair(end);
        let (own_memory, peer_memory) = (vec![1; 64], vec![0; 64]);
        a.register(0, &own_memory);
        let key = b.register(0, &peer_memory);
        let at = Seq::Strided { offset: 0, stride: 64 };
        let data = data((&own_memory, at.clone()), (key, at), 64, 1);
        a.post(0, &WorkRequest::Write { data, count: None });
        drive(&mut a, &mut b, "a write", |a, _| a.done.contains_key(&0));
        a.domain.close();
        drive(&mut a, &mut b, "its end", |_, b| {
            b.down.is_some() && b.domain.closing_windows.is_empty()
        });
    }
    leaves(tcp);
    leaves(shm);
}

#[test]
fn a_peer_that_violates_the_protocol_loses_its_link() {
    fn request_copy(slot: u8, key: RegionKey) -> Frame {
        let pages = Pages { key, offset: 0, stride: 8, page_len: 8, n: 1, indices: Vec::new() };
        Frame::CopyRequest { slot, chunk: 1, pages, inward: true, count: None }
    }
    type Say = Box<dyn Fn(RegionKey) -> Vec<Vec<u8>>>;
    let bad: Vec<(&str, Say)> = vec![
        ("decode", Box::new(|_| vec![b"nonsense".to_vec()])),
        ("slot that it does not own", Box::new(|key| vec![request_copy(0, key).encode()])),
        (
            "slot that it does not own",
            Box::new(|key| vec![Frame::OpenWindow.encode(), request_copy(SLOTS, key).encode()]),
        ),
        (
            "without a request",
            Box::new(|_| {
                vec![Frame::Window { key: RegionKey { index: FIRST_INTERNAL_INDEX, rkey: 0 } }
                    .encode()]
            }),
        ),
        (
            "answer without a request",
            Box::new(|_| vec![Frame::CopyDone { chunk: 77, result: Ok(()) }.encode()]),
        ),
    ];
    for (cause, send) in bad {
        let (mut a, mut b) = pair(tcp);
        let peer_memory = vec![0u8; 64];
        let key = b.register(0, &peer_memory);
        for frame in send(key) {
            let link = a.link.unwrap();
            a.domain.inner.send_control(link, frame);
        }
        drive(&mut a, &mut b, "the end of the link", |a, b| a.down.is_some() && b.down.is_some());
        let text = b.down.as_ref().unwrap().to_string();
        assert!(text.contains(cause), "{text}");
        assert!(b.domain.link_states.is_empty() && b.domain.window_copies.is_empty());
    }
}
