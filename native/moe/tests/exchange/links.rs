//! Ranks as threads, over the transports of this machine.

use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::{EngineConfig, NicConfig, TransportKind},
    Result, TransferEngine,
};
use fabric_moe::{
    kernels::{Part, PartMut},
    AllToAll, Shape,
};

use crate::model::{rows_of_answers, shape, sums, Batch, Handed, EXTRA, ORDERS, WIDE};

/// A rank's engine over one transport. `FABRIC_MOE_TRANSPORT` names another one; even ranks have
/// the NICs of `FABRIC_TEST_NICS_A`, odd ones those of `FABRIC_TEST_NICS_B`, if these are given.
fn engine(rank: u32, name: &str, transport: TransportKind) -> Arc<TransferEngine> {
    let transport = match std::env::var("FABRIC_MOE_TRANSPORT").as_deref() {
        Ok("verbs") => TransportKind::Verbs,
        Ok("libfabric") => TransportKind::Libfabric,
        Ok(other) => panic!("FABRIC_MOE_TRANSPORT names verbs or libfabric, not {other}"),
        Err(_) => transport,
    };
    let side = if rank.is_multiple_of(2) { "FABRIC_TEST_NICS_A" } else { "FABRIC_TEST_NICS_B" };
    let named = std::env::var(side).unwrap_or_default();
    let names = named.split(',').filter(|nic| !nic.is_empty()).map(str::to_owned).collect();
    let nics = NicConfig { names, ..NicConfig::default() };
    let (name, transports) = (name.to_owned(), vec![transport]);
    let config = EngineConfig { name, transports, nics, ..EngineConfig::default() };
    Arc::new(TransferEngine::open(config).unwrap())
}

/// Ranks that know one another.
fn ranks(shape: Shape, transport: TransportKind) -> Vec<AllToAll> {
    let open = |rank: u32| {
        let engine = engine(rank, &format!("rank-{rank}"), transport);
        AllToAll::new(engine, shape, rank).unwrap()
    };
    let ranks: Vec<AllToAll> = (0..shape.ranks).map(open).collect();
    let descriptors: Vec<Vec<u8>> = ranks.iter().map(|r| r.descriptor(None).unwrap()).collect();
    for (i, rank) in ranks.iter().enumerate() {
        for (j, descriptor) in descriptors.iter().enumerate().filter(|(j, _)| *j != i) {
            assert_eq!(rank.admit(descriptor).unwrap(), j as u32);
        }
    }
    ranks
}

/// One exchange of one rank; returns the sums.
pub fn exchange(all: &AllToAll, rank: u32, batch: &Batch, turn: usize) -> Result<Vec<f32>> {
    batch.send(all)?;
    let placing = all.wait_arriving(ORDERS[turn % ORDERS.len()])?;
    let mut handed = Handed::room(placing.rows);
    all.dispatch_recv(&mut handed.parts())?;
    let answers = handed.answers(all.shape(), rank, &placing.counts, &placing.starts);
    all.combine_send(rows_of_answers(&answers))?;
    Ok(sums(all, batch)?.0)
}

fn all_sums_are_right(shape: Shape, transport: TransportKind, rounds: usize, seed: u64) {
    let ranks = ranks(shape, transport);
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            scope.spawn(move || {
                for turn in 0..rounds {
                    let mut rng = fastrand::Rng::with_seed(seed + (turn * 64 + rank) as u64);
                    let hot = (turn % 3 == 1).then_some(1);
                    let batch = Batch::random(&mut rng, &shape, hot);
                    let sums = exchange(all, rank as u32, &batch, turn).unwrap();
                    assert_eq!(sums, batch.sums(&shape, &[]), "rank {rank} in exchange {turn}");
                }
                assert_eq!(all.lost(), []);
            });
        }
    });
}

#[test]
fn sums_equal_those_without_any_ranks_over_shared_memory() {
    all_sums_are_right(shape(4, 2, 3, 40), TransportKind::Shm, 30, 1);
}

#[test]
fn sums_equal_those_without_any_ranks_over_tcp() {
    all_sums_are_right(shape(3, 3, 4, 40), TransportKind::Tcp, 20, 2);
}

#[test]
fn one_rank_is_enough() {
    all_sums_are_right(shape(1, 4, 2, 10), TransportKind::Shm, 5, 3);
}

#[test]
fn a_shared_buffer_of_a_few_rows_serves_all_in_turns() {
    for (private_rows, rows) in [(0, 1), (1, 7), (0, 100)] {
        let shape = Shape { private_rows, shared_rows: Some(rows), ..shape(3, 2, 3, 12) };
        all_sums_are_right(shape, TransportKind::Shm, 8, u64::from(rows));
    }
}

#[test]
fn combine_may_be_left_out_by_all() {
    let shape = shape(3, 2, 2, 9);
    let ranks = ranks(shape, TransportKind::Shm);
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            scope.spawn(move || {
                all.set_timeout(Duration::from_secs(10));
                for turn in 0..12 {
                    let mut rng = fastrand::Rng::with_seed((turn * 64 + rank) as u64);
                    let batch = Batch::random(&mut rng, &shape, None);
                    if turn % 3 == 2 {
                        let sums = exchange(all, rank as u32, &batch, turn).unwrap();
                        assert_eq!(sums, batch.sums(&shape, &[]));
                        continue;
                    }
                    batch.send(all).unwrap();
                    let placing = all.wait_arriving(ORDERS[0]).unwrap();
                    all.dispatch_recv(&mut Handed::room(placing.rows).parts()).unwrap();
                    assert_eq!(all.lost(), []);
                }
            });
        }
    });
}

#[test]
fn rs_4_a_rank_that_is_gone_is_named_and_the_others_go_on_without_it() {
    let shape = shape(3, 2, 3, 20);
    let mut ranks = ranks(shape, TransportKind::Shm);
    let dead = ranks.pop().unwrap();
    drop(dead);
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            scope.spawn(move || {
                all.set_timeout(Duration::from_secs(2));
                for turn in 0..4 {
                    let mut rng = fastrand::Rng::with_seed((turn * 64 + rank) as u64);
                    let batch = Batch::random(&mut rng, &shape, None);
                    let sums = exchange(all, rank as u32, &batch, turn).unwrap();
                    assert_eq!(sums, batch.sums(&shape, &[2]), "{:?}", all.lost());
                }
                let lost = all.lost();
                assert_eq!(lost.iter().map(|l| l.rank).collect::<Vec<_>>(), [2], "{lost:?}");
                assert_eq!(all.present(), [true, true, false]);
            });
        }
    });
}

#[test]
fn a_rank_that_comes_anew_takes_part_again() {
    let shape = shape(3, 2, 3, 20);
    let mut ranks = ranks(shape, TransportKind::Shm);
    drop(ranks.pop());
    for all in &ranks {
        all.mask(2, "its node is gone").unwrap();
        assert_eq!(all.lost()[0].cause, "its node is gone");
    }
    let again = engine(2, "rank-2 again", TransportKind::Shm);
    let again = AllToAll::new(again, shape, 2).unwrap();
    let descriptor = again.descriptor(None).unwrap();
    for all in &ranks {
        again.admit(&all.descriptor(Some(2)).unwrap()).unwrap();
        assert_eq!(all.admit(&descriptor).unwrap(), 2);
        assert_eq!(all.lost(), []);
    }
    ranks.push(again);
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            scope.spawn(move || {
                for turn in 0..4 {
                    let mut rng = fastrand::Rng::with_seed((turn * 64 + rank) as u64);
                    let batch = Batch::random(&mut rng, &shape, None);
                    let sums = exchange(all, rank as u32, &batch, turn).unwrap();
                    assert_eq!(sums, batch.sums(&shape, &[]));
                }
            });
        }
    });
}

#[test]
fn rs_1_who_comes_in_the_middle_of_an_exchange_has_no_part_in_it() {
    let shape = shape(3, 2, 3, 20);
    let mut ranks = ranks(shape, TransportKind::Shm);
    let dying = ranks.pop().unwrap();
    let again = AllToAll::new(engine(2, "rank-2 again", TransportKind::Shm), shape, 2).unwrap();
    let descriptor = again.descriptor(None).unwrap();
    let batch = |rank: u64, turn: u64| {
        Batch::random(&mut fastrand::Rng::with_seed(turn * 64 + rank), &shape, None)
    };
    let collected = |all: &AllToAll, rank: u32, batch: &Batch| {
        batch.send(all).unwrap();
        let placing = all.wait_arriving(ORDERS[0]).unwrap();
        let mut handed = Handed::room(placing.rows);
        all.dispatch_recv(&mut handed.parts()).unwrap();
        handed.answers(&shape, rank, &placing.counts, &placing.starts)
    };
    let answers: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let all = ranks.iter().chain([&dying]).enumerate();
        let threads: Vec<_> = all
            .map(|(rank, all)| {
                scope.spawn(move || collected(all, rank as u32, &batch(rank as u64, 0)))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    drop(dying);
    for all in &ranks {
        all.mask(2, "its node is gone").unwrap();
        again.admit(&all.descriptor(Some(2)).unwrap()).unwrap();
        assert_eq!(all.admit(&descriptor).unwrap(), 2);
    }
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            let answers = &answers[rank];
            scope.spawn(move || {
                let first = batch(rank as u64, 0);
                all.combine_send(rows_of_answers(answers)).unwrap();
                let (got, left_out) = sums(all, &first).unwrap();
                assert_eq!(got, first.sums(&shape, &left_out));
                assert!(left_out.iter().all(|r| *r == 2));
            });
        }
    });
    ranks.push(again);
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            scope.spawn(move || {
                for turn in 1..4 {
                    let batch = batch(rank as u64, turn as u64);
                    let sums = exchange(all, rank as u32, &batch, turn).unwrap();
                    assert_eq!(sums, batch.sums(&shape, &[]));
                }
            });
        }
    });
}

#[test]
fn rs_1_a_rank_that_is_admitted_between_other_exchanges_by_some_takes_no_part_with_all() {
    let shape = shape(3, 2, 3, 20);
    let mut ranks = ranks(shape, TransportKind::Shm);
    drop(ranks.pop());
    let again = AllToAll::new(engine(2, "rank-2 again", TransportKind::Shm), shape, 2).unwrap();
    let descriptor = again.descriptor(None).unwrap();
    for all in &ranks {
        all.mask(2, "its node is gone").unwrap();
        again.admit(&all.descriptor(Some(2)).unwrap()).unwrap();
    }
    ranks.push(again);
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            let (descriptor, admits_before) = (&descriptor, [2, 3, 0][rank]);
            scope.spawn(move || {
                all.set_timeout(Duration::from_secs(1));
                for turn in if rank == 2 { 0..1 } else { 0..4 } {
                    if turn == admits_before && rank < 2 {
                        all.admit(descriptor).unwrap();
                    }
                    let mut rng = fastrand::Rng::with_seed((turn * 64 + rank) as u64);
                    exchange(all, rank as u32, &Batch::random(&mut rng, &shape, None), turn)
                        .unwrap();
                }
            });
        }
    });
    let lost = ranks[2].lost();
    assert!(lost.iter().any(|l| l.cause.contains("between the same two exchanges")), "{lost:?}");
    // It is in no exchange of theirs any more, and so given up by both.
    for all in &ranks[..2] {
        assert!(all.lost().iter().any(|l| l.rank == 2), "{:?}", all.lost());
    }
}

#[test]
fn rs_1_one_rank_that_leaves_combine_out_is_named() {
    let shape = shape(2, 2, 2, 4);
    let ranks = ranks(shape, TransportKind::Shm);
    std::thread::scope(|scope| {
        for (rank, all) in ranks.iter().enumerate() {
            scope.spawn(move || {
                all.set_timeout(Duration::from_millis(500));
                let mut rng = fastrand::Rng::with_seed(rank as u64);
                let batch = Batch::random(&mut rng, &shape, None);
                batch.send(all).unwrap();
                let placing = all.wait_arriving(ORDERS[0]).unwrap();
                let mut handed = Handed::room(placing.rows);
                all.dispatch_recv(&mut handed.parts()).unwrap();
                if rank == 0 {
                    let answers = handed.answers(&shape, 0, &placing.counts, &placing.starts);
                    all.combine_send(rows_of_answers(&answers)).unwrap();
                    let (got, left_out) = sums(all, &batch).unwrap();
                    assert_eq!(got, batch.sums(&shape, &left_out));
                }
                batch.send(all).unwrap();
                all.wait_arriving(ORDERS[0]).unwrap();
                assert_eq!(all.lost().len(), 1, "rank {rank}");
            });
        }
    });
}

#[test]
fn rows_are_placed_anew_for_who_asks_for_another_order() {
    let shape = shape(1, 4, 2, 6);
    let ranks = ranks(shape, TransportKind::Shm);
    let batch = Batch::random(&mut fastrand::Rng::with_seed(3), &shape, None);
    batch.send(&ranks[0]).unwrap();
    let strided = |rows| fabric_moe::routes::Order::Strided { rows };
    let close = ranks[0].wait_arriving(strided(6)).unwrap();
    let wide = ranks[0].wait_arriving(strided(8)).unwrap();
    assert_eq!((&close.starts[..], &wide.starts[..]), (&[0, 6, 12, 18][..], &[0, 8, 16, 24][..]));
    assert!(ranks[0].wait_arriving(strided(1 << 31)).unwrap_err().to_string().contains("32 bits"));
}

#[test]
fn what_is_wrong_is_refused_before_anything_is_sent() {
    let shape = shape(2, 2, 2, 4);
    let ranks = ranks(shape, TransportKind::Shm);
    let all = &ranks[0];
    let narrow = [Part { bytes: &[0; 40], stride: 4, width: 4 }];
    let said = |e: fabric_engine::EngineError| e.to_string();
    assert!(said(all.dispatch_send(&narrow, &[0, 1]).unwrap_err()).contains("4 bytes"));
    let (values, extra) = (vec![0; WIDE * 4], vec![0; EXTRA]);
    let parts = [
        Part { bytes: &values, stride: WIDE * 4, width: WIDE * 4 },
        Part { bytes: &extra, stride: EXTRA, width: EXTRA },
    ];
    assert!(said(all.dispatch_send(&parts, &[0, 1, 2, 3]).unwrap_err()).contains("2 rows"));
    assert!(said(all.dispatch_send(&parts, &[0, 7]).unwrap_err()).contains("expert 7"));
    let none = Part { bytes: &[], stride: 0, width: 0 };
    assert!(said(all.combine_send(none).unwrap_err()).contains("dispatch_send"));
    let mut out = PartMut { bytes: &mut [], stride: 20, width: 20 };
    let float = fabric_moe::kernels::Float::F32;
    assert!(said(all.combine_recv(None, &mut out, float).unwrap_err()).contains("dispatch_send"));
    let other = Shape { topk: 1, ..shape };
    let other = AllToAll::new(engine(1, "other", TransportKind::Shm), other, 1).unwrap();
    all.mask(1, "to make room").unwrap();
    assert!(said(all.admit(&other.descriptor(None).unwrap()).unwrap_err()).contains("topk"));
    assert!(said(all.admit(b"FEP\x01rest").unwrap_err()).contains("version 1"));
    assert!(said(all.admit(b"what").unwrap_err()).contains("begin"));
}
