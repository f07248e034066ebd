//! What it costs a rank to post what it sends in one dispatch, a block of routes and rows to each
//! peer (fabric-lib, Table 9): over a link to nowhere, where all is the engine's and the
//! exchange's, and over simulated links. Beside each the floor: as many writes, as long, by one
//! request to the engine.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use criterion::{criterion_group, criterion_main, Criterion};
use fabric_engine::{
    api::{EngineConfig, Imm, TransportKind},
    simulation::SimNet,
    transport::sim::SimConfig,
    Local, Op, Region, Remote, RemoteRegion, Submit, TransferEngine,
};
use fabric_moe::{
    kernels::{Float, Part, PartMut},
    routes::Order,
    AllToAll, AnswerFormat, Shape,
};

const PEERS: [u32; 4] = [7, 15, 31, 63];
/// Rows for each rank, and what they are long: so little to pack that posting is what takes time.
const ROWS: u32 = 2;
const WIDTH: u32 = 128;

fn shape(peers: u32) -> Shape {
    Shape {
        ranks: peers + 1,
        experts: peers + 1,
        topk: 1,
        max_tokens: ROWS * (peers + 1),
        row_nbytes: WIDTH,
        back: AnswerFormat { elements: 32, float: Float::F32 },
        private_rows: ROWS,
        shared_rows: None,
    }
}

/// Two tokens for the expert of each rank.
fn indices(shape: &Shape) -> Vec<i64> {
    (0..shape.max_tokens).map(|token| i64::from(token % shape.ranks)).collect()
}

fn dispatch(all: &AllToAll, tokens: &[u8], indices: &[i64]) -> Duration {
    let width = WIDTH as usize;
    let part = Part { bytes: tokens, stride: width, width };
    let begun = Instant::now();
    all.dispatch_send(&[part], indices).expect("a dispatch");
    begun.elapsed()
}

/// Where the floor's writes go: each peer's memory, as a rank of an exchange has it.
struct Floor {
    src: Region,
    there: Vec<RemoteRegion>,
    _theirs: Vec<Region>,
}

impl Floor {
    fn new(engine: &TransferEngine, peers: &[Arc<TransferEngine>]) -> Self {
        let descriptor: Vec<Region> =
            peers.iter().map(|p| p.alloc(1 << 16).expect("memory")).collect();
        let reach = |region: &Region| engine.import(&region.descriptor()).expect("a descriptor");
        let there = descriptor.iter().map(reach).collect();
        Self { src: engine.alloc(1 << 16).expect("memory"), there, _theirs: descriptor }
    }

    /// To each peer as many bytes as a block of routes has, and as its rows have.
    fn ops(&self) -> Vec<Op<'_>> {
        let write = |dst, len| Op::Write {
            src: Local { region: &self.src, offset: 0 },
            dst: Remote { region: dst, offset: 64 },
            len,
            imm: Some(Imm::plain(1).expect("small")),
        };
        let both = |dst| [write(dst, 32), write(dst, u64::from(ROWS * WIDTH))];
        self.there.iter().flat_map(both).collect()
    }

    fn post(&self, engine: &TransferEngine, ops: &[Op<'_>]) -> Duration {
        let begun = Instant::now();
        engine.submit(ops, Submit::default()).expect("writes");
        begun.elapsed()
    }
}

fn null_engine(name: &str) -> Arc<TransferEngine> {
    let transports = vec![TransportKind::Null];
    let config = EngineConfig { name: name.into(), transports, ..EngineConfig::default() };
    Arc::new(TransferEngine::open(config).expect("a null engine"))
}

/// A rank whose writes go nowhere. No answer comes, so each dispatch is that of a new exchange, to
/// the same engines.
fn nowhere(c: &mut Criterion) {
    let mut group = c.benchmark_group("post to nowhere");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_millis(300));
    group.sample_size(30);
    for n in PEERS {
        let shape = shape(n);
        let (tokens, indices) = (vec![7u8; (shape.max_tokens * WIDTH) as usize], indices(&shape));
        let engine = null_engine("writer");
        let engines: Vec<_> = (0..n).map(|_| null_engine("peer")).collect();
        let rank = |(i, e): (usize, &Arc<TransferEngine>)| {
            AllToAll::new(Arc::clone(e), shape, i as u32 + 1).expect("a rank")
        };
        let others: Vec<AllToAll> = engines.iter().enumerate().map(rank).collect();
        let descriptors: Vec<_> =
            others.iter().map(|o| o.descriptor(Some(0)).expect("a descriptor")).collect();
        let floor = Floor::new(&engine, &engines);
        let ops = floor.ops();
        let connected = engine.submit(&ops, Submit::default()).expect("writes");
        connected.wait(Duration::from_secs(5)).expect("in time").expect("connected");
        group.bench_function(format!("{n} peers, dispatch"), |b| {
            b.iter_custom(|iters| {
                let mut took = Duration::ZERO;
                for _ in 0..iters {
                    let all = AllToAll::new(Arc::clone(&engine), shape, 0).expect("a rank");
                    all.descriptor(None).expect("a descriptor");
                    for descriptor in &descriptors {
                        all.admit(descriptor).expect("a peer");
                    }
                    took += dispatch(&all, &tokens, &indices);
                }
                took
            });
        });
        group.bench_function(format!("{n} peers, floor"), |b| {
            b.iter_custom(|iters| (0..iters).map(|_| floor.post(&engine, &ops)).sum());
        });
    }
    group.finish();
}

/// Ranks on simulated NICs, which take turns to post.
struct Simulated {
    net: SimNet,
    engines: Vec<Arc<TransferEngine>>,
    ranks: Vec<AllToAll>,
    rows: Vec<u8>,
}

impl Simulated {
    fn new(shape: Shape) -> Self {
        let mut net = SimNet::new(SimConfig { window: 1 << 12, ..SimConfig::default() });
        let mut open = |_| net.engine(EngineConfig::default()).expect("an engine");
        let engines: Vec<_> = (0..shape.ranks).map(&mut open).collect();
        let rank = |(i, e): (usize, &Arc<TransferEngine>)| {
            AllToAll::new(Arc::clone(e), shape, i as u32).expect("a rank")
        };
        let ranks: Vec<AllToAll> = engines.iter().enumerate().map(rank).collect();
        let descriptors: Vec<_> =
            ranks.iter().map(|r| r.descriptor(None).expect("a descriptor")).collect();
        for (i, rank) in ranks.iter().enumerate() {
            for (_, descriptor) in descriptors.iter().enumerate().filter(|(j, _)| *j != i) {
                rank.admit(descriptor).expect("a peer");
            }
        }
        let rows = vec![0; (shape.max_tokens * WIDTH) as usize];
        let mut all = Self { net, engines, ranks, rows };
        all.settle();
        all
    }

    /// Lets all end that is under way.
    fn settle(&mut self) {
        let end = self.net.now().after(Duration::from_millis(1));
        self.net.run_until(end);
    }

    /// A dispatch of all ranks; what a rank's posting takes.
    fn dispatch(&mut self, tokens: &[u8], indices: &[i64]) -> Duration {
        let took: Duration = self.ranks.iter().map(|r| dispatch(r, tokens, indices)).sum();
        self.settle();
        let width = WIDTH as usize;
        for rank in &self.ranks {
            let placing = rank.arriving(Order::Packed { multiple: 1 }).expect("in turn");
            assert!(placing.is_some_and(|p| p.rows == u64::from(ROWS) * self.ranks.len() as u64));
            let out = PartMut { bytes: &mut self.rows, stride: width, width };
            assert!(rank.collect(&mut [out]).expect("in turn"), "all have come");
        }
        self.settle();
        took / self.ranks.len() as u32
    }
}

fn simulated(c: &mut Criterion) {
    let mut group = c.benchmark_group("post to simulated links");
    group.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_millis(10));
    group.sample_size(10);
    for n in PEERS {
        let shape = shape(n);
        let (tokens, indices) = (vec![7u8; (shape.max_tokens * WIDTH) as usize], indices(&shape));
        let mut sim = Simulated::new(shape);
        group.bench_function(format!("{n} peers, dispatch"), |b| {
            b.iter_custom(|iters| (0..iters).map(|_| sim.dispatch(&tokens, &indices)).sum());
        });
        let of = |i: usize| {
            let mut others = sim.engines.clone();
            let engine = others.remove(i);
            let floor = Floor::new(&engine, &others);
            (engine, floor)
        };
        let floors: Vec<_> = (0..sim.engines.len()).map(of).collect();
        group.bench_function(format!("{n} peers, floor"), |b| {
            b.iter_custom(|iters| {
                let mut took = Duration::ZERO;
                for _ in 0..iters {
                    for (engine, floor) in &floors {
                        took += floor.post(engine, &floor.ops());
                    }
                    sim.settle();
                }
                took / floors.len() as u32
            });
        });
    }
    group.finish();
}

criterion_group!(benches, nowhere, simulated);
criterion_main!(benches);
