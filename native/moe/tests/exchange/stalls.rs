//! Ranks that run but stall: ranks that wait for them, directly or not, are not given up.

use fabric_moe::device::rounds;

use crate::schedules::{env, Run, Stall, Sum, MS, TIMEOUT};

const T: u64 = TIMEOUT.as_nanos() as u64;
/// Steps after which a rank stalls: the steps of three exchanges, and more.
const STEPS: u32 = 20;

/// Exchanges in which `stalls` befall ranks. A rank's work in one takes a fraction of the timeout.
/// Returns the longest time from a stop to the loss.
fn run(
    seed: u64,
    kernels: bool,
    ranks: u32,
    stalls: &[(u32, Stall)],
    part: u64,
) -> Result<u64, String> {
    let mut run = Run::of(seed, kernels, Some(ranks));
    run.faults = false;
    let (lots, rooms) = rounds(&run.shape);
    // Two steps for each turn, and for each source's rows.
    run.pace = T / part / (2 * (lots + rooms) + u64::from(2 * ranks) + 8);
    for (rank, stall) in stalls {
        run.ranks[*rank as usize].stall = Some(*stall);
    }
    run.go(&mut Sum::default())?;
    Ok(run.slowest)
}

fn each(mut one: impl FnMut(u64, bool, u32, u32) -> Result<u64, String>) {
    let (first, runs) = (env("FABRIC_MOE_SEED", 0), env("FABRIC_MOE_STALLS", 1));
    for seed in first..first + runs {
        for (kernels, ranks, step) in [false, true]
            .into_iter()
            .flat_map(|k| (3..=8).flat_map(move |n| (0..STEPS).map(move |s| (k, n, s))))
        {
            let of_its_own = seed * 1000 + u64::from(ranks * STEPS + step);
            if let Err(what) = one(of_its_own, kernels, ranks, step) {
                panic!("seed {seed}, kernels {kernels}, {ranks} ranks, step {step}: {what}");
            }
        }
    }
}

fn within(took: u64, most: u64) -> Result<u64, String> {
    match took <= most {
        true => Ok(took),
        false => Err(format!("it took {} ms", took / MS)),
    }
}

#[test]
fn rs_4_only_the_rank_that_stalls_is_given_up_at_any_step() {
    each(|seed, kernels, ranks, step| {
        let stall = Stall { after: step, lasts: None };
        within(run(seed, kernels, ranks, &[(1, stall)], 2)?, 3 * T)
    });
}

#[test]
fn rs_4_two_that_stall_one_after_the_other_are_the_only_ones_that_are_given_up() {
    each(|seed, kernels, ranks, step| {
        let first = (1, Stall { after: step, lasts: None });
        let second = (2, Stall { after: step + 1 + seed as u32 % 3, lasts: None });
        within(run(seed, kernels, ranks, &[first, second], 2)?, 6 * T)
    });
}

#[test]
fn no_rank_is_given_up_for_less_than_the_timeout() {
    each(|seed, kernels, ranks, step| {
        let stall = Stall { after: step, lasts: Some(T * 3 / 4) };
        run(seed, kernels, ranks, &[(1, stall)], 8)
    });
}

#[test]
fn rs_4_ranks_that_make_different_calls_are_told_to_make_the_same() {
    let mut lost = Vec::new();
    for seed in 0..20 {
        let mut run = Run::of(seed, false, Some(4));
        run.faults = false;
        run.without.fill(false);
        run.differ = vec![2, 3];
        // Ranks that live are given up, which is an error to schedules.
        let _ = run.go(&mut Sum::default());
        lost.extend(run.ranks.iter().flat_map(|r| r.lost()));
    }
    // Those that were waited for to the end.
    lost.retain(|l| l.cause.contains("did not finish"));
    let told = lost.iter().all(|l| l.cause.contains("have all make the same calls"));
    assert!(!lost.is_empty() && told, "{lost:#?}");
}
