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
    EngineError, Local, Op, Remote, Submit, TransferEngine,
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

/// Callers wait at once, each for its own counter and with timeouts around the time of an arrival.
/// After each round no caller waits, and the worker must have taken over: a callback follows.
fn callers_that_leave_hand_over(transport: TransportKind) {
    const CALLERS: usize = 4;
    let (a, b) = (engine(transport), engine(transport));
    let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    let counters: Vec<_> = (0..=CALLERS).map(|_| b.counter().unwrap()).collect();
    let there = a.import(&dst.descriptor()).unwrap();
    let write = |at: usize| {
        let op = Op::Write {
            src: Local { region: &src, offset: 0 },
            dst: Remote { region: &there, offset: 0 },
            len: 8,
            imm: Some(counters[at].imm()),
        };
        a.submit(&[op], Submit::default()).unwrap().wait(TIMEOUT).unwrap().unwrap();
    };
    for round in 0..40u64 {
        std::thread::scope(|scope| {
            for (at, counter) in counters[..CALLERS].iter().enumerate() {
                let arrival = counter.expect(1, &[], TIMEOUT).unwrap();
                scope.spawn(move || {
                    let start = Instant::now();
                    let mut turn = round + at as u64;
                    while arrival.wait(Duration::from_micros(turn * 700 % 4900)).is_none() {
                        assert!(start.elapsed() < TIMEOUT, "{transport}: caller {at} sleeps");
                        turn += 1;
                    }
                });
            }
            for at in 0..CALLERS {
                std::thread::sleep(Duration::from_micros(300 * (round % 8)));
                write((at + round as usize) % CALLERS);
            }
        });
        let (told, arrived) = std::sync::mpsc::channel();
        let last = counters[CALLERS].expect(1, &[], TIMEOUT).unwrap();
        last.on_done(move |result| told.send(result).unwrap());
        write(CALLERS);
        let result = arrived.recv_timeout(TIMEOUT / 2);
        assert!(result.is_ok(), "{transport}: no thread drives after round {round}");
    }
}

#[test]
fn callers_that_leave_hand_over_to_the_worker_over_shm() {
    callers_that_leave_hand_over(TransportKind::Shm);
}

#[test]
fn callers_that_leave_hand_over_to_the_worker_over_tcp() {
    callers_that_leave_hand_over(TransportKind::Tcp);
}

#[test]
fn a_closed_engine_wakes_the_callers_that_wait() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let engine = engine(transport);
        let counters: Vec<_> = (0..3).map(|_| engine.counter().unwrap()).collect();
        std::thread::scope(|scope| {
            for counter in &counters {
                let arrival = counter.expect(1, &[], TIMEOUT * 2).unwrap();
                scope.spawn(move || {
                    let result = arrival.wait(TIMEOUT);
                    assert!(matches!(result, Some(Err(EngineError::Closed))), "{result:?}");
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            engine.close();
        });
    }
}

/// A caller whose handle another thread ends would sleep for another second.
#[test]
fn a_caller_that_sleeps_is_woken_by_the_end_of_its_handle() {
    let engine = engine(TransportKind::Shm);
    let counter = engine.counter().unwrap();
    let start = Instant::now();
    for _ in 0..40 {
        let arrival = counter.expect(1, &[], TIMEOUT * 2).unwrap();
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| arrival.wait(TIMEOUT));
            std::thread::sleep(Duration::from_millis(5));
            arrival.cancel();
            let result = caller.join().unwrap();
            assert!(matches!(result, Some(Err(EngineError::Cancelled { .. }))), "{result:?}");
        });
    }
    assert!(start.elapsed() < TIMEOUT, "the caller sleeps on");
}

/// Holds a thread up from a signal until it is released, as one that gets no core.
mod held_up {
    use super::*;

    static IS: AtomicBool = AtomicBool::new(false);
    static RELEASED: AtomicBool = AtomicBool::new(false);

    extern "C" fn hold_up(_signal: libc::c_int) {
        IS.store(true, SeqCst);
        while !RELEASED.load(SeqCst) {
            // SAFETY: `usleep` takes no memory of this process, and may be called by a handler.
            unsafe { libc::usleep(1000) };
        }
    }

    /// Returns once the thread stands still.
    pub fn begin(thread: libc::pthread_t) {
        IS.store(false, SeqCst);
        RELEASED.store(false, SeqCst);
        let handler = hold_up as extern "C" fn(libc::c_int);
        // SAFETY: the handler stores and loads atomics only, and sleeps. The caller joins the
        // thread later.
        unsafe {
            libc::signal(libc::SIGUSR2, handler as libc::sighandler_t);
            assert_eq!(libc::pthread_kill(thread, libc::SIGUSR2), 0);
        }
        while !IS.load(SeqCst) {
            std::thread::yield_now();
        }
    }

    pub fn end() {
        RELEASED.store(true, SeqCst);
    }
}

#[test]
fn a_caller_that_sleeps_and_gets_no_core_holds_up_no_other() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let (a, b) = (engine(transport), engine(transport));
        let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
        let counters: Vec<_> = (0..2).map(|_| b.counter().unwrap()).collect();
        let there = a.import(&dst.descriptor()).unwrap();
        let write = |at: usize| {
            let op = Op::Write {
                src: Local { region: &src, offset: 0 },
                dst: Remote { region: &there, offset: 0 },
                len: 8,
                imm: Some(counters[at].imm()),
            };
            a.submit(&[op], Submit::default()).unwrap()
        };
        write(1).wait(TIMEOUT).unwrap().unwrap();
        counters[1].expect(1, &[], TIMEOUT).unwrap().wait(TIMEOUT).unwrap().unwrap();
        let first = counters[0].expect(1, &[], TIMEOUT * 4).unwrap();
        let result = std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let held_up = scope.spawn(move || {
                // SAFETY: it reads the thread's own number.
                tell.send(unsafe { libc::pthread_self() }).unwrap();
                first.wait(TIMEOUT * 3)
            });
            let thread = told.recv().unwrap();
            // It sleeps by then, and no timer of another call is set.
            std::thread::sleep(Duration::from_millis(200));
            held_up::begin(thread);
            let arrivals: Vec<_> = (0..20)
                .map(|_| {
                    let (tell, told) = std::sync::mpsc::channel();
                    let arrival = counters[1].expect(1, &[], TIMEOUT).unwrap();
                    arrival.on_done(move |result| drop(tell.send(result)));
                    let sent = write(1);
                    let result = told.recv_timeout(TIMEOUT / 4).ok();
                    result.and_then(|_| sent.wait(TIMEOUT / 4))
                })
                .take_while(Option::is_some)
                .collect();
            held_up::end();
            write(0).wait(TIMEOUT).unwrap().unwrap();
            held_up.join().unwrap().unwrap().unwrap();
            arrivals.len()
        });
        assert_eq!(result, 20, "{transport}: no thread drives while a caller gets no core");
    }
}

/// No caller waits, and the engine sleeps when the request is posted.
fn requests_end_while_no_caller_waits(transport: TransportKind) {
    let (a, b) = (engine(transport), engine(transport));
    let (src, dst) = (a.alloc(4 << 20).unwrap(), b.alloc(4 << 20).unwrap());
    let (there, peer) = (a.import(&dst.descriptor()).unwrap(), a.peer(b.address()).unwrap());
    b.receive(64, 4, |_| ()).unwrap();
    let (local, remote) = (Local { region: &src, offset: 0 }, Remote { region: &there, offset: 0 });
    let requests = [
        Op::Send { peer: &peer, message: b"hello" },
        Op::Write { src: local, dst: remote, len: 8, imm: None },
        Op::Write { src: local, dst: remote, len: 4 << 20, imm: None },
        Op::Read { src: remote, dst: local, len: 4 << 20 },
    ];
    for round in 0..3 {
        for op in &requests {
            // No timer of an earlier call is set by then.
            std::thread::sleep(Duration::from_millis(150));
            let (told, ended) = std::sync::mpsc::channel();
            let request = a.submit(std::slice::from_ref(op), Submit::default()).unwrap();
            request.on_done(move |result| told.send(result).unwrap());
            let result = ended.recv_timeout(TIMEOUT / 2);
            assert_eq!(result, Ok(Ok(())), "{transport}: {} of round {round}", request.op());
        }
    }
}

#[test]
fn requests_end_while_no_caller_waits_over_shm() {
    requests_end_while_no_caller_waits(TransportKind::Shm);
}

#[test]
fn requests_end_while_no_caller_waits_over_tcp() {
    requests_end_while_no_caller_waits(TransportKind::Tcp);
}
