//! Segments: one address space over memory and files, with local and remote parts.

use std::fs;

use fabric_engine::{
    api::{PartLocation, SegmentDescriptor, TransportKind},
    EngineError, FileOptions, Op, Region, Segment, Submit, TransferEngine,
};

use super::{engine, TestFolder, TIMEOUT};

impl TestFolder {
    fn region(&self, engine: &TransferEngine, name: &str, len: u64) -> Region {
        let options = FileOptions { len: Some(len), create: true, ..Default::default() };
        engine.register_file(&self.0.join(name), options).unwrap()
    }
}

/// Memory and files in turn, of odd lengths.
fn mixed(
    engine: &TransferEngine,
    folder: &TestFolder,
    name: &str,
    total: u64,
    seed: u64,
) -> Segment {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut parts, mut at) = (Vec::new(), 0);
    while at < total {
        let len = rng.u64(1..total / 3).min(total - at);
        let region = match parts.len() % 2 {
            0 => engine.alloc(len).unwrap(),
            _ => folder.region(engine, &format!("{name}{at}"), len),
        };
        parts.push((at, region));
        at += len;
    }
    engine.segment(&parts).unwrap()
}

fn done(engine: &TransferEngine, ops: &[Op<'_>]) -> Result<(), EngineError> {
    engine.submit(ops, Submit::default()).unwrap().wait(TIMEOUT).expect("it ends")
}

/// Writes a vector to a range of the engine's own segment, or reads it.
fn own(engine: &TransferEngine, segment: &Segment, offset: u64, bytes: &mut [u8], into: bool) {
    let buffer = engine.alloc(bytes.len() as u64).unwrap();
    buffer.put(0, bytes).unwrap();
    let memory = engine.segment(&[(0, buffer.clone())]).unwrap();
    let remote = engine.open_segment(segment.descriptor()).unwrap();
    let pieces = memory.pieces(0, (&remote, offset), bytes.len() as u64).unwrap();
    match into {
        true => done(engine, &[Op::WritePieces { pieces: &pieces, imm: None }]).unwrap(),
        false => done(engine, &[Op::ReadPieces { pieces: &pieces }]).unwrap(),
    }
    bytes.copy_from_slice(&buffer.get(0, bytes.len() as u64).unwrap());
}

#[test]
fn ic_1_random_ranges_over_memory_and_files_arrive_whole_and_count_one_each() {
    const N: u64 = 3_000_000;
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let folder = TestFolder::new();
        let (a, b) = (engine(transport), engine(transport));
        let mut rng = fastrand::Rng::with_seed(11);
        let (here, there) = (mixed(&a, &folder, "a", N, 1), mixed(&b, &folder, "b", N, 2));
        let mut bytes: Vec<u8> = (0..N).map(|_| rng.u8(..)).collect();
        let mut expected = vec![0; N as usize];
        own(&a, &here, 0, &mut bytes, true);
        let sent = SegmentDescriptor::from_bytes(&there.descriptor().to_bytes()).unwrap();
        let remote = a.open_segment(&sent).unwrap();
        let counter = b.counter().unwrap();
        for round in 1..=12u64 {
            let len = rng.u64(1..N / 2);
            let (from, to) = (rng.u64(..N - len), rng.u64(..N - len));
            let pieces = here.pieces(from, (&remote, to), len).unwrap();
            let arrived = counter.expect(1, &[], TIMEOUT).unwrap();
            let op = Op::WritePieces { pieces: &pieces, imm: Some(counter.imm()) };
            let handle = a.submit(&[op], Submit::default()).unwrap();
            arrived.wait(TIMEOUT).unwrap().unwrap();
            // IC-2: the bytes are readable once the count is seen.
            let (from, to, len) = (from as usize, to as usize, len as usize);
            expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
            let mut got = vec![0; N as usize];
            own(&b, &there, 0, &mut got, false);
            assert!(got == expected, "{transport}, round {round}");
            handle.wait(TIMEOUT).unwrap().unwrap();
            assert_eq!(counter.arrived(), round);
            let pieces = here.pieces(from as u64, (&remote, to as u64), len as u64).unwrap();
            done(&a, &[Op::ReadPieces { pieces: &pieces }]).unwrap();
        }
    }
}

#[test]
fn rs_1_a_piece_that_fails_leaves_the_whole_write_uncounted() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let folder = TestFolder::new();
        let (a, b) = (engine(transport), engine(transport));
        let frozen = folder.0.join("frozen");
        fs::write(&frozen, [0; 1000]).unwrap();
        let options = FileOptions { writable: false, ..Default::default() };
        let frozen = b.register_file(&frozen, options).unwrap();
        let memory = b.alloc(1000).unwrap();
        let there = b.segment(&[(0, memory.clone()), (1000, frozen), (2000, memory)]).unwrap();
        let remote = a.open_segment(there.descriptor()).unwrap();
        let here = a.segment(&[(0, a.alloc(3000).unwrap())]).unwrap();
        let counter = b.counter().unwrap();
        let pieces = here.pieces(0, (&remote, 0), 3000).unwrap();
        assert_eq!(pieces.len(), 3);
        let op = Op::WritePieces { pieces: &pieces, imm: Some(counter.imm()) };
        let e = done(&a, &[op]).unwrap_err();
        assert!(e.to_string().contains("frozen"), "{e}");
        // A write that doesn't touch the file succeeds, and is the first to count.
        let pieces = here.pieces(0, (&remote, 0), 1000).unwrap();
        let op = Op::WritePieces { pieces: &pieces, imm: Some(counter.imm()) };
        done(&a, &[op]).unwrap();
        counter.expect(1, &[], TIMEOUT).unwrap().wait(TIMEOUT).unwrap().unwrap();
        assert_eq!(counter.arrived(), 1);
    }
}

#[test]
fn a_descriptor_names_location_and_transports_of_each_part() {
    let folder = TestFolder::new();
    let engine = engine(TransportKind::Tcp);
    let parts = [(0, engine.alloc(100).unwrap()), (500, folder.region(&engine, "part", 200))];
    let segment = engine.segment(&parts).unwrap();
    let said = segment.descriptor();
    assert_eq!(said.len(), 700);
    assert!(matches!(said.parts[0].location, PartLocation::Host { .. }));
    assert_eq!(said.parts[1].location, PartLocation::File);
    for part in &said.parts {
        assert_eq!(part.transports, [TransportKind::Tcp]);
    }
    let own = engine.open_segment(said).unwrap();
    let e = segment.pieces(50, (&own, 0), 100).unwrap_err().to_string();
    assert!(e.contains("from byte 100 until 500"), "{e}");
}

#[test]
fn the_path_of_each_piece_is_described() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let folder = TestFolder::new();
        let (a, b) = (engine(transport), engine(transport));
        let two = |engine: &TransferEngine, name| {
            let file = folder.region(engine, name, 1000);
            engine.segment(&[(0, engine.alloc(1000).unwrap()), (1000, file)]).unwrap()
        };
        let (here, there) = (two(&a, "here"), two(&b, "there"));
        let remote = a.open_segment(there.descriptor()).unwrap();
        let pieces = here.pieces(0, (&remote, 500), 1500).unwrap();
        let op = [Op::WritePieces { pieces: &pieces, imm: None }];
        let before = a.paths(&op).unwrap();
        assert!(before
            .iter()
            .all(|p| p.transport.is_none() && p.description.contains("not connected")));
        done(&a, &op).unwrap();
        let paths = a.paths(&op).unwrap();
        let told: Vec<_> =
            paths.iter().map(|p| (p.bytes, &*p.remote, p.description.as_str())).collect();
        let name = transport.name();
        assert_eq!(
            told,
            [
                (500, "host", &*format!("direct over {name}")),
                (500, "file", &*format!("over {name}, staged through host memory at the peer")),
                (500, "file", &*format!("over {name}, staged through host memory at both ends")),
            ]
        );
        let own = a.open_segment(here.descriptor()).unwrap();
        let pieces = here.pieces(0, (&own, 1000), 1000).unwrap();
        let op = [Op::WritePieces { pieces: &pieces, imm: None }];
        done(&a, &op).unwrap();
        assert!(a.paths(&op).unwrap()[0].description.contains("without staging"));
    }
}

#[test]
fn invalid_segments_are_refused() {
    let (a, b) = (engine(TransportKind::Shm), engine(TransportKind::Shm));
    let (one, two) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    assert!(a.segment(&[]).is_err());
    let e = a.segment(&[(0, one.clone()), (10, one.clone())]).unwrap_err().to_string();
    assert!(e.contains("without overlap"), "{e}");
    let e = a.segment(&[(0, two.clone())]).unwrap_err().to_string();
    assert!(e.contains("another engine"), "{e}");
    // All pieces of one write must be of one peer.
    let here = a.segment(&[(0, one)]).unwrap();
    let peers = [&a, &b].map(|e| e.segment(&[(0, e.alloc(64).unwrap())]).unwrap());
    let opened = peers.each_ref().map(|s| a.open_segment(s.descriptor()).unwrap());
    let pieces: Vec<_> = opened.iter().flat_map(|r| here.pieces(0, (r, 0), 64).unwrap()).collect();
    let op = Op::WritePieces { pieces: &pieces, imm: None };
    let e = a.submit(&[op], Submit::default()).unwrap_err().to_string();
    assert!(e.contains("of one peer"), "{e}");
}
