//! Ranks as threads that leave, are given up and join again, over shared memory.

use std::time::{Duration, Instant};

use fabric_engine::{api::TransportKind, EngineError, Result};
use fabric_moe::throughput::{Member, Spec, Throughput};

use crate::{
    grouped::spec,
    nodes::{batch, exchange, open_incarnation},
};

const TIMEOUT: Duration = Duration::from_secs(20);

fn open(spec: Spec, rank: u32, incarnation: u32) -> Throughput {
    open_incarnation(spec, Member { rank, incarnation }, TransportKind::Shm, TIMEOUT)
}

/// Two of three ranks, which the third has yet to come to.
fn two_of_three(spec: Spec) -> [Throughput; 2] {
    let ranks = [open(spec, 0, 0), open(spec, 1, 0)];
    for (one, other) in [(0, 1), (1, 0)] {
        ranks[one].admit(&ranks[other].descriptor()).unwrap();
        ranks[one].leave_out(2).unwrap();
    }
    ranks
}

/// One exchange of some ranks at once.
fn exchange_all(ranks: &[(u32, &Throughput)], turn: usize) -> Vec<Result<Vec<f32>>> {
    std::thread::scope(|scope| {
        let one = |(rank, all): (u32, &Throughput)| {
            exchange(all, rank, &batch(&all.spec(), rank, turn), turn)
        };
        let calls: Vec<_> = ranks.iter().map(|r| scope.spawn(move || one(*r))).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

fn sums_are_right(ranks: &[(u32, &Throughput)], turn: usize, here: &[bool]) {
    for ((rank, all), found) in ranks.iter().zip(exchange_all(ranks, turn)) {
        assert_eq!(found.unwrap(), batch(&all.spec(), *rank, turn).sums_of(here), "rank {rank}");
    }
}

/// A rank that joins again may know of incarnations that others have yet to see.
#[test]
fn a_rank_comes_anew_though_others_knew_of_it_before_the_one_before_it_had_ended() {
    let spec = spec(1, 3, 2, 2, 8);
    let [first, one, two] = [0, 1, 2].map(|rank| open(spec, rank, 0));
    let all = [&first, &one, &two];
    for (at, rank) in all.iter().enumerate() {
        let others = all.iter().enumerate().filter(|(other, _)| *other != at);
        for (_, other) in others {
            rank.admit(&other.descriptor()).unwrap();
        }
    }
    first.mask(1, "it is slow").unwrap();
    first.mask(2, "it is slower").unwrap();
    // Both are named, at once.
    let told = exchange(&first, 0, &batch(&spec, 0, 0), 0).unwrap_err();
    assert!(
        matches!(&told, EngineError::PeerLost { peer, cause, .. }
            if peer == "rank 1, rank 2" && cause.contains("rank 2: it is slower")),
        "{told}"
    );
    drop(one);
    let (one, anew) = (open(spec, 1, 1), open(spec, 2, 1));
    one.admit(&anew.descriptor()).unwrap();
    first.admit(&one.descriptor()).unwrap();
    drop(two);
    first.admit(&anew.descriptor()).unwrap();
    one.admit(&first.descriptor()).unwrap();
    anew.admit(&first.descriptor()).unwrap();
    anew.admit(&one.descriptor()).unwrap();
    sums_are_right(&[(0, &first), (1, &one), (2, &anew)], 1, &[true; 3]);
}

#[test]
fn a_rank_that_comes_during_an_exchange_is_refused_at_once() {
    let spec = spec(1, 3, 2, 2, 8);
    let ranks = two_of_three(spec);
    let anew = open(spec, 2, 1);
    batch(&spec, 0, 0).with_parts(|p, i, w| ranks[0].dispatch_send(p, i, w)).unwrap();
    let refused = ranks[0].admit(&anew.descriptor()).unwrap_err();
    let is_told = matches!(&refused, EngineError::Invalid(text) if text.contains("under way"));
    assert!(is_told, "{refused}");
}

/// One of two ranks has admitted a newcomer that dies before the other one admits it.
#[test]
fn a_newcomer_that_dies_before_all_admitted_it_is_the_only_loss() {
    let spec = spec(1, 3, 2, 2, 8);
    let ranks = two_of_three(spec);
    let both = [(0, &ranks[0]), (1, &ranks[1])];
    let here = [true, true, false];
    sums_are_right(&both, 0, &here);
    for incarnation in 1..9 {
        let anew = open(spec, 2, incarnation);
        ranks[1].admit(&anew.descriptor()).unwrap();
        ranks[1].mask(2, "it died").unwrap();
        drop(anew);
        for error in exchange_all(&both, 1) {
            let error = error.unwrap_err();
            let is_named = matches!(&error, EngineError::PeerLost { peer, .. } if peer == "rank 2");
            assert!(is_named, "{error}");
        }
        sums_are_right(&both, 2, &here);
        assert!(ranks.iter().all(|r| r.lost().len() == 1 && r.broken().is_none()));
    }
    let said = ranks[0].admit(&open(spec, 2, 8).descriptor()).unwrap_err().to_string();
    assert!(said.contains("incarnation=9"), "{said}");
}

/// The mask waits for a call under way, which admits the next incarnation of the rank.
#[test]
fn rs_4_a_mask_of_an_incarnation_does_not_hit_the_next_one() {
    let spec = spec(1, 2, 2, 2, 8);
    let (all, old) = (open(spec, 0, 0), open(spec, 1, 0));
    all.admit(&old.descriptor()).unwrap();
    old.admit(&all.descriptor()).unwrap();
    all.mask(1, "it is slow").unwrap();
    let anew = open(spec, 1, 1);
    let descriptor = anew.descriptor();
    std::thread::scope(|scope| {
        // It waits until the old incarnation has ended.
        let admitting = scope.spawn(|| all.admit(&descriptor));
        std::thread::sleep(Duration::from_millis(500));
        let masking = scope.spawn(|| all.mask(1, "it is slow"));
        std::thread::sleep(Duration::from_millis(500));
        drop(old);
        admitting.join().unwrap().unwrap();
        masking.join().unwrap().unwrap();
    });
    assert!(all.lost().is_empty() && all.present()[1], "{:?}", all.lost());
}

/// What a rank's next exchange says that others go on without.
fn ended_by(all: &Throughput, rank: u32) -> String {
    match exchange(all, rank, &batch(&all.spec(), rank, 0), 0).unwrap_err() {
        EngineError::PeerLost { peer, cause, .. } => format!("{peer}: {cause}"),
        other => panic!("{other}"),
    }
}

/// It is given up before it has admitted the rank that gives it up.
#[test]
fn rs_4_a_rank_that_admits_others_too_late_hears_that_they_go_on_without_it() {
    let spec = spec(1, 2, 2, 2, 8);
    let short = Duration::from_millis(200);
    let member = Member { rank: 0, incarnation: 0 };
    let (first, late) =
        (open_incarnation(spec, member, TransportKind::Shm, short), open(spec, 1, 0));
    first.admit(&late.descriptor()).unwrap();
    let lost = ended_by(&first, 0);
    assert!(lost.starts_with("rank 1: it did not admit this rank"), "{lost}");
    late.admit(&first.descriptor()).unwrap();
    let ended = ended_by(&late, 1);
    assert!(ended.starts_with("rank 1: rank 0 gave it up"), "{ended}");
    assert!(late.broken().is_some() && late.lost().is_empty());
}

/// The ranks have admitted one another, and no call has seen that yet.
#[test]
fn rs_4_a_mask_before_the_first_exchange_reaches_all() {
    let spec = spec(1, 3, 2, 2, 8);
    let ranks = [0, 1, 2].map(|rank| open(spec, rank, 0));
    for (at, rank) in ranks.iter().enumerate() {
        let others = ranks.iter().enumerate().filter(|(other, _)| *other != at);
        others.for_each(|(_, other)| assert!(rank.admit(&other.descriptor()).is_ok()));
    }
    ranks[0].mask(2, "it is slow").unwrap();
    // Rank 0 makes no call.
    let ended = ended_by(&ranks[2], 2);
    assert!(ended.starts_with("rank 2: rank 0 gave it up"), "{ended}");
    let told = ended_by(&ranks[1], 1);
    assert!(told.starts_with("rank 2: another rank gave it up"), "{told}");
}

#[test]
fn mr_1_a_rank_with_several_proxy_threads_leaves_and_comes_anew() {
    let spec = Spec { channels: 2, threads: 2, ..spec(1, 2, 2, 2, 8) };
    let all = open(spec, 0, 0);
    let mut other = open(spec, 1, 0);
    all.admit(&other.descriptor()).unwrap();
    other.admit(&all.descriptor()).unwrap();
    sums_are_right(&[(0, &all), (1, &other)], 0, &[true; 2]);
    for incarnation in 1..4 {
        // Between two exchanges no rank waits for it.
        drop(other);
        other = open(spec, 1, incarnation);
        let until = Instant::now() + TIMEOUT;
        while let Err(error) = all.admit(&other.descriptor()) {
            // That it left may have yet to be seen.
            assert!(error.to_string().contains("here already"), "{error}");
            assert!(Instant::now() < until, "{error}");
            std::thread::yield_now();
        }
        other.admit(&all.descriptor()).unwrap();
        let told = exchange(&all, 0, &batch(&spec, 0, 0), 0).unwrap_err();
        assert!(matches!(told, EngineError::PeerLost { .. }), "{told}");
        sums_are_right(&[(0, &all), (1, &other)], 1, &[true; 2]);
    }
}
