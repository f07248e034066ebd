use std::{
    sync::{
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
        Arc, Mutex,
    },
    time::Duration,
};

use fabric_engine::{
    api::{CounterRef, Imm, PageIndices, Pages, RegionDescriptor, SegmentDescriptor},
    EngineError, FileOptions, Handle, Local, Op, Quiescence, Region, Remote, RemoteRegion, Result,
    ScatterDst, Submit, TransferEngine,
};

pub use crate::grants::{
    mr_1_a_region_is_quiet_when_all_its_grants_are, mr_2_a_grant_expires,
    mr_2_a_nested_grant_gives_no_more_than_its_parent,
    mr_3_a_grant_reaches_no_further_than_its_part,
    mr_3_a_grant_to_one_peer_is_refused_to_all_others,
};
pub use crate::tags::{
    each_tag_is_reported_once_with_its_bytes,
    memory_of_another_engine_of_the_process_is_reached_through_either,
};
use crate::worlds::World;

/// Long, because some NICs under test run on an emulated processor.
const SOON: Duration = Duration::from_secs(60);

fn pattern(n: usize, salt: u8) -> Vec<u8> {
    const PERIOD: usize = 1 << 16;
    let byte = |i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ salt;
    let mut bytes: Vec<u8> = (0..n.min(PERIOD)).map(byte).collect();
    while bytes.len() < n {
        bytes.extend_from_within(..(n - bytes.len()).min(PERIOD));
    }
    bytes
}

/// A region of `engine` filled with a pattern, and the pattern.
fn filled(engine: &TransferEngine, n: usize, salt: u8) -> (Region, Vec<u8>) {
    let region = engine.alloc(n as u64).unwrap();
    let bytes = pattern(n, salt);
    region.put(0, &bytes).unwrap();
    (region, bytes)
}

/// The region as imported by a peer that was sent its descriptor.
fn import(at: &TransferEngine, region: &Region) -> RemoteRegion {
    let sent = region.descriptor().to_bytes();
    at.import(&RegionDescriptor::from_bytes(&sent).unwrap()).unwrap()
}

fn write<'a>(
    src: &'a Region,
    dst: &'a RemoteRegion,
    offset: u64,
    len: u64,
    imm: Option<Imm>,
) -> Op<'a> {
    let (src, dst) = (Local { region: src, offset }, Remote { region: dst, offset });
    Op::Write { src, dst, len, imm }
}

fn read<'a>(src: &'a RemoteRegion, dst: &'a Region, offset: u64, len: u64) -> Op<'a> {
    let (src, dst) = (Remote { region: src, offset }, Local { region: dst, offset: 0 });
    Op::Read { src, dst, len }
}

fn submit(engine: &TransferEngine, op: Op<'_>) -> Result<Handle> {
    engine.submit(&[op], Submit::default())
}

pub fn a_write_arrives_and_counts_once(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, bytes) = filled(&a, 10_000, 1);
    let dst = b.alloc(10_000).unwrap();
    let counter = b.counter().unwrap();
    let reference = CounterRef::from_bytes(&counter.reference().to_bytes()).unwrap();
    assert_eq!(reference.owner, b.id());
    let imported = import(&a, &dst);
    let done = submit(&a, write(&src, &imported, 0, 10_000, Some(reference.imm()))).unwrap();
    let arrived = counter.expect(1, &[], SOON).unwrap();
    assert_eq!(w.wait(&arrived), Ok(()));
    assert_eq!(dst.get(0, 10_000).unwrap(), bytes);
    assert_eq!(w.wait(&done), Ok(()));
    w.idle();
    assert_eq!(counter.arrived(), 1);
}

pub fn ic_1_counts_are_logical(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 64 * 100, 2);
    let dst = b.alloc(64 * 100).unwrap();
    let imported = import(&a, &dst);
    let [single, paged, scatter] = [(); 3].map(|()| b.counter().unwrap());
    let pages = |first| Pages::new(PageIndices::range(first, 37).unwrap(), 64, 0);
    let parts: Vec<ScatterDst> = (0..5)
        .map(|i| ScatterDst { len: 10, src_offset: i, dst: imported.clone(), dst_offset: i * 64 })
        .collect();
    let ops = [
        write(&src, &imported, 0, 64, Some(single.imm())),
        Op::WritePages {
            page_len: 64,
            src: &src,
            src_pages: &pages(0),
            dst: &imported,
            dst_pages: &pages(50),
            imm: Some(paged.imm()),
        },
        Op::Scatter { group: None, src: &src, parts: &parts, imm: Some(scatter.imm()) },
    ];
    let handle = a.submit(&ops, Submit::default()).unwrap();
    assert_eq!(w.wait(&handle), Ok(()));
    let counts = || (single.poll().unwrap(), paged.arrived(), scatter.arrived());
    w.until("counts", &mut || counts() == (1, 37, 5));
    w.idle();
    assert_eq!(counts(), (1, 37, 5));
}

pub fn ic_1_a_cut_write_counts_once(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    // The lengths in between go over several streams where the transport has them.
    for n in if w.cuts() { [100_000, 3000] } else { [20 << 20, 3 << 20] } {
        let (src, bytes) = filled(&a, n, 3);
        let dst = b.alloc(n as u64).unwrap();
        let imported = import(&a, &dst);
        let counter = b.counter().unwrap();
        let arrived = counter.expect(1, &[], SOON).unwrap();
        let done = submit(&a, write(&src, &imported, 0, n as u64, Some(counter.imm()))).unwrap();
        assert_eq!(w.wait(&arrived), Ok(()));
        assert!(dst.get(0, n as u64).unwrap() == bytes);
        assert_eq!(w.wait(&done), Ok(()));
        w.idle();
        assert_eq!(counter.arrived(), 1);
    }
}

pub fn ic_1_a_write_in_pieces_counts_once(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let n: u64 = if w.cuts() { 5_000 } else { 700_000 };
    let (one, first) = filled(&a, n as usize, 1);
    let (two, second) = filled(&a, 2 * n as usize, 2);
    let local = a.segment(&[(0, one), (n, two)]).unwrap();
    let bytes = [first, second].concat();
    let targets = [n / 2, n, n / 3, 2 * n].map(|len| b.alloc(len).unwrap().slice(0, len).unwrap());
    let mut at = 0;
    let parts = targets.clone().map(|region| {
        at += region.len();
        (at - region.len(), region)
    });
    let sent = b.segment(&parts).unwrap().descriptor().to_bytes();
    let imported = a.open_segment(&SegmentDescriptor::from_bytes(&sent).unwrap()).unwrap();
    let counter = b.counter().unwrap();
    for (round, (from, to, len)) in
        [(0, 0, 3 * n), (5, n / 2 - 7, n), (n - 1, n / 2 - 1, 2), (7, 9, 100)]
            .into_iter()
            .enumerate()
    {
        let pieces = local.pieces(from, (&imported, to), len).unwrap();
        let arrived = counter.expect(1, &[], SOON).unwrap();
        let op = Op::WritePieces { pieces: &pieces, imm: Some(counter.imm()) };
        let done = submit(&a, op).unwrap();
        let whole = || {
            let all: Vec<u8> = targets.iter().flat_map(|t| t.get(0, t.len()).unwrap()).collect();
            all[to as usize..(to + len) as usize] == bytes[from as usize..(from + len) as usize]
        };
        w.until("arrival", &mut || {
            let counted = arrived.drive().is_some();
            assert!(!counted || whole(), "round {round}: counted before all pieces are there");
            counted
        });
        assert_eq!(w.wait(&done), Ok(()));
        w.idle();
        assert_eq!(counter.arrived(), round as u64 + 1);
        let (back, _) = filled(&a, len as usize, 9);
        let back = a.segment(&[(0, back)]).unwrap();
        let pieces = back.pieces(0, (&imported, to), len).unwrap();
        let done = submit(&a, Op::ReadPieces { pieces: &pieces }).unwrap();
        assert_eq!(w.wait(&done), Ok(()));
        let got = back.regions()[0].get(0, len).unwrap();
        assert!(got == bytes[from as usize..(from + len) as usize]);
    }
}

pub fn ic_2_bytes_have_landed_when_the_counter_counts_them(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    const N: usize = 3000;
    let dst = b.alloc(N as u64).unwrap();
    let imported = import(&a, &dst);
    let counter = b.counter().unwrap();
    for round in 0..50u8 {
        let (src, bytes) = filled(&a, N, round);
        let arrived = counter.expect(1, &[], SOON).unwrap();
        let done = submit(&a, write(&src, &imported, 0, N as u64, Some(counter.imm()))).unwrap();
        w.until("arrival", &mut || {
            let imported = arrived.drive().is_some();
            if imported {
                assert!(dst.get(0, N as u64).unwrap() == bytes, "round {round}");
            }
            imported
        });
        assert_eq!(w.wait(&done), Ok(()));
    }
}

pub fn ic_5_early_arrivals_are_kept(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 64, 4);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst);
    let imm = Imm::plain(77).unwrap();
    for _ in 0..3 {
        let h = submit(&a, write(&src, &imported, 0, 64, Some(imm))).unwrap();
        assert_eq!(w.wait(&h), Ok(()));
    }
    w.idle();
    let counter = b.plain_counter(imm);
    let two = counter.expect(2, &[], SOON).unwrap();
    assert_eq!(w.wait(&two), Ok(()));
    let two_more = counter.expect(2, &[], SOON).unwrap();
    w.idle();
    assert!(!two_more.is_done(), "done after three arrivals of four");
    let h = submit(&a, write(&src, &imported, 0, 64, Some(imm))).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    assert_eq!(w.wait(&two_more), Ok(()));
    assert_eq!(counter.unclaimed(), 0);
}

pub fn ic_6_a_released_counter_sees_no_late_arrivals(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 64, 5);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst);
    let old = b.counter().unwrap().imm();
    w.idle();
    let before = b.stats().ghosts;
    let h = submit(&a, write(&src, &imported, 0, 64, Some(old))).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    let fresh: Vec<_> = (0..3).map(|_| b.counter().unwrap()).collect();
    let other = b.plain_counter(Imm::plain(0).unwrap());
    w.until("a late arrival", &mut || {
        other.poll().unwrap();
        b.stats().ghosts > before
    });
    w.idle();
    assert_eq!(b.stats().ghosts, before + 1);
    assert!(fresh.iter().all(|c| c.arrived() == 0));
}

pub fn counters_fire_in_order_and_rounds_do_not_mix(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 64, 6);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst);
    let counter = b.counter().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let rounds: Vec<_> = [3, 1, 2].map(|n| counter.expect(n, &[], SOON).unwrap()).into();
    for (i, h) in rounds.iter().enumerate() {
        let order = Arc::clone(&order);
        h.on_done(move |r| order.lock().unwrap().push((i, r)));
    }
    for _ in 0..6 {
        let h = submit(&a, write(&src, &imported, 0, 8, Some(counter.imm()))).unwrap();
        assert_eq!(w.wait(&h), Ok(()));
    }
    w.until("callbacks", &mut || {
        counter.poll().unwrap();
        order.lock().unwrap().len() == 3
    });
    assert_eq!(*order.lock().unwrap(), [(0, Ok(())), (1, Ok(())), (2, Ok(()))]);
}

pub fn shuffled_pages_land_where_they_belong(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    const PAGE: usize = 300;
    const N: usize = 50;
    let (src, bytes) = filled(&a, PAGE * N, 7);
    let dst = b.alloc((PAGE * 2 * N + 16) as u64).unwrap();
    let imported = import(&a, &dst);
    let counter = b.counter().unwrap();
    let to: Vec<u32> = (0..N as u32).map(|i| (i * 17 + 5) % N as u32).collect();
    let from: Vec<u32> = (0..N as u32).rev().collect();
    let op = Op::WritePages {
        page_len: PAGE as u64,
        src: &src,
        src_pages: &Pages::new(PageIndices::list(from.clone()).unwrap(), PAGE as u64, 0),
        dst: &imported,
        dst_pages: &Pages::new(PageIndices::list(to.clone()).unwrap(), 2 * PAGE as u64, 16),
        imm: Some(counter.imm()),
    };
    let arrived = counter.expect(N as u32, &[], SOON).unwrap();
    let done = submit(&a, op).unwrap();
    assert_eq!(w.wait(&arrived), Ok(()));
    for (f, t) in from.iter().zip(&to) {
        let at = 16 + *t as usize * 2 * PAGE;
        let got = dst.get(at as u64, 2 * PAGE as u64).unwrap();
        assert_eq!(got[..PAGE], bytes[*f as usize * PAGE..][..PAGE]);
        assert!(got[PAGE..].iter().all(|b| *b == 0), "the gap is untouched");
    }
    assert_eq!(w.wait(&done), Ok(()));
}

pub fn reads_fetch(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (remote, bytes) = filled(&b, 50_000, 8);
    let local = a.alloc(60_000).unwrap();
    let imported = import(&a, &remote);
    let op = Op::Read {
        src: Remote { region: &imported, offset: 10 },
        dst: Local { region: &local, offset: 100 },
        len: 49_000,
    };
    let h = submit(&a, op).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    assert!(local.get(100, 49_000).unwrap() == bytes[10..49_010]);
    assert_eq!(local.get(0, 100).unwrap(), [0; 100]);
    let pages = |i: Vec<u32>| Pages::new(PageIndices::list(i).unwrap(), 100, 0);
    let op = Op::ReadPages {
        page_len: 100,
        src: &imported,
        src_pages: &pages(vec![9, 2, 400]),
        dst: &local,
        dst_pages: &pages(vec![0, 7, 3]),
    };
    let h = submit(&a, op).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    for (f, t) in [(9, 0), (2, 7), (400, 3)] {
        assert_eq!(local.get(t * 100, 100).unwrap(), bytes[f * 100..][..100]);
    }
}

pub fn preparing_moves_and_counts_nothing(w: &mut dyn World) {
    let n = w.large().min(5 << 20);
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, bytes) = filled(&a, n as usize, 9);
    let dst = b.alloc(n).unwrap();
    let counter = b.counter().unwrap();
    let imported = import(&a, &dst);
    let op = || write(&src, &imported, 0, n, Some(counter.imm()));
    let ready = a.prepare(&[op()], Submit::default()).unwrap();
    assert_eq!(w.wait(&ready), Ok(()));
    w.idle();
    assert_eq!(counter.arrived(), 0);
    assert!(dst.get(0, n).unwrap().iter().all(|b| *b == 0));
    let done = submit(&a, op()).unwrap();
    assert_eq!(w.wait(&counter.expect(1, &[], SOON).unwrap()), Ok(()));
    assert_eq!(w.wait(&done), Ok(()));
    assert!(dst.get(0, n).unwrap() == bytes);
}

pub fn batches_mix_operations_and_peers(w: &mut dyn World) {
    let (a, b, c) = (w.engine("a"), w.engine("b"), w.engine("c"));
    let (src, bytes) = filled(&a, 4000, 9);
    let (at_b, at_c) = (b.alloc(4000).unwrap(), c.alloc(4000).unwrap());
    let (remote, other) = filled(&c, 4000, 10);
    let (to_b, to_c, from_c) = (import(&a, &at_b), import(&a, &at_c), import(&a, &remote));
    let local = a.alloc(4000).unwrap();
    let (in_b, in_c) = (b.counter().unwrap(), c.counter().unwrap());
    let ops = [
        write(&src, &to_b, 0, 4000, Some(in_b.imm())),
        write(&src, &to_c, 0, 4000, Some(in_c.imm())),
        Op::Read {
            src: Remote { region: &from_c, offset: 0 },
            dst: Local { region: &local, offset: 0 },
            len: 4000,
        },
        write(&src, &to_b, 0, 0, Some(in_b.imm())),
    ];
    let h = a.submit(&ops, Submit::default()).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    for handle in [in_b.expect(2, &[], SOON).unwrap(), in_c.expect(1, &[], SOON).unwrap()] {
        assert_eq!(w.wait(&handle), Ok(()));
    }
    assert!(at_b.get(0, 4000).unwrap() == bytes && at_c.get(0, 4000).unwrap() == bytes);
    assert!(local.get(0, 4000).unwrap() == other);
}

pub fn scatter_and_barrier_reach_every_peer(w: &mut dyn World) {
    let a = w.engine("a");
    let others: Vec<_> = (0..5).map(|i| w.engine(&format!("b{i}"))).collect();
    let (src, bytes) = filled(&a, 5 * 512, 11);
    let regions: Vec<_> = others.iter().map(|e| e.alloc(1024).unwrap()).collect();
    let peers: Vec<_> = others.iter().map(|e| a.peer(e.address()).unwrap()).collect();
    let group = a.peer_group(&peers).unwrap();
    let imm = Imm::plain(5).unwrap();
    let parts: Vec<_> = regions
        .iter()
        .enumerate()
        .map(|(i, r)| ScatterDst {
            len: 512,
            src_offset: 512 * i as u64,
            dst: import(&a, r),
            dst_offset: 256,
        })
        .collect();
    let h =
        submit(&a, Op::Scatter { group: Some(&group), src: &src, parts: &parts, imm: Some(imm) });
    assert_eq!(w.wait(&h.unwrap()), Ok(()));
    let h = submit(&a, Op::Barrier { group: &group, imm: Imm::plain(6).unwrap() }).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    for (i, (engine, region)) in others.iter().zip(&regions).enumerate() {
        for value in [5, 6] {
            let counter = engine.plain_counter(Imm::plain(value).unwrap());
            let h = counter.expect(1, &[], SOON).unwrap();
            assert_eq!(w.wait(&h), Ok(()));
        }
        assert_eq!(region.get(256, 512).unwrap(), bytes[512 * i..][..512]);
    }
    let mut wrong = parts.clone();
    wrong.swap(0, 1);
    let op = Op::Scatter { group: Some(&group), src: &src, parts: &wrong, imm: None };
    assert!(matches!(submit(&a, op), Err(EngineError::Invalid(_))));
}

pub fn messages_arrive_whole_and_wait_for_room(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let peer = a.peer(b.address()).unwrap();
    let sent: Vec<Vec<u8>> = (0..40).map(|i| pattern(i * 97, i as u8)).collect();
    let handles: Vec<_> =
        sent.iter().map(|m| submit(&a, Op::Send { peer: &peer, message: m }).unwrap()).collect();
    w.idle();
    assert!(handles.iter().all(|h| !h.is_done()), "no message is received yet");
    let got = Arc::new(Mutex::new(Vec::new()));
    let held = Arc::new(AtomicU32::new(0));
    let most = Arc::new(AtomicU32::new(0));
    let (into, h, m, from) = (Arc::clone(&got), Arc::clone(&held), Arc::clone(&most), a.id());
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&kept);
    b.receive(1 << 16, 3, move |delivery| {
        assert_eq!(delivery.from(), from);
        m.fetch_max(h.fetch_add(1, SeqCst) + 1, SeqCst);
        into.lock().unwrap().push(delivery.message().to_vec());
        keep.lock().unwrap().push(delivery);
    })
    .unwrap();
    w.until("a full pool", &mut || kept.lock().unwrap().len() == 3);
    w.idle();
    assert_eq!(kept.lock().unwrap().len(), 3, "the rest waits while they are held");
    w.until("all messages", &mut || {
        let freed = std::mem::take(&mut *kept.lock().unwrap());
        held.fetch_sub(freed.len() as u32, SeqCst);
        drop(freed);
        got.lock().unwrap().len() == sent.len()
    });
    for h in &handles {
        assert_eq!(w.wait(h), Ok(()));
    }
    let mut got = std::mem::take(&mut *got.lock().unwrap());
    got.sort();
    let mut sent = sent;
    sent.sort();
    assert!(got == sent);
    assert!(most.load(SeqCst) <= 3);
}

pub fn a_sender_of_many_messages_keeps_out_no_other(w: &mut dyn World) {
    let (a, b, c) = (w.engine("a"), w.engine("b"), w.engine("c"));
    let dst = c.alloc(64).unwrap();
    let peers = [&a, &b].map(|engine| {
        let (src, _) = filled(engine, 64, 1);
        let h = submit(engine, write(&src, &import(engine, &dst), 0, 64, None)).unwrap();
        assert_eq!(w.wait(&h), Ok(()));
        engine.peer(c.address()).unwrap()
    });
    let send = |engine, peer| submit(engine, Op::Send { peer, message: b"m" }).unwrap();
    let mut handles = vec![send(&b, &peers[1])];
    w.idle();
    handles.extend((0..40).map(|_| send(&a, &peers[0])));
    w.idle();
    let (got, kept) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(None)));
    let (into, keep) = (Arc::clone(&got), Arc::clone(&kept));
    c.receive(64, 1, move |delivery| {
        into.lock().unwrap().push(delivery.from());
        *keep.lock().unwrap() = Some(delivery);
    })
    .unwrap();
    w.until("all messages", &mut || {
        drop(kept.lock().unwrap().take());
        got.lock().unwrap().len() == handles.len()
    });
    for h in &handles {
        assert_eq!(w.wait(h), Ok(()));
    }
    let at = got.lock().unwrap().iter().position(|from| *from == b.id());
    assert!(at.is_some_and(|at| at < 4), "{at:?} messages of one sender went before the other's");
}

pub fn messages_too_long_for_the_pool_are_refused(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let peer = a.peer(b.address()).unwrap();
    b.receive(100, 4, |_| {}).unwrap();
    let long = submit(&a, Op::Send { peer: &peer, message: &[0; 101] }).unwrap();
    let short = submit(&a, Op::Send { peer: &peer, message: &[0; 100] }).unwrap();
    assert!(matches!(w.wait(&long), Err(EngineError::Refused { .. })));
    assert_eq!(w.wait(&short), Ok(()));
    let huge = vec![0; 8 << 20];
    let huge = submit(&a, Op::Send { peer: &peer, message: &huge });
    assert!(matches!(huge, Err(EngineError::Invalid(_))));
}

pub fn mr_2_a_deregistered_region_is_stale(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 64, 12);
    let dst = b.alloc(64).unwrap();
    let (imported, counter) = (import(&a, &dst), b.counter().unwrap());
    let h = submit(&a, write(&src, &imported, 0, 64, None)).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    drop(dst);
    w.idle();
    let h = submit(&a, write(&src, &imported, 0, 64, Some(counter.imm()))).unwrap();
    assert!(matches!(w.wait(&h), Err(EngineError::Stale { .. })));
    // The next region in the same slot has another key.
    let next = b.alloc(64).unwrap();
    let h = submit(&a, write(&src, &imported, 0, 64, Some(counter.imm()))).unwrap();
    assert!(matches!(w.wait(&h), Err(EngineError::Stale { .. })));
    assert_eq!(next.get(0, 64).unwrap(), [0; 64]);
    w.idle();
    assert_eq!(counter.poll().unwrap(), 0);
}

pub fn mr_1_deregistration_waits_for_peers(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let n = if w.cuts() { 50_000u64 } else { 64 << 20 };
    let (src, _) = filled(&a, n as usize, 13);
    for _ in 0..3 {
        let dst = b.alloc(n).unwrap();
        let imported = import(&a, &dst);
        let mut quick = vec![0; 64];
        let h = submit(&a, write(&src, &imported, 0, n, None)).unwrap();
        w.until("the first bytes", &mut || {
            h.drive();
            quick = dst.get(0, 64).unwrap();
            quick.iter().any(|b| *b != 0) || h.is_done()
        });
        let released = Arc::new(AtomicBool::new(false));
        let keep = Keeper(Arc::clone(&released));
        // SAFETY: `dst` outlives this registration.
        let alias = unsafe { b.register(dst.addr(), n, Some(Box::new(keep))) }.unwrap();
        drop(alias);
        drop(dst);
        w.until("the registration's end", &mut || {
            h.drive();
            released.load(SeqCst) && b.stats().retiring == 0
        });
        match w.wait(&h) {
            Ok(()) | Err(EngineError::Stale { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

pub fn mr_1_nothing_lands_once_a_region_is_quiet(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let n = w.large();
    let (src, _) = filled(&a, n as usize, 13);
    let dst = b.alloc(n).unwrap();
    // Samples a few bytes of each part: quick enough to catch bytes that land a moment later.
    let look = || -> Vec<u8> {
        (0..n).step_by(n as usize / 1000).map(|at| dst.get(at, 1).unwrap()[0]).collect()
    };
    for round in 0..10 {
        dst.put(0, &vec![0; n as usize]).unwrap();
        // SAFETY: `dst` outlives this registration.
        let alias = unsafe { b.register(dst.addr(), n, None) }.unwrap();
        let imported = import(&a, &alias);
        let h = submit(&a, write(&src, &imported, 0, n, None)).unwrap();
        w.until("the first bytes", &mut || {
            h.drive();
            dst.get(0, 64).unwrap() != [0; 64] || h.is_done()
        });
        alias.deregister(SOON).unwrap();
        let quiet = look();
        let _ = w.wait(&h);
        w.idle();
        assert!(look() == quiet, "bytes landed after quiet in round {round}");
    }
}

pub fn mr_2_revoking_one_peers_grant_leaves_the_others(w: &mut dyn World) {
    let (a, b, c) = (w.engine("a"), w.engine("b"), w.engine("c"));
    let (a_src, bytes) = filled(&a, 4096, 17);
    let (c_src, _) = filled(&c, 4096, 18);
    let memory = b.alloc(4096).unwrap();
    let (first, second) = (b.register_again(&memory).unwrap(), b.register_again(&memory).unwrap());
    let (to_first, to_second) = (import(&a, &first), import(&c, &second));
    for (engine, src, dst) in [(&a, &a_src, &to_first), (&c, &c_src, &to_second)] {
        let handle = submit(engine, write(src, dst, 0, 4096, None)).unwrap();
        assert_eq!(w.wait(&handle), Ok(()));
    }
    second.deregister(SOON).unwrap();
    let refused = submit(&c, write(&c_src, &to_second, 0, 4096, None));
    let refused = refused.and_then(|handle| w.wait(&handle));
    assert!(
        matches!(refused, Err(EngineError::Stale { .. } | EngineError::Refused { .. })),
        "{refused:?}"
    );
    let handle = submit(&a, write(&a_src, &to_first, 0, 4096, None)).unwrap();
    assert_eq!(w.wait(&handle), Ok(()));
    // Both regions keep the memory; it stays as long as either does.
    drop(memory);
    assert_eq!(first.get(0, 4096).unwrap(), bytes);
    second.get(0, 1).unwrap_err();
    b.register_again(&second).unwrap_err();
}

pub fn mr_1_an_abandoned_transfer_reports_when_it_is_quiet(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let n = w.large();
    let (src, _) = filled(&a, n as usize, 19);
    let dst = b.alloc(n).unwrap();
    let imported = import(&a, &dst);
    for give_up in [false, true] {
        let handle = submit(&a, write(&src, &imported, 0, n, None)).unwrap();
        if give_up {
            handle.cancel();
        }
        let reported = Arc::new(AtomicBool::new(false));
        let reporter = Arc::clone(&reported);
        handle.on_quiesced(move |quiet| reporter.store(quiet == Quiescence::Quiesced, SeqCst));
        let _ = w.wait(&handle);
        w.until("quiet", &mut || {
            handle.drive();
            reported.load(SeqCst)
        });
        assert_eq!(handle.quiescence(), Quiescence::Quiesced);
    }
}

struct Keeper(Arc<AtomicBool>);

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

pub fn mr_3_bounds_hold_on_both_sides(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 8192, 14);
    let dst = b.alloc(8192).unwrap();
    let part = dst.slice(4096, 64).unwrap();
    let imported = import(&a, &part);
    for (offset, len) in [(0, 65), (64, 1), (1 << 63, 1 << 63), (u64::MAX, 2), (0, 1 << 63)] {
        let op = Op::Write {
            src: Local { region: &src, offset: 0 },
            dst: Remote { region: &imported, offset },
            len,
            imm: None,
        };
        let e = submit(&a, op).unwrap_err();
        assert!(matches!(e, EngineError::OutOfBounds { .. }), "{e}");
    }
    // A forged descriptor: the owner's bounds decide.
    let mut lie = dst.descriptor();
    lie.len = 1 << 40;
    lie.offset = 1 << 30;
    let lie = a.import(&lie).unwrap();
    let counter = b.counter().unwrap();
    let h = submit(&a, write(&src, &lie, 0, 64, Some(counter.imm()))).unwrap();
    assert!(matches!(w.wait(&h), Err(EngineError::Refused { .. })));
    // Some bits of a key encode the kind of memory.
    for bit in [0, 1, 2, 20, 50] {
        let mut guess = dst.descriptor();
        guess.key.rkey ^= 1 << bit;
        let guess = a.import(&guess).unwrap();
        let h = submit(&a, write(&src, &guess, 0, 64, Some(counter.imm()))).unwrap();
        assert!(matches!(w.wait(&h), Err(EngineError::Stale { .. })), "bit {bit}: {h:?}");
    }
    w.idle();
    assert_eq!(counter.poll().unwrap(), 0);
    assert_eq!(dst.get(0, 8192).unwrap(), vec![0; 8192]);
    // The link survives all these errors.
    let h = submit(&a, write(&src, &imported, 0, 64, Some(counter.imm()))).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
}

pub fn mr_3_memory_beside_a_region_is_out_of_reach(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 8192, 14);
    // In the middle of memory that transports map or copy as one range.
    let around = b.alloc(3 * 4096).unwrap();
    // SAFETY: `around` outlives this registration.
    let region = unsafe { b.register(around.addr() + 4096, 4096, None) }.unwrap();
    let mut lie = region.descriptor();
    lie.len = 8192;
    let imported = a.import(&lie).unwrap();
    let counter = b.counter().unwrap();
    let range = |first| Pages::new(PageIndices::range(first, 3).unwrap(), 1024, 0);
    let (from, over_the_end) = (range(0), range(2));
    let scattered = Pages::new(PageIndices::list([1, 7, 0]).unwrap(), 1024, 0);
    let paged = |dst_pages| Op::WritePages {
        page_len: 1024,
        src: &src,
        src_pages: &from,
        dst: &imported,
        dst_pages,
        imm: None,
    };
    let ops = [
        write(&src, &imported, 4095, 2, Some(counter.imm())),
        write(&src, &imported, 4096, 4096, Some(counter.imm())),
        paged(&over_the_end),
        paged(&scattered),
        read(&imported, &src, 4095, 2),
    ];
    for op in ops {
        let name = format!("{op:?}");
        let h = submit(&a, op).unwrap();
        assert!(matches!(w.wait(&h), Err(EngineError::Refused { .. })), "{name}: {h:?}");
    }
    w.idle();
    assert_eq!(counter.poll().unwrap(), 0);
    for beside in [0, 8192] {
        assert_eq!(around.get(beside, 4096).unwrap(), [0; 4096], "bytes from {beside} on");
    }
    let h = submit(&a, write(&src, &imported, 0, 4096, Some(counter.imm()))).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
}

pub fn rs_1_no_read_ends_well_without_its_bytes(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let n = w.large();
    let (remote, bytes) = filled(&b, n as usize, 8);
    let gone = b.alloc(64).unwrap();
    let (imported, lost) = (import(&a, &remote), import(&a, &gone));
    let places: Vec<Region> = (0..6).map(|_| a.alloc(n).unwrap()).collect();
    drop(gone);
    w.idle();
    // A read either has all its bytes or has failed.
    let (good, bad) = (read(&imported, &places[0], 0, 64), read(&lost, &places[1], 0, 64));
    for ops in [[good.clone(), bad.clone()], [bad, good]] {
        let h = a.submit(&ops, Submit::default()).unwrap();
        assert!(w.wait(&h).is_err(), "{h:?}");
    }
    let handles: Vec<_> =
        places.iter().map(|to| submit(&a, read(&imported, to, 0, n)).unwrap()).collect();
    w.until("the first bytes", &mut || {
        handles[0].drive();
        places[0].get(100, 64).unwrap() != [0; 64] || handles[0].is_done()
    });
    b.close();
    for (h, to) in handles.iter().zip(&places) {
        match w.wait(h) {
            Ok(()) => assert!(to.get(0, n).unwrap() == bytes, "bytes are missing"),
            Err(EngineError::PeerLost { .. } | EngineError::Unreachable { .. }) => {}
            // A transfer over libfabric ends with the rail that it is on (docs/nics.md).
            Err(EngineError::RailLost { transport, .. }) if transport == "libfabric" => {}
            other => panic!("{other:?}"),
        }
    }
}

pub fn rs_2_the_transport_in_use_is_visible(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 64, 9);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst);
    let h = submit(&a, write(&src, &imported, 0, 64, None)).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    let used = a.transport(imported.peer()).expect("there is a link");
    let verdicts = a.explain(imported.peer()).unwrap().verdicts;
    assert!(verdicts.iter().any(|v| v.chosen), "{verdicts:?}");
    for v in &verdicts {
        assert!(!v.chosen || v.transport == used, "{used} is in use: {v:?}");
        assert!(!v.reason.is_empty(), "{v:?}");
    }
}

pub fn rs_4_a_closed_peer_ends_everything(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 64, 15);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst);
    let h = submit(&a, write(&src, &imported, 0, 64, None)).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    let peer = imported.peer().clone();
    let counter = a.counter().unwrap();
    let expected = counter.expect(1, std::slice::from_ref(&peer), SOON).unwrap();
    let unheard = submit(&a, Op::Send { peer: &peer, message: b"?" }).unwrap();
    w.idle();
    b.close();
    for h in [expected, unheard] {
        assert!(matches!(w.wait(&h), Err(EngineError::PeerLost { .. })), "{:?}", h);
    }
    let h = submit(&a, write(&src, &imported, 0, 64, None)).unwrap();
    let e = w.wait(&h).unwrap_err();
    // Another process may have its port by now: then the error is `Stale` (MR-2).
    let over = matches!(
        e,
        EngineError::PeerLost { .. } | EngineError::Unreachable { .. } | EngineError::Stale { .. }
    );
    assert!(over, "{e}");
    assert!(e.to_string().contains("b#"), "the peer is named: {e}");
    let late = counter.expect(1, &[peer], SOON).unwrap();
    assert!(w.wait(&late).is_err());
}

pub fn rs_4_an_expectation_ends_by_its_deadline(w: &mut dyn World) {
    let a = w.engine("a");
    let counter = a.counter().unwrap();
    let h = counter.expect(3, &[], Duration::from_millis(30)).unwrap();
    let e = w.wait(&h).unwrap_err();
    assert!(matches!(e, EngineError::Timeout { .. }), "{e}");
    assert!(e.to_string().contains("3 writes are missing"), "{e}");
}

pub fn ic_5_a_cancelled_wait_takes_no_arrivals(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 64, 30);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst);
    let counter = b.counter().unwrap();
    let early = counter.expect(2, &[], Duration::from_millis(30)).unwrap();
    let late = counter.expect(1, &[], SOON).unwrap();
    assert!(matches!(w.wait(&early), Err(EngineError::Timeout { .. })));
    let h = submit(&a, write(&src, &imported, 0, 64, Some(counter.imm()))).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    assert_eq!(w.wait(&late), Ok(()));
    assert_eq!((counter.arrived(), counter.unclaimed()), (1, 0));
}

pub fn an_engine_can_write_to_itself(w: &mut dyn World) {
    let a = w.engine("a");
    let (src, bytes) = filled(&a, 5000, 16);
    let dst = a.alloc(5000).unwrap();
    let imported = import(&a, &dst);
    let counter = a.counter().unwrap();
    let arrived = counter.expect(1, &[], SOON).unwrap();
    let h = submit(&a, write(&src, &imported, 0, 5000, Some(counter.imm()))).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    assert_eq!(w.wait(&arrived), Ok(()));
    assert!(dst.get(0, 5000).unwrap() == bytes);
}

pub fn both_sides_connect_at_once(w: &mut dyn World) {
    for _ in 0..5 {
        let (a, b) = (w.engine("a"), w.engine("b"));
        let (src_a, _) = filled(&a, 64, 17);
        let (src_b, _) = filled(&b, 64, 18);
        let (dst_a, dst_b) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
        let (to_b, to_a) = (import(&a, &dst_b), import(&b, &dst_a));
        let imm = Imm::plain(1).unwrap();
        let ha = submit(&a, write(&src_a, &to_b, 0, 64, Some(imm))).unwrap();
        let hb = submit(&b, write(&src_b, &to_a, 0, 64, Some(imm))).unwrap();
        assert_eq!((w.wait(&ha), w.wait(&hb)), (Ok(()), Ok(())));
        // A write is done for its sender when its bytes have landed; its count is seen a moment
        // later.
        for engine in [&a, &b] {
            w.until("the count", &mut || engine.plain_counter(imm).poll().unwrap() > 0);
        }
        w.idle();
        for (engine, region, salt) in [(&a, &dst_a, 18), (&b, &dst_b, 17)] {
            assert_eq!(engine.plain_counter(imm).poll().unwrap(), 1);
            assert_eq!(region.get(0, 64).unwrap(), pattern(64, salt));
        }
    }
}

pub fn bad_requests_are_refused_before_anything_is_sent(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, _) = filled(&a, 4096, 19);
    let dst = b.alloc(4096).unwrap();
    let imported = import(&a, &dst);
    let counter = b.counter().unwrap();
    let good = write(&src, &imported, 0, 64, Some(counter.imm()));
    let elsewhere = b.alloc(64).unwrap();
    let other_peer = b.peer(a.address()).unwrap();
    let list = |i: &[u32]| Pages::new(PageIndices::list(i).unwrap(), 1024, 0);
    let far = Pages::new(PageIndices::list([u32::MAX]).unwrap(), u64::MAX, 0);
    let paged = |src_pages, dst_pages, page_len| Op::WritePages {
        page_len,
        src: &src,
        src_pages,
        dst: &imported,
        dst_pages,
        imm: None,
    };
    let (one, two, out) = (list(&[0]), list(&[0, 1]), list(&[4]));
    let none = list(&[]);
    let bad = [
        write(&src, &imported, 0, 0, None),
        write(&elsewhere, &imported, 0, 64, None),
        paged(&one, &two, 64),
        paged(&one, &out, 64),
        paged(&out, &one, 64),
        paged(&none, &none, 64),
        paged(&far, &one, 64),
        paged(&one, &one, 0),
        paged(&two, &two, 1 << 63),
        Op::Send { peer: &other_peer, message: b"x" },
        Op::Scatter { group: None, src: &src, parts: &[], imm: None },
    ];
    for op in bad {
        let name = format!("{op:?}");
        assert!(a.submit(&[good.clone(), op], Submit::default()).is_err(), "{name}");
    }
    assert!(a.submit(&[], Submit::default()).is_err());
    src.deregister(SOON).unwrap();
    let e = a.submit(&[good], Submit::default()).unwrap_err();
    assert!(matches!(e, EngineError::Stale { .. }));
    w.idle();
    assert_eq!(counter.poll().unwrap(), 0, "nothing was sent");
}

pub fn foreign_memory_is_reached(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let bytes = pattern(3 << 20, 20);
    let mut target = vec![0u8; 3 << 20];
    // SAFETY: both vectors outlive their registrations, which end below.
    let (src, dst) = unsafe {
        (
            a.register(bytes.as_ptr() as usize, 3 << 20, None).unwrap(),
            b.register(target.as_mut_ptr() as usize, 3 << 20, None).unwrap(),
        )
    };
    let imported = import(&a, &dst);
    let counter = b.counter().unwrap();
    let pages = |i: &[u32]| Pages::new(PageIndices::list(i).unwrap(), 10_000, 3);
    let op = Op::WritePages {
        page_len: 10_000,
        src: &src,
        src_pages: &pages(&[5, 100, 7]),
        dst: &imported,
        dst_pages: &pages(&[100, 7, 5]),
        imm: Some(counter.imm()),
    };
    let h = submit(&a, op).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    let h = counter.expect(3, &[], SOON).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    for (f, t) in [(5, 100), (100, 7), (7, 5)] {
        assert!(target[t * 10_000 + 3..][..10_000] == bytes[f * 10_000 + 3..][..10_000]);
    }
    let n = w.large().min(3 << 20);
    let h = submit(&a, write(&src, &imported, 0, n, None)).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    assert!(target[..n as usize] == bytes[..n as usize]);
    target.fill(1);
    let op = Op::Read {
        src: Remote { region: &imported, offset: 0 },
        dst: Local { region: &src, offset: 0 },
        len: 100,
    };
    let h = submit(&a, op).unwrap();
    assert_eq!(w.wait(&h), Ok(()));
    assert!(src.get(0, 100).unwrap() == [1; 100]);
    let registrations = [src, dst].map(|r| r.deregister(SOON));
    w.idle();
    assert!(registrations.iter().all(|r| r.is_ok()), "{registrations:?}");
}

pub fn files_are_reached_or_refused_with_a_reason(w: &mut dyn World) {
    const N: u64 = 300_000;
    let (a, b) = (w.engine("a"), w.engine("b"));
    let path = |end| {
        let name = format!("fabric-conformance-{}-{}-{end}", std::process::id(), b.id());
        std::env::temp_dir().join(name)
    };
    let options = FileOptions { len: Some(N), create: true, ..Default::default() };
    let (remote_file, local_file) =
        match (b.register_file(&path("b"), options), a.register_file(&path("a"), options)) {
            (Ok(remote_file), Ok(local_file)) => (remote_file, local_file),
            // The simulator has no files.
            (e, _) => return assert!(e.unwrap_err().to_string().contains("no files")),
        };
    let (src, bytes) = filled(&a, N as usize, 5);
    let counter = b.counter().unwrap();
    let mut reached = 0;
    let to_file = import(&a, &remote_file);
    let memory = b.alloc(N).unwrap();
    let to_memory = import(&a, &memory);
    for (from, to) in [(&src, &to_file), (&local_file, &to_memory)] {
        let done = submit(&a, write(from, to, 0, N, Some(counter.imm()))).unwrap();
        match w.wait(&done) {
            Ok(()) => reached += 1,
            Err(e) => assert!(e.to_string().contains("file"), "{e}"),
        }
    }
    w.until("counts", &mut || counter.poll().unwrap() >= reached);
    w.idle();
    assert_eq!(counter.arrived(), reached);
    if reached > 0 {
        assert!(std::fs::read(path("b")).unwrap() == bytes);
        assert_eq!(memory.get(0, N).unwrap(), vec![0; N as usize]);
    }
    // Memory is still reachable.
    let done = submit(&a, write(&src, &to_memory, 0, N, None)).unwrap();
    assert_eq!(w.wait(&done), Ok(()));
    assert!(memory.get(0, N).unwrap() == bytes);
    ["a", "b"].into_iter().for_each(|end| std::fs::remove_file(path(end)).unwrap());
}

pub fn many_small_writes_all_count(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, bytes) = filled(&a, 8000, 21);
    let dst = b.alloc(8000).unwrap();
    let imported = import(&a, &dst);
    let counter = b.counter().unwrap();
    let n = w.many();
    let handles: Vec<_> = (0..n)
        .map(|i| submit(&a, write(&src, &imported, i % 1000 * 8, 8, Some(counter.imm()))).unwrap())
        .collect();
    let all = counter.expect(n as u32, &[], SOON).unwrap();
    // First the handles, whose errors say what went wrong.
    for h in handles {
        assert_eq!(w.wait(&h), Ok(()), "{} of {n} arrived", counter.arrived());
    }
    assert_eq!(w.wait(&all), Ok(()));
    assert!(dst.get(0, 8000).unwrap() == bytes);
    assert_eq!(counter.arrived(), n);
}

pub fn many_small_writes_of_few_requests_all_count(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, bytes) = filled(&a, 8000, 22);
    let parts = [b.alloc(4000).unwrap(), b.alloc(4000).unwrap()];
    let imported = parts.each_ref().map(|part| import(&a, part));
    let counters = [b.counter().unwrap(), b.counter().unwrap()];
    let op = |i: u64, counter: usize| Op::Write {
        src: Local { region: &src, offset: i % 1000 * 8 },
        dst: Remote { region: &imported[(i % 1000 / 500) as usize], offset: i % 500 * 8 },
        len: if i.is_multiple_of(7) && i >= 1000 { 0 } else { 8 },
        imm: Some(counters[counter].imm()),
    };
    let n = w.many();
    let mut sent = [0, 0];
    let mut handles = Vec::new();
    for (round, size) in [1, 2, 64, 300, 700].into_iter().cycle().enumerate() {
        if sent[0] + sent[1] >= n {
            break;
        }
        // One counter or both in turn.
        let of = |i: u64| if round % 2 == 0 { round / 2 % 2 } else { i as usize % 2 };
        let from = sent[0] + sent[1];
        let ops: Vec<_> = (from..from + size).map(|i| op(i, of(i))).collect();
        (from..from + size).for_each(|i| sent[of(i)] += 1);
        handles.push(a.submit(&ops, Submit::default()).unwrap());
    }
    let all = [0, 1].map(|i| counters[i].expect(sent[i] as u32, &[], SOON).unwrap());
    for h in handles.iter().chain(&all) {
        assert_eq!(w.wait(h), Ok(()));
    }
    let there = parts.map(|part| part.get(0, 4000).unwrap()).concat();
    let reached = bytes.len().min((sent[0] + sent[1]) as usize * 8);
    assert!(there[..reached] == bytes[..reached]);
    assert_eq!(counters.each_ref().map(|counter| counter.arrived()), sent);
}

pub fn closing_in_any_order_is_safe(w: &mut dyn World) {
    let n = w.large().min(1 << 20);
    for order in 0..6 {
        let (a, b) = (w.engine("a"), w.engine("b"));
        let (src, _) = filled(&a, n as usize, 22);
        let dst = b.alloc(n).unwrap();
        let imported = import(&a, &dst);
        let counter = b.counter().unwrap();
        let h = submit(&a, write(&src, &imported, 0, n, Some(counter.imm()))).unwrap();
        let expected = counter.expect(1, &[], SOON).unwrap();
        if order % 2 == 0 {
            let _ = w.wait(&h);
        }
        match order / 2 {
            0 => {
                drop((a, src, imported));
                drop((dst, counter, b));
            }
            1 => {
                drop((b, counter));
                drop(dst);
                drop((imported, a));
                drop(src);
            }
            _ => {
                drop((src, dst));
                a.close();
                b.close();
                a.close();
            }
        }
        w.until("the handles", &mut || h.poll().is_some() && expected.poll().is_some());
    }
}
