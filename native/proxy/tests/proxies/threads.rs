use std::{
    sync::{
        atomic::Ordering::Acquire,
        mpsc::{channel, Receiver, Sender},
        Arc,
    },
    thread,
    time::{Duration, Instant},
};

use fabric_engine::api::{EngineConfig, TransportKind};
use fabric_proxy::{
    command::{Add, Command, Scope},
    fifo::FifoError,
    Config, DeviceMemory, Engines, Event, OnEvent, Proxy, ProxyError, RankDescriptor,
};

use crate::device::{Device, Plan};

const TIMEOUT: Duration = Duration::from_secs(60);

pub fn open(transport: TransportKind, config: &Config, memory: u64, on_event: OnEvent) -> Proxy {
    let engine = EngineConfig {
        name: format!("rank-{}", config.rank),
        transports: vec![transport],
        ..EngineConfig::default()
    };
    let engines = Engines::open(&engine, config.threads, memory).unwrap();
    Proxy::open(config, engines, DeviceMemory::host(config).unwrap(), on_event).unwrap()
}

/// All ranks in this process, and the events of each.
/// `Joined` and `Gone` events are left out: each thread reports them.
fn tell(told: &Sender<Event>, event: Event) {
    if !matches!(event, Event::Joined { .. } | Event::Gone { .. }) {
        drop(told.send(event));
    }
}

fn group(transport: TransportKind, config: &Config, memory: u64) -> Vec<(Proxy, Receiver<Event>)> {
    let open_one = |rank| {
        let (told, events) = channel();
        // Longer than the tests' timeout, so that it hides no hang.
        let config = Config { rank, deadline: 4 * TIMEOUT, ..config.clone() };
        let proxy = open(transport, &config, memory, Arc::new(move |e| tell(&told, e)));
        (proxy, events)
    };
    let all: Vec<_> = (0..config.ranks).map(open_one).collect();
    for (a, _) in &all {
        for (b, _) in &all {
            if a.descriptor().rank != b.descriptor().rank {
                a.join(&through_bytes(b.descriptor())).unwrap();
            }
        }
    }
    all
}

fn through_bytes(descriptor: &RankDescriptor) -> RankDescriptor {
    RankDescriptor::from_bytes(&descriptor.to_bytes()).unwrap()
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "{what} does not end");
        thread::yield_now();
    }
}

pub fn device(proxy: &Proxy, plan: Plan, peers: &[usize], barrier: bool) -> Device {
    let threads = proxy.descriptor().threads.len();
    let pusher = |c: u8| proxy.pusher(usize::from(c) % threads, usize::from(c) / threads).unwrap();
    let own =
        (proxy.memory().clone(), proxy.words().clone(), (0..plan.channels).map(pusher).collect());
    Device::new(proxy.descriptor().rank.into(), plan, own, peers, barrier)
}

pub fn config(plan: &Plan) -> Config {
    Config {
        ranks: plan.ranks,
        threads: 2,
        fifos: usize::from(plan.channels) / 2,
        capacity: 64,
        words: plan.words(),
        ..Config::default()
    }
}

fn ranks_meet(transport: TransportKind) {
    for ordered in [false, true] {
        let plan = Plan { ranks: 3, channels: 4, rounds: 80, ordered, seed: 5 };
        let all = group(transport, &config(&plan), plan.memory());
        let mut devices: Vec<_> =
            all.iter().map(|(proxy, _)| device(proxy, plan, &[0, 1, 2], true)).collect();
        until("sending", || {
            devices.iter_mut().for_each(Device::step);
            devices.iter().all(|d| d.has_sent_all() && d.has_all_of(&[0, 1, 2]))
        });
        for (_, events) in &all {
            assert!(events.try_recv().is_err());
        }
    }
}

#[test]
fn ranks_send_and_meet_over_shm() {
    ranks_meet(TransportKind::Shm);
}

#[test]
fn ranks_send_and_meet_over_tcp() {
    ranks_meet(TransportKind::Tcp);
}

fn a_rank_leaves(transport: TransportKind) {
    let plan = Plan { ranks: 3, channels: 2, rounds: 100, ordered: true, seed: 6 };
    let mut all = group(transport, &config(&plan), plan.memory());
    let mut devices: Vec<_> =
        all.iter().map(|(proxy, _)| device(proxy, plan, &[0, 1, 2], true)).collect();
    devices.iter_mut().for_each(Device::step);
    let (leaving, _) = all.pop().unwrap();
    devices.pop();
    leaving.close();
    until("sending after a rank left", || {
        devices.iter_mut().for_each(Device::step);
        devices.iter().all(|d| d.has_sent_all() && d.has_all_of(&[0, 1]))
    });
    for (proxy, events) in &all {
        match events.recv_timeout(TIMEOUT).unwrap() {
            Event::Lost { rank: 2, incarnation: 1, .. } => {}
            other => panic!("{other:?}"),
        }
        until("the other threads' part", || !proxy.alive().is_alive(2));
        assert!(events.try_recv().is_err(), "told twice");
    }
}

#[test]
fn a_rank_that_leaves_is_reported_once_and_does_not_stop_the_others_over_shm() {
    a_rank_leaves(TransportKind::Shm);
}

#[test]
fn a_rank_that_leaves_is_reported_once_and_does_not_stop_the_others_over_tcp() {
    a_rank_leaves(TransportKind::Tcp);
}

#[test]
fn a_rank_that_comes_back_takes_part_again() {
    let plan = Plan { ranks: 3, channels: 2, rounds: 60, ordered: true, seed: 8 };
    let mut all = group(TransportKind::Shm, &config(&plan), plan.memory());
    for incarnation in 2..=20 {
        let (lost, events) = all.remove(0);
        assert!(events.try_recv().is_err());
        let rank = usize::from(lost.descriptor().rank);
        lost.close();
        for (proxy, events) in &all {
            match events.recv_timeout(TIMEOUT).unwrap() {
                Event::Lost { rank: gone, .. } => assert_eq!(gone, rank),
                other => panic!("{other:?}"),
            }
            until("the loss", || !proxy.alive().is_alive(rank));
        }
        let (told, events) = channel();
        let config = Config { rank, incarnation, ..config(&plan) };
        let on_event: OnEvent = Arc::new(move |e| tell(&told, e));
        let newcomer = open(TransportKind::Shm, &config, plan.memory(), on_event);
        // The rank sends before it is announced: early messages are kept.
        for (proxy, _) in &all {
            newcomer.join(proxy.descriptor()).unwrap();
        }
        let add = Add { slot: 5, value: i64::from(incarnation), ordered: true };
        let before: Vec<_> = all.iter().map(|(p, _)| p.words()[5].load(Acquire)).collect();
        let pusher = newcomer.pusher(1, 0).unwrap();
        for (proxy, _) in &all {
            let to = proxy.descriptor().rank;
            pusher.push(&Command::Atomic { rank: to, channel: 1, add }).unwrap();
        }
        for (proxy, _) in &all {
            proxy.join(&through_bytes(newcomer.descriptor())).unwrap();
        }
        for ((proxy, _), before) in all.iter().zip(before) {
            until("an early atomic", || {
                proxy.words()[5].load(Acquire) == before + u64::from(incarnation)
            });
        }
        all.push((newcomer, events));
        let barrier = Command::Barrier { scope: Scope::All, channel: 1 };
        let pushers: Vec<_> = all.iter().map(|(p, _)| p.pusher(1, 0).unwrap()).collect();
        let entered: Vec<_> = pushers.iter().map(|p| p.push(&barrier).unwrap()).collect();
        until("the barrier", || pushers.iter().zip(&entered).all(|(p, i)| p.is_complete(*i)));
    }
}

/// The proxy sleeps for up to an hour, so that only a push can have woken it.
#[test]
fn a_sleeping_proxy_is_woken_by_a_push_and_by_a_peer() {
    let (nap, spin) = (Duration::from_secs(3600), Duration::ZERO);
    let base = Config { ranks: 2, nap, spin, ..Config::default() };
    let all = group(TransportKind::Shm, &base, 4096);
    for round in 0..50u64 {
        let pushers: Vec<_> = all.iter().map(|(p, _)| p.pusher(0, 0).unwrap()).collect();
        let add = Add { slot: 3, value: 1, ordered: true };
        let write =
            Command::Write { rank: 1, channel: 0, from: 0, to: 64, len: 64, add: Some(add) };
        let sent = pushers[0].push(&write).unwrap();
        until("the write", || pushers[0].is_complete(sent));
        until("the atomic", || all[1].0.words()[3].load(Acquire) == round + 1);
        let barrier = Command::Barrier { scope: Scope::All, channel: 0 };
        let entered: Vec<_> = pushers.iter().map(|p| p.push(&barrier).unwrap()).collect();
        until("the barrier", || pushers.iter().zip(&entered).all(|(p, i)| p.is_complete(*i)));
    }
}

#[test]
fn a_barrier_of_a_rail_waits_for_its_ranks_only() {
    let base = Config { ranks: 4, per_node: 2, ..Config::default() };
    let all = group(TransportKind::Shm, &base, 4096);
    let pushers: Vec<_> = all.iter().map(|(p, _)| p.pusher(0, 0).unwrap()).collect();
    let enter =
        |rank: usize, scope| pushers[rank].push(&Command::Barrier { scope, channel: 0 }).unwrap();
    let first = enter(0, Scope::Rail);
    let other = enter(1, Scope::All);
    let third = enter(2, Scope::Rail);
    until("the rail", || pushers[0].is_complete(first) && pushers[2].is_complete(third));
    assert!(!pushers[1].is_complete(other));
    for rank in [0, 2, 3] {
        enter(rank, Scope::All);
    }
    until("all", || pushers[1].is_complete(other));
}

#[test]
fn invalid_commands_are_refused_and_others_go_on() {
    let base = Config { ranks: 3, words: 4, ..Config::default() };
    let (told, events) = channel();
    let proxy = open(TransportKind::Shm, &base, 4096, Arc::new(move |e| tell(&told, e)));
    let pusher = proxy.pusher(0, 0).unwrap();
    let add = |slot| Add { slot, value: 1, ordered: false };
    let write = |rank, from, to| Command::Write { rank, channel: 0, from, to, len: 64, add: None };
    let wrong = [
        (write(0, 4096, 0).encode().unwrap(), "rank 0: bytes 4096..4160 exceed its 4096"),
        (write(0, 0, 4080).encode().unwrap(), "rank 0: bytes 4080..4144 exceed its 4096"),
        (write(5, 0, 0).encode().unwrap(), "rank 5 is out of range [0, 3)"),
        (write(1, 0, 0).encode().unwrap(), "rank 1 is not connected"),
        (
            Command::Atomic { rank: 0, channel: 1, add: add(4) }.encode().unwrap(),
            "slot 4 is out of range [0, 4)",
        ),
        ([7 << 60, 0], "command: kind is 7"),
    ];
    for (i, (words, text)) in wrong.into_iter().enumerate() {
        pusher.try_push_words(words).unwrap();
        match events.recv_timeout(TIMEOUT).unwrap() {
            Event::Refused { fifo: 0, index, error } => {
                assert!(error.to_string().contains(text), "{error}");
                assert_eq!(index, i as u64);
            }
            other => panic!("{other:?}"),
        }
    }
    pusher.push(&Command::Atomic { rank: 0, channel: 0, add: add(3) }).unwrap();
    until("the atomic", || proxy.words()[3].load(Acquire) == 1);
    // The rank never joined, so there is nothing to wait for.
    proxy.mask(1).unwrap();
    let masked = pusher.push(&write(1, 0, 0)).unwrap();
    let barrier = pusher.push(&Command::Barrier { scope: Scope::All, channel: 0 }).unwrap();
    until("commands to a masked rank", || {
        pusher.is_complete(masked) && pusher.is_complete(barrier)
    });
    assert!(events.try_recv().is_err());
    assert!(matches!(proxy.mask(0), Err(ProxyError::Invalid(_))));
    assert!(matches!(proxy.mask(3), Err(ProxyError::Rank { .. })));
    let own = proxy.descriptor().clone();
    assert!(matches!(proxy.join(&own), Err(ProxyError::StaleIncarnation { had: 1, .. })));
    let fewer = RankDescriptor { rank: 1, threads: Vec::new(), ..own };
    assert!(matches!(proxy.join(&fewer), Err(ProxyError::Invalid(_))));
    for bytes in [&[][..], &[0xff; 64], &proxy.descriptor().to_bytes()[1..]] {
        assert!(RankDescriptor::from_bytes(bytes).is_err());
    }
}

#[test]
fn waiting_pushers_of_a_closed_proxy_get_an_error() {
    let base = Config { ranks: 2, capacity: 2, ..Config::default() };
    let mut all = group(TransportKind::Shm, &base, 4096);
    let (proxy, _) = all.remove(0);
    let pusher = proxy.pusher(0, 0).unwrap();
    // The other rank never enters.
    let barrier = Command::Barrier { scope: Scope::All, channel: 0 };
    let entered = pusher.push(&barrier).unwrap();
    let waiting = {
        let pusher = pusher.clone();
        thread::spawn(move || pusher.wait(entered))
    };
    let pushing = {
        let pusher = pusher.clone();
        thread::spawn(move || (0..3).find_map(|_| pusher.push(&barrier).err()))
    };
    until("a full FIFO", || pusher.try_push(&barrier) == Err(FifoError::Full(2)));
    drop(proxy);
    assert_eq!(waiting.join().unwrap(), Err(FifoError::Closed));
    assert_eq!(pushing.join().unwrap(), Some(FifoError::Closed));
    assert!(!pusher.is_complete(entered));
}

/// Several threads push more commands into each FIFO at once than it holds, and all arrive.
#[test]
fn fifos_of_many_pushers_lose_nothing() {
    const EACH: u64 = 3000;
    let base = Config { ranks: 2, threads: 2, fifos: 2, capacity: 32, ..Config::default() };
    let all = group(TransportKind::Shm, &base, 4096);
    let mut pushing = Vec::new();
    for (i, (t, f)) in [(0, 0), (0, 1), (1, 0), (1, 1)].into_iter().enumerate() {
        for _ in 0..3 {
            let pusher = all[0].0.pusher(t, f).unwrap();
            let add = Add { slot: i as u16, value: 2, ordered: i % 2 == 0 };
            let command = Command::Write {
                rank: 1,
                channel: i as u8,
                from: 0,
                to: 64 * i as u64,
                len: 64,
                add: Some(add),
            };
            pushing.push(thread::spawn(move || {
                (0..EACH).for_each(|_| assert!(pusher.push(&command).is_ok()));
            }));
        }
    }
    pushing.into_iter().for_each(|t| t.join().unwrap());
    let words = all[1].0.words();
    until("all atomics", || words[..4].iter().all(|w| w.load(Acquire) == 3 * EACH * 2));
}
