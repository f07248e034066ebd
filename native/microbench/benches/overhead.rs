//! What the engine itself costs: requests over a link to nowhere.

use std::time::Duration;

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use fabric_engine::{
    api::{EngineConfig, Imm, PageIndices, Pages, TransportKind},
    Local, Op, Region, Remote, RemoteRegion, ScatterDst, Submit, TransferEngine,
};

struct Nowhere {
    engine: TransferEngine,
    src: Region,
    dst: RemoteRegion,
    imm: Imm,
}

fn nowhere(peers: usize) -> (Nowhere, Vec<ScatterDst>) {
    let open = |name: &str| {
        TransferEngine::open(EngineConfig {
            name: name.into(),
            transports: vec![TransportKind::Null],
            ..Default::default()
        })
        .expect("a null engine opens")
    };
    let engine = open("writer");
    let src = engine.alloc(1 << 20).expect("memory");
    let mut parts = Vec::new();
    for _ in 0..peers {
        let peer = open("peer");
        let region = peer.alloc(1 << 20).expect("memory");
        let dst = engine.import(&region.descriptor()).expect("a descriptor");
        let write = Op::Write {
            src: Local { region: &src, offset: 0 },
            dst: Remote { region: &dst, offset: 0 },
            len: 8,
            imm: None,
        };
        let connected = engine.submit(&[write], Submit::default()).expect("a write");
        connected.wait(Duration::from_secs(5)).expect("in time").expect("connected");
        parts.push(ScatterDst { len: 64, src_offset: 0, dst, dst_offset: 0 });
    }
    let imm = Imm::plain(1).expect("small");
    (Nowhere { engine, src, dst: parts[0].dst.clone(), imm }, parts)
}

fn overhead(c: &mut Criterion) {
    let (n, parts) = nowhere(63);
    let write = || Op::Write {
        src: Local { region: &n.src, offset: 0 },
        dst: Remote { region: &n.dst, offset: 64 },
        len: 8,
        imm: Some(n.imm),
    };
    // Posting to the null link is done when submit returns: this is submit to first post and back.
    c.bench_function("write: submit, post, complete", |b| {
        b.iter(|| n.engine.submit(&[write()], Submit::default()));
    });
    let mut group = c.benchmark_group("per work request");
    for count in [16usize, 1024] {
        let ops: Vec<_> = (0..count).map(|_| write()).collect();
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(format!("batch of {count} writes"), |b| {
            b.iter(|| n.engine.submit(&ops, Submit::default()));
        });
        let list: Vec<u32> = (0..count as u32).rev().collect();
        let pages = Pages::new(PageIndices::list(list).expect("fits"), 64, 0);
        let paged = [Op::WritePages {
            page_len: 64,
            src: &n.src,
            src_pages: &pages,
            dst: &n.dst,
            dst_pages: &pages,
            imm: Some(n.imm),
        }];
        group.bench_function(format!("paged write of {count} pages"), |b| {
            b.iter(|| n.engine.submit(&paged, Submit::default()));
        });
    }
    group.finish();
    let scatter = [Op::Scatter { group: None, src: &n.src, parts: &parts, imm: Some(n.imm) }];
    c.bench_function("scatter to 63 peers", |b| {
        b.iter(|| n.engine.submit(&scatter, Submit::default()));
    });
}

criterion_group!(benches, overhead);
criterion_main!(benches);
