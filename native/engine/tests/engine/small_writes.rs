//! Requests of small writes over shm, which one post carries out.

use std::{
    sync::{mpsc, Arc},
    time::{Duration, Instant},
};

use fabric_engine::{
    api::{EngineConfig, Imm, Spin, TransportKind},
    BatchObserver, Local, Op, Outcome, Remote, Submit,
};

use super::{engine, open, TIMEOUT};

#[test]
fn ic_1_small_writes_of_one_request_to_two_peers_count_at_each() {
    let [a, b, c] = [0; 3].map(|_| engine(TransportKind::Shm));
    let src = a.alloc(8).unwrap();
    src.put(0, &[7; 8]).unwrap();
    let (at_b, at_c) = (b.alloc(8).unwrap(), c.alloc(8).unwrap());
    let imm = Imm::plain(5).unwrap();
    let counters = [b.plain_counter(imm), c.plain_counter(imm)];
    let there = [&at_b, &at_c].map(|region| a.import(&region.descriptor()).unwrap());
    let write = |to: usize, len| Op::Write {
        src: Local { region: &src, offset: 0 },
        dst: Remote { region: &there[to], offset: 0 },
        len,
        imm: Some(imm),
    };
    // The first request connects, and resolves the regions.
    for round in 1..=3 {
        let counts = [write(0, 0), write(1, 0), write(1, 0)];
        for ops in [&[write(0, 8), write(1, 8)][..], &counts] {
            a.submit(ops, Submit::default()).unwrap().wait(TIMEOUT).unwrap().unwrap();
        }
        let arrived = || [0, 1].map(|to: usize| counters[to].arrived());
        let start = Instant::now();
        while arrived().iter().sum::<u64>() < 5 * round && start.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(arrived(), [2 * round, 3 * round]);
    }
    assert_eq!([at_b.get(0, 8).unwrap(), at_c.get(0, 8).unwrap()], [[7; 8], [7; 8]]);
}

#[test]
fn small_writes_between_views_stay_within_them() {
    let (a, b) = (engine(TransportKind::Shm), engine(TransportKind::Shm));
    let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    src.put(0, &std::array::from_fn::<u8, 64, _>(|at| at as u8)).unwrap();
    let (from, to) = (src.slice(16, 16).unwrap(), dst.slice(32, 16).unwrap());
    let there = a.import(&to.descriptor()).unwrap().slice(4, 8).unwrap();
    let write = Op::Write {
        src: Local { region: &from, offset: 2 },
        dst: Remote { region: &there, offset: 1 },
        len: 4,
        imm: None,
    };
    for _ in 0..2 {
        dst.put(0, &[0; 64]).unwrap();
        let ops = std::slice::from_ref(&write);
        a.submit(ops, Submit::default()).unwrap().wait(TIMEOUT).unwrap().unwrap();
        let mut expected = [0; 64];
        expected[37..41].copy_from_slice(&[18, 19, 20, 21]);
        assert_eq!(dst.get(0, 64).unwrap(), expected);
    }
}

struct Results(mpsc::Sender<(usize, Outcome)>);

impl BatchObserver for Results {
    fn on_events(&self, events: Vec<(usize, Outcome)>) {
        events.into_iter().for_each(|event| drop(self.0.send(event)));
    }
}

#[test]
fn ic_4_small_writes_of_one_call_wake_each_peer_that_sleeps() {
    // Nothing but an arrival ends a sleep within the time that the test waits.
    let [a, b, c] = [0; 3].map(|_| {
        open(EngineConfig {
            transports: vec![TransportKind::Shm],
            spin: Spin::For(Duration::ZERO),
            peer_timeout: Duration::from_secs(600),
            ..Default::default()
        })
    });
    let src = a.alloc(8).unwrap();
    let regions = [&b, &c].map(|peer| peer.alloc(8).unwrap());
    let counters = [&b, &c].map(|peer| peer.counter().unwrap());
    let there = [0, 1].map(|to| a.import(&regions[to].descriptor()).unwrap());
    let ops = [0, 1, 0].map(|to| Op::Write {
        src: Local { region: &src, offset: 0 },
        dst: Remote { region: &there[to], offset: 0 },
        len: 8,
        imm: Some(counters[to].imm()),
    });
    for round in 1..=20 {
        std::thread::sleep(Duration::from_millis(5));
        let (tell, told) = mpsc::channel();
        a.submit_batch(&ops, Submit::default(), Arc::new(Results(tell))).unwrap();
        let start = Instant::now();
        while [2, 1] != [0, 1].map(|to: usize| counters[to].arrived() / round) {
            assert!(start.elapsed() < TIMEOUT / 2, "a peer sleeps on in round {round}");
            std::thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(told.iter().take(3).count(), 3);
    }
}
