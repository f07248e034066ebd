use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::RegionDescriptor, EngineError, Grant, Handle, Local, Op, Region, Remote, RemoteRegion,
    Result, Submit, TransferEngine,
};

use crate::worlds::World;

const SOON: Duration = Duration::from_secs(60);

fn full(engine: &TransferEngine, n: u64) -> Region {
    let region = engine.alloc(n).unwrap();
    region.put(0, &vec![7; n as usize]).unwrap();
    region
}

fn import(at: &TransferEngine, descriptor: &RegionDescriptor) -> RemoteRegion {
    at.import(&RegionDescriptor::from_bytes(&descriptor.to_bytes()).unwrap()).unwrap()
}

fn submit(engine: &TransferEngine, src: &Region, dst: &RemoteRegion, len: u64) -> Result<Handle> {
    let (src, dst) = (Local { region: src, offset: 0 }, Remote { region: dst, offset: 0 });
    engine.submit(&[Op::Write { src, dst, len, imm: None }], Submit::default())
}

fn write(
    w: &mut dyn World,
    engine: &TransferEngine,
    src: &Region,
    dst: &RemoteRegion,
    len: u64,
) -> Result<()> {
    submit(engine, src, dst, len).and_then(|handle| w.wait(&handle))
}

pub fn mr_3_a_grant_reaches_no_further_than_its_part(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, memory) = (full(&a, 8192), b.alloc(3 * 4096).unwrap());
    let grant = memory.grant(4096, 4096, Grant::default()).unwrap();
    assert_eq!((grant.len(), grant.addr()), (4096, memory.addr() + 4096));
    assert_eq!(grant.is_mappable(), memory.is_mappable());
    assert_ne!(grant.descriptor().key, memory.descriptor().key);
    let honest = import(&a, &grant.descriptor());
    assert_eq!(write(w, &a, &src, &honest, 4096), Ok(()));
    memory.put(4096, &[0; 4096]).unwrap();
    // A descriptor with a forged end: its key covers the part alone.
    let longer = RegionDescriptor { len: 8192, ..grant.descriptor() };
    let longer = import(&a, &longer);
    let e = write(w, &a, &src, &longer, 8192).unwrap_err();
    assert!(matches!(e, EngineError::Refused { .. }), "{e}");
    w.idle();
    for beside in [0, 8192] {
        assert_eq!(memory.get(beside, 4096).unwrap(), [0; 4096], "bytes from {beside} on");
    }
    assert_eq!(write(w, &a, &src, &honest, 4096), Ok(()));
    for (offset, len) in [(0, 12_289), (12_288, 1), (u64::MAX, 2)] {
        let e = memory.grant(offset, len, Grant::default()).unwrap_err();
        assert!(matches!(e, EngineError::OutOfBounds { .. }), "{e}");
    }
    let none = Grant { ttl: Some(Duration::ZERO), ..Default::default() };
    for (len, terms) in [(0, Grant::default()), (1, none)] {
        let e = memory.grant(0, len, terms).unwrap_err();
        assert!(matches!(e, EngineError::Invalid(_)), "{e}");
    }
    // Offsets of a nested part are relative to the outer part.
    let inner = grant.slice(1024, 2048).unwrap().grant(512, 64, Grant::default()).unwrap();
    assert_eq!(inner.addr(), memory.addr() + 4096 + 1536);
    let imported = import(&a, &inner.descriptor());
    memory.put(0, &[0; 3 * 4096]).unwrap();
    assert_eq!(write(w, &a, &src, &imported, 64), Ok(()));
    let mut expected = vec![0; 3 * 4096];
    expected[4096 + 1536..4096 + 1600].fill(7);
    assert_eq!(memory.get(0, 3 * 4096).unwrap(), expected);
}

pub fn mr_3_a_grant_to_one_peer_is_refused_to_all_others(w: &mut dyn World) {
    if !w.sees_writers() {
        return;
    }
    let (a, b, c) = (w.engine("a"), w.engine("b"), w.engine("c"));
    let memory = b.alloc(4096).unwrap();
    let grant = memory.grant(0, 4096, Grant { peer: Some(a.id()), ttl: None }).unwrap();
    let (of_a, of_c) = (full(&a, 4096), full(&c, 4096));
    let (to_a, to_c) = (import(&a, &grant.descriptor()), import(&c, &grant.descriptor()));
    let e = write(w, &c, &of_c, &to_c, 64).unwrap_err();
    assert!(matches!(e, EngineError::Refused { .. }), "{e}");
    assert!(e.to_string().contains("granted to another engine"), "{e}");
    let read = Op::Read {
        src: Remote { region: &to_c, offset: 0 },
        dst: Local { region: &of_c, offset: 0 },
        len: 64,
    };
    let read = c.submit(&[read], Submit::default()).unwrap();
    let e = w.wait(&read).unwrap_err();
    assert!(matches!(e, EngineError::Refused { .. }), "{e}");
    w.idle();
    assert_eq!(memory.get(0, 4096).unwrap(), [0; 4096]);
    assert_eq!(write(w, &a, &of_a, &to_a, 4096), Ok(()));
    assert_eq!(memory.get(0, 4096).unwrap(), [7; 4096]);
    // The refused peer keeps its link and its own grants.
    let own = memory.grant(64, 64, Grant { peer: Some(c.id()), ttl: None }).unwrap();
    let own = import(&c, &own.descriptor());
    assert_eq!(write(w, &c, &of_c, &own, 64), Ok(()));
}

pub fn mr_2_a_grant_expires(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, memory) = (full(&a, 4096), b.alloc(8192).unwrap());
    let long = Grant { ttl: Some(Duration::from_secs(1 << 20)), ..Default::default() };
    let stays = memory.grant(4096, 4096, long).unwrap();
    let to_stay = import(&a, &stays.descriptor());
    let short = Grant { ttl: Some(Duration::from_millis(30)), ..Default::default() };
    let grant = memory.grant(0, 4096, short).unwrap();
    let imported = import(&a, &grant.descriptor());
    let mut last = Ok(());
    for _ in 0..1000 {
        last = write(w, &a, &src, &imported, 64);
        if last.is_err() {
            break;
        }
        w.idle();
    }
    assert!(last.is_err(), "a grant is valid after its expiry");
    let stale = |e: &EngineError| matches!(e, EngineError::Stale { .. });
    assert!(stale(last.as_ref().unwrap_err()), "{last:?}");
    // The grant has ended at the owner as well; a revocation has no effect.
    assert!(stale(&grant.get(0, 1).unwrap_err()));
    assert!(stale(&grant.grant(0, 1, Grant::default()).unwrap_err()));
    grant.deregister(SOON).unwrap();
    memory.put(0, &[0; 64]).unwrap();
    assert!(write(w, &a, &src, &imported, 64).is_err());
    w.idle();
    assert_eq!(memory.get(0, 64).unwrap(), [0; 64]);
    assert_eq!(write(w, &a, &src, &to_stay, 4096), Ok(()));
}

pub fn mr_2_a_nested_grant_gives_no_more_than_its_parent(w: &mut dyn World) {
    let (a, b, c) = (w.engine("a"), w.engine("b"), w.engine("c"));
    let memory = b.alloc(4096).unwrap();
    let for_a = Grant { peer: Some(a.id()), ttl: None };
    let first = memory.grant(0, 4096, for_a).unwrap();
    let to_another = Grant { peer: Some(c.id()), ttl: None };
    let e = first.grant(0, 64, to_another).unwrap_err();
    assert!(matches!(e, EngineError::Invalid(_)), "{e}");
    let (src, of_c) = (full(&a, 64), full(&c, 64));
    let second = first.grant(0, 64, Grant::default()).unwrap();
    if w.sees_writers() {
        let to_c = import(&c, &second.descriptor());
        let e = write(w, &c, &of_c, &to_c, 64).unwrap_err();
        assert!(matches!(e, EngineError::Refused { .. }), "{e}");
    }
    // It ends when the first grant would have, even if that one was dropped.
    let long = Grant { ttl: Some(Duration::from_secs(1 << 20)), ..for_a };
    let in_time = |ttl: Duration| {
        let first = memory.grant(0, 4096, Grant { ttl: Some(ttl), ..for_a })?;
        first.grant(0, 64, Grant::default())?.grant(0, 64, long)
    };
    let third = (5..20).find_map(|n| in_time(Duration::from_millis(1 << n)).ok()).unwrap();
    let imported = import(&a, &third.descriptor());
    let mut last = Ok(());
    for _ in 0..1000 {
        last = write(w, &a, &src, &imported, 64);
        if last.is_err() {
            break;
        }
        w.idle();
    }
    assert!(matches!(last, Err(EngineError::Stale { .. })), "{last:?}");
    assert!(third.get(0, 1).is_err());
}

pub fn mr_1_a_region_is_quiet_when_all_its_grants_are(w: &mut dyn World) {
    let (a, b) = (w.engine("a"), w.engine("b"));
    let n = w.large();
    let (src, memory) = (full(&a, n), b.alloc(n).unwrap());
    let look = || -> Vec<u8> {
        (0..n).step_by(n as usize / 1000).map(|at| memory.get(at, 1).unwrap()[0]).collect()
    };
    for round in 0..5 {
        memory.put(0, &vec![0; n as usize]).unwrap();
        let region = b.register_again(&memory).unwrap();
        let half = region.grant(0, n / 2, Grant::default()).unwrap();
        let grant = half.grant(0, n / 2, Grant::default()).unwrap();
        // It makes no difference whether the grants between them still exist.
        let half = Some(half).filter(|_| round % 2 == 0);
        w.idle();
        let imported = import(&a, &grant.descriptor());
        let handle = submit(&a, &src, &imported, n / 2).unwrap();
        w.until("the first bytes", &mut || {
            handle.drive();
            memory.get(0, 64).unwrap() != [0; 64] || handle.is_done()
        });
        region.deregister(SOON).unwrap();
        let quiet = look();
        let _ = w.wait(&handle);
        w.idle();
        assert!(look() == quiet, "something landed in round {round}");
        assert!(grant.get(0, 1).is_err());
        assert!(half.is_none_or(|half| half.get(0, 1).is_err()));
        assert!(write(w, &a, &src, &imported, 64).is_err());
    }
    // Revoking a grant ends the grants made from it, and no others.
    let middle = memory.grant(0, 64, Grant::default()).unwrap();
    let (own, other) = (middle.slice(0, 32).unwrap(), memory.slice(0, 32).unwrap());
    let [inner, beside] = [own, other].map(|of| of.grant(0, 32, Grant::default()).unwrap());
    let innermost = inner.grant(0, 8, Grant::default()).unwrap();
    drop(inner);
    w.idle();
    middle.deregister(SOON).unwrap();
    assert!(innermost.get(0, 1).is_err() && beside.get(0, 1).is_ok());
    // Without a revocation a grant outlives the grant it was made from, and keeps the memory.
    let region = full(&b, 4096);
    let grant = region.grant(0, 64, Grant::default()).unwrap();
    drop(region);
    w.idle();
    assert_eq!(grant.get(0, 64).unwrap(), [7; 64]);
    let imported = import(&a, &grant.descriptor());
    assert_eq!(write(w, &a, &src, &imported, 64), Ok(()));
    drop(grant);
    let b: Arc<TransferEngine> = b;
    w.until("the end of all registrations", &mut || b.stats().retiring == 0);
}
