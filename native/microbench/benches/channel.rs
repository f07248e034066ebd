//! What the channel costs: FIFOs between threads, and a command on its way to the engine's post.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        Arc,
    },
    thread,
    time::{Duration, Instant},
};

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use fabric_engine::{
    api::{EngineConfig, Imm, TransportKind},
    Local, Op, Region, Remote, RemoteRegion, Submit, Time, TransferEngine,
};
use fabric_proxy::{
    command::{Add, Command},
    fifo::{fifo, Popper, Pusher},
    Config, Executor, Parker, SharedState, ThreadDescriptor,
};

fn write(add: Option<Add>) -> Command {
    Command::Write { rank: 1, channel: 0, from: 0, to: 64, len: 64, add }
}

/// One pusher for each FIFO, one popper for all: commands that were pushed and completed in a time.
fn throughput(c: &mut Criterion) {
    const EACH: u64 = 200_000;
    let mut group = c.benchmark_group("fifo");
    group.sample_size(10);
    for channels in 1..=4u64 {
        group.throughput(Throughput::Elements(channels * EACH));
        group.bench_function(format!("{channels} channels"), |b| {
            b.iter_custom(|rounds| (0..rounds).map(|_| through(channels, EACH)).sum());
        });
    }
    group.finish();
}

fn through(channels: u64, each: u64) -> Duration {
    let parker = Arc::new(Parker::default());
    let (pushers, mut poppers): (Vec<Pusher>, Vec<Popper>) =
        (0..channels).map(|_| fifo(1024, Arc::clone(&parker)).expect("a power of two")).unzip();
    let begin = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = pushers
        .into_iter()
        .map(|pusher| {
            let begin = Arc::clone(&begin);
            thread::spawn(move || {
                while !begin.load(Relaxed) {
                    thread::yield_now();
                }
                for _ in 0..each {
                    pusher.push(&write(None)).expect("a command");
                }
            })
        })
        .collect();
    let mut left = channels * each;
    let start = Instant::now();
    begin.store(true, Relaxed);
    while left > 0 {
        let before = left;
        for popper in &mut poppers {
            let mut n = 0;
            while let Some(words) = popper.poll(n).filter(|_| n < 32) {
                std::hint::black_box(Command::decode(words).expect("what was pushed"));
                n += 1;
            }
            if n > 0 {
                popper.pop(n);
                left -= n;
            }
        }
        if left == before {
            thread::yield_now();
        }
    }
    let took = start.elapsed();
    threads.into_iter().for_each(|t| t.join().expect("a pusher"));
    took
}

/// From a push to the poll that sees it, one at a time: the half of a round trip between two
/// threads.
fn latency(_: &mut Criterion) {
    const ROUNDS: usize = 100_000;
    let parker = Arc::new(Parker::default());
    let (there, mut at_there) = fifo(64, Arc::clone(&parker)).expect("a power of two");
    let (back, mut at_back) = fifo(64, parker).expect("a power of two");
    let words = write(None).encode().expect("a command");
    let far = thread::spawn(move || {
        for _ in 0..ROUNDS {
            while at_there.poll(0).is_none() {
                std::hint::spin_loop();
            }
            at_there.pop(1);
            back.try_push_words(words).expect("room");
        }
    });
    let mut times: Vec<u64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            there.try_push_words(words).expect("room");
            while at_back.poll(0).is_none() {
                std::hint::spin_loop();
            }
            at_back.pop(1);
            start.elapsed().as_nanos() as u64 / 2
        })
        .collect();
    far.join().expect("the far end");
    times.sort_unstable();
    let at = |share: f64| times[((ROUNDS - 1) as f64 * share) as usize];
    println!("fifo/push to poll: p50 {} ns, p99 {} ns", at(0.5), at(0.99));
}

struct Nowhere {
    engine: Arc<TransferEngine>,
    part: Region,
    /// Of the peer, which does nothing but to be there.
    _peer: Executor,
    descriptor: ThreadDescriptor,
    there: RemoteRegion,
    executor: Executor,
    pusher: Pusher,
}

fn executor(rank: usize) -> (Arc<TransferEngine>, Region, Executor, Pusher) {
    let engine = TransferEngine::open(EngineConfig {
        name: format!("rank {rank}"),
        transports: vec![TransportKind::Null],
        ..Default::default()
    });
    let engine = Arc::new(engine.expect("a null engine opens"));
    let config = Config { rank, ranks: 2, ..Config::default() };
    let part = engine.alloc(1 << 20).expect("memory");
    let parker = Arc::new(Parker::default());
    let (pusher, popper) = fifo(1024, Arc::clone(&parker)).expect("a power of two");
    let executor = Executor::new(
        Arc::clone(&engine),
        part.clone(),
        &config,
        SharedState::new(&config),
        (parker, vec![popper]),
        Arc::new(|event| panic!("{event:?}")),
    );
    (engine, part, executor.expect("an executor"), pusher)
}

fn nowhere() -> Nowhere {
    let (engine, part, mut executor, pusher) = executor(0);
    let (_, _, peer, _) = self::executor(1);
    let descriptor = peer.descriptor();
    executor.membership().join(1, 1, descriptor.clone());
    let there = engine.import(&descriptor.memory).expect("a descriptor");
    // Connects.
    let first = pusher.push(&write(None)).expect("a command");
    while !pusher.is_complete(first) || executor.outstanding() > 0 {
        executor.step(Time::now());
    }
    Nowhere { engine, part, _peer: peer, descriptor, there, executor, pusher }
}

/// Writes by way of the executor, and the same writes submitted as the engine takes them: the
/// difference is what a command costs beyond its post.
fn command(c: &mut Criterion) {
    const BATCH: u64 = 32;
    let mut n = nowhere();
    assert_eq!(n.descriptor.memory.len, 1 << 20);
    let mut group = c.benchmark_group("command");
    group.throughput(Throughput::Elements(BATCH));
    group.bench_function("pushed, decoded and posted by 32", |b| {
        let words = write(None).encode().expect("a command");
        b.iter(|| {
            for _ in 0..BATCH {
                n.pusher.try_push_words(words).expect("room");
            }
            n.executor.step(Time::now());
        });
    });
    let imm = Some(Imm::plain(1).expect("small"));
    let op = Op::Write {
        src: Local { region: &n.part, offset: 0 },
        dst: Remote { region: &n.there, offset: 64 },
        len: 64,
        imm,
    };
    let ops: Vec<_> = (0..BATCH).map(|_| op.clone()).collect();
    group.bench_function("posted by 32", |b| {
        b.iter(|| n.engine.submit(&ops, Submit::default()));
    });
    group.bench_function("an empty step", |b| b.iter(|| n.executor.step(Time::now())));
    group.finish();
}

criterion_group!(benches, throughput, latency, command);
criterion_main!(benches);
