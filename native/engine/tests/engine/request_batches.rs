//! Request batches: many requests, or expectations, in one call, each with a result of its own.

use std::{
    sync::{
        mpsc::{channel, Receiver, Sender},
        Arc, Mutex,
    },
    time::Duration,
};

use fabric_engine::{
    api::{EngineConfig, TransportKind},
    simulation::SimNet,
    transport::sim::{Fault, SimConfig},
    BatchObserver, EngineError, Expect, Local, Op, Outcome, Quiescence, Region, Remote,
    RemoteRegion, Submit, TransferEngine,
};

/// Records events.
#[derive(Default)]
struct EventRecorder(Mutex<Vec<(usize, Outcome)>>);

impl BatchObserver for EventRecorder {
    fn on_events(&self, events: Vec<(usize, Outcome)>) {
        self.0.lock().unwrap().extend(events);
    }
}

impl EventRecorder {
    /// The events of one request, in order.
    fn of(&self, at: usize) -> Vec<Outcome> {
        let all = self.0.lock().unwrap();
        all.iter().filter(|(place, _)| *place == at).map(|(_, outcome)| outcome.clone()).collect()
    }
}

fn write<'a>(src: &'a Region, dst: &'a RemoteRegion, len: u64) -> Op<'a> {
    let (src, dst) = (Local { region: src, offset: 0 }, Remote { region: dst, offset: 0 });
    Op::Write { src, dst, len, imm: None }
}

fn failed(outcomes: &[Outcome]) -> bool {
    matches!(outcomes, [Outcome::Ended(Err(_)), Outcome::Quiesced(_)])
}

const DONE: [Outcome; 1] = [Outcome::Ended(Ok(()))];

#[test]
fn rs_4_a_failed_request_ends_no_other() {
    let mut net = SimNet::new(SimConfig::default());
    let mut open = || net.engine(EngineConfig::default()).unwrap();
    let (a, b, dead) = (open(), open(), open());
    let src = a.alloc(64).unwrap();
    let (here, there) = (b.alloc(64).unwrap(), dead.alloc(64).unwrap());
    src.put(0, &[7; 64]).unwrap();
    let (to_b, to_dead) =
        (a.import(&here.descriptor()).unwrap(), a.import(&there.descriptor()).unwrap());
    net.kill(dead.id());
    let recorder = Arc::new(EventRecorder::default());
    let ops = [write(&src, &to_dead, 64), write(&src, &to_b, 65), write(&src, &to_b, 64)];
    a.submit_batch(&ops, Submit::default(), recorder.clone()).unwrap();
    assert!(failed(&recorder.of(1)), "an invalid request fails within the call");
    let end = net.now().after(Duration::from_millis(1));
    net.run_until(end);
    assert_eq!(recorder.of(2), DONE);
    assert_eq!(here.get(0, 64).unwrap(), [7; 64]);
    assert!(failed(&recorder.of(0)) && failed(&recorder.of(1)), "{:?}", recorder.of(0));
    // Nothing is under way, and the engine has released the memory.
    let retired = src.revoke().unwrap();
    let end = net.now().after(Duration::from_millis(1));
    net.run_until(end);
    assert!(retired.is_done());
}

#[test]
fn ic_4_each_expectation_of_a_batch_has_its_own_end() {
    let mut net = SimNet::new(SimConfig::default());
    let mut open = || net.engine(EngineConfig::default()).unwrap();
    let (a, b) = (open(), open());
    let (met, missed, early) = (a.counter().unwrap(), a.counter().unwrap(), a.counter().unwrap());
    let (src, dst) = (b.alloc(64).unwrap(), a.alloc(64).unwrap());
    let dst = b.import(&dst.descriptor()).unwrap();
    let count = |counter: &fabric_engine::Counter| {
        let (src, dst) = (Local { region: &src, offset: 0 }, Remote { region: &dst, offset: 0 });
        let op = Op::Write { src, dst, len: 8, imm: Some(counter.imm()) };
        b.submit(&[op], Submit::default()).unwrap();
    };
    count(&early);
    let end = net.now().after(Duration::from_millis(1));
    net.run_until(end);
    let writers = [a.peer(b.address()).unwrap()];
    let recorder = Arc::new(EventRecorder::default());
    let all: Vec<Expect<'_>> =
        [&met, &missed, &early].map(|counter| Expect { counter, n: 1, writers: &writers }).into();
    a.expect_batch(&all, Duration::from_millis(50), recorder.clone()).unwrap();
    count(&met);
    let end = net.now().after(Duration::from_millis(10));
    net.run_until(end);
    assert_eq!(
        (recorder.of(0), recorder.of(1), recorder.of(2)),
        (DONE.into(), vec![], DONE.into())
    );
    let end = net.now().after(Duration::from_millis(50));
    net.run_until(end);
    let timed_out = |o: &Outcome| matches!(o, Outcome::Ended(Err(EngineError::Timeout { .. })));
    assert!(
        recorder.of(1).iter().all(timed_out) && recorder.of(1).len() == 1,
        "{:?}",
        recorder.of(1)
    );

    let none = [Expect { counter: &met, n: 0, writers: &writers }];
    assert!(a.expect_batch(&none, Duration::MAX, recorder.clone()).is_err());
    let others = b.counter().unwrap();
    let others = [Expect { counter: &others, n: 1, writers: &[] }];
    assert!(a.expect_batch(&others, Duration::MAX, recorder).is_err());
}

#[test]
fn rs_4_an_expectation_fails_when_its_writer_is_lost() {
    let mut net = SimNet::new(SimConfig::default());
    let mut open = || net.engine(EngineConfig::default()).unwrap();
    let (a, b, c) = (open(), open(), open());
    let (of_b, of_c) = (a.counter().unwrap(), a.counter().unwrap());
    let writers = [a.peer(b.address()).unwrap(), a.peer(c.address()).unwrap()];
    let recorder = Arc::new(EventRecorder::default());
    let expect = |counter, writers| Expect { counter, n: 1, writers };
    let all = [expect(&of_b, &writers[..1]), expect(&of_c, &writers[1..])];
    a.expect_batch(&all, Duration::from_secs(3600), recorder.clone()).unwrap();
    let end = net.now().after(Duration::from_millis(1));
    net.run_until(end);
    net.kill(b.id());
    let end = net.now().after(Duration::from_secs(60));
    net.run_until(end);
    let lost = recorder.of(0);
    assert!(matches!(lost[..], [Outcome::Ended(Err(EngineError::PeerLost { .. }))]), "{lost:?}");
    assert_eq!(recorder.of(1), []);
}

/// A request may end long before its memory is no longer read.
#[test]
fn mr_1_memory_is_in_use_until_the_last_is_quiet() {
    let mut net = SimNet::new(SimConfig::default());
    let mut open = || net.engine(EngineConfig::default()).unwrap();
    let (a, b) = (open(), open());
    let (src, there) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    let dst = a.import(&there.descriptor()).unwrap();
    let pass = |net: &mut SimNet, us| {
        let end = net.now().after(Duration::from_micros(us));
        net.run_until(end);
    };
    let first = a.submit(&[write(&src, &dst, 64)], Submit::default()).unwrap();
    pass(&mut net, 1000);
    assert!(first.is_done());
    net.inject(&Fault::Stall { node: 0, rail: 0, link_index: 0, duration: 1_000_000 });
    let recorder = Arc::new(EventRecorder::default());
    let soon = Submit { timeout: Some(Duration::from_micros(100)), ..Submit::default() };
    a.submit_batch(&[write(&src, &dst, 64), write(&src, &dst, 65)], soon, recorder.clone())
        .unwrap();
    let retired = src.revoke().unwrap();
    pass(&mut net, 200);
    let late = recorder.of(0);
    let late = matches!(late[..], [Outcome::Ended(Err(EngineError::Timeout { .. }))]);
    assert!(late && failed(&recorder.of(1)), "{:?}", recorder.of(0));
    assert!(!retired.is_done());
    pass(&mut net, 2000);
    assert_eq!(recorder.of(0)[1..], [Outcome::Quiesced(Quiescence::Quiesced)]);
    assert!(retired.is_done());
}

/// Signals that it was called, and blocks until a signal.
struct Busy(Mutex<(Sender<()>, Receiver<()>)>);

impl BatchObserver for Busy {
    fn on_events(&self, _: Vec<(usize, Outcome)>) {
        let channels = self.0.lock().unwrap();
        channels.0.send(()).unwrap();
        channels.1.recv().unwrap();
    }
}

/// Records events under the name of its batch.
struct Named(&'static str, Arc<Mutex<Vec<(&'static str, usize)>>>);

impl BatchObserver for Named {
    fn on_events(&self, events: Vec<(usize, Outcome)>) {
        self.1.lock().unwrap().extend(events.into_iter().map(|(at, _)| (self.0, at)));
    }
}

#[test]
fn events_keep_the_order_of_completion_over_all_batches() {
    let open = |name: &str| {
        let transports = vec![TransportKind::Shm];
        let config = EngineConfig { name: name.into(), transports, ..EngineConfig::default() };
        TransferEngine::open(config).unwrap()
    };
    let (a, b) = (open("hears"), open("writes"));
    let (src, dst) = (b.alloc(64).unwrap(), a.alloc(64).unwrap());
    let dst = b.import(&dst.descriptor()).unwrap();
    let counters: Vec<_> = (0..4).map(|_| a.counter().unwrap()).collect();
    let expect = |counters: &[&fabric_engine::Counter], observer: Arc<dyn BatchObserver>| {
        let one = |counter| Expect { counter, n: 1, writers: &[] };
        let all: Vec<Expect<'_>> = counters.iter().map(|counter| one(*counter)).collect();
        a.expect_batch(&all, Duration::MAX, observer).unwrap();
    };
    let count = |counter: &fabric_engine::Counter| {
        let (src, dst) = (Local { region: &src, offset: 0 }, Remote { region: &dst, offset: 0 });
        let op = Op::Write { src, dst, len: 8, imm: Some(counter.imm()) };
        let also = counter.expect(1, &[], Duration::MAX).unwrap();
        for _ in 0..2 {
            let done = b.submit(std::slice::from_ref(&op), Submit::default()).unwrap();
            done.wait(Duration::from_secs(60)).expect("in time").unwrap();
        }
        also.wait(Duration::from_secs(60)).expect("in time").unwrap();
    };
    let (hears, is_busy) = channel();
    let (go_on, word) = channel();
    let told = Arc::new(Mutex::default());
    expect(&[&counters[0]], Arc::new(Busy(Mutex::new((hears, word)))));
    expect(&[&counters[1], &counters[3]], Arc::new(Named("x", Arc::clone(&told))));
    expect(&[&counters[2]], Arc::new(Named("y", Arc::clone(&told))));
    count(&counters[0]);
    is_busy.recv_timeout(Duration::from_secs(60)).unwrap();
    counters[1..].iter().for_each(count);
    go_on.send(()).unwrap();
    a.close();
    assert_eq!(*told.lock().unwrap(), [("x", 0), ("y", 0), ("x", 1)]);
}

/// A thread that finds the engine's lock taken leaves its requests to the holder.
#[test]
fn requests_of_many_threads_are_reported_once() {
    const THREADS: usize = 4;
    const CALLS: usize = 300;
    const EACH: usize = 8;
    let open = |name: &str| {
        let transports = vec![TransportKind::Shm];
        let config = EngineConfig { name: name.into(), transports, ..EngineConfig::default() };
        TransferEngine::open(config).unwrap()
    };
    let (a, b) = (open("a"), open("b"));
    let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    let dst = a.import(&dst.descriptor()).unwrap();
    let counter = b.counter().unwrap();
    let all = counter.expect((THREADS * CALLS * EACH) as u32, &[], Duration::MAX).unwrap();
    let run = || {
        let recorder = Arc::new(EventRecorder::default());
        let (src, dst) = (Local { region: &src, offset: 0 }, Remote { region: &dst, offset: 0 });
        let op = Op::Write { src, dst, len: 8, imm: Some(counter.imm()) };
        let ops = vec![op; EACH];
        for _ in 0..CALLS {
            a.submit_batch(&ops, Submit::default(), recorder.clone()).unwrap();
        }
        recorder
    };
    let recorder: Vec<Arc<EventRecorder>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    all.wait(Duration::from_secs(60)).expect("in time").unwrap();
    a.drain().unwrap().wait(Duration::from_secs(60)).expect("in time").unwrap();
    a.close();
    for recorder in &recorder {
        for at in 0..EACH {
            assert_eq!(recorder.of(at), vec![Outcome::Ended(Ok(())); CALLS]);
        }
    }
    assert!(!recorder
        .iter()
        .flat_map(|h| h.of(0))
        .any(|o| o == Outcome::Quiesced(Quiescence::Unknown)));
    let nothing = Arc::new(EventRecorder::default());
    assert!(a.submit_batch(&[write(&src, &dst, 8)], Submit::default(), nothing.clone()).is_err());
    assert_eq!(nothing.of(0), []);
}

#[test]
fn an_expectation_with_a_peer_of_another_engine_fails_no_other() {
    let mut net = SimNet::new(SimConfig::default());
    let mut open = || net.engine(EngineConfig::default()).unwrap();
    let (a, b, writer) = (open(), open(), open());
    let (mine, theirs) = (a.peer(writer.address()).unwrap(), b.peer(writer.address()).unwrap());
    let (counter, other) = (a.counter().unwrap(), a.counter().unwrap());
    let waits = counter.expect(1, std::slice::from_ref(&mine), Duration::from_secs(9)).unwrap();
    let writers = &[mine, theirs];
    let refused = other.expect(1, writers, Duration::from_secs(9)).unwrap_err();
    assert!(matches!(refused, EngineError::Invalid(_)), "{refused}");
    let expected = [Expect { counter: &other, n: 1, writers }];
    let recorder = Arc::new(EventRecorder::default());
    let refused = a.expect_batch(&expected, Duration::from_secs(9), recorder).unwrap_err();
    assert!(matches!(refused, EngineError::Invalid(_)), "{refused}");
    assert_eq!(waits.poll(), None);
}
