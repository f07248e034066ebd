//! Links that break while their peer runs: their writes arrive all the same, and count once.

use std::{os::fd::BorrowedFd, sync::Arc, time::Duration};

use fabric_engine::{
    api::{EngineConfig, PageIndices, Pages, TransportKind},
    Local, Op, Remote, SegmentPiece, Submit, TransferEngine,
};

const LONG: Duration = Duration::from_secs(30);
const PAGE: u64 = 16 << 10;
const PAGES: u32 = 64;

fn engine(name: &str) -> Arc<TransferEngine> {
    let transports = vec![TransportKind::Tcp];
    let config = EngineConfig { name: name.into(), transports, ..Default::default() };
    Arc::new(TransferEngine::open(config).unwrap())
}

/// Connected TCP sockets of this process: both ends of every link.
fn connected() -> Vec<i32> {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = fds.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    let is_connected = |fd: &i32| {
        // SAFETY: only asked for its peer; if it was closed meanwhile, that fails.
        let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
        rustix::net::getpeername(fd).is_ok_and(|p| {
            p.is_some_and(|p| p.address_family() == rustix::net::AddressFamily::INET)
        })
    };
    numbers.filter(is_connected).collect()
}

/// Breaks one connection, as a reset on the way would.
fn break_one(rng: &mut fastrand::Rng) {
    let sockets = connected();
    if sockets.is_empty() {
        return;
    }
    let fd = sockets[rng.usize(..sockets.len())];
    // SAFETY: at worst it was closed meanwhile, and its number belongs to a newer socket of the
    // engines'.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
}

#[test]
fn ic_3_what_a_broken_tcp_link_carried_arrives_and_counts_once() {
    let (a, b) = (engine("a"), engine("b"));
    let len = PAGE * u64::from(PAGES);
    let (src, dst) = (a.alloc(len).unwrap(), b.alloc(len).unwrap());
    let there = a.import(&dst.descriptor()).unwrap();
    let from_a = b.peer(a.address()).unwrap();
    let counter = b.counter().unwrap();
    let pages = Pages::new(PageIndices::range(0, PAGES).unwrap(), PAGE, 0);
    let piece = |offset, len| SegmentPiece {
        local: src.clone(),
        local_offset: offset,
        remote: there.clone(),
        remote_offset: offset,
        len,
    };
    let pieces = [piece(0, 8), piece(8, 100_000), piece(len - 70_000, 70_000)];
    let mut rng = fastrand::Rng::with_seed(4);
    let rounds: u32 = std::env::var("FABRIC_TEST_ROUNDS").map_or(100, |n| n.parse().unwrap());
    for round in 1..=rounds {
        let bytes: Vec<u8> =
            (0..len).map(|i| (i as u32 ^ round.wrapping_mul(2_654_435_761)) as u8).collect();
        src.put(0, &bytes).unwrap();
        let imm = Some(counter.imm());
        let (from, to) = (Local { region: &src, offset: 0 }, Remote { region: &there, offset: 0 });
        let ops = [
            Op::WritePages {
                page_len: PAGE,
                src: &src,
                src_pages: &pages,
                dst: &there,
                dst_pages: &pages,
                imm,
            },
            Op::Write { src: from, dst: to, len, imm },
            Op::Write { src: from, dst: to, len: 8, imm },
            Op::Write { src: from, dst: to, len: 0, imm },
            Op::WritePieces { pieces: &pieces, imm },
        ];
        let arrived = counter.expect(PAGES + 4, std::slice::from_ref(&from_a), LONG).unwrap();
        let done = a.submit(&ops, Submit::default()).unwrap();
        std::thread::sleep(Duration::from_micros(rng.u64(..1500)));
        break_one(&mut rng);
        assert_eq!(done.wait(LONG), Some(Ok(())), "round {round}");
        assert_eq!(arrived.wait(LONG), Some(Ok(())), "round {round}");
        assert_eq!(counter.arrived(), u64::from(round * (PAGES + 4)));
        assert!(dst.get(0, len).unwrap() == bytes, "round {round}");
        // Far below the number of losses in a row for which a peer is given up.
        std::thread::sleep(Duration::from_millis(20));
    }
}
