//! Several NICs behind one engine: spread and pinned transfers, and lost rails.

use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::{EngineConfig, PageIndices, Pages},
    simulation::SimNet,
    transport::sim::SimConfig,
    Counter, EngineError, Handle, Local, Op, Quiescence, Region, Remote, RemoteRegion, Result,
    Submit, TransferEngine,
};

const SOON: Duration = Duration::from_secs(10);

struct Pair {
    net: SimNet,
    a: Arc<TransferEngine>,
    b: Arc<TransferEngine>,
    src: Region,
    dst: Region,
    imported: RemoteRegion,
}

fn pair(seed: u64, rails: (u8, u8)) -> Pair {
    pair_with(seed, rails, 1 << 20, None)
}

/// NICs take at most `max_bytes`; the cable of rail `out` of b is unplugged at first.
fn pair_with(seed: u64, rails: (u8, u8), max_bytes: u64, out: Option<u8>) -> Pair {
    let config = SimConfig { seed, max_bytes, max_pages: 32, ..Default::default() };
    let mut net = SimNet::new(config);
    let named = |name: &str| EngineConfig { name: name.into(), ..Default::default() };
    let a = net.engine_with_rails(named("a"), rails.0).unwrap();
    let b = net.engine_with_rails(named("b"), rails.1).unwrap();
    let (src, dst) = (a.alloc(1 << 20).unwrap(), b.alloc(1 << 20).unwrap());
    let bytes: Vec<u8> = (0..1u32 << 20).map(|i| (i % 251) as u8).collect();
    src.put(0, &bytes).unwrap();
    let imported = a.import(&dst.descriptor()).unwrap();
    if let Some(rail) = out {
        net.plug(b.id(), rail, false);
    }
    a.connect(imported.peer()).unwrap();
    let mut pair = Pair { net, a, b, src, dst, imported };
    pair.ms(1000);
    pair
}

impl Pair {
    fn ms(&mut self, ms: u64) {
        let limit = fabric_engine::Time(self.net.now().0 + ms * 1_000_000);
        while self.net.step_until(limit) {}
    }

    fn wait(&mut self, handle: &Handle) -> Result<()> {
        while handle.drive().is_none() && self.net.step() {}
        handle.poll().expect("the simulation has no more events, and the handle has not ended")
    }

    fn write(&self, len: u64, rail: Option<u8>) -> Handle {
        let (src, dst) =
            (Local { region: &self.src, offset: 0 }, Remote { region: &self.imported, offset: 0 });
        let op = Op::Write { src, dst, len, imm: None };
        self.a.submit(&[op], Submit { rail, ..Default::default() }).unwrap()
    }

    /// Number of operations posted on each rail of `a` while `f` ran.
    fn carried(&mut self, rails: u8, f: impl FnOnce(&mut Self)) -> Vec<u64> {
        let now = |p: &Self| (0..rails).map(|r| p.net.posted(p.a.id(), r)).collect::<Vec<_>>();
        let before = now(self);
        f(self);
        now(self).iter().zip(before).map(|(a, b)| a - b).collect()
    }
}

#[test]
fn a_large_write_uses_every_rail_and_arrives_whole() {
    for rails in [(2, 2), (4, 4), (4, 1), (3, 2)] {
        let mut p = pair(1, rails);
        let carried = p.carried(rails.0, |p| {
            let done = p.write(1 << 20, None);
            assert_eq!(p.wait(&done), Ok(()));
        });
        assert!(carried.iter().all(|n| *n > 0), "{rails:?}: {carried:?}");
        assert!(p.src.get(0, 1 << 20) == p.dst.get(0, 1 << 20));
    }
}

#[test]
fn the_side_with_more_nics_uses_them_all() {
    let mut p = pair(2, (1, 4));
    p.carried(1, |p| {
        let done = p.write(1 << 20, None);
        assert_eq!(p.wait(&done), Ok(()));
    });
    // b writes back: its four NICs all have a link to the one of a.
    let (src, imported) = (p.b.alloc(1 << 20).unwrap(), p.b.import(&p.src.descriptor()).unwrap());
    let before: Vec<u64> = (0..4).map(|r| p.net.posted(p.b.id(), r)).collect();
    let op = Op::Write {
        src: Local { region: &src, offset: 0 },
        dst: Remote { region: &imported, offset: 0 },
        len: 1 << 20,
        imm: None,
    };
    let done = p.b.submit(&[op], Submit::default()).unwrap();
    assert_eq!(p.wait(&done), Ok(()));
    for (rail, before) in before.into_iter().enumerate() {
        assert!(p.net.posted(p.b.id(), rail as u8) > before, "rail {rail} carried nothing");
    }
}

#[test]
fn pages_rotate_and_count_once_each() {
    let mut p = pair(3, (4, 4));
    let counter = p.b.counter().unwrap();
    let pages = Pages::new(PageIndices::range(0, 256).unwrap(), 4096, 0);
    let arrived = counter.expect(256, &[], SOON).unwrap();
    let carried = p.carried(4, |p| {
        let op = Op::WritePages {
            page_len: 4096,
            src: &p.src,
            src_pages: &pages,
            dst: &p.imported,
            dst_pages: &pages,
            imm: Some(counter.imm()),
        };
        let done = p.a.submit(&[op], Submit::default()).unwrap();
        assert_eq!(p.wait(&arrived), Ok(()));
        assert_eq!(p.wait(&done), Ok(()));
    });
    // 64 KiB each.
    assert_eq!(carried, [4, 4, 4, 4]);
    assert_eq!(counter.arrived(), 256);
    assert!(p.src.get(0, 1 << 20) == p.dst.get(0, 1 << 20));
}

#[test]
fn small_writes_take_turns() {
    let mut p = pair(4, (4, 4));
    let carried = p.carried(4, |p| {
        let handles: Vec<_> = (0..8).map(|_| p.write(64, None)).collect();
        handles.iter().for_each(|h| assert_eq!(p.wait(h), Ok(())));
    });
    assert_eq!(carried, [2, 2, 2, 2]);
}

#[test]
fn a_pinned_transfer_keeps_to_its_rail() {
    let mut p = pair(5, (4, 4));
    let carried = p.carried(4, |p| {
        let done = p.write(1 << 20, Some(2));
        assert_eq!(p.wait(&done), Ok(()));
    });
    assert_eq!((carried[0], carried[1], carried[3]), (0, 0, 0));
    assert!(carried[2] > 0);
    let error = p.write(64, Some(4)).poll().unwrap().unwrap_err();
    assert!(error.to_string().contains("pinned to rail 4, but sim has 4 here"), "{error}");
}

#[test]
fn a_lost_rails_operations_move_to_other_rails() {
    for seed in 0..20 {
        let mut p = pair(seed, (2, 2));
        let waits = p.b.counter().unwrap();
        let from_a = p.b.peer(p.a.address()).unwrap();
        let waiting = waits.expect(1, &[from_a], SOON).unwrap();
        let cut = p.write(1 << 20, None);
        let (a, b) = (p.a.id(), p.b.id());
        p.net.plug(if seed % 2 == 0 { a } else { b }, 1, false);
        assert_eq!(p.wait(&cut), Ok(()), "seed {seed}");
        assert!(p.src.get(0, 1 << 20) == p.dst.get(0, 1 << 20));
        // The peer is not lost: expectations of it wait on.
        assert!(waiting.poll().is_none());
        let pinned = p.write(64, Some(1));
        let pinned = p.wait(&pinned).unwrap_err();
        assert!(pinned.to_string().contains("does not reach this peer now"), "{pinned}");
    }
}

#[test]
fn ic_3_a_resent_write_counts_once() {
    let pages = Pages::new(PageIndices::range(0, 64).unwrap(), 4096, 0);
    for seed in 0..200 {
        let mut p = pair(seed, (2, 3));
        let counter = p.b.counter().unwrap();
        let (n, id) = (1 + 1 + 64 + 8, p.a.id());
        let arrived = counter.expect(n, &[], SOON).unwrap();
        let imm = Some(counter.imm());
        let (src, imported) =
            (Local { region: &p.src, offset: 0 }, Remote { region: &p.imported, offset: 0 });
        let mut ops = vec![
            Op::Write { src, dst: imported, len: 1 << 20, imm },
            Op::Write { src, dst: imported, len: 100, imm },
            Op::WritePages {
                page_len: 4096,
                src: &p.src,
                src_pages: &pages,
                dst: &p.imported,
                dst_pages: &pages,
                imm,
            },
        ];
        ops.extend((0..8).map(|_| Op::Write { src, dst: imported, len: 0, imm }));
        let done = p.a.submit(&ops, Submit::default()).unwrap();
        // One rail fails at any step of the write; some steps later the other does, while the first
        // is back.
        for rail in [(seed % 2) as u8, (seed % 2) as u8 ^ 1] {
            for _ in 0..seed * 3 {
                p.net.step();
            }
            p.net.plug(id, rail, false);
            p.ms(seed % 3);
            p.net.plug(id, rail, true);
            p.ms(seed);
        }
        assert_eq!(p.wait(&done), Ok(()), "seed {seed}");
        assert_eq!(p.wait(&arrived), Ok(()), "seed {seed}");
        p.ms(1000);
        assert_eq!(counter.arrived(), u64::from(n), "seed {seed}");
        assert!(p.src.get(0, 1 << 20) == p.dst.get(0, 1 << 20), "seed {seed}");
    }
}

#[test]
fn a_rail_that_returns_is_used_again() {
    let mut p = pair(6, (2, 2));
    let id = p.a.id();
    p.net.plug(id, 1, false);
    p.ms(500);
    assert_eq!(p.carried(2, |p| assert_eq!(p.write(64, None).poll(), None))[1], 0);
    p.net.plug(id, 1, true);
    p.ms(10_000);
    let carried = p.carried(2, |p| {
        let done = p.write(1 << 20, None);
        assert_eq!(p.wait(&done), Ok(()));
    });
    assert!(carried[1] > 0, "{carried:?}");
}

#[test]
fn rs_4_with_the_last_rail_the_peer_is_lost() {
    let mut p = pair(7, (2, 2));
    let waits = p.b.counter().unwrap();
    let from_a = p.b.peer(p.a.address()).unwrap();
    let waiting = waits.expect(1, &[from_a], SOON).unwrap();
    let id = p.a.id();
    p.net.plug(id, 0, false);
    p.ms(1);
    assert!(waiting.poll().is_none());
    p.net.plug(id, 1, false);
    assert!(matches!(p.wait(&waiting), Err(EngineError::PeerLost { .. })));
}

#[test]
fn rs_4_a_dead_peer_is_lost_however_its_rails_die() {
    let mut lost = 0;
    for seed in 0..20 {
        let mut p = pair(seed, (2, 2));
        let cut = p.write(1 << 20, None);
        let id = p.b.id();
        p.net.plug(id, 0, false);
        for _ in 0..seed {
            p.net.step();
        }
        p.net.plug(id, 1, false);
        match p.wait(&cut) {
            Err(EngineError::PeerLost { .. }) => lost += 1,
            Ok(()) => assert!(p.src.get(0, 1 << 20) == p.dst.get(0, 1 << 20)),
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(lost >= 5, "{lost}");
}

#[test]
fn a_rail_that_was_out_at_first_is_used_when_it_comes() {
    let mut never = Vec::new();
    for seed in 0..10 {
        let mut p = pair_with(seed, (2, 2), 1 << 20, Some(1));
        let id = p.b.id();
        p.net.plug(id, 1, true);
        p.ms(30_000);
        let carried = p.carried(2, |p| {
            let done = p.write(1 << 20, None);
            assert_eq!(p.wait(&done), Ok(()));
        });
        if carried[1] == 0 {
            never.push(seed);
        }
    }
    assert!(never.is_empty(), "never connected again under seeds {never:?}");
}

#[test]
fn a_pinned_write_that_is_cut_counts_over_its_rail() {
    let mut p = pair_with(1, (4, 4), 1 << 18, None);
    let counter = p.b.counter().unwrap();
    let carried = p.carried(4, |p| {
        let op = Op::Write {
            src: Local { region: &p.src, offset: 0 },
            dst: Remote { region: &p.imported, offset: 0 },
            len: 1 << 20,
            imm: Some(counter.imm()),
        };
        let done = p.a.submit(&[op], Submit { rail: Some(2), ..Default::default() }).unwrap();
        assert_eq!(p.wait(&done), Ok(()));
    });
    assert_eq!((carried[0], carried[1], carried[3]), (0, 0, 0), "{carried:?}");
}

#[test]
fn unposted_work_takes_another_rail() {
    let mut p = pair(5, (2, 2));
    let id = p.a.id();
    p.net.plug(id, 1, false);
    let handles: Vec<_> = (0..4).map(|_| p.write(64, None)).collect();
    let results: Vec<_> = handles.iter().map(|h| p.wait(h)).collect();
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn rs_4_a_pinned_transfer_learns_that_the_peer_is_lost() {
    let mut p = pair(5, (2, 2));
    let id = p.b.id();
    let handles: Vec<_> = (0..40).map(|_| p.write(64, Some(1))).collect();
    p.net.plug(id, 1, false);
    p.ms(100);
    p.net.plug(id, 0, false);
    let results: Vec<_> = handles.iter().map(|h| p.wait(h)).collect();
    // Posted work went over the other rail; work that was not posted fails with its own rail.
    let lost = results.iter().filter(|r| matches!(r, Err(EngineError::PeerLost { .. }))).count();
    let done = results.iter().filter(|r| r.is_ok()).count();
    assert!(lost > 0 && done > 0 && lost + done == results.len(), "{:?}", results.last());
}

/// `RailLost` warns that its count may have arrived.
#[test]
fn ic_6_a_repeat_after_a_lost_rail_counts_on_a_fresh_counter() {
    for seed in 0..20 {
        let mut p = pair(seed, (2, 2));
        let (first, fresh) = (p.b.counter().unwrap(), p.b.counter().unwrap());
        let both = fresh.expect(2, &[], SOON).unwrap();
        let write = |p: &Pair, counter: &Counter| {
            let op = Op::Write {
                src: Local { region: &p.src, offset: 0 },
                dst: Remote { region: &p.imported, offset: 0 },
                len: 64,
                imm: Some(counter.imm()),
            };
            p.a.submit(&[op], Submit::default()).unwrap()
        };
        let lost = write(&p, &first);
        while first.arrived() == 0 && p.net.step() {}
        let id = p.a.id();
        let rail = (0..2).find(|r| p.net.posted(id, *r) > 0).unwrap();
        p.net.plug(id, rail, false);
        if let Err(e) = p.wait(&lost) {
            assert!(e.to_string().contains("fresh counter"), "{e}");
        }
        let again = write(&p, &fresh);
        assert_eq!(p.wait(&again), Ok(()));
        assert_eq!((fresh.arrived(), both.poll()), (1, None));
    }
}

#[test]
fn mr_1_a_cancelled_transfer_reports_when_it_is_quiet() {
    let mut under_way = 0;
    for seed in 0..60 {
        let mut p = pair(seed, (2, 2));
        let done = p.write(1 << 20, None);
        for _ in 0..seed * 4 {
            p.net.step();
        }
        if done.is_done() {
            continue;
        }
        done.cancel();
        assert!(matches!(done.poll(), Some(Err(EngineError::Cancelled { .. }))), "{done:?}");
        if seed % 2 == 1 {
            // If a link is lost meanwhile, quiet means that its other end is down as well.
            let id = p.a.id();
            p.net.plug(id, 0, false);
        }
        under_way += u32::from(done.quiescence() == Quiescence::InFlight);
        while done.quiescence() == Quiescence::InFlight && p.net.step() {}
        assert_eq!(done.quiescence(), Quiescence::Quiesced, "seed {seed}");
        let reused = vec![0xEE; 1 << 20];
        p.dst.put(0, &reused).unwrap();
        p.ms(5000);
        assert!(p.dst.get(0, 1 << 20).unwrap() == reused, "seed {seed}: bytes landed after quiet");
        // The peer is still usable.
        let again = p.write(1 << 20, None);
        assert_eq!(p.wait(&again), Ok(()));
    }
    assert!(under_way > 10, "{under_way}");
}

#[test]
fn a_cancelled_expectation_takes_nothing_from_the_next() {
    let mut p = pair(3, (1, 1));
    let counter = p.b.counter().unwrap();
    let (first, second) =
        (counter.expect(1, &[], SOON).unwrap(), counter.expect(1, &[], SOON).unwrap());
    first.cancel();
    assert!(matches!(first.poll(), Some(Err(EngineError::Cancelled { .. }))), "{first:?}");
    assert_eq!(first.quiescence(), Quiescence::Quiesced);
    let op = Op::Write {
        src: Local { region: &p.src, offset: 0 },
        dst: Remote { region: &p.imported, offset: 0 },
        len: 8,
        imm: Some(counter.imm()),
    };
    let done = p.a.submit(&[op], Submit::default()).unwrap();
    assert_eq!(p.wait(&done), Ok(()));
    assert_eq!(p.wait(&second), Ok(()));
    done.cancel();
    assert_eq!((done.poll(), done.quiescence()), (Some(Ok(())), Quiescence::Quiesced));
}
