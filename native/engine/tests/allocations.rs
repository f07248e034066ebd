//! No memory is allocated for a work request: what a request allocates doesn't grow with what it
//! posts.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::Duration,
};

use fabric_engine::{
    api::{EngineConfig, Imm, PageIndices, Pages, TransportKind},
    Local, Op, Region, Remote, RemoteRegion, ScatterDst, Submit, TransferEngine,
};

thread_local! {
    static MADE: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is the system allocator's; a counter is kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = MADE.try_with(|n| n.set(n.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread while `f` runs.
fn allocations(f: impl FnOnce()) -> u64 {
    let before = MADE.with(Cell::get);
    f();
    MADE.with(Cell::get) - before
}

fn open(name: &str) -> TransferEngine {
    let config = EngineConfig {
        name: name.into(),
        transports: vec![TransportKind::Null],
        ..Default::default()
    };
    TransferEngine::open(config).expect("a null engine opens")
}

fn reach(engine: &TransferEngine, src: &Region) -> RemoteRegion {
    let peer = open("peer");
    let region = peer.alloc(1 << 20).expect("memory");
    let dst = engine.import(&region.descriptor()).expect("a descriptor");
    submit(engine, &[write(src, &dst)]);
    dst
}

fn write<'a>(src: &'a Region, dst: &'a RemoteRegion) -> Op<'a> {
    let (src, dst) = (Local { region: src, offset: 0 }, Remote { region: dst, offset: 64 });
    Op::Write { src, dst, len: 8, imm: Some(Imm::plain(1).expect("small")) }
}

fn submit(engine: &TransferEngine, ops: &[Op<'_>]) {
    let handle = engine.submit(ops, Submit::default()).expect("a request");
    handle.wait(Duration::from_secs(5)).expect("in time").expect("done");
}

#[test]
fn a_work_request_allocates_nothing() {
    let engine = open("writer");
    let src = engine.alloc(1 << 20).expect("memory");
    let dst = reach(&engine, &src);

    let batch = |n: usize| {
        let ops: Vec<_> = (0..n).map(|_| write(&src, &dst)).collect();
        submit(&engine, &ops);
        allocations(|| submit(&engine, &ops))
    };
    assert_eq!(batch(16), batch(4096), "writes of a batch");

    let paged = |n: u32| {
        let list: Vec<u32> = (0..n).rev().collect();
        let pages = Pages::new(PageIndices::list(list).expect("fits"), 64, 0);
        let op = [Op::WritePages {
            page_len: 64,
            src: &src,
            src_pages: &pages,
            dst: &dst,
            dst_pages: &pages,
            imm: Some(Imm::plain(1).expect("small")),
        }];
        submit(&engine, &op);
        allocations(|| submit(&engine, &op))
    };
    assert_eq!(paged(16), paged(4096), "pages");

    let peers: Vec<_> = (0..63).map(|_| reach(&engine, &src)).collect();
    let scatter = |n: usize| {
        let part = |dst: &RemoteRegion| ScatterDst {
            len: 64,
            src_offset: 0,
            dst: dst.clone(),
            dst_offset: 0,
        };
        let parts: Vec<_> = peers[..n].iter().map(part).collect();
        let op = [Op::Scatter { group: None, src: &src, parts: &parts, imm: None }];
        submit(&engine, &op);
        allocations(|| submit(&engine, &op))
    };
    assert_eq!(scatter(2), scatter(63), "parts of a scatter");
}
