//! Only a rank from which something is missing is given up, not one that has done its part.

use super::*;

/// Three nodes of one rank. One token of rank 0 goes to the ranks 1 and 2. A rank that is done
/// makes no further call.
fn token_to_two_nodes(seed: u64) -> Run {
    let spec = Spec { channels: 1, ..spec(3, 1, 1, 2, 1) };
    let mut run = Run::new(spec, seed, SimConfig::default());
    for rank in &mut run.ranks {
        let tokens = usize::from(rank.member.rank == 0);
        rank.batches = vec![batch_to(&spec, tokens, &[1, 2])];
        rank.without = vec![false];
        rank.leaves = true;
    }
    run
}

/// The steps of an undisturbed run.
fn steps_of(seed: u64) -> u32 {
    token_to_two_nodes(seed).go().unwrap()
}

/// Rank 1 has sent its sum and is done; rank 2 stalls.
#[test]
fn rs_4_a_rank_whose_sums_are_here_is_not_given_up_for_one_that_stalls() {
    let mut lost_after_dispatch = 0;
    for seed in 0..8 {
        for at in 0..steps_of(seed) {
            let mut run = token_to_two_nodes(seed);
            run.accidents = vec![(2, Accident::Stalls, at)];
            let losses = |run: &Run| run.ranks[0].machine.losses().lost();
            let ended = |run: &mut Run| run.ranks[0].is_over() || !losses(run).is_empty();
            run.go_until(ended).unwrap_or_else(|what| panic!("seed {seed}, at {at}: {what}"));
            let lost = losses(&run);
            assert!(lost.iter().all(|lost| lost.rank == 2), "seed {seed}, at {at}: {lost:?}");
            let is_done = run.ranks[1].is_over() && run.ranks[1].error.is_none();
            lost_after_dispatch += u32::from(!lost.is_empty() && is_done);
        }
    }
    assert!(lost_after_dispatch > 0);
}

/// Rank 1 has sent its sum and closes. Rank 2 sleeps until the proxies have noticed that.
#[test]
fn rs_4_an_exchange_goes_on_though_a_rank_that_has_done_its_part_is_gone() {
    let mut noticed = 0;
    for seed in 0..8 {
        for at in 0..steps_of(seed) {
            let mut run = token_to_two_nodes(seed);
            run.ranks.iter_mut().for_each(|r| r.timeout = 40 * TIMEOUT);
            run.accidents = vec![(2, Accident::Sleeps, at)];
            run.nap = 2_000 * MS;
            let has_left = |run: &mut Run| {
                let rank = &mut run.ranks[1];
                rank.is_over() && rank.machine.has_left()
            };
            let what = format!("seed {seed}, at {at}");
            run.go_until(has_left).unwrap_or_else(|said| panic!("{what}: {said}"));
            run.accidents.clear();
            let gone = run.ranks.remove(1);
            run.net.kill(gone.engine.id());
            run.gone.push(gone);
            run.go().unwrap_or_else(|said| panic!("{what}: {said}"));
            for rank in &run.ranks {
                let lost = rank.machine.losses().lost();
                assert!(lost.is_empty(), "{what}, rank {}: {lost:?}", rank.member.rank);
            }
            noticed += u32::from(run.ranks[0].has_lost);
        }
    }
    assert!(noticed > 0);
}
