//! Requests to an engine's own memory whose source and target overlap: refused, because their parts
//! are copied in no order.

use std::fs;

use fabric_engine::{
    api::{PageIndices, Pages, TransportKind},
    EngineError, FileOptions, Local, Op, Region, Remote, RemoteRegion, ScatterDst, Submit,
    TransferEngine,
};

use super::{engine, TestFolder, TIMEOUT};

const LEN: u64 = 6 << 20;
/// More than one chunk.
const PART: u64 = 4 << 20;

fn submit(engine: &TransferEngine, op: &Op<'_>) -> Result<(), EngineError> {
    let handle = engine.submit(std::slice::from_ref(op), Submit::default())?;
    handle.wait(TIMEOUT).expect("it ends")
}

/// A region with the bytes of `seed`, and itself as the engine's peers see it.
fn filled(engine: &TransferEngine, seed: u64) -> (Region, RemoteRegion, Vec<u8>) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let bytes: Vec<u8> = (0..LEN).map(|_| rng.u8(..)).collect();
    let region = engine.alloc(LEN).unwrap();
    region.put(0, &bytes).unwrap();
    let remote = engine.import(&region.descriptor()).unwrap();
    (region, remote, bytes)
}

fn refused(engine: &TransferEngine, op: &Op<'_>) {
    let e = submit(engine, op).unwrap_err();
    assert!(matches!(e, EngineError::Invalid(_)), "{e}");
    assert!(e.to_string().contains("overlap"), "{e}");
}

#[test]
fn rs_1_copies_within_a_region_are_whole_or_refused() {
    for transport in [TransportKind::Shm, TransportKind::Tcp, TransportKind::File] {
        let engine = engine(transport);
        let (region, remote, mut bytes) = filled(&engine, 1);
        for (from, to) in [(0, 1), (1, 0), (0, 1 << 20), (1 << 20, 0), (0, PART - 1)] {
            let len = PART.min(LEN - from.max(to));
            let src = Local { region: &region, offset: from };
            let dst = Remote { region: &remote, offset: to };
            let write = Op::Write { src, dst, len, imm: None };
            let src = Remote { region: &remote, offset: from };
            let dst = Local { region: &region, offset: to };
            for op in [write, Op::Read { src, dst, len }] {
                match from.abs_diff(to) < len {
                    true => refused(&engine, &op),
                    false => {
                        submit(&engine, &op).unwrap();
                        bytes.copy_within(from as usize..(from + len) as usize, to as usize);
                    }
                }
            }
            assert!(region.get(0, LEN).unwrap() == bytes, "{transport:?}: {from} to {to}");
        }
        // Views, and a second registration, are the same memory.
        let again = engine.register_again(&region).unwrap();
        let other = engine.import(&again.descriptor()).unwrap().slice(4096, PART).unwrap();
        let src = region.slice(0, PART).unwrap();
        let op = |src, dst| Op::Write {
            src: Local { region: src, offset: 0 },
            dst: Remote { region: dst, offset: 0 },
            len: PART,
            imm: None,
        };
        refused(&engine, &op(&src, &other));
        // Onto itself.
        let itself = engine.import(&again.descriptor()).unwrap();
        submit(&engine, &op(&src, &itself)).unwrap();
        assert!(region.get(0, LEN).unwrap() == bytes);
    }
}

#[test]
fn pages_may_change_places_within_a_region_and_may_not_overlap() {
    const PAGE: u64 = 1 << 16;
    let engine = engine(TransportKind::Shm);
    let (region, remote, mut bytes) = filled(&engine, 2);
    let list = |indices: &[u32]| Pages::new(PageIndices::list(indices).unwrap(), PAGE, 0);
    let shifted = |offset| Pages::new(PageIndices::range(0, 3).unwrap(), 2 * PAGE, offset);
    let page = |i: u32| i as usize * PAGE as usize..(i as usize + 1) * PAGE as usize;
    let moved: [(&[u32], &[u32]); 2] = [(&[0, 9, 4, 0], &[1, 8, 3, 5]), (&[2, 6], &[2, 7])];
    for (from, to) in moved {
        let op = Op::WritePages {
            page_len: PAGE,
            src: &region,
            src_pages: &list(from),
            dst: &remote,
            dst_pages: &list(to),
            imm: None,
        };
        submit(&engine, &op).unwrap();
        from.iter().zip(to).for_each(|(a, b)| bytes.copy_within(page(*a), page(*b).start));
        assert!(region.get(0, LEN).unwrap() == bytes);
    }
    for (from, to) in [
        (list(&[0, 1]), list(&[1, 2])),
        (list(&[0, 1]), list(&[1, 0])),
        (list(&[5, 6]), list(&[5, 5])),
        (shifted(0), shifted(1)),
        (shifted(0), shifted(PAGE - 1)),
    ] {
        let (src, dst) = (&region, &remote);
        let (src_pages, dst_pages) = (&from, &to);
        refused(
            &engine,
            &Op::WritePages { page_len: PAGE, src, src_pages, dst, dst_pages, imm: None },
        );
        let (src, dst) = (&remote, &region);
        refused(&engine, &Op::ReadPages { page_len: PAGE, src, src_pages, dst, dst_pages });
    }
    assert!(region.get(0, LEN).unwrap() == bytes);
}

#[test]
fn scatters_segments_and_files_may_not_overlap() {
    let engine = engine(TransportKind::Tcp);
    let (region, remote, _) = filled(&engine, 3);
    let part = |src_offset, dst_offset| ScatterDst {
        len: 4096,
        src_offset,
        dst: remote.clone(),
        dst_offset,
    };
    let scatter = |parts: &[ScatterDst]| {
        submit(&engine, &Op::Scatter { group: None, src: &region, parts, imm: None })
    };
    scatter(&[part(0, 8192), part(4096, 12288)]).unwrap();
    let e = scatter(&[part(0, 8192), part(8192, 16384)]).unwrap_err();
    assert!(e.to_string().contains("overlap"), "{e}");

    let folder = TestFolder::new();
    let path = folder.0.join("file");
    let link = folder.0.join("link");
    fs::write(&path, vec![7; LEN as usize]).unwrap();
    fs::hard_link(&path, &link).unwrap();
    let file = |path| engine.register_file(path, FileOptions::default()).unwrap();
    let (a, b) = (file(&path), file(&link));
    let remote = engine.import(&b.descriptor()).unwrap();
    let op = |from, to| Op::Write {
        src: Local { region: &a, offset: from },
        dst: Remote { region: &remote, offset: to },
        len: PART / 4,
        imm: None,
    };
    refused(&engine, &op(0, 4096));
    submit(&engine, &op(0, PART / 4)).unwrap();

    // Each piece alone is apart from where it goes.
    let segment = engine.segment(&[(0, region.slice(0, PART).unwrap()), (PART, a)]).unwrap();
    let remote = engine.open_segment(segment.descriptor()).unwrap();
    let pieces = segment.pieces(PART - (1 << 20), (&remote, PART), 2 << 20).unwrap();
    refused(&engine, &Op::WritePieces { pieces: &pieces, imm: None });
    refused(&engine, &Op::ReadPieces { pieces: &pieces });
    let pieces = segment.pieces(0, (&remote, PART), 2 << 20).unwrap();
    submit(&engine, &Op::WritePieces { pieces: &pieces, imm: None }).unwrap();
}
