//! Simulated pushes small enough to calculate by hand.

use fabric_simulate::{simulate, Network, Outcome, Push, Stage, Step, Write, STAGES};

const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;
/// 400 Gb/s.
const NETWORK: Network =
    Network { nics: 1, rate: 50.0, latency: 2_000, call: 0, request: 0, page: 2 * MIB };

fn step(rollouts: &[u32], bytes: u64) -> Step {
    let writes = rollouts.iter().map(|r| Write { rollout: *r, requests: 1, bytes }).collect();
    Step { writes, ..Step::default() }
}

fn run(trainers: Vec<Vec<Step>>, rollouts: usize, network: &Network) -> Outcome {
    let outcome = simulate(&Push { trainers, rollouts }, network).unwrap();
    let path: u64 = outcome.path.iter().sum();
    assert_eq!(path, outcome.time, "the path is all of the time: {outcome:?}");
    outcome
}

/// Ideal time of `bytes` on one NIC.
fn floor(bytes: u64) -> f64 {
    bytes as f64 / NETWORK.rate
}

fn close(time: u64, expected: f64) {
    let ratio = time as f64 / expected;
    assert!((1.0..1.03).contains(&ratio), "{time} ns is {ratio:.3} times what was expected");
}

#[test]
fn a_push_takes_its_bytes_over_the_nic() {
    let outcome = run(vec![vec![step(&[0], 256 * MIB)]], 1, &NETWORK);
    close(outcome.time, floor(256 * MIB));
    assert_eq!(outcome.path[Stage::Write as usize], outcome.time);
}

#[test]
fn two_senders_into_one_nic_take_twice_as_long() {
    let two = |to: [u32; 2]| to.map(|r| vec![step(&[r], 256 * MIB)]).to_vec();
    close(run(two([0, 1]), 2, &NETWORK).time, floor(256 * MIB));
    close(run(two([0, 0]), 2, &NETWORK).time, floor(512 * MIB));
    // A trainer that sends twice as much takes twice as long, too.
    close(run(vec![vec![step(&[0, 1], 256 * MIB)]], 2, &NETWORK).time, floor(512 * MIB));
}

#[test]
fn several_nics_share_what_is_sent() {
    for nics in [2, 4] {
        let network = Network { nics, ..NETWORK };
        let outcome = run(vec![vec![step(&[0], 512 * MIB)]], 1, &network);
        close(outcome.time, floor(512 * MIB) / f64::from(nics));
    }
}

/// As of four FSDP ranks to two engines of tensor-parallel ranks: each trainer sends most to two
/// rollouts.
#[test]
fn receivers_share_every_nic_of_a_sender() {
    for page in [MIB / 2, 8 * MIB] {
        let network = Network { nics: 2, page, ..NETWORK };
        let much = |trainer: u32, rollout: u32| rollout % 2 == trainer / 2;
        let bytes = |trainer, rollout| if much(trainer, rollout) { 3400 * MIB } else { 600 * MIB };
        let write = |t, r| Write { rollout: r, requests: 1, bytes: bytes(t, r) };
        let writes = |t| (0..4).map(|i| write(t, (t + i) % 4)).collect();
        let trainers =
            (0..4).map(|t| vec![Step { writes: writes(t), ..Step::default() }]).collect();
        let ratio = run(trainers, 4, &network).time as f64 / (floor(8000 * MIB) / 2.0);
        assert!(ratio < 1.2, "{page} bytes: {ratio:.2} times the least");
    }
}

#[test]
fn the_path_shows_the_dominating_stage() {
    for stage in 0..4 {
        let mut ready = [MS / 10; 4];
        ready[stage] = 20 * MS;
        let slow = Step { ready, ..step(&[0], 64 * MIB) };
        let outcome = run(vec![vec![slow; 5]], 1, &NETWORK);
        assert!(outcome.path[stage] >= 5 * 20 * MS, "{stage}: {outcome:?}");
        close(outcome.time, 100.0 * MS as f64 + floor(64 * MIB) + 0.3 * MS as f64);
        assert_eq!(outcome.busy[0][stage], 100 * MS);
    }
}

#[test]
fn requests_take_the_processor() {
    let network = Network { call: MS, request: MS / 10, ..NETWORK };
    let mut steps = vec![step(&[0, 1], MIB); 5];
    steps.iter_mut().flat_map(|s| &mut s.writes).for_each(|w| w.requests = 10);
    let outcome = run(vec![steps], 2, &network);
    // The last write is on the wire with its first request.
    assert_eq!(outcome.path[Stage::Submit as usize], 19 * MS + MS / 10);
    assert_eq!(outcome.busy[0][Stage::Submit as usize], 20 * MS);
}

/// Steps of 64 MiB that take 1 ms to prepare and 1.3 ms to send.
fn ready_and_sent(under_way: usize) -> Vec<Vec<Step>> {
    let step = Step { ready: [0, MS, 0, 0], memory: 64 * MIB, ..step(&[0], 64 * MIB) };
    let after = |number: usize| (number + 1).saturating_sub(under_way);
    vec![(0..16).map(|number| Step { after: after(number), ..step.clone() }).collect()]
}

#[test]
fn a_watermark_bounds_memory_and_costs_time() {
    let [one, two, all] = [1, 2, 16].map(|n| run(ready_and_sent(n), 1, &NETWORK));
    assert_eq!([one.peak, two.peak, all.peak], [64 * MIB, 128 * MIB, 16 * 64 * MIB]);
    // One step at a time is prepared and then sent.
    close(one.time, 16.0 * (MS as f64 + floor(64 * MIB)));
    assert_eq!(one.path[Stage::Gather as usize], 16 * MS);
    // Two steps: one is prepared while the other is sent.
    close(two.time, MS as f64 + 16.0 * floor(64 * MIB));
    assert!(all.time <= two.time);
}

#[test]
fn a_group_waits_for_the_slowest_trainer_of_the_group_before() {
    let grouped = |first: u64| {
        let of = |group, ready| Step { group, ready: [0, ready, 0, 0], ..step(&[0], MIB) };
        vec![of(0, first), of(1, 2 * MS)]
    };
    let outcome = run(vec![grouped(MS), grouped(30 * MS)], 1, &NETWORK);
    assert!(outcome.ended[0] > 32 * MS, "{outcome:?}");
    assert_eq!(outcome.path[Stage::Gather as usize], 32 * MS);
}

#[test]
fn the_same_push_takes_the_same_time() {
    let trainers: Vec<Vec<Step>> = (0..12)
        .map(|t| {
            (0..4).map(|s| step(&[t % 5, (t + s) % 5, 4], MIB * u64::from(1 + t + s))).collect()
        })
        .collect();
    let network = Network { nics: 2, call: 23_000, ..NETWORK };
    let [a, b] = [(); 2].map(|()| run(trainers.clone(), 5, &network));
    assert_eq!(a, b);
    assert_eq!(a.busy.len(), 12);
    assert_eq!(a.path.len(), STAGES);
}

#[test]
fn invalid_input_is_refused_by_name() {
    let refused = |step: Step, network: Network| {
        simulate(&Push { trainers: vec![vec![step]], rollouts: 1 }, &network).unwrap_err().0
    };
    let fine = step(&[0], MIB);
    assert!(refused(step(&[1], MIB), NETWORK).contains("step 0 of trainer 0"));
    assert!(refused(Step { after: 1, ..fine.clone() }, NETWORK).contains("step 0 of trainer 0"));
    assert!(refused(fine.clone(), Network { nics: 5, ..NETWORK })
        .contains("nics is out of range [1, 4]"));
    assert!(refused(fine, Network { rate: 0.0, ..NETWORK }).contains("rate"));
    // More pages than a counter counts: of one write, and of both together.
    let bytewise = Network { page: 1, ..NETWORK };
    assert!(refused(step(&[0], (1 << 32) + 1), bytewise).contains("4294967297 pages"));
    assert!(refused(step(&[0, 0], (1 << 31) + 1), bytewise).contains("4294967298 pages"));
}

/// With equal numbers of senders and receivers, a NIC must not idle behind one receiver.
#[test]
fn all_to_all_writes_keep_every_nic_busy() {
    let all = [0, 1, 2, 3, 4, 5, 6, 7];
    let from = |t: usize| [&all[t..], &all[..t]].concat();
    let trainers = (0..8).map(|t| vec![step(&from(t), 256 * MIB)]).collect();
    close(run(trainers, 8, &NETWORK).time, floor(8 * 256 * MIB));
}
