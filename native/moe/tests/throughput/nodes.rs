//! Ranks as threads, over the transports of this machine, grouped into nodes.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use fabric_engine::{
    api::{EngineConfig, TransportKind},
    EngineError, Result, TransferEngine,
};
use fabric_moe::{
    kernels::Float,
    throughput::{
        device::{AtomicWords, QueueLayout},
        KernelMemory, Layout, Member, Spec, Throughput,
    },
};

use crate::grouped::{rows_of_answers, spec, sums, Batch, Handed, ORDERS};

pub fn open(spec: Spec, rank: u32, transport: TransportKind, timeout: Duration) -> Throughput {
    open_incarnation(spec, Member { rank, incarnation: 0 }, transport, timeout)
}

pub fn open_incarnation(
    spec: Spec,
    member: Member,
    transport: TransportKind,
    timeout: Duration,
) -> Throughput {
    let name = format!("rank-{}-{}", member.rank, member.incarnation);
    let config = EngineConfig { name, transports: vec![transport], ..EngineConfig::default() };
    Throughput::open(&config, spec, member, timeout).unwrap()
}

/// Ranks that know one another.
fn ranks(spec: Spec, transport: TransportKind, timeout: Duration) -> Vec<Throughput> {
    let ranks: Vec<_> = (0..spec.shape.ranks).map(|r| open(spec, r, transport, timeout)).collect();
    let descriptors: Vec<Vec<u8>> = ranks.iter().map(Throughput::descriptor).collect();
    for (i, rank) in ranks.iter().enumerate() {
        for (j, descriptor) in descriptors.iter().enumerate().filter(|(j, _)| *j != i) {
            assert_eq!(rank.admit(descriptor).unwrap(), j as u32);
        }
    }
    ranks
}

/// One exchange of one rank; returns the sums.
pub fn exchange(all: &Throughput, rank: u32, batch: &Batch, turn: usize) -> Result<Vec<f32>> {
    batch.with_parts(|parts, indices, weights| all.dispatch_send(parts, indices, weights))?;
    let placing = all.wait_arriving(ORDERS[turn % ORDERS.len()])?;
    let mut handed = Handed::room(placing.rows);
    all.dispatch_recv(&mut handed.parts())?;
    let answers = handed.answers(&all.spec(), rank, &placing);
    all.combine_send(rows_of_answers(&answers))?;
    sums(batch.tokens(), |out| all.combine_recv(out, Float::F32))
}

pub fn batch(spec: &Spec, rank: u32, turn: usize) -> Batch {
    let mut rng = fastrand::Rng::with_seed(turn as u64 * 64 + u64::from(rank));
    Batch::random(&mut rng, spec, (turn % 3 == 1).then_some(1))
}

fn all_sums_are_right(spec: Spec, transport: TransportKind, turns: usize) {
    let ranks = ranks(spec, transport, Duration::from_secs(60));
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            scope.spawn(move || {
                for turn in 0..turns {
                    let batch = batch(&spec, rank as u32, turn);
                    let sums = exchange(all, rank as u32, &batch, turn).unwrap();
                    assert_eq!(sums, batch.sums(), "rank {rank} in exchange {turn}");
                }
            });
        }
    });
}

#[test]
fn sums_are_those_of_the_order_over_shared_memory() {
    all_sums_are_right(spec(2, 2, 2, 4, 200), TransportKind::Shm, 12);
}

#[test]
fn sums_are_those_of_the_order_over_tcp() {
    all_sums_are_right(spec(2, 2, 2, 4, 100), TransportKind::Tcp, 8);
}

#[test]
fn several_proxy_threads_share_the_channels() {
    let spec = Spec { channels: 3, threads: 2, chunk: 8, ..spec(2, 1, 3, 3, 150) };
    all_sums_are_right(spec, TransportKind::Shm, 8);
}

#[test]
fn one_node_or_one_rank_is_enough() {
    all_sums_are_right(spec(1, 3, 2, 4, 40), TransportKind::Shm, 6);
    all_sums_are_right(spec(1, 1, 4, 2, 10), TransportKind::Shm, 4);
}

/// Rows that kernels move are not the host's to move, nor the other way round.
#[test]
fn calls_for_the_other_kind_of_exchange_are_refused() {
    fn refused<T: std::fmt::Debug>(call: Result<T>, word: &str) {
        let error = call.unwrap_err();
        let is_told = matches!(&error, EngineError::Invalid(text) if text.contains(word));
        assert!(is_told, "{error}");
    }
    let spec = spec(1, 1, 4, 2, 10);
    let config = EngineConfig { transports: vec![TransportKind::Shm], ..EngineConfig::default() };
    let engine = TransferEngine::open(config.clone()).unwrap();
    let region = engine.alloc(Layout::new(spec).unwrap().nbytes()).unwrap();
    let words = AtomicWords::allocate(QueueLayout::new(&spec, 1).unwrap().words);
    let timeout = Duration::from_secs(60);
    let memory = KernelMemory { region, words, workers: 1 };
    let on_kernels = Throughput::open_with_kernels(
        &config,
        spec,
        Member { rank: 0, incarnation: 0 },
        timeout,
        memory,
    )
    .unwrap();
    let batch = batch(&spec, 0, 0);
    batch.with_parts(|parts, indices, weights| {
        refused(on_kernels.dispatch_send(parts, indices, weights), "kernels move");
    });
    refused(on_kernels.dispatch_recv(&mut Handed::room(0).parts()), "kernels move");
    refused(on_kernels.combine_send(rows_of_answers(&[])), "kernels move");
    refused(sums(0, |out| on_kernels.combine_recv(out, Float::F32)), "kernels move");

    let on_host = open(spec, 0, TransportKind::Shm, timeout);
    refused(on_host.begin_work(), "no kernels");
    batch.with_parts(|_, indices, weights| {
        refused(on_host.kernel_dispatch_send(indices, weights), "no kernels");
    });
    refused(on_host.kernel_dispatch_recv(0), "no kernels");
    refused(on_host.kernel_combine_send(0), "no kernels");
    refused(on_host.kernel_combine_recv(), "no kernels");
    // Nothing was begun.
    assert_eq!(exchange(&on_host, 0, &batch, 0).unwrap(), batch.sums());
}

/// All remaining ranks report the loss once; then they continue without the rank.
#[test]
fn rs_4_a_rank_that_is_gone_is_named_by_all_others_and_left_out() {
    let spec = spec(2, 2, 2, 4, 40);
    let mut ranks = ranks(spec, TransportKind::Shm, Duration::from_secs(30));
    drop(ranks.remove(1));
    std::thread::scope(|scope| {
        // All are open until the last has its answer: one that left would be named too.
        for (rank, all) in [0, 2, 3].into_iter().zip(&ranks) {
            scope.spawn(move || {
                let error = exchange(all, rank, &batch(&spec, rank, 5), 5).unwrap_err();
                assert!(
                    matches!(&error, EngineError::PeerLost { peer, .. } if peer == "rank 1"),
                    "{error}"
                );
                assert_eq!(all.lost()[0].rank, 1);
                assert!(all.broken().is_none());
                for turn in 6..9 {
                    let batch = batch(&spec, rank, turn);
                    let here = [true, false, true, true];
                    assert_eq!(exchange(all, rank, &batch, turn).unwrap(), batch.sums_of(&here));
                    assert_eq!(all.present(), here);
                    assert_eq!(all.left_out(), batch.missing(&here));
                }
            });
        }
    });
}

#[test]
fn a_rank_that_never_came_is_left_out_by_all() {
    let spec = spec(1, 3, 2, 4, 20);
    let timeout = Duration::from_secs(30);
    let ranks: Vec<_> = (0..2).map(|r| open(spec, r, TransportKind::Shm, timeout)).collect();
    for (one, other) in [(0, 1), (1, 0)] {
        ranks[one].admit(&ranks[other].descriptor()).unwrap();
        ranks[one].leave_out(2).unwrap();
    }
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            scope.spawn(move || {
                let batch = batch(&spec, rank as u32, 0);
                let here = [true, true, false];
                let sums = exchange(all, rank as u32, &batch, 0).unwrap();
                assert_eq!(sums, batch.sums_of(&here));
            });
        }
    });
}

/// The one before it is masked, and incarnations: what it writes might land.
#[test]
fn mr_1_a_rank_comes_anew_only_when_the_one_before_it_has_ended() {
    let spec = spec(1, 2, 2, 2, 8);
    let mut ranks = ranks(spec, TransportKind::Shm, Duration::from_millis(100));
    let old = ranks.pop().unwrap();
    let all = &ranks[0];
    all.mask(1, "it is slow").unwrap();
    let config = EngineConfig { transports: vec![TransportKind::Shm], ..EngineConfig::default() };
    let again = |incarnation| {
        let member = Member { rank: 1, incarnation };
        Throughput::open(&config, spec, member, Duration::from_secs(30)).unwrap()
    };
    let anew = again(1);
    assert!(matches!(all.admit(&anew.descriptor()), Err(EngineError::NotQuiesced { .. })));
    drop(old);
    all.set_timeout(Duration::from_secs(30));
    let said = all.admit(&again(0).descriptor()).unwrap_err().to_string();
    assert!(said.contains("incarnation=1"), "{said}");
    anew.admit(&all.descriptor()).unwrap();
    all.admit(&anew.descriptor()).unwrap();
    assert!(all.lost().is_empty());
    // The mask is told, once.
    let told = exchange(all, 0, &batch(&spec, 0, 0), 0).unwrap_err().to_string();
    assert!(told.contains("it is slow"), "{told}");
    std::thread::scope(|scope| {
        for (rank, all) in [(0, all), (1, &anew)] {
            scope.spawn(move || {
                let batch = batch(&spec, rank, 1);
                assert_eq!(exchange(all, rank, &batch, 1).unwrap(), batch.sums());
            });
        }
    });
}

#[test]
fn a_rank_is_masked_and_asked_after_while_a_call_waits_for_it() {
    let spec = spec(2, 1, 2, 2, 8);
    let ranks = ranks(spec, TransportKind::Shm, Duration::from_secs(10));
    let all = &ranks[0];
    batch(&spec, 0, 0).with_parts(|p, i, w| all.dispatch_send(p, i, w)).unwrap();
    std::thread::scope(|scope| {
        let busy = |error: &EngineError| error.to_string().contains("another thread is in a call");
        let call = scope.spawn(move || loop {
            let error = all.wait_arriving(ORDERS[0]).unwrap_err();
            if !busy(&error) {
                return error;
            }
        });
        // Out of turn until the other is in its call.
        while !busy(&all.combine_send(rows_of_answers(&[])).unwrap_err()) {
            std::thread::yield_now();
        }
        assert!(all.broken().is_none());
        assert_eq!(all.spec(), spec);
        all.mask(1, "its node is gone").unwrap();
        let error = call.join().unwrap().to_string();
        assert!(error.contains("rank 1 ") && error.contains("its node is gone"), "{error}");
    });
    assert_eq!(all.lost()[0].cause, "its node is gone");
}

#[test]
fn reading_losses_blocks_no_call() {
    let spec = spec(1, 2, 2, 2, 8);
    let ranks = ranks(spec, TransportKind::Shm, Duration::from_secs(60));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Relaxed) {
                assert!(ranks[0].broken().is_none());
                let _ = ranks[0].traffic();
            }
        });
        let calls = |(rank, all): (usize, &Throughput)| {
            for turn in 0..20 {
                let batch = batch(&spec, rank as u32, turn);
                assert_eq!(exchange(all, rank as u32, &batch, turn).unwrap(), batch.sums());
            }
        };
        let calls: Vec<_> =
            ranks.iter().enumerate().map(|one| scope.spawn(move || calls(one))).collect();
        let ends: Vec<_> = calls.into_iter().map(|c| c.join()).collect();
        over.store(true, Relaxed);
        ends.into_iter().for_each(|end| end.unwrap());
    });
}

#[test]
fn descriptors_of_another_shape_are_refused() {
    let shape = spec(2, 1, 2, 2, 4);
    let timeout = Duration::from_secs(10);
    let one = open(shape, 0, TransportKind::Shm, timeout);
    let other = open(Spec { chunk: 9, ..shape }, 1, TransportKind::Shm, timeout);
    let said = |e: EngineError| e.to_string();
    assert!(said(one.admit(&other.descriptor()).unwrap_err()).contains("chunk: 9"));
    assert!(said(one.admit(&one.descriptor()).unwrap_err()).contains("already"));
    assert!(said(one.admit(b"FET\x09rest").unwrap_err()).contains("version 9"));
    assert!(said(one.admit(b"what").unwrap_err()).contains("begin"));
    let absent = batch(&shape, 0, 0).with_parts(|p, i, w| one.dispatch_send(p, i, w)).unwrap_err();
    assert!(said(absent).contains("rank 1 is not connected"));
}
