//! Links that are lost or slow, and refused writes, at particular moments.

use fabric_engine::{
    api::{EngineConfig, Imm},
    simulation::SimNet,
    transport::sim::{Fault, SimConfig},
    Handle, Local, Op, Region, Remote, RemoteRegion, Result, Submit, TransferEngine,
};
use std::{sync::Arc, time::Duration};
const SOON: Duration = Duration::from_secs(10);
struct Pair {
    net: SimNet,
    a: Arc<TransferEngine>,
    b: Arc<TransferEngine>,
    src: Region,
    dst: Region,
    imported: RemoteRegion,
}
fn pair(config: SimConfig, rails: (u8, u8)) -> Pair {
    let mut net = SimNet::new(config);
    let named = |name: &str| EngineConfig { name: name.into(), ..Default::default() };
    let a = net.engine_with_rails(named("a"), rails.0).unwrap();
    let b = net.engine_with_rails(named("b"), rails.1).unwrap();
    let (src, dst) = (a.alloc(1 << 20).unwrap(), b.alloc(1 << 20).unwrap());
    let bytes: Vec<u8> = (0..1u32 << 20).map(|i| (i % 251) as u8 | 1).collect();
    src.put(0, &bytes).unwrap();
    let imported = a.import(&dst.descriptor()).unwrap();
    a.connect(imported.peer()).unwrap();
    let mut p = Pair { net, a, b, src, dst, imported };
    p.us(1_000_000);
    p
}
fn config(seed: u64) -> SimConfig {
    SimConfig { seed, max_bytes: 1 << 20, max_pages: 32, ..Default::default() }
}
impl Pair {
    fn us(&mut self, us: u64) {
        let limit = fabric_engine::Time(self.net.now().0 + us * 1000);
        while self.net.step_until(limit) {}
    }
    fn until(&mut self, ns: u64) {
        while self.net.step_until(fabric_engine::Time(ns)) {}
    }
    fn wait(&mut self, handle: &Handle) -> Result<()> {
        while handle.drive().is_none() && self.net.step() {}
        handle.poll().expect("the simulation has no more events, and the handle has not ended")
    }
    fn write(&self, at: u64, len: u64, imm: Option<fabric_engine::api::Imm>) -> Handle {
        let (src, dst) = (
            Local { region: &self.src, offset: at },
            Remote { region: &self.imported, offset: at },
        );
        self.a.submit(&[Op::Write { src, dst, len, imm }], Submit::default()).unwrap()
    }
    fn posted(&self, rails: u8) -> Vec<u64> {
        (0..rails).map(|r| self.net.posted(self.a.id(), r)).collect()
    }
}

#[test]
fn a_request_on_a_lost_link_is_repeated_on_another() {
    let mut failed = Vec::new();
    for seed in 0..20 {
        let mut p = pair(config(seed), (3, 3));
        let counter = p.b.counter().unwrap();
        let before = p.posted(3);
        let done = p.write(0, 100, Some(counter.imm()));
        let now = p.posted(3);
        let rail = (0..3).find(|r| now[*r] > before[*r]).unwrap() as u8;
        let id = p.a.id();
        p.net.plug(id, rail, false);
        p.us(0); // a notices, and asks over the first link that is up
        let via = if rail == 0 { 1 } else { 0 };
        p.net.plug(id, via, false);
        let r = p.wait(&done);
        if r.is_err() {
            failed.push((seed, rail, r));
        }
    }
    assert!(failed.is_empty(), "{} of 20: {:?}", failed.len(), failed[0]);
}

#[test]
fn refused_writes_free_their_queue_slots() {
    let mut p = pair(config(1), (2, 2));
    let gone = p.b.alloc(1 << 20).unwrap();
    let stale = p.a.import(&gone.descriptor()).unwrap();
    drop(gone);
    p.us(1000);
    for i in 0..40 {
        let (src, dst) =
            (Local { region: &p.src, offset: 0 }, Remote { region: &stale, offset: 0 });
        let h =
            p.a.submit(&[Op::Write { src, dst, len: 1 << 20, imm: None }], Submit::default())
                .unwrap();
        let r = p.wait(&h);
        assert!(
            matches!(r, Err(fabric_engine::EngineError::Stale { .. })),
            "refused write {i}: {r:?}"
        );
    }
    let done = p.write(0, 1 << 20, None);
    assert_eq!(p.wait(&done), Ok(()));
}

#[test]
fn links_with_latency_are_not_taken_for_stalled() {
    let config = SimConfig { window: 1000, delay: 30_000_000..31_000_000, ..config(1) };
    let mut p = pair(config, (2, 2));
    let before = p.posted(2);
    let mut handles = Vec::new();
    let mut at = p.net.now().0;
    for _ in 0..60 {
        handles.push(p.write(0, 1000, None));
        at += 3_000_000;
        p.until(at);
    }
    for h in &handles {
        assert_eq!(p.wait(h), Ok(()));
    }
    let after = p.posted(2);
    let n: u64 = after.iter().zip(&before).map(|(a, b)| a - b).sum();
    assert_eq!(n, 60, "posted; extra posts mean that a healthy link was given up");
}

/// The application reuses the memory after a count.
#[test]
fn mr_1_bytes_that_were_counted_do_not_land_again() {
    let mut bad = Vec::new();
    for seed in 0..50 {
        let mut p = pair(config(seed), (1, 1));
        let counter = p.b.counter().unwrap();
        let first = counter.expect(1, &[], SOON).unwrap();
        let a1 = p.write(0, 100, Some(counter.imm()));
        while counter.arrived() == 0 && p.net.step() {}
        assert_eq!(first.drive(), Some(Ok(())));
        // The receiver has consumed the bytes, and reuses the memory.
        p.dst.put(0, &[0; 100]).unwrap();
        let second = counter.expect(1, &[], SOON).unwrap();
        let a2 = p.write(4096, 100, Some(counter.imm()));
        let acked = a1.poll().is_some();
        let id = p.a.id();
        p.net.plug(id, 0, false);
        p.net.plug(id, 0, true);
        let r = (p.wait(&a1), p.wait(&a2), p.wait(&second));
        p.us(1_000_000);
        if p.dst.get(0, 100).unwrap() != [0; 100] {
            bad.push((seed, acked, r));
        }
    }
    assert!(bad.is_empty(), "{} of 50: {:?}", bad.len(), bad[0]);
}

#[test]
fn a_message_on_a_broken_last_link_is_not_a_lost_peer() {
    let mut p = pair(config(1), (1, 1));
    let sent =
        p.a.submit(&[Op::Send { peer: p.imported.peer(), message: &[1; 100] }], Submit::default())
            .unwrap();
    let id = p.a.id();
    p.net.plug(id, 0, false);
    p.net.plug(id, 0, true);
    let r = p.wait(&sent);
    let w = p.write(0, 100, None);
    assert_eq!(p.wait(&w), Ok(()));
    assert!(!matches!(r, Err(fabric_engine::EngineError::PeerLost { .. })), "{r:?}");
}

#[test]
fn a_first_write_with_latency_is_not_a_stall() {
    let config = SimConfig { window: 1000, delay: 30_000_000..31_000_000, ..config(1) };
    let mut p = pair(config, (2, 2));
    let before = p.posted(2);
    let mut handles = Vec::new();
    let mut at = p.net.now().0;
    for i in 0..100 {
        let rail = if i < 30 { Some(0) } else { None };
        let (src, dst) =
            (Local { region: &p.src, offset: 0 }, Remote { region: &p.imported, offset: 0 });
        handles.push(
            p.a.submit(
                &[Op::Write { src, dst, len: 1000, imm: None }],
                Submit { rail, ..Default::default() },
            )
            .unwrap(),
        );
        at += 2_000_000;
        p.until(at);
    }
    for h in &handles {
        assert_eq!(p.wait(h), Ok(()));
    }
    let after = p.posted(2);
    let n: u64 = after.iter().zip(&before).map(|(a, b)| a - b).sum();
    assert_eq!(n, 100, "posted; extra posts mean that a healthy link was given up");
}

/// Pinned to a healthy rail whose round trip takes 30 ms.
#[test]
fn a_pinned_write_over_a_healthy_rail_with_latency() {
    let config = SimConfig { window: 1000, delay: 30_000_000..31_000_000, ..config(1) };
    let mut p = pair(config, (2, 2));
    let mut handles = Vec::new();
    let mut at = p.net.now().0;
    for i in 0..100 {
        let rail = if i == 30 { 1 } else { 0 };
        let (src, dst) =
            (Local { region: &p.src, offset: 0 }, Remote { region: &p.imported, offset: 0 });
        handles.push(
            p.a.submit(
                &[Op::Write { src, dst, len: 1000, imm: None }],
                Submit { rail: Some(rail), ..Default::default() },
            )
            .unwrap(),
        );
        at += 2_000_000;
        p.until(at);
    }
    for h in &handles {
        assert_eq!(p.wait(h), Ok(()));
    }
}

#[test]
fn mr_1_close_in_the_middle_does_not_promise_quiet() {
    let mut bad = Vec::new();
    for seed in 0..60u64 {
        let mut p = pair(config(seed), (2, 2));
        let done = p.write(0, 1 << 20, None);
        for _ in 0..seed {
            p.net.step();
        }
        if done.is_done() {
            continue;
        }
        p.a.close();
        let quiet = done.quiescence();
        let reused = vec![0xEE; 1 << 20];
        p.dst.put(0, &reused).unwrap();
        p.us(5_000_000);
        let landed = p.dst.get(0, 1 << 20).unwrap() != reused;
        if landed && quiet == fabric_engine::Quiescence::Quiesced {
            bad.push((seed, done.poll()));
        }
    }
    assert!(bad.is_empty(), "bytes landed after quiet: {} {:?}", bad.len(), bad[0]);
}

/// 64 MiB pinned to a rail of 10 Gb/s, small writes on the other.
#[test]
fn a_slow_healthy_rail_is_not_stalled() {
    let len = 64 << 20;
    let config = SimConfig {
        max_bytes: 1 << 30,
        window: 100,
        link_rate: Some(1.25),
        ordered: true,
        ..config(1)
    };
    let mut p = pair(config, (2, 2));
    let (src, dst) = (p.a.alloc(len).unwrap(), p.b.alloc(len).unwrap());
    let imported = p.a.import(&dst.descriptor()).unwrap();
    let (from, to) = (Local { region: &src, offset: 0 }, Remote { region: &imported, offset: 0 });
    let before = p.posted(2);
    let big =
        p.a.submit(
            &[Op::Write { src: from, dst: to, len, imm: None }],
            Submit { rail: Some(1), ..Default::default() },
        )
        .unwrap();
    let mut handles = Vec::new();
    let mut at = p.net.now().0;
    for _ in 0..60 {
        let op = Op::Write { src: from, dst: to, len: 1000, imm: None };
        handles.push(p.a.submit(&[op], Submit { rail: Some(0), ..Default::default() }).unwrap());
        at += 1_000_000;
        p.until(at);
    }
    assert_eq!(p.wait(&big), Ok(()));
    for h in &handles {
        assert_eq!(p.wait(h), Ok(()));
    }
    let n: Vec<u64> = p.posted(2).iter().zip(&before).map(|(a, b)| a - b).collect();
    // Each slice once.
    let slices = len.div_ceil(4 << 20);
    assert_eq!(n, [60, slices], "posted");
}

/// A rail goes silent without a report: its operations move to another rail long before the peer
/// timeout.
#[test]
fn a_rail_that_has_stalled_is_given_up() {
    for seed in 0..10 {
        let mut p = pair(config(seed), (2, 2));
        for _ in 0..30 {
            let done = p.write(0, 1 << 20, None);
            assert_eq!(p.wait(&done), Ok(()));
        }
        let counter = p.b.counter().unwrap();
        let done = p.write(0, 1 << 20, Some(counter.imm()));
        let duration = 1_500_000_000;
        p.net.inject(&Fault::Stall { node: 0, rail: 1, link_index: 0, duration });
        let start = p.net.now().0;
        // Other rails carry on meanwhile, which shows that the rail is at fault and not the peer.
        while !done.is_done() {
            assert!(p.net.now().0 < start + 100_000_000, "seed {seed}");
            let _ = p.write(0, 1000, Some(Imm::plain(7).unwrap()));
            p.us(1000);
        }
        assert_eq!(done.poll(), Some(Ok(())), "seed {seed}");
        p.us(3_000_000);
        assert_eq!(counter.arrived(), 1, "seed {seed}");
    }
}

#[test]
fn ic_3_a_small_write_on_a_broken_only_link_is_sent_again_and_counts_once() {
    for seed in 0..20 {
        let mut p = pair(config(seed), (1, 1));
        let counter = p.b.counter().unwrap();
        let written = p.write(0, 100, Some(counter.imm()));
        let id = p.a.id();
        p.net.plug(id, 0, false);
        p.net.plug(id, 0, true);
        assert_eq!(p.wait(&written), Ok(()), "seed {seed}");
        p.us(1_000_000);
        assert_eq!(counter.arrived(), 1, "seed {seed}");
    }
}
