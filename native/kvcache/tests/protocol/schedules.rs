//! The protocol under random work and faults, on simulated links and a virtual clock. A schedule is
//! replayed by its seed, which a failure prints:
//!
//! `FABRIC_KV_SEED=7 FABRIC_KV_SCHEDULES=1 cargo test -p fabric-kvcache --test protocol schedules`
//!
//! What a seed does is the same each time that it is run.

mod decoding;
pub mod faulty_delivery;
pub mod judge;
mod prefilling;
mod run;

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use fabric_engine::locks::Mutex;

/// Schedules between two lines that say how far it is.
const PROGRESS: u64 = 5_000;

fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().unwrap())
}

/// What panics in a callback is kept from the engine's thread, so it is counted here.
static PANICS: AtomicU64 = AtomicU64::new(0);

fn watch_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, SeqCst);
        before(info);
    }));
}

fn run(seed: u64) -> Result<run::Outcome, String> {
    let panics = PANICS.load(SeqCst);
    let outcome = std::panic::catch_unwind(|| run::run(seed));
    let outcome = outcome.unwrap_or_else(|_| Err("the schedule panicked".into()))?;
    match PANICS.load(SeqCst) == panics {
        true => Ok(outcome),
        false => Err("a callback panicked".into()),
    }
}

#[test]
fn ic_2_mr_1_rs_4_random_schedules_break_no_promise() {
    watch_panics();
    let (first, runs) = (env("FABRIC_KV_SEED", 0), env("FABRIC_KV_SCHEDULES", 300));
    let next = AtomicU64::new(first);
    let found = Mutex::new(None);
    let sum = Mutex::new((0u64, 0u64));
    let threads = env("FABRIC_KV_THREADS", 2);
    std::thread::scope(|s| {
        for _ in 0..threads {
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
                    match run(seed) {
                        Err(what) => *found.lock() = Some((seed, what)),
                        Ok(o) => {
                            let mut sum = sum.lock();
                            sum.0 += u64::from(o.ready);
                            sum.1 += u64::from(o.failed);
                        }
                    }
                }
            });
        }
    });
    if let Some((seed, what)) = found.into_inner() {
        panic!(
            "{what}\nreplay: FABRIC_KV_SEED={seed} FABRIC_KV_SCHEDULES=1 cargo test -p fabric-kvcache \
             --test protocol schedules"
        );
    }
    let (ready, failed) = sum.into_inner();
    println!("{runs} schedules from seed {first}: {ready} requests ready, {failed} failed");
    // Neither did faults stop everything, nor was all in vain.
    assert!(runs < 100 || (ready > runs && failed > runs / 4));
}

#[test]
fn a_seed_draws_the_same_run_every_time() {
    watch_panics();
    for seed in 500..540 {
        assert_eq!(run(seed).unwrap(), run(seed).unwrap(), "seed {seed}");
    }
}

/// In which a promise was once broken: a request whose number was changed on its way, and which its
/// decoder therefore never ended.
#[test]
fn a_schedule_that_found_something_stays_well() {
    watch_panics();
    assert_eq!(run(22_206_229).err(), None);
}
