//! Engines that must not let the kernel access memory which they didn't allocate: peers reach that
//! memory through staging windows, and all promises hold.

use std::sync::Arc;

use fabric_engine::{
    api::{EngineConfig, PageIndices, Pages, RegionDescriptor, TransportKind},
    EngineError, Grant, Local, Op, Region, Remote, Submit, TransferEngine,
};

use super::{open, TIMEOUT};

fn engine(transport: TransportKind) -> Arc<TransferEngine> {
    open(EngineConfig { transports: vec![transport], stage_foreign: true, ..Default::default() })
}

/// Registers memory allocated by the caller; the region keeps it alive.
fn foreign(engine: &TransferEngine, bytes: Vec<u8>) -> Region {
    let (addr, len) = (bytes.as_ptr() as usize, bytes.len() as u64);
    // SAFETY: the vector's buffer stays where it is for as long as the region keeps it.
    unsafe { engine.register(addr, len, Some(Box::new(bytes))) }.unwrap()
}

fn on_both(test: impl Fn(TransportKind)) {
    test(TransportKind::Shm);
    test(TransportKind::Tcp);
}

#[test]
fn writes_pages_and_reads_arrive_and_count() {
    on_both(|transport| {
        let (a, b) = (engine(transport), engine(transport));
        let n = 5 << 20;
        let bytes: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
        let src = foreign(&a, bytes.clone());
        let dst = foreign(&b, vec![0; n]);
        let counter = b.counter().unwrap();
        let peer = b.peer(a.address()).unwrap();
        let remote = a.import(&dst.descriptor()).unwrap();
        let expected = counter.expect(1, &[peer], TIMEOUT).unwrap();

        let write = Op::Write {
            src: Local { region: &src, offset: 3 },
            dst: Remote { region: &remote, offset: 1000 },
            len: 4 << 20,
            imm: Some(counter.imm()),
        };
        a.submit(&[write], Submit::default()).unwrap().wait(TIMEOUT).unwrap().unwrap();
        expected.wait(TIMEOUT).unwrap().unwrap();
        assert!(dst.get(1000, 4 << 20).unwrap() == bytes[3..3 + (4 << 20)]);
        assert_eq!(counter.arrived(), 1);
        let explanation = a.explain(remote.peer()).unwrap();
        let chosen = explanation.verdicts.iter().find(|v| v.chosen).unwrap();
        assert!(chosen.reason.contains("staged through a window"), "{}", chosen.reason);

        let order: Vec<u32> = (0..1200).rev().collect();
        let dst_pages = Pages::new(PageIndices::list(order).unwrap(), 100, 0);
        let src_pages = Pages::new(PageIndices::range(0, 1200).unwrap(), 100, 0);
        let pages = Op::WritePages {
            page_len: 100,
            src: &src,
            src_pages: &src_pages,
            dst: &remote,
            dst_pages: &dst_pages,
            imm: Some(counter.imm()),
        };
        a.submit(&[pages], Submit::default()).unwrap().wait(TIMEOUT).unwrap().unwrap();
        let all = counter.expect(1200, &[], TIMEOUT).unwrap();
        all.wait(TIMEOUT).unwrap().unwrap();
        for i in [0usize, 1, 700, 1199] {
            let at = (1199 - i) * 100;
            assert_eq!(dst.get(at as u64, 100).unwrap(), bytes[i * 100..i * 100 + 100]);
        }

        let back = foreign(&a, vec![0; n]);
        let read = Op::Read {
            src: Remote { region: &remote, offset: 0 },
            dst: Local { region: &back, offset: 0 },
            len: n as u64,
        };
        a.submit(&[read], Submit::default()).unwrap().wait(TIMEOUT).unwrap().unwrap();
        assert!(back.get(0, n as u64).unwrap() == dst.get(0, n as u64).unwrap());
    });
}

#[test]
fn mr_2_a_deregistered_region_is_stale() {
    on_both(|transport| {
        let (a, b) = (engine(transport), engine(transport));
        let (src, dst) = (foreign(&a, vec![1; 64]), foreign(&b, vec![0; 64]));
        let remote = a.import(&dst.descriptor()).unwrap();
        let write = || {
            let (src, dst) =
                (Local { region: &src, offset: 0 }, Remote { region: &remote, offset: 0 });
            let op = Op::Write { src, dst, len: 64, imm: None };
            a.submit(&[op], Submit::default()).unwrap().wait(TIMEOUT).unwrap()
        };
        write().unwrap();
        dst.deregister(TIMEOUT).unwrap();
        let e = write().unwrap_err();
        assert!(matches!(e, EngineError::Stale { .. }), "{e}");
    });
}

#[test]
fn mr_3_the_owner_of_staged_memory_keeps_its_bounds() {
    on_both(|transport| {
        let (a, b) = (engine(transport), engine(transport));
        let src = foreign(&a, vec![1; 8192]);
        let around = vec![0u8; 3 * 4096];
        // SAFETY: `around` outlives this registration, which ends below.
        let dst = unsafe { b.register(around.as_ptr() as usize + 4096, 4096, None) }.unwrap();
        let mut lie = dst.descriptor();
        lie.len = 8192;
        let remote = a.import(&lie).unwrap();
        let counter = b.counter().unwrap();
        let imm = Some(counter.imm());
        let (from, to) =
            (Local { region: &src, offset: 0 }, Remote { region: &remote, offset: 4095 });
        let pages = |first| Pages::new(PageIndices::range(first, 2).unwrap(), 1024, 0);
        let (within, across) = (pages(0), pages(3));
        let ops = [
            Op::Write { src: from, dst: to, len: 2, imm },
            Op::WritePages {
                page_len: 1024,
                src: &src,
                src_pages: &within,
                dst: &remote,
                dst_pages: &across,
                imm,
            },
            Op::Read { src: to, dst: from, len: 2 },
        ];
        for op in ops {
            let e = a.submit(&[op], Submit::default()).unwrap().wait(TIMEOUT).unwrap();
            assert!(matches!(e, Err(EngineError::Refused { .. })), "{e:?}");
        }
        dst.deregister(TIMEOUT).unwrap();
        assert_eq!(counter.poll().unwrap(), 0);
        assert!(around[..4096] == [0; 4096] && around[8192..] == [0; 4096]);
    });
}

#[test]
fn rs_4_a_closed_peer_ends_staged_transfers() {
    on_both(|transport| {
        let (a, b) = (engine(transport), engine(transport));
        let (src, dst) = (foreign(&a, vec![1; 64 << 20]), foreign(&b, vec![0; 64 << 20]));
        let remote = a.import(&dst.descriptor()).unwrap();
        let op = || Op::Write {
            src: Local { region: &src, offset: 0 },
            dst: Remote { region: &remote, offset: 0 },
            len: 64 << 20,
            imm: None,
        };
        let handles: Vec<_> =
            (0..8).map(|_| a.submit(&[op()], Submit::default()).unwrap()).collect();
        b.close();
        for handle in handles {
            let end = handle.wait(TIMEOUT).expect("the handle ends");
            assert!(
                matches!(
                    end,
                    Ok(()) | Err(EngineError::PeerLost { .. } | EngineError::Unreachable { .. })
                ),
                "{end:?}"
            );
        }
        src.deregister(TIMEOUT).unwrap();
    });
}

#[test]
fn mr_3_staged_memory_granted_to_one_peer_is_refused_to_all_others() {
    on_both(|transport| {
        let (a, b, c) = (engine(transport), engine(transport), engine(transport));
        let memory = foreign(&b, vec![0; 4096]);
        let grant =
            memory.grant(1024, 64, Grant { peer: Some(a.id()), ..Default::default() }).unwrap();
        let write = |by: &TransferEngine, len| {
            let src = foreign(by, vec![1; 4096]);
            let imported = RegionDescriptor { len, ..grant.descriptor() };
            let remote = by.import(&imported).unwrap();
            let (src, dst) =
                (Local { region: &src, offset: 0 }, Remote { region: &remote, offset: 0 });
            let op = Op::Write { src, dst, len, imm: None };
            by.submit(&[op], Submit::default()).unwrap().wait(TIMEOUT).unwrap()
        };
        for (by, len) in [(&c, 64), (&a, 65)] {
            let e = write(by, len).unwrap_err();
            assert!(matches!(e, EngineError::Refused { .. }), "{e}");
        }
        assert_eq!(memory.get(0, 4096).unwrap(), [0; 4096]);
        write(&a, 64).unwrap();
        assert_eq!(memory.get(1024, 64).unwrap(), [1; 64]);
        memory.deregister(TIMEOUT).unwrap();
        let e = write(&a, 64).unwrap_err();
        assert!(matches!(e, EngineError::Stale { .. }), "{e}");
    });
}
