//! Faults of engines with two NICs: `FABRIC_TEST_NICS_A` and `FABRIC_TEST_NICS_B` list two each,
//! and each NIC of one list reaches the NIC at the same position of the other.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use fabric_engine::{
    api::{EngineConfig, NicConfig, PageIndices, Pages},
    EngineError, Handle, Local, Op, Peer, Region, Remote, RemoteRegion, Submit, TransferEngine,
};

use crate::world::{config, filled, import, nics, pattern, run, wait, Side, Undo, LONG};

/// Time to tell a rail's failure from the peer's, and some slack for emulated processors.
const SOON: Duration = Duration::from_secs(8);
/// Longer than the default: soft-RoCE sends again and again on a link that is down, and beside that an
/// emulated processor may keep a heartbeat of the other rail back for two seconds. A rail's failure
/// shows by its port or its retries, which end in half of this.
const PEER_TIMEOUT: Duration = Duration::from_secs(4);
/// The longest interval between attempts to reconnect a rail, and some slack.
const BACK: Duration = Duration::from_secs(30);
const BYTES: usize = 32 << 20;

/// Two engines over two rails, both of which are up.
struct Pair {
    a: Arc<TransferEngine>,
    b: Arc<TransferEngine>,
    src: Region,
    dst: Region,
    imported: RemoteRegion,
    /// Peer `a` of engine `b`.
    from: Peer,
}

fn engine(side: Side) -> Arc<TransferEngine> {
    let names = nics(side);
    assert!(names.len() >= 2, "two rails are needed, got {names:?}");
    let nics = NicConfig { names, ..Default::default() };
    let config = EngineConfig { nics, peer_timeout: PEER_TIMEOUT, ..config(side) };
    Arc::new(TransferEngine::open(config).unwrap())
}

impl Pair {
    fn new(bytes: usize, salt: u8) -> Self {
        let (a, b) = (engine(Side::A), engine(Side::B));
        let src = filled(&a, bytes, salt);
        let dst = b.alloc(bytes as u64).unwrap();
        let imported = import(&a, &dst.descriptor().to_bytes());
        let from = b.peer(a.address()).unwrap();
        let pair = Self { a, b, src, dst, imported, from };
        assert_eq!(wait(&pair.write(64, None)), Ok(()));
        (0..2).for_each(|rail| pair.until_used(rail));
        pair
    }

    fn write(&self, len: usize, rail: Option<u8>) -> Handle {
        let (src, dst) =
            (Local { region: &self.src, offset: 0 }, Remote { region: &self.imported, offset: 0 });
        let op = Op::Write { src, dst, len: len as u64, imm: None };
        self.a.submit(&[op], Submit { rail, ..Default::default() }).unwrap()
    }

    fn until_used(&self, rail: u8) {
        until("a rail carries", BACK, || wait(&self.write(64, Some(rail))).is_ok());
    }

    /// Checks that the whole region arrives.
    fn arrives(&self, salt: u8) {
        let bytes = pattern(self.src.len() as usize, salt);
        self.src.put(0, &bytes).unwrap();
        assert_eq!(wait(&self.write(bytes.len(), None)), Ok(()));
        assert!(self.dst.get(0, bytes.len() as u64).unwrap() == bytes);
    }

    /// One expectation at each end, which only the loss of the peer ends.
    fn waiting(&self) -> [Handle; 2] {
        let expect = |at: &TransferEngine, peer: &Peer| {
            at.counter().unwrap().expect(1, std::slice::from_ref(peer), LONG).unwrap()
        };
        [expect(&self.a, self.imported.peer()), expect(&self.b, &self.from)]
    }

    /// Whether each end has its second rail in use.
    fn second_in_use(&self) -> [bool; 2] {
        let used = |at: &TransferEngine, peer: &Peer, side| {
            let name = &nics(side)[1];
            let verdicts = at.explain(peer).unwrap().verdicts;
            verdicts.iter().any(|v| v.device == *name && v.chosen)
        };
        [used(&self.a, self.imported.peer(), Side::A), used(&self.b, &self.from, Side::B)]
    }
}

fn until(what: &str, timeout: Duration, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < timeout, "not after {timeout:?}: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn interface(side: Side, rail: usize) -> String {
    nics(side)[rail].trim_start_matches("rxe_").to_owned()
}

/// Number of RoCE packets sent by a NIC of `a`.
fn sent(rail: usize) -> u64 {
    let path =
        format!("/sys/class/infiniband/{}/ports/1/hw_counters/sent_pkts", nics(Side::A)[rail]);
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Takes one link of the second rail down during a write, and up again.
fn second_rail_fails(link: &str) {
    let pair = Pair::new(BYTES, 1);
    let waiting = pair.waiting();
    let up = Undo::with(&format!("ip link set {link} up"));
    // Slow enough that the write can't end before the link is down, even on busy CPUs.
    let wire = interface(Side::A, 1);
    let free = Undo::with(&format!("tc qdisc del dev {wire} root"));
    run(&format!("tc qdisc add dev {wire} root netem rate 50mbit"));
    let before = sent(1);
    let cut = pair.write(BYTES, None);
    until("the second rail carries some of it", SOON, || sent(1) > before + 100);
    assert!(!cut.is_done(), "it is under way");
    run(&format!("ip link set {link} down"));
    drop(free);
    let start = Instant::now();
    // The rail's operations under way move to the other rail.
    assert_eq!(wait(&cut), Ok(()));
    let after = start.elapsed();
    assert!(pair.dst.get(0, BYTES as u64).unwrap() == pattern(BYTES, 1));
    assert!(after < SOON, "{after:?}");
    until("both ends know", SOON, || pair.second_in_use() == [false, false]);
    // The peer is not lost, and the other rail carries everything.
    pair.arrives(2);
    for h in &waiting {
        assert!(!h.is_done(), "{:?}", h.poll());
    }
    drop(up);
    pair.until_used(1);
    until("both ends know", SOON, || pair.second_in_use() == [true, true]);
    let before = sent(1);
    pair.arrives(3);
    // A slower rail gets fewer chunks, each 1 MiB in packets of at most 4 KiB.
    let packets = sent(1) - before;
    assert!(packets > 200, "{packets} packets went over it");
    for h in &waiting {
        assert!(!h.is_done(), "{:?}", h.poll());
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_the_link_of_a_peer_s_rail_fails_and_returns() {
    second_rail_fails(&interface(Side::B, 1));
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_the_link_of_an_own_rail_fails_and_returns() {
    second_rail_fails(&interface(Side::A, 1));
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_the_switch_of_a_rail_fails_and_returns() {
    second_rail_fails("rail1");
}

/// Independent of whether the accepting end has seen the rail used.
#[test]
#[ignore = "needs RDMA devices"]
fn ic_4_the_first_write_over_a_rail_survives_its_loss() {
    let (a, b) = (engine(Side::A), engine(Side::B));
    let (src, dst) = (filled(&a, BYTES, 8), b.alloc(BYTES as u64).unwrap());
    let imported = import(&a, &dst.descriptor().to_bytes());
    let from = b.peer(a.address()).unwrap();
    a.connect(imported.peer()).unwrap();
    let pair = Pair { a, b, src, dst, imported, from };
    until("the initiator has both rails", SOON, || pair.second_in_use()[0]);
    let up = Undo::with("ip link set rail1 up");
    run("ip link set rail1 down");
    assert_eq!(wait(&pair.write(BYTES, None)), Ok(()));
    assert!(pair.dst.get(0, BYTES as u64).unwrap() == pattern(BYTES, 8));
    drop(up);
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_with_the_last_rail_the_peer_is_lost_at_both_ends() {
    let pair = Pair::new(BYTES, 4);
    let waiting = pair.waiting();
    let up: Vec<Undo> = (0..2).map(|i| Undo::with(&format!("ip link set rail{i} up"))).collect();
    // Several writes: the first may complete before both links are down.
    let writes: Vec<Handle> = (0..4).map(|_| pair.write(BYTES, None)).collect();
    (0..2).for_each(|i| run(&format!("ip link set rail{i} down")));
    let start = Instant::now();
    for h in waiting.iter().chain(writes.last()) {
        let error = wait(h).unwrap_err();
        assert!(matches!(error, EngineError::PeerLost { .. }), "{error}");
    }
    assert!(start.elapsed() < SOON, "after {:?}", start.elapsed());
    drop(up);
    until("it is reached again", BACK, || wait(&pair.write(64, None)).is_ok());
    pair.arrives(5);
}

#[test]
#[ignore = "needs RDMA devices"]
fn writes_arrive_over_a_lossy_and_slow_network() {
    const PAGE: u64 = 4096;
    const PAGES: u32 = 64;
    let ends: Vec<String> = [Side::A, Side::B]
        .iter()
        .flat_map(|side| (0..2).map(|rail| interface(*side, rail)))
        .collect();
    let undo: Vec<Undo> =
        ends.iter().map(|i| Undo::with(&format!("tc qdisc del dev {i} root"))).collect();
    let pair = Pair::new(PAGES as usize * PAGE as usize, 6);
    for i in &ends {
        run(&format!("tc qdisc add dev {i} root netem loss 2% delay 20ms limit 10000"));
    }
    let counter = pair.b.counter().unwrap();
    let pages = |list: Vec<u32>| Pages::new(PageIndices::list(list).unwrap(), PAGE, 0);
    for salt in 7..10u8 {
        pair.arrives(salt);
        let bytes = pattern((PAGES as u64 * PAGE) as usize, salt ^ 0x80);
        pair.src.put(0, &bytes).unwrap();
        let arrived = counter.expect(PAGES, &[], LONG).unwrap();
        let op = Op::WritePages {
            page_len: PAGE,
            src: &pair.src,
            src_pages: &pages((0..PAGES).collect()),
            dst: &pair.imported,
            dst_pages: &pages((0..PAGES).rev().collect()),
            imm: Some(counter.imm()),
        };
        let done = pair.a.submit(&[op], Submit::default()).unwrap();
        assert_eq!(wait(&arrived), Ok(()));
        for (from, to) in (0..PAGES).zip((0..PAGES).rev()) {
            let got = pair.dst.get(u64::from(to) * PAGE, PAGE).unwrap();
            assert!(got == bytes[from as usize * PAGE as usize..][..PAGE as usize]);
        }
        assert_eq!(wait(&done), Ok(()));
    }
    assert_eq!(counter.arrived(), u64::from(3 * PAGES));
    drop(undo);
}
