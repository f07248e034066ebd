use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use fabric_engine::{
    api::EngineConfig, simulation::SimNet, transport::sim::SimConfig, Time, TransferEngine,
};
use fabric_proxy::{
    command::{Command, Scope},
    fifo::{fifo, Pusher},
    Config, Event, Executor, Parker, SharedState, ThreadDescriptor,
};

use crate::device::{Device, Plan};

const MAX_OUTSTANDING: usize = 12;
const DEADLINE: Duration = Duration::from_millis(200);

struct Rank {
    executor: Executor,
    engine: Arc<TransferEngine>,
    device: Device,
    common: SharedState,
    descriptor: ThreadDescriptor,
    events: Arc<Mutex<Vec<Event>>>,
    pushers: Vec<Pusher>,
}

impl Rank {
    fn new(
        engine: Arc<TransferEngine>,
        plan: Plan,
        (rank, incarnation): (usize, u32),
        peers: &[usize],
        barrier: bool,
    ) -> Self {
        let config = Config {
            rank,
            ranks: plan.ranks,
            incarnation,
            fifos: plan.channels.into(),
            capacity: 16,
            words: plan.words().max(1),
            max_outstanding: MAX_OUTSTANDING as u32,
            deadline: DEADLINE,
            ..Config::default()
        };
        let part = engine.alloc(plan.memory().max(16)).unwrap();
        let common = SharedState::new(&config);
        let parker = Arc::new(Parker::default());
        let fifos = (0..config.fifos).map(|_| fifo(config.capacity, Arc::clone(&parker)).unwrap());
        let (pushers, poppers): (Vec<_>, Vec<_>) = fifos.unzip();
        let events = Arc::new(Mutex::new(Vec::new()));
        let descriptor = Arc::clone(&events);
        let executor = Executor::new(
            Arc::clone(&engine),
            part.clone(),
            &config,
            common.clone(),
            (parker, poppers),
            Arc::new(move |e| descriptor.lock().unwrap().push(e)),
        )
        .unwrap();
        let descriptor = executor.descriptor();
        let own = (part, common.words.clone(), pushers.clone());
        let device = Device::new(rank, plan, own, peers, barrier);
        Self { executor, engine, device, common, descriptor, events, pushers }
    }

    fn meet(&self, rank: usize, incarnation: u32, descriptor: &ThreadDescriptor) {
        self.executor.membership().join(rank, incarnation, descriptor.clone());
    }

    fn lost(&self) -> Vec<usize> {
        let events = self.events.lock().unwrap();
        let ranks = events.iter().filter_map(|e| match e {
            Event::Lost { rank, .. } => Some(*rank),
            Event::Joined { .. } | Event::Masked { .. } | Event::Gone { .. } => None,
            other => panic!("{other:?}"),
        });
        ranks.collect()
    }
}

fn engine(net: &mut SimNet) -> Arc<TransferEngine> {
    net.engine(EngineConfig { op_timeout: Duration::from_secs(60), ..Default::default() }).unwrap()
}

fn network(seed: u64) -> SimNet {
    let max_bytes = [16, 1000][seed as usize % 2];
    let ordered = seed % 5 == 4;
    SimNet::new(SimConfig { seed, max_bytes, ordered, ..SimConfig::default() })
}

fn all_ranks(net: &mut SimNet, plan: Plan, barrier: bool) -> Vec<Rank> {
    let all: Vec<_> = (0..plan.ranks).collect();
    let ranks: Vec<_> =
        all.iter().map(|r| Rank::new(engine(net), plan, (*r, 1), &all, barrier)).collect();
    for a in &ranks {
        for b in &ranks {
            a.meet(b.device.rank, 1, &b.descriptor);
        }
    }
    ranks
}

/// Advances the simulation by one event, and steps every rank.
fn step(net: &mut SimNet, ranks: &mut [Rank]) {
    while ranks.iter_mut().fold(false, |moved, r| {
        r.device.step();
        moved | r.executor.step(net.now())
    }) {}
    assert!(ranks.iter().all(|r| r.executor.outstanding() <= 3 * MAX_OUTSTANDING));
    if !net.step() {
        // Only timeouts are left.
        net.advance(Time(net.now().0 + 1_000_000));
    }
    ranks.iter_mut().for_each(|r| r.device.look());
}

fn until(net: &mut SimNet, ranks: &mut [Rank], what: &str, done: impl Fn(&[Rank]) -> bool) {
    for _ in 0..2_000_000 {
        if done(ranks) {
            return;
        }
        step(net, ranks);
    }
    panic!("{what} does not end; lost: {:?}", ranks.iter().map(Rank::lost).collect::<Vec<_>>());
}

fn plan(seed: u64, ordered: bool) -> Plan {
    // More rounds than epochs have numbers.
    Plan { ranks: 3, channels: 2, rounds: 70, ordered, seed }
}

#[test]
fn or_tokens_are_there_when_an_atomic_says_so_whatever_order_they_come_in() {
    for seed in 0..10 {
        for ordered in [false, true] {
            let mut net = network(seed);
            let mut ranks = all_ranks(&mut net, plan(seed, ordered), true);
            until(&mut net, &mut ranks, "sending", |ranks| {
                ranks.iter().all(|r| r.device.has_sent_all() && r.device.has_all_of(&[0, 1, 2]))
            });
            assert!(ranks.iter().all(|r| r.lost().is_empty()));
            assert!(ranks.iter().all(|r| r.executor.outstanding() == 0));
        }
    }
}

#[test]
fn a_killed_rank_is_reported_once_and_the_others_go_on() {
    for seed in 0..16 {
        let mut net = network(seed);
        let mut ranks = all_ranks(&mut net, plan(seed, seed % 2 == 0), true);
        for _ in 0..seed * seed * 16 {
            step(&mut net, &mut ranks);
        }
        let killed = ranks.pop().unwrap();
        net.kill(killed.engine.id());
        let at = net.now();
        until(&mut net, &mut ranks, "sending past a dead rank", |ranks| {
            ranks
                .iter()
                .all(|r| r.device.has_sent_all() && r.device.has_all_of(&[0, 1]) && r.lost() == [2])
        });
        let took = net.now().since(at);
        assert!(took < Duration::from_secs(4), "RS-4: {took:?} under seed {seed}");
        assert!(ranks.iter().all(|r| !r.common.alive.is_alive(2) && r.common.alive.is_alive(1)));

        // A later incarnation joins and takes part as before.
        let again = Plan { seed: seed + 100, ..plan(seed, false) };
        let newcomer = Rank::new(engine(&mut net), again, (2, 2), &[0, 1, 2], false);
        let mut all = ranks;
        for r in &all {
            r.meet(2, 2, &newcomer.descriptor);
            newcomer.meet(r.device.rank, 1, &r.descriptor);
        }
        newcomer.meet(2, 2, &newcomer.descriptor);
        let words: Vec<u64> = all.iter().map(sum).collect();
        for r in &mut all {
            let command = Command::Atomic {
                rank: 2,
                channel: 0,
                add: fabric_proxy::command::Add { slot: 0, value: 0, ordered: true },
            };
            r.pushers[0].try_push(&command).unwrap();
            r.pushers[0].try_push(&Command::Barrier { scope: Scope::All, channel: 1 }).unwrap();
        }
        newcomer.pushers[1].try_push(&Command::Barrier { scope: Scope::All, channel: 1 }).unwrap();
        all.push(newcomer);
        // The newcomer's plan changes words that the survivors read: only the newcomer checks.
        let own = all.len() - 1;
        for _ in 0..2_000_000 {
            if all[own].device.has_sent_all() && all[own].device.has_all_of(&[2]) {
                break;
            }
            while all.iter_mut().fold(false, |moved, r| moved | r.executor.step(net.now())) {}
            all[own].device.step();
            net.step();
        }
        assert!(all[own].device.has_sent_all(), "the newcomer is stuck under seed {seed}");
        assert!(all[own].lost().is_empty());
        assert!(all.iter().zip(words).all(|(r, before)| sum(r) > before));
        assert!(all.iter().all(|r| r.common.alive.is_alive(2)));
    }
}

#[test]
fn a_rank_that_is_killed_at_any_step_does_not_stop_the_others() {
    let small = |seed| Plan { ranks: 3, channels: 2, rounds: 3, ordered: seed % 2 == 0, seed };
    for at in 0..150 {
        let mut net = network(at);
        let mut ranks = all_ranks(&mut net, small(at), true);
        (0..at).for_each(|_| step(&mut net, &mut ranks));
        let killed = ranks.pop().unwrap();
        net.kill(killed.engine.id());
        let since = net.now();
        until(&mut net, &mut ranks, "sending past a dead rank", |ranks| {
            ranks
                .iter()
                .all(|r| r.device.has_sent_all() && r.device.has_all_of(&[0, 1]) && r.lost() == [2])
        });
        let took = net.now().since(since);
        assert!(took < Duration::from_secs(4), "RS-4: {took:?} at step {at}");
    }
}

/// Time begins at 0, before anything has arrived from a peer.
#[test]
fn an_immediate_barrier_loses_no_rank() {
    let mut net = network(3);
    let mut ranks = all_ranks(&mut net, Plan { rounds: 0, ..plan(3, true) }, true);
    until(&mut net, &mut ranks, "barrier", |ranks| ranks.iter().all(|r| r.device.has_sent_all()));
    assert!(ranks.iter().all(|r| r.lost().is_empty()));
}

/// The engine runs and takes bytes, but its proxy executes nothing.
#[test]
fn a_rank_that_stalls_is_given_up_by_the_deadline() {
    for seed in 0..6 {
        let mut net = network(seed);
        // A rank that waits for no epochs notices the stall in a barrier.
        let plan = match seed % 2 {
            0 => plan(seed, true),
            _ => Plan { rounds: 3, ..plan(seed, true) },
        };
        let mut ranks = all_ranks(&mut net, plan, true);
        (0..seed / 2 * 40).for_each(|_| step(&mut net, &mut ranks));
        let stalled = ranks.pop().unwrap();
        let since = net.now();
        until(&mut net, &mut ranks, "sending past a stalled rank", |ranks| {
            ranks
                .iter()
                .all(|r| r.device.has_sent_all() && r.device.has_all_of(&[0, 1]) && r.lost() == [2])
        });
        let took = net.now().since(since);
        assert!(took < 4 * DEADLINE, "{took:?} under seed {seed}");
        drop(stalled);
    }
}

type Thread = (Executor, Arc<TransferEngine>, Pusher);

/// Two ranks of two threads each; with the shared state of each rank and all events.
fn two_threads_each(net: &mut SimNet) -> (Vec<Thread>, [SharedState; 2], Arc<Mutex<Vec<Event>>>) {
    let plan = Plan { ranks: 2, channels: 1, rounds: 0, ordered: true, seed: 1 };
    let config = Config { ranks: 2, threads: 2, fifos: 1, words: 2, ..Config::default() };
    let common = [SharedState::new(&config), SharedState::new(&config)];
    let events = Arc::new(Mutex::new(Vec::new()));
    let open = |rank: usize| {
        let (engine, parker) = (engine(net), Arc::new(Parker::default()));
        let part = engine.alloc(plan.memory().max(16)).unwrap();
        let (pusher, popper) = fifo(16, Arc::clone(&parker)).unwrap();
        let (config, descriptor) = (Config { rank, ..config.clone() }, Arc::clone(&events));
        let on_event: fabric_proxy::OnEvent = Arc::new(move |event| {
            // Each thread reports these.
            if !matches!(event, Event::Joined { .. } | Event::Gone { .. }) {
                descriptor.lock().unwrap().push(event);
            }
        });
        let ends = (parker, vec![popper]);
        let common = common[rank].clone();
        let executor =
            Executor::new(Arc::clone(&engine), part, &config, common, ends, on_event).unwrap();
        (executor, engine, pusher)
    };
    let all = [0, 0, 1, 1].into_iter().map(open).collect();
    (all, common, events)
}

/// One thread fails to add a rank that another thread has added.
#[test]
fn a_failed_join_is_reported_when_all_threads_have_dropped_the_rank() {
    let mut net = network(1);
    let (mut all, common, events) = two_threads_each(&mut net);
    let descriptor = [all[2].0.descriptor(), all[3].0.descriptor()];
    let mixed = ThreadDescriptor {
        memory: descriptor[0].memory.clone(),
        control: descriptor[1].control.clone(),
    };
    all[0].0.membership().join(1, 1, descriptor[0].clone());
    all[0].0.step(net.now());
    assert!(common[0].alive.is_alive(1));
    all[1].0.membership().join(1, 1, mixed);
    all[1].0.step(net.now());
    assert!(!common[0].alive.is_alive(1));
    assert!(events.lock().unwrap().is_empty(), "{:?}", events.lock().unwrap());
    for _ in 0..3 {
        for (executor, ..) in &mut all[..2] {
            executor.step(net.now());
        }
    }
    let events = events.lock().unwrap();
    assert!(matches!(events[..], [Event::Lost { rank: 1, incarnation: 1, .. }]), "{events:?}");
}

/// One thread sees that a rank left while another has not applied its earlier data.
#[test]
fn a_loss_is_reported_after_all_threads_have_applied_earlier_data() {
    let mut net = network(1);
    let (mut all, common, events) = two_threads_each(&mut net);
    for (i, (executor, ..)) in all.iter().enumerate() {
        for rank in 0..2 {
            let descriptor = all[2 * rank + i % 2].0.descriptor();
            executor.membership().join(rank, 1, descriptor);
        }
    }
    for thread in 0..2 {
        let add = fabric_proxy::command::Add { slot: thread, value: 1, ordered: true };
        let command = Command::Atomic { rank: 0, channel: 0, add };
        all[2 + usize::from(thread)].2.try_push(&command).unwrap();
    }
    // Rank 1 sends on both threads and leaves; one thread of rank 0 is not stepped meanwhile.
    for _ in 0..1000 {
        for (executor, ..) in all.iter_mut().skip(2) {
            executor.step(net.now());
        }
        all[0].0.step(net.now());
        net.step();
    }
    (2..4).for_each(|i| net.kill(all[i].1.id()));
    let word = |i: usize| common[0].words[i].load(std::sync::atomic::Ordering::Acquire);
    for _ in 0..100_000 {
        all[0].0.step(net.now());
        if !common[0].alive.is_alive(1) {
            break;
        }
        net.step();
    }
    assert!(!common[0].alive.is_alive(1), "the first thread has seen it");
    assert_eq!((word(0), word(1)), (1, 0), "the other one has taken nothing in");
    assert!(events.lock().unwrap().is_empty(), "{:?}", events.lock().unwrap());
    while all[1].0.step(net.now()) || events.lock().unwrap().is_empty() && net.step() {}
    assert_eq!(word(1), 1);
    let events = events.lock().unwrap();
    assert!(matches!(events[..], [Event::Lost { rank: 1, incarnation: 1, .. }]), "{events:?}");
}

fn sum(rank: &Rank) -> u64 {
    rank.common.words.iter().map(|w| w.load(std::sync::atomic::Ordering::Acquire)).sum()
}
