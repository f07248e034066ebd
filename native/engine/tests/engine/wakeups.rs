//! A sleeping engine is woken by what arrives, however callers compete with its worker for it.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        Arc,
    },
    time::{Duration, Instant},
};

use fabric_engine::{
    api::{EngineConfig, Spin, TransportKind},
    Local, Op, Remote, Submit, TransferEngine,
};

use super::{open, TIMEOUT};

/// Nothing but an arrival ends the sleep within the time that the test waits.
fn engine(transport: TransportKind) -> Arc<TransferEngine> {
    open(EngineConfig {
        transports: vec![transport],
        spin: Spin::For(Duration::ZERO),
        peer_timeout: Duration::from_secs(600),
        ..Default::default()
    })
}

fn arrivals_are_seen(transport: TransportKind) {
    let (a, b) = (engine(transport), engine(transport));
    let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    let counter = b.counter().unwrap();
    let there = a.import(&dst.descriptor()).unwrap();
    let back = b.peer(a.address()).unwrap();
    let write = || Op::Write {
        src: Local { region: &src, offset: 0 },
        dst: Remote { region: &there, offset: 0 },
        len: 8,
        imm: Some(counter.imm()),
    };
    let (busy, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        // A caller that has the engine's lock half of the time and never moves it on.
        scope.spawn(|| {
            while !over.load(SeqCst) {
                match busy.load(SeqCst) {
                    true => drop(b.explain(&back)),
                    false => std::thread::yield_now(),
                }
            }
        });
        for round in 1..=300 {
            busy.store(true, SeqCst);
            let sent = a.submit(&[write()], Submit::default()).unwrap();
            std::thread::sleep(Duration::from_micros(300));
            busy.store(false, SeqCst);
            let start = Instant::now();
            while counter.arrived() < round {
                if start.elapsed() > TIMEOUT {
                    over.store(true, SeqCst);
                    panic!("{transport}: the engine sleeps on write {round}");
                }
                std::thread::sleep(Duration::from_micros(50));
            }
            sent.wait(TIMEOUT).unwrap().unwrap();
        }
        over.store(true, SeqCst);
    });
}

#[test]
fn an_engine_that_callers_compete_for_wakes_over_shm() {
    arrivals_are_seen(TransportKind::Shm);
}

#[test]
fn an_engine_that_callers_compete_for_wakes_over_tcp() {
    arrivals_are_seen(TransportKind::Tcp);
}
