//! The memory that an engine keeps for lost peers and dropped regions is bounded.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        atomic::{AtomicI64, Ordering::Relaxed},
        Mutex,
    },
    time::{Duration, Instant},
};

use fabric_engine::{
    api::{EngineAddress, EngineConfig, EngineId, Imm, TransportKind},
    EngineError, Local, Op, Region, Remote, RemoteRegion, Submit, TransferEngine,
};

static LIVE: AtomicI64 = AtomicI64::new(0);

struct Counting;

// SAFETY: forwards to the system allocator and keeps a sum beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Time after a loss at which the engine may forget a peer.
const REST: Duration = Duration::from_secs(2);
const WAIT: Duration = Duration::from_secs(20);

fn open(name: &str, transport: TransportKind) -> TransferEngine {
    let config = EngineConfig {
        name: name.into(),
        transports: vec![transport],
        peer_timeout: REST / 2,
        records: 64,
        ..Default::default()
    };
    TransferEngine::open(config).expect("an engine opens")
}

fn within(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < WAIT, "{what} took longer than {WAIT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn put(engine: &TransferEngine, src: &Region, dst: &RemoteRegion) -> Result<(), EngineError> {
    let (src, dst) = (Local { region: src, offset: 0 }, Remote { region: dst, offset: 0 });
    let op = Op::Write { src, dst, len: 8, imm: Some(Imm::plain(1)?) };
    engine.submit(&[op], Submit::default())?.wait(WAIT).expect("in time")
}

/// An address that no engine has; a different one for each number.
fn stranger(n: u32) -> EngineAddress {
    let mut id = [0; 16];
    id[..4].copy_from_slice(&n.to_le_bytes());
    EngineAddress { id: EngineId(id), name: "stranger".into(), endpoints: Vec::new() }
}

/// Waits until lost peers may be forgotten, and names enough others to purge them.
fn rest(engine: &TransferEngine) {
    std::thread::sleep(REST * 11 / 10);
    (0..2000).for_each(|n| drop(engine.peer(&stranger(n))));
}

/// Bytes that the engine keeps per round.
fn kept(engine: &TransferEngine, rounds: i64, mut round: impl FnMut()) -> i64 {
    rest(engine);
    let before = LIVE.load(Relaxed);
    (0..rounds).for_each(|_| round());
    rest(engine);
    (LIVE.load(Relaxed) - before) / rounds
}

fn peers_that_come_and_go(transport: TransportKind) {
    let hub = open("hub", transport);
    let memory = hub.alloc(64).expect("memory");
    let descriptor = memory.descriptor();
    let visit = || {
        let visitor = open("visitor", transport);
        let (there, mine) = (visitor.import(&descriptor).expect("valid"), visitor.alloc(64));
        put(&visitor, &mine.expect("memory"), &there).expect("it arrives");
    };
    (0..200).for_each(|_| visit());
    let each = kept(&hub, 1000, visit);
    assert!(each < 200, "{each} bytes are kept for each peer that was ever met over {transport}");
    assert!(hub.metrics().unwrap().peers.len() < 100, "peers that are gone are still listed");
}

/// Serialises the tests, because allocations of another test would be counted.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn memory_of_lost_peers_and_dropped_regions_is_bounded() {
    let _alone = ALONE.lock();
    peers_that_come_and_go(TransportKind::Shm);
    peers_that_come_and_go(TransportKind::Tcp);

    let engine = open("engine", TransportKind::Tcp);
    let region = || drop(engine.alloc(64).expect("memory"));
    (0..3000).for_each(|_| region());
    let each = kept(&engine, 10_000, region);
    assert!(each < 4, "{each} bytes are kept for each region that was ever registered");

    let held: Vec<_> = (0..100).map(|n| engine.peer(&stranger(n)).expect("open")).collect();
    let mut n = 100;
    let each = kept(&engine, 10_000, || {
        n += 1;
        drop(engine.peer(&stranger(n)));
    });
    assert!(each < 100, "{each} bytes are kept for each peer that was ever named");
    // Peers that a caller holds are kept.
    for (n, peer) in (0..).zip(&held) {
        assert_eq!(engine.explain(peer).expect("known").peer, stranger(n).label());
        assert_eq!(peer.address().label(), stranger(n).label());
    }
}

#[test]
fn a_peer_keeps_the_address_that_it_was_made_from() {
    let _alone = ALONE.lock();
    let (a, b) = (open("a", TransportKind::Tcp), open("b", TransportKind::Tcp));
    let said =
        EngineAddress { name: "another name".into(), endpoints: Vec::new(), ..b.address().clone() };
    let first = a.peer(&said).expect("open");
    let memory = b.alloc(64).expect("memory");
    let region = a.import(&memory.descriptor()).expect("valid");
    assert_eq!(first.address(), &said);
    assert_eq!(a.peer(b.address()).expect("open").address(), b.address());
    assert_eq!(region.peer().address(), b.address());
    // The peer is kept while any of the two objects is held.
    drop(first);
    (100..400).for_each(|n| drop(a.peer(&stranger(n))));
    assert_eq!(a.metrics().unwrap().peers.iter().filter(|p| p.id == b.id()).count(), 1);
}

#[test]
fn mr_2_an_old_descriptor_never_reaches_a_later_region_with_its_index() {
    let _alone = ALONE.lock();
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let (owner, writer) = (open("owner", transport), open("writer", transport));
        let mine = writer.alloc(64).expect("memory");
        let first = owner.alloc(64).expect("memory");
        let old = first.descriptor();
        let there = writer.import(&old).expect("valid");
        put(&writer, &mine, &there).expect("it arrives");
        first.deregister(WAIT).expect("deregistered");
        drop(first);
        let mut later = owner.alloc(64).expect("memory");
        within("the index's return", || {
            later = owner.alloc(64).expect("memory");
            later.descriptor().key.index == old.key.index
        });
        assert_ne!(later.descriptor().key.rkey, old.key.rkey);
        let stale = put(&writer, &mine, &there);
        assert!(matches!(stale, Err(EngineError::Stale { .. })), "{transport}: {stale:?}");
        assert_eq!(later.get(0, 8).expect("in bounds"), [0; 8], "{transport}");
        let now = writer.import(&later.descriptor()).expect("valid");
        put(&writer, &mine, &now).expect("it arrives");
    }
}
