//! Links of two domains, polled step by step.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        Arc,
    },
    time::Duration,
};

use super::ShmDomain;
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, RailKeys, RegionKey, TransportKind},
    domain::{
        Admit, Completion, Count, Data, Domain, DomainError, LinkId, LocalAddr, MessageRoom, Post,
        RegionRelease, Seq, Token, WorkRequest,
    },
    domain::{PeerMapping, StoreGuard},
    memory::{Allocation, Backing, RegionMemory},
    time::Time,
    wake::Waker,
};

pub(super) struct NoRoom;

impl MessageRoom for NoRoom {
    fn admit(&self, _: usize) -> Admit {
        Admit::Wait
    }
}

struct Room;

impl MessageRoom for Room {
    fn admit(&self, _: usize) -> Admit {
        Admit::Take
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

/// Two domains connected by one link.
pub(super) struct Pair {
    pub(super) a: ShmDomain,
    pub(super) b: ShmDomain,
    pub(super) from_a: Vec<Completion>,
    pub(super) from_b: Vec<Completion>,
    /// The link's id at each end.
    pub(super) own_link: LinkId,
    pub(super) peer_link: LinkId,
    pub(super) now: Time,
}

impl Pair {
    pub(super) fn new() -> Self {
        let ((a, _), (b, b_address)) = (domain(), domain());
        let (from_a, from_b, now) = (Vec::new(), Vec::new(), Time(1));
        let mut pair = Self { a, b, from_a, from_b, own_link: 0, peer_link: 0, now };
        pair.a.connect(now, &b_address, 0).unwrap();
        loop {
            pair.poll_a();
            pair.poll_b();
            if let (Some(own_link), Some(peer_link)) =
                (link_up(&pair.from_a), link_up(&pair.from_b))
            {
                return Self { own_link, peer_link, ..pair };
            }
        }
    }

    pub(super) fn poll_a(&mut self) {
        self.now = self.now.after(Duration::from_millis(1));
        self.a.poll(self.now, &NoRoom, &mut self.from_a);
    }

    pub(super) fn poll_b(&mut self) {
        self.now = self.now.after(Duration::from_millis(1));
        self.b.poll(self.now, &NoRoom, &mut self.from_b);
    }

    /// Memory of `b` that `a` may store to, and its peer_mapping.
    pub(super) fn expose_memory(&mut self) -> (Arc<Allocation>, Arc<PeerMapping>) {
        let memory = Arc::new(Allocation::new(4096).unwrap());
        let (base, backing) =
            (memory.base(), Backing::Owned { allocation: Arc::clone(&memory), offset: 0 });
        self.b
            .register(&Arc::new(RegionMemory::new(KEY, base, 4096, backing, None)), None)
            .unwrap();
        let local = [0u8; 16];
        let data = Data {
            local: LocalAddr(local.as_ptr() as usize),
            local_region: 0,
            local_seq: Seq::at(0),
            remote: KEY,
            remote_keys: RailKeys::default(),
            remote_seq: Seq::at(0),
            page_len: 16,
            pages: 1,
        };
        let early = self.a.map_peer_region(self.own_link, KEY, None).unwrap_err();
        assert!(early.contains("not resolved"), "{early}");
        self.a.post(self.own_link, Token::default(), &WorkRequest::Prepare { data }).unwrap();
        for _ in 0..10 {
            self.poll_b();
            self.poll_a();
        }
        let peer_mapping = self.a.map_peer_region(self.own_link, KEY, None).unwrap();
        (memory, peer_mapping)
    }

    fn poll_both(&mut self) {
        for _ in 0..10 {
            self.poll_a();
            self.poll_b();
        }
    }

    /// Starts a copy of `from` by `a` into `memory` of `b`, which is reported at the next poll of
    /// `a`.
    fn begin_copy(&mut self, from: &[u8], memory: &mut [u8]) {
        self.b.register(&region(memory), None).unwrap();
        let data = Data {
            local: LocalAddr(from.as_ptr() as usize),
            local_region: 0,
            local_seq: Seq::at(0),
            remote: KEY,
            remote_keys: RailKeys::default(),
            remote_seq: Seq::at(0),
            page_len: from.len() as u64,
            pages: 1,
        };
        let write = WorkRequest::Write { data, count: None };
        self.a.post(self.own_link, Token::default(), &write).unwrap();
        while self.a.link(self.own_link).unwrap().jobs.is_empty() {
            self.poll_b();
            self.poll_a();
        }
    }
}

pub(super) const KEY: RegionKey = RegionKey { index: 0, rkey: 7 };
const LARGE: usize = 64 << 20;

fn region(memory: &mut [u8]) -> Arc<RegionMemory> {
    let (base, len) = (memory.as_mut_ptr() as usize, memory.len() as u64);
    Arc::new(RegionMemory::new(KEY, base, len, Backing::Foreign, None))
}

pub(super) fn is_down(out: &[Completion]) -> bool {
    out.iter().any(|c| matches!(c, Completion::LinkDown { .. }))
}

fn is_released(out: &[Completion]) -> bool {
    out.iter().any(|c| matches!(c, Completion::RegionReleased { .. }))
}

#[test]
fn ic_4_a_count_after_the_end_of_its_link_fails() {
    let mut pair = Pair::new();
    let count = |imm| WorkRequest::Count(Count { imm, n: 1 });
    let token = |slot| Token { slot, ..Token::default() };
    pair.b.post(pair.peer_link, token(1), &count(1)).unwrap();
    // Like a broken socket: `b` does not know yet.
    let cause = DomainError::LinkDown("its connection was reset".into());
    pair.a.on_connection_lost(pair.own_link, cause, &mut pair.from_a);
    pair.b.post(pair.peer_link, token(2), &count(2)).unwrap();
    for _ in 0..3 {
        pair.poll_a();
        pair.poll_b();
    }
    let Pair { from_a, from_b, .. } = pair;
    let counted: Vec<u32> = from_a
        .iter()
        .filter_map(|c| match c {
            Completion::Count(count) => Some(count.imm),
            _ => None,
        })
        .collect();
    assert_eq!(counted, [1]);
    let failed = from_b.iter().any(|c| {
        matches!(c, Completion::Done { token, result: Err(e), .. } if token.slot == 2 && e.is_loss())
    });
    assert!(failed, "{from_b:?}");
}

#[test]
fn ic_4_an_engine_whose_count_was_refused_does_not_sleep_once_there_is_room() {
    let mut pair = Pair::new();
    let count = WorkRequest::Count(Count { imm: 1, n: 1 });
    let posts = |pair: &mut Pair| pair.a.post(pair.own_link, Token::default(), &count).unwrap();
    while posts(&mut pair) != Post::Full {}
    pair.poll_a();
    assert!(pair.a.arm(), "nothing can be done before there is room");
    pair.a.disarm();
    // `b` need not wake an engine that is awake, and does so only once.
    for _ in 0..10 {
        pair.poll_b();
    }
    assert!(!pair.a.arm(), "there is room, and no further wake-up follows");
    pair.a.disarm();
    assert!(pair.a.poll(pair.now, &NoRoom, &mut pair.from_a));
    assert_eq!(posts(&mut pair), Post::Done);
    // The refused count may have been dropped, so it keeps no engine awake.
    assert!(pair.a.arm());
}

#[test]
fn an_engine_sleeps_while_its_messages_find_no_room_and_only_then() {
    let mut pair = Pair::new();
    pair.poll_both();
    let send = WorkRequest::Send((*b"hello").into());
    for _ in 0..2 {
        assert_eq!(pair.a.post(pair.own_link, Token::default(), &send), Ok(Post::Queued));
    }
    assert!(!pair.b.arm(), "the messages were not looked at");
    pair.b.disarm();
    pair.poll_b();
    assert!(pair.b.arm(), "nothing can be done before there is room");
    pair.b.disarm();
    pair.b.poll(pair.now, &Room, &mut pair.from_b);
    assert!(!pair.b.arm(), "the second message may find room");
    pair.b.disarm();
    pair.b.poll(pair.now, &Room, &mut pair.from_b);
    let messages = pair.from_b.iter().filter(|c| matches!(c, Completion::Message { .. }));
    assert_eq!(messages.count(), 2);
    assert!(pair.b.arm(), "nothing is left to do");
}

#[test]
fn a_message_that_is_posted_while_the_engine_sleeps_wakes_it_when_it_is_delivered() {
    let mut pair = Pair::new();
    pair.poll_both();
    for round in 0..3 {
        assert!(pair.a.arm(), "round {round}");
        let send = WorkRequest::Send((*b"hello").into());
        assert_eq!(pair.a.post(pair.own_link, Token::default(), &send), Ok(Post::Queued));
        pair.b.poll(pair.now, &Room, &mut pair.from_b);
        assert!(pair.a.doorbell.was_rung(), "round {round}");
        pair.a.disarm();
        pair.poll_both();
    }
}

#[test]
fn mr_1_memory_is_quiet_only_after_a_leaving_peer_ended_its_copies() {
    let mut pair = Pair::new();
    let (from, mut memory) = (vec![1u8; LARGE], vec![0u8; LARGE]);
    pair.begin_copy(&from, &mut memory);
    pair.a.disconnect(pair.own_link, "enough");
    while !is_down(&pair.from_b) {
        pair.poll_b();
    }
    assert_eq!(pair.b.deregister(KEY.index), RegionRelease::Later);
    for _ in 0..10 {
        pair.poll_b();
    }
    assert!(!is_released(&pair.from_b), "the copy may go on");
    while !is_released(&pair.from_b) {
        pair.poll_a();
        pair.poll_b();
    }
    memory.fill(2);
    std::thread::sleep(Duration::from_millis(20));
    assert!(memory.iter().all(|byte| *byte == 2));
    assert!(is_down(&pair.from_a));
}

#[test]
fn mr_1_callers_that_help_copy_have_ended_when_their_engine_is_closed() {
    for round in 0..20 {
        let mut pair = Pair::new();
        let (from, mut memory) = (vec![1u8; LARGE], vec![0u8; LARGE]);
        let caller = pair.a.assistant().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&over);
        // Started before there is a copy, so that it runs before the pool's own thread.
        let helps = std::thread::spawn(move || {
            while !ends.load(Relaxed) {
                caller.assist();
            }
        });
        pair.begin_copy(&from, &mut memory);
        std::thread::sleep(Duration::from_micros(100 * round));
        pair.a.close();
        // A copying thread checks for cancellation once per MiB.
        let torn = memory.chunks(1 << 20).any(|chunk| chunk.first() != chunk.last());
        over.store(true, Relaxed);
        helps.join().unwrap();
        assert!(!torn, "a copy was still under way, round {round}");
    }
}

#[test]
fn mr_1_an_engine_that_closes_during_a_copy_frees_its_own_memory() {
    let mut pair = Pair::new();
    let (from, mut memory) = (vec![1u8; LARGE], vec![0u8; LARGE]);
    pair.begin_copy(&from, &mut memory);
    // `b` may access memory of `a` too, so `a` waits for its answer.
    let mut own = vec![0u8; 64];
    let region = region(&mut own);
    pair.a.register(&region, None).unwrap();
    pair.a.link(pair.own_link).unwrap().exported.insert(KEY.index);
    let (mut a, mut b, mut now) = (pair.a, pair.b, pair.now);
    let closes = std::thread::spawn(move || {
        a.close();
        a
    });
    let mut from_b = Vec::new();
    while !closes.is_finished() {
        now = now.after(Duration::from_millis(1));
        b.poll(now, &NoRoom, &mut from_b);
    }
    drop(closes.join().unwrap());
    assert_eq!(Arc::strong_count(&region), 1, "memory that no peer releases is leaked");
}

#[test]
fn a_peer_sees_a_close_while_a_child_process_holds_the_socket_open() {
    let mut pair = Pair::new();
    let control = &pair.a.link(pair.own_link).unwrap().control;
    let inherited = control.fd().try_clone_to_owned().unwrap();
    pair.a.close();
    for _ in 0..100 {
        pair.poll_b();
    }
    assert!(is_down(&pair.from_b));
    assert!(pair.b.links.is_empty(), "the end of the connection was missed");
    drop(inherited);
}

#[test]
fn a_link_that_waits_for_its_peer_to_close_lets_the_engine_sleep() {
    let mut pair = Pair::new();
    pair.a.disconnect(pair.own_link, "enough");
    let sleeps = |domain: &mut ShmDomain, now: &mut Time| {
        (0..10).any(|_| {
            *now = now.after(Duration::from_millis(1));
            !domain.poll(*now, &NoRoom, &mut Vec::new()) && domain.arm()
        })
    };
    assert!(sleeps(&mut pair.a, &mut pair.now), "the peer has not closed yet");
    // A copy of `b` delays the close of its side.
    pair.poll_b();
    assert!(sleeps(&mut pair.b, &mut pair.now));
}

/// Stores as a device does.
fn store(guard: &StoreGuard, value: u8) {
    let at = guard.address(100, 1).unwrap() as *mut u8;
    // SAFETY: the guard keeps the peer's memory mapped, and there is no other writer.
    unsafe { at.write_volatile(value) };
}

fn read(memory: &Allocation) -> u8 {
    byte(memory, 100)
}

pub(super) fn byte(memory: &Allocation, at: usize) -> u8 {
    assert!((at as u64) < memory.len());
    // SAFETY: inside a live allocation, and read after the writer has finished.
    unsafe { ((memory.base() + at) as *const u8).read_volatile() }
}

#[test]
fn mr_1_memory_is_quiet_only_after_a_device_ended_its_stores() {
    let mut pair = Pair::new();
    let (memory, peer_mapping) = pair.expose_memory();
    let guard = peer_mapping.begin_stores().unwrap();
    assert_eq!(pair.b.deregister(KEY.index), RegionRelease::Later);
    pair.poll_both();
    assert!(!is_released(&pair.from_b), "a device may be storing");
    assert!(peer_mapping.begin_stores().is_none(), "no new guard begins");
    assert!(pair.a.arm(), "the engine must be able to sleep");
    pair.a.disarm();
    store(&guard, 7);
    assert_eq!(read(&memory), 7);
    drop(guard);
    assert!(!pair.a.arm(), "the release must be sent");
    pair.poll_both();
    assert!(is_released(&pair.from_b));
}

#[test]
fn mr_1_a_region_without_device_stores_is_released_at_once() {
    let mut pair = Pair::new();
    let (_memory, peer_mapping) = pair.expose_memory();
    drop(peer_mapping.begin_stores());
    assert_eq!(pair.b.deregister(KEY.index), RegionRelease::Later);
    pair.poll_both();
    assert!(is_released(&pair.from_b) && !peer_mapping.is_open());
    assert!(pair.a.map_peer_region(pair.own_link, KEY, None).is_err());
}

#[test]
fn mr_1_a_link_ends_for_the_owner_after_the_device_finished() {
    for leaves in [true, false] {
        let mut pair = Pair::new();
        let (memory, peer_mapping) = pair.expose_memory();
        let guard = peer_mapping.begin_stores().unwrap();
        match leaves {
            true => pair.a.disconnect(pair.own_link, "enough"),
            false => pair.b.disconnect(pair.peer_link, "enough"),
        }
        pair.poll_both();
        assert!(is_down(&pair.from_a), "callers that wait for the peer are told at once (RS-4)");
        assert!(peer_mapping.begin_stores().is_none());
        assert_eq!(pair.b.deregister(KEY.index), RegionRelease::Later);
        pair.poll_both();
        assert!(!is_released(&pair.from_b), "a device may be storing");
        assert!(pair.a.arm(), "the engine must be able to sleep");
        pair.a.disarm();
        store(&guard, 9);
        assert_eq!(read(&memory), 9);
        drop(guard);
        pair.poll_both();
        assert!(is_released(&pair.from_b) && pair.a.links.is_empty());
    }
}

#[test]
fn mr_1_after_a_close_the_peer_waits_only_for_the_device_stores() {
    let mut pair = Pair::new();
    let (_memory, peer_mapping) = pair.expose_memory();
    let guard = peer_mapping.begin_stores().unwrap();
    pair.a.close();
    assert_eq!(pair.b.deregister(KEY.index), RegionRelease::Later);
    for _ in 0..20 {
        pair.poll_b();
    }
    assert!(!is_released(&pair.from_b));
    assert_eq!(peer_mapping.closed_by().as_deref(), Some("this engine was closed"));
    drop(guard);
    for _ in 0..20 {
        pair.poll_b();
    }
    assert!(is_released(&pair.from_b) && pair.b.links.is_empty());
}

/// A peer that has not answered a revocation may be in the middle of a copy.
#[test]
fn mr_1_a_close_waits_for_revocations_under_way() {
    for answers in [true, false] {
        let mut pair = Pair::new();
        let (memory, _) = pair.expose_memory();
        let weak = Arc::downgrade(&memory);
        drop(memory);
        assert_eq!(pair.b.deregister(KEY.index), RegionRelease::Later);
        let (mut a, mut b, mut now) = (pair.a, pair.b, pair.now);
        let closes = std::thread::spawn(move || {
            b.close();
            b
        });
        while answers && !closes.is_finished() {
            now = now.after(Duration::from_millis(1));
            a.poll(now, &NoRoom, &mut Vec::new());
        }
        let b = closes.join().unwrap();
        assert_eq!(b.keeps(KEY.index), !answers);
        drop(b);
        assert_eq!(weak.strong_count() > 0, !answers, "memory is freed once it is released");
    }
}
