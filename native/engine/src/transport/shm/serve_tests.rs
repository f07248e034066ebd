//! Links of two domains, poll by poll.

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
        Quiet, Seq, Token, WorkRequest,
    },
    domain::{Aperture, Stay},
    memory::{Allocation, Backing, RegionMemory},
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

    /// Memory of `b` that `a` may store to by itself, and where.
    fn show(&mut self) -> (Arc<Allocation>, Arc<Aperture>) {
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
        let early = self.a.aperture(self.mine, KEY, None).unwrap_err();
        assert!(early.contains("not shown it yet"), "{early}");
        self.a.post(self.mine, Token::default(), &WorkRequest::Prepare { data }).unwrap();
        for _ in 0..10 {
            self.poll_b();
            self.poll_a();
        }
        let aperture = self.a.aperture(self.mine, KEY, None).unwrap();
        (memory, aperture)
    }

    fn poll_both(&mut self) {
        for _ in 0..10 {
            self.poll_a();
            self.poll_b();
        }
    }

    /// `a` copies all of `from` into `memory` of `b`, and says nothing of it before it is polled again.
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
        self.a.post(self.mine, Token::default(), &write).unwrap();
        while self.a.link(self.mine).unwrap().jobs.is_empty() {
            self.poll_b();
            self.poll_a();
        }
    }
}

const KEY: RegionKey = RegionKey { index: 0, rkey: 7 };
const LARGE: usize = 64 << 20;

fn region(memory: &mut [u8]) -> Arc<RegionMemory> {
    let (base, len) = (memory.as_mut_ptr() as usize, memory.len() as u64);
    Arc::new(RegionMemory::new(KEY, base, len, Backing::Foreign, None))
}

fn is_down(out: &[Completion]) -> bool {
    out.iter().any(|c| matches!(c, Completion::LinkDown { .. }))
}

fn is_quiet(out: &[Completion]) -> bool {
    out.iter().any(|c| matches!(c, Completion::RegionQuiet { .. }))
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
fn ic_4_an_engine_whose_count_was_refused_does_not_sleep_once_there_is_room() {
    let mut pair = Pair::new();
    let count = WorkRequest::Count(Count { imm: 1, n: 1 });
    let posts = |pair: &mut Pair| pair.a.post(pair.mine, Token::default(), &count).unwrap();
    while posts(&mut pair) != Post::Full {}
    pair.poll_a();
    assert!(pair.a.arm(), "nothing can be done before there is room");
    pair.a.disarm();
    // `b` need not wake who is awake, and says so once only.
    for _ in 0..10 {
        pair.poll_b();
    }
    assert!(!pair.a.arm(), "there is room, and nobody will say so again");
    pair.a.disarm();
    assert!(pair.a.poll(pair.now, &NoRoom, &mut pair.of_a));
    assert_eq!(posts(&mut pair), Post::Done);
    // What was refused may have been given up: nobody is kept awake for it.
    assert!(pair.a.arm());
}

#[test]
fn mr_1_memory_is_quiet_when_a_peer_that_leaves_has_ended_its_copies_and_not_before() {
    let mut pair = Pair::new();
    let (from, mut memory) = (vec![1u8; LARGE], vec![0u8; LARGE]);
    pair.begin_copy(&from, &mut memory);
    pair.a.disconnect(pair.mine, "enough");
    while !is_down(&pair.of_b) {
        pair.poll_b();
    }
    assert_eq!(pair.b.deregister(KEY.index), Quiet::Later);
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

#[test]
fn mr_1_callers_that_help_copy_have_ended_when_their_engine_is_closed() {
    for round in 0..20 {
        let mut pair = Pair::new();
        let (from, mut memory) = (vec![1u8; LARGE], vec![0u8; LARGE]);
        let caller = pair.a.assistant().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&over);
        // Before there is a copy, so that it is there before the pool's own thread has woken up.
        let helps = std::thread::spawn(move || {
            while !ends.load(Relaxed) {
                caller.assist();
            }
        });
        pair.begin_copy(&from, &mut memory);
        std::thread::sleep(Duration::from_micros(100 * round));
        pair.a.close();
        // Whoever copies looks around once in a MiB, and not before it is done with that.
        let torn = memory.chunks(1 << 20).any(|chunk| chunk.first() != chunk.last());
        over.store(true, Relaxed);
        helps.join().unwrap();
        assert!(!torn, "a copy was still under way, round {round}");
    }
}

#[test]
fn mr_1_an_engine_that_closes_in_mid_copy_gets_its_own_memory_back() {
    let mut pair = Pair::new();
    let (from, mut memory) = (vec![1u8; LARGE], vec![0u8; LARGE]);
    pair.begin_copy(&from, &mut memory);
    // `b` may reach memory of `a` as well, so that `a` waits for its word.
    let mut own = vec![0u8; 64];
    let region = region(&mut own);
    pair.a.register(&region, None).unwrap();
    pair.a.link(pair.mine).unwrap().exported.insert(KEY.index);
    let (mut a, mut b, mut now) = (pair.a, pair.b, pair.now);
    let closes = std::thread::spawn(move || {
        a.close();
        a
    });
    let mut of_b = Vec::new();
    while !closes.is_finished() {
        now = now.after(Duration::from_millis(1));
        b.poll(now, &NoRoom, &mut of_b);
    }
    drop(closes.join().unwrap());
    assert_eq!(Arc::strong_count(&region), 1, "memory of which no peer lets go is kept for ever");
}

#[test]
fn a_peer_hears_of_a_close_though_a_child_of_the_process_holds_the_connection_open() {
    let mut pair = Pair::new();
    let control = &pair.a.link(pair.mine).unwrap().control;
    let inherited = control.fd().try_clone_to_owned().unwrap();
    pair.a.close();
    for _ in 0..100 {
        pair.poll_b();
    }
    assert!(is_down(&pair.of_b));
    assert!(pair.b.links.is_empty(), "the end of the connection wasn't heard");
    drop(inherited);
}

#[test]
fn a_link_that_waits_for_the_end_of_its_peer_lets_its_engine_sleep() {
    let mut pair = Pair::new();
    pair.a.disconnect(pair.mine, "enough");
    let sleeps = |domain: &mut ShmDomain, now: &mut Time| {
        (0..10).any(|_| {
            *now = now.after(Duration::from_millis(1));
            !domain.poll(*now, &NoRoom, &mut Vec::new()) && domain.arm()
        })
    };
    assert!(sleeps(&mut pair.a, &mut pair.now), "its peer has said nothing yet");
    // A copy of `b` holds up the end of its side.
    pair.poll_b();
    assert!(sleeps(&mut pair.b, &mut pair.now));
}

/// What a device does.
fn store(stay: &Stay, value: u8) {
    let at = stay.address(100, 1).unwrap() as *mut u8;
    // SAFETY: the stay keeps the peer's memory mapped, and nobody else writes there.
    unsafe { at.write_volatile(value) };
}

fn read(memory: &Allocation) -> u8 {
    // SAFETY: inside of an allocation that lives, and read after whoever wrote has said so.
    unsafe { ((memory.base() + 100) as *const u8).read_volatile() }
}

#[test]
fn mr_1_memory_that_a_device_stores_to_is_quiet_when_it_has_ended_and_not_before() {
    let mut pair = Pair::new();
    let (memory, aperture) = pair.show();
    let stay = aperture.enter().unwrap();
    assert_eq!(pair.b.deregister(KEY.index), Quiet::Later);
    pair.poll_both();
    assert!(!is_quiet(&pair.of_b), "a device may be storing");
    assert!(aperture.enter().is_none(), "none begins any more");
    assert!(pair.a.arm(), "nobody spins for it");
    pair.a.disarm();
    store(&stay, 7);
    assert_eq!(read(&memory), 7);
    drop(stay);
    assert!(!pair.a.arm(), "there is something to say");
    pair.poll_both();
    assert!(is_quiet(&pair.of_b));
}

#[test]
fn mr_1_a_region_that_no_device_stores_to_is_given_back_at_once() {
    let mut pair = Pair::new();
    let (_memory, aperture) = pair.show();
    drop(aperture.enter());
    assert_eq!(pair.b.deregister(KEY.index), Quiet::Later);
    pair.poll_both();
    assert!(is_quiet(&pair.of_b) && !aperture.is_open());
    assert!(pair.a.aperture(pair.mine, KEY, None).is_err());
}

#[test]
fn mr_1_a_link_ends_for_the_owner_when_the_device_has_ended() {
    for leaves in [true, false] {
        let mut pair = Pair::new();
        let (memory, aperture) = pair.show();
        let stay = aperture.enter().unwrap();
        match leaves {
            true => pair.a.disconnect(pair.mine, "enough"),
            false => pair.b.disconnect(pair.theirs, "enough"),
        }
        pair.poll_both();
        assert!(is_down(&pair.of_a), "whoever waits for the peer is told at once (RS-4)");
        assert!(aperture.enter().is_none());
        assert_eq!(pair.b.deregister(KEY.index), Quiet::Later);
        pair.poll_both();
        assert!(!is_quiet(&pair.of_b), "a device may be storing");
        assert!(pair.a.arm(), "nobody spins for it");
        pair.a.disarm();
        store(&stay, 9);
        assert_eq!(read(&memory), 9);
        drop(stay);
        pair.poll_both();
        assert!(is_quiet(&pair.of_b) && pair.a.links.is_empty());
    }
}

#[test]
fn mr_1_an_engine_that_closes_while_a_device_stores_leaves_the_peer_waiting_for_that_alone() {
    let mut pair = Pair::new();
    let (_memory, aperture) = pair.show();
    let stay = aperture.enter().unwrap();
    pair.a.close();
    assert_eq!(pair.b.deregister(KEY.index), Quiet::Later);
    for _ in 0..20 {
        pair.poll_b();
    }
    assert!(!is_quiet(&pair.of_b));
    assert_eq!(aperture.shut_by().as_deref(), Some("this engine was closed"));
    drop(stay);
    for _ in 0..20 {
        pair.poll_b();
    }
    assert!(is_quiet(&pair.of_b) && pair.b.links.is_empty());
}

/// What a peer may make us keep is replies with a descriptor each: one that takes none of them is not listened to.
#[test]
fn a_peer_that_asks_for_regions_and_takes_no_answer_uses_up_no_descriptors() {
    use std::os::fd::AsFd;

    use super::control::{Frame, MOST_OWED};

    let mut pair = Pair::new();
    let memory = Arc::new(Allocation::new(4096).unwrap());
    let (base, backing) =
        (memory.base(), Backing::Owned { allocation: Arc::clone(&memory), offset: 0 });
    pair.b.register(&Arc::new(RegionMemory::new(KEY, base, 4096, backing, None)), None).unwrap();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (before, frame) = (descriptors(), Frame::Resolve(KEY).encode());
    let slot = ShmDomain::slot(pair.mine);
    let (mut asked, mut refused) = (0, 0);
    while refused < 50 {
        match rustix::io::write(pair.a.links[slot].control.fd().as_fd(), &frame) {
            Ok(_) => (asked, refused) = (asked + 1, 0),
            Err(rustix::io::Errno::AGAIN) => refused += 1,
            Err(e) => panic!("{e}"),
        }
        pair.poll_b();
        // Other tests of this process open some as well.
        assert!(descriptors() < before + 4 * MOST_OWED, "after {asked} questions");
        assert!(asked < 100_000, "it is listened to for ever");
    }
    assert!(asked > MOST_OWED);
    // It takes them after all, and each question has its answer.
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
