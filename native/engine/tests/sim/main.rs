//! The engine under random workloads and faults, on simulated links. Every promise of the design is
//! checked after every step. A run is replayed by its seed:
//!
//! `FABRIC_SIM_SEED=7 FABRIC_SIM_RUNS=1 cargo test -p fabric-engine --test sim random`

mod case;
mod check;
mod draw;
mod judge;
mod many;
mod memory;
mod model;
mod run;
mod shrink;
mod steps;
mod wire;

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use case::Case;
use fabric_engine::locks::Mutex;

/// Schedules between two lines of progress.
const PROGRESS: u64 = 50_000;

fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().unwrap())
}

#[test]
fn random_schedules_break_no_promise() {
    let (first, runs) = (env("FABRIC_SIM_SEED", 0), env("FABRIC_SIM_RUNS", 20_000));
    let next = AtomicU64::new(first);
    let found = Mutex::new(None);
    let sum = Mutex::new(run::Outcome::default());
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(2, |n| n.get()) {
            s.spawn(|| {
                while found.lock().is_none() {
                    let seed = next.fetch_add(1, SeqCst);
                    if seed >= first + runs {
                        return;
                    }
                    let done = seed - first;
                    if done > 0 && done.is_multiple_of(PROGRESS) {
                        println!("{done} of {runs} schedules");
                    }
                    match run::run(&Case::random(seed)) {
                        Err(violation) => *found.lock() = Some((seed, violation)),
                        Ok(o) => {
                            let mut sum = sum.lock();
                            sum.succeeded += o.succeeded;
                            sum.failed += o.failed;
                            sum.met += o.met;
                            sum.unmet += o.unmet;
                            sum.group_frames += o.group_frames;
                        }
                    }
                }
            });
        }
    });
    if let Some((seed, violation)) = found.into_inner() {
        let (small, violation) = shrink::shrink(&Case::random(seed), &violation, &run::run);
        panic!(
            "{violation}\nthe smallest case found:\n{}\nreplay: FABRIC_SIM_SEED={seed} \
             FABRIC_SIM_RUNS=1 cargo test -p fabric-engine --test sim random",
            small.literal()
        );
    }
    let sum = sum.into_inner();
    println!("{sum:?}");
    // Faults stop some operations, but not most of them.
    assert!(runs < 1000 || (sum.succeeded > sum.failed && sum.failed > 0 && sum.met > 0));
}

#[test]
fn a_seed_replays_its_run() {
    for seed in 0..200 {
        let case = Case::random(seed);
        assert_eq!(run::run(&case), run::run(&case), "seed {seed}");
    }
}

#[test]
fn a_case_shrinks_to_what_breaks_the_promise() {
    use fabric_engine::transport::sim::Fault;
    let crashes = |c: &Case| c.faults.iter().any(|(_, f)| matches!(f, Fault::Crash { .. }));
    let case = (0..).map(Case::random).find(|c| crashes(c) && c.faults.len() > 3).unwrap();
    let violation = check::Violation { promise: "RS-4", at: 0, what: String::new() };
    let broken = violation.clone();
    let run = move |c: &Case| if crashes(c) { Err(broken.clone()) } else { Ok(Default::default()) };
    let (small, _) = shrink::shrink(&case, &violation, &run);
    assert_eq!((small.faults.len(), small.work.len()), (1, 0));
    assert!(small.literal().contains("Crash {") && !small.literal().contains(" [\n"));
}
