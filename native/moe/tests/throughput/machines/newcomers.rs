//! Processes that take the place of a rank at once when it dies, before the others have noticed.

use super::*;

/// Puts a process in the place of a rank that just died: it admits all others, and begins to
/// dispatch as soon as it may. Each of the others admits it once it has seen to the death.
fn replace(run: &mut Run, rank: u32) {
    let last = run.gone.iter().rev().find(|gone| gone.member.rank == rank).unwrap();
    let member = Member { rank, incarnation: last.member.incarnation + 1 };
    let (spec, batches, without) = (last.spec, last.batches.clone(), last.without.clone());
    let given = (member, By::CpuWorker);
    let mut newcomer = Rank::new(&mut run.net, spec, given, batches, &without);
    // It waits until the others have seen to the death.
    newcomer.timeout = 3 * TIMEOUT;
    let descriptors: Vec<_> = run.ranks.iter().map(Rank::descriptor).collect();
    newcomer.admit_all(&descriptors).unwrap();
    for other in &mut run.ranks {
        other.newcomer = Some(newcomer.descriptor());
    }
    run.ranks.insert(rank as usize, newcomer);
}

/// Any rank dies at any step, a process takes its place at once, and another one takes that one's
/// place at any later step.
fn replaced_at_once(seed: u64) -> Result<bool, String> {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x11e3);
    let (nodes, per_node) = (rng.u32(1..4), rng.u32(1..3));
    let spec = Spec {
        channels: rng.u32(1..3),
        chunk: rng.u32(1..4),
        ring_chunks: 2,
        ..spec(nodes, per_node.max(2 / nodes), 1, 2, rng.u32(4..24))
    };
    let config = SimConfig {
        delay: 500..[50_000, MS, 8 * MS][rng.usize(..3)],
        max_bytes: 1 << rng.u32(6..10),
        ..SimConfig::default()
    };
    let steps = Run::new(spec, seed, config.clone()).go()?;
    let rank = rng.u32(..spec.shape.ranks);
    let (dies, dies_again) = (rng.u32(..steps), rng.bool().then(|| rng.u32(..steps)));
    let mut run = Run::new(spec, seed, config);
    let kill = |run: &mut Run| {
        let at = run.ranks.iter().position(|r| r.member.rank == rank).unwrap();
        let dead = run.ranks.remove(at);
        run.net.kill(dead.engine.id());
        run.gone.push(dead);
        replace(run, rank);
    };
    let about = |what| format!("{what}; rank {rank} at {dies} and {dies_again:?}, {spec:?}");
    for steps in [Some(dies), dies_again].into_iter().flatten() {
        let mut turns = 0..steps;
        run.go_until(|_| turns.next().is_none()).map_err(about)?;
        kill(&mut run);
    }
    // Those that did not need it any more may be done without it.
    let is_done = |r: &Rank| r.member.rank == rank || r.is_over();
    run.go_until(|run| run.ranks.iter().all(is_done)).map_err(about)?;
    if run.ranks.iter().any(|r| r.newcomer.is_some()) {
        return Ok(false);
    }
    run.go_until(|run| run.ranks.iter().all(Rank::is_over)).map_err(about)?;
    for rank in &run.ranks {
        let lost = rank.machine.losses().lost();
        if rank.error.is_some() || !lost.is_empty() {
            return Err(about(format!("{}, {lost:?}", rank.standing())));
        }
    }
    Ok(true)
}

#[test]
fn mr_1_a_process_that_takes_a_place_at_once_writes_when_its_predecessor_has_ended() {
    let (runs, admitted) = schedules(replaced_at_once);
    assert!(admitted > runs / 2, "{admitted}");
}
