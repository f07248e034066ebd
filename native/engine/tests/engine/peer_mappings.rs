//! Memory of a peer that a device stores to by itself.

use fabric_engine::{api::TransportKind, Local, Op, Remote, Submit};

use super::{engine, TIMEOUT};

#[test]
fn mr_3_a_part_of_a_region_opens_no_way_to_the_whole() {
    let (a, b) = (engine(TransportKind::Shm), engine(TransportKind::Shm));
    let (src, dst) = (a.alloc(64).unwrap(), b.alloc(4096).unwrap());
    let there = a.import(&dst.descriptor()).unwrap();
    let op = Op::Write {
        src: Local { region: &src, offset: 0 },
        dst: Remote { region: &there, offset: 0 },
        len: 64,
        imm: None,
    };
    let shown = a.prepare(&[op], Submit::default()).unwrap();
    assert_eq!(shown.wait(TIMEOUT), Some(Ok(())));
    for (offset, len) in [(0, 64), (64, 64), (64, 4032)] {
        let part = there.slice(offset, len).unwrap();
        let said = a.map_peer_region(&part, None).unwrap_err();
        assert!(said.contains("part of a region"), "{said}");
    }
    let guard = a.map_peer_region(&there, None).unwrap().begin_stores().unwrap();
    assert!(guard.address(0, 4096).is_some() && guard.address(0, 4097).is_none());
}
