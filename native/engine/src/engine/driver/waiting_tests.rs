//! Callers that wait, and the worker beside them.

use std::{
    sync::mpsc::Receiver,
    thread,
    time::{Duration, Instant},
};

use super::{
    group_driver::{HANDOVER_DELAY, MAX_HANDOVER_DELAY},
    parker::Sleeper,
};
use crate::{
    api::{EngineConfig, Spin, TransportKind},
    engine::{Counter, Delivery, Handle, Local, Op, Remote, Submit, TransferEngine},
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Nothing but an arrival ends a sleep within the time that the test waits.
fn engine(transport: TransportKind) -> TransferEngine {
    TransferEngine::open(EngineConfig {
        transports: vec![transport],
        spin: Spin::For(Duration::ZERO),
        peer_timeout: Duration::from_secs(600),
        token: Some(b"t".to_vec()),
        ..Default::default()
    })
    .unwrap()
}

/// Begins a write of 8 bytes that counts, at each call.
fn counted_writes<'a>(
    a: &'a TransferEngine,
    b: &TransferEngine,
    counter: &'a Counter,
) -> impl Fn() -> Handle + Sync + 'a {
    let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    let there = a.import(&dst.descriptor()).unwrap();
    move || {
        // The region is held as long as it is written to.
        let _ = &dst;
        let src = Local { region: &src, offset: 0 };
        let dst = Remote { region: &there, offset: 0 };
        let op = Op::Write { src, dst, len: 8, imm: Some(counter.imm()) };
        a.submit(&[op], Submit::default()).unwrap()
    }
}

fn a_caller_that_waits_needs_no_worker(transport: TransportKind) {
    let (a, b) = (engine(transport), engine(transport));
    let counter = b.counter().unwrap();
    let write = counted_writes(&a, &b, &counter);
    write().wait(TIMEOUT).unwrap().unwrap();
    // Joined: it may hold the lock until it ends.
    b.worker.lock().take().unwrap().stop(&b.shared);
    counter.expect(1, &[], TIMEOUT).unwrap().wait(TIMEOUT).unwrap().unwrap();
    for round in 0..20 {
        let arrival = counter.expect(1, &[], TIMEOUT * 2).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(5));
                // Its acknowledgement is the worker's.
                write();
            });
            let result = arrival.wait(TIMEOUT);
            assert!(result.is_some(), "{transport}: the caller sleeps on write {round}");
        });
    }
}

#[test]
fn a_caller_that_waits_is_woken_by_its_peer_over_shm() {
    a_caller_that_waits_needs_no_worker(TransportKind::Shm);
}

#[test]
fn a_caller_that_waits_is_woken_by_its_peer_over_tcp() {
    a_caller_that_waits_needs_no_worker(TransportKind::Tcp);
}

/// A caller that polls, and then gets no core, leaves the engine disarmed.
fn callers_progress_beside_one_that_gets_no_core(transport: TransportKind) {
    let (a, b) = (engine(transport), engine(transport));
    let counter = b.counter().unwrap();
    let write = counted_writes(&a, &b, &counter);
    write().wait(TIMEOUT).unwrap().unwrap();
    counter.expect(1, &[], TIMEOUT).unwrap().wait(TIMEOUT).unwrap().unwrap();
    let driver = b.shared.driver().unwrap();
    // No timer of the wait is set by then.
    thread::sleep(Duration::from_millis(200));
    driver.enter();
    driver.step(&b.shared, &mut 0);
    for round in 0..20 {
        let (told, arrived) = std::sync::mpsc::channel();
        let arrival = counter.expect(1, &[], TIMEOUT).unwrap();
        arrival.on_done(move |result| told.send(result).unwrap());
        let sent = write();
        let result = arrived.recv_timeout(TIMEOUT / 2);
        assert!(result.is_ok(), "{transport}: no thread drives in round {round}");
        sent.wait(TIMEOUT).unwrap().unwrap();
    }
}

#[test]
fn callers_progress_beside_one_that_gets_no_core_over_shm() {
    callers_progress_beside_one_that_gets_no_core(TransportKind::Shm);
}

#[test]
fn callers_progress_beside_one_that_gets_no_core_over_tcp() {
    callers_progress_beside_one_that_gets_no_core(TransportKind::Tcp);
}

#[test]
fn events_wake_the_worker_until_a_caller_that_left_one_unread_sleeps_anew() {
    let (a, b) = (engine(TransportKind::Shm), engine(TransportKind::Shm));
    let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    let there = a.import(&dst.descriptor()).unwrap();
    let waiters = &b.shared.driver().unwrap().waiters;
    assert!(waiters.begin_sleep());
    assert_eq!(waiters.sleeper(), Sleeper::Caller);
    let src = Local { region: &src, offset: 0 };
    let dst = Remote { region: &there, offset: 0 };
    let op = Op::Write { src, dst, len: 8, imm: None };
    a.submit(&[op], Submit::default()).unwrap().wait(TIMEOUT).unwrap().unwrap();
    let start = Instant::now();
    while waiters.sleeper() != Sleeper::Worker {
        assert!(start.elapsed() < TIMEOUT, "the worker leaves events to a caller that is late");
        thread::sleep(Duration::from_millis(1));
    }
    waiters.end_sleep();
    assert!(waiters.begin_sleep());
    waiters.leave();
    assert_eq!(waiters.sleeper(), Sleeper::Caller);
}

#[test]
fn events_wake_the_worker_while_a_callback_depends_on_them() {
    let (a, b) = (engine(TransportKind::Shm), engine(TransportKind::Shm));
    let counter = b.counter().unwrap();
    let write = counted_writes(&a, &b, &counter);
    let driver = b.shared.driver().unwrap();
    driver.enter();
    assert!(driver.waiters.begin_sleep());
    driver.hand_over(&b.shared);
    assert_eq!(driver.waiters.sleeper(), Sleeper::Caller);
    let (told, arrived) = std::sync::mpsc::channel();
    let arrival = counter.expect(1, &[], TIMEOUT).unwrap();
    arrival.on_done(move |result| told.send(result).unwrap());
    assert_eq!(driver.waiters.sleeper(), Sleeper::Worker);
    write().wait(TIMEOUT).unwrap().unwrap();
    arrived.recv_timeout(TIMEOUT / 2).expect("the worker drives").unwrap();
    driver.waiters.end_sleep();
    driver.waiters.leave();
    assert!(driver.waiters.begin_sleep());
    assert_eq!(driver.waiters.sleeper(), Sleeper::Caller);
}

/// Whether a caller sleeps until an event while a thread with `nice` waits.
fn sleeps_until_an_event(nice: i32) -> bool {
    let b = engine(TransportKind::Shm);
    let counter = b.counter().unwrap();
    let arrival = counter.expect(1, &[], TIMEOUT).unwrap();
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            rustix::process::setpriority_process(None, nice).unwrap();
            arrival.wait(Duration::from_millis(300))
        });
        let mut sleeps = false;
        while !caller.is_finished() {
            sleeps |= b.shared.driver().unwrap().waiters.does_caller_sleep();
            thread::sleep(Duration::from_millis(1));
        }
        sleeps
    })
}

#[test]
fn only_callers_that_run_as_soon_as_the_worker_sleep_until_an_event() {
    let nice = rustix::process::getpriority_process(None).unwrap();
    assert!(sleeps_until_an_event(nice));
    assert!(!sleeps_until_an_event(nice + 1));
}

/// Polls again and again, or not at all, until the worker's delay is what is asked for.
fn until_delay(b: &TransferEngine, polls: bool, is_reached: impl Fn(Duration) -> bool) {
    let driver = b.shared.driver().unwrap();
    let start = Instant::now();
    while !is_reached(driver.handover_delay()) {
        assert!(
            start.elapsed() < TIMEOUT,
            "the worker's delay stays {:?}",
            driver.handover_delay()
        );
        match polls {
            true => drop(driver.poll_once(&b.shared)),
            false => thread::sleep(Duration::from_millis(1)),
        }
    }
}

#[test]
fn the_worker_checks_seldom_while_callers_poll_and_soon_once_it_has_driven() {
    let b = engine(TransportKind::Tcp);
    for _ in 0..3 {
        until_delay(&b, true, |delay| delay == MAX_HANDOVER_DELAY);
        until_delay(&b, false, |delay| delay == HANDOVER_DELAY);
    }
}

#[test]
fn a_caller_that_is_in_its_next_wait_goes_on() {
    let b = engine(TransportKind::Tcp);
    let driver = b.shared.driver().unwrap();
    b.worker.lock().take().unwrap().stop(&b.shared);
    driver.poll_once(&b.shared);
    let left = driver.left_at();
    assert!(driver.do_callers_go_on(left));
    assert!(!driver.do_callers_go_on(left.after(HANDOVER_DELAY)));
    driver.enter();
    assert!(driver.do_callers_go_on(left.after(HANDOVER_DELAY)));
    // One that polls on needs no check so soon.
    assert!(!driver.do_callers_go_on(left.after(MAX_HANDOVER_DELAY)));
}

/// The next message, by polls of this thread alone.
fn next_message(b: &TransferEngine, told: &Receiver<Delivery>) -> Delivery {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < TIMEOUT, "a message never comes");
        b.poll().unwrap();
        if let Ok(next) = told.try_recv() {
            return next;
        }
    }
}

/// The worker is not woken while a caller polls.
fn a_caller_that_falls_asleep_sees_new_room_for_a_message(transport: TransportKind) {
    let (a, b) = (engine(transport), engine(transport));
    let (tell, told) = std::sync::mpsc::channel();
    b.receive(64, 1, move |delivery| tell.send(delivery).unwrap()).unwrap();
    let peer = a.peer(b.address()).unwrap();
    let send = |message| a.submit(&[Op::Send { peer: &peer, message }], Submit::default()).unwrap();
    send(b"first").wait(TIMEOUT).unwrap().unwrap();
    let first = told.recv_timeout(TIMEOUT).unwrap();
    // Joined: only this thread drives from now on.
    b.worker.lock().take().unwrap().stop(&b.shared);
    let second = send(b"second");
    assert!(second.wait(Duration::from_millis(50)).is_none(), "the pool has room for one");
    let driver = b.shared.driver().unwrap();
    driver.enter();
    (0..100).for_each(|_| driver.step(&b.shared, &mut 0));
    drop(first);
    assert!(!driver.hand_over(&b.shared), "{transport}: a message waits though there is room");
    let second = next_message(&b, &told);
    assert_eq!(second.message(), b"second");
    driver.enter();
    (0..100).for_each(|_| driver.step(&b.shared, &mut 0));
    assert!(driver.hand_over(&b.shared), "{transport}: there is nothing left to do");
}

#[test]
fn a_caller_that_falls_asleep_sees_new_room_for_a_message_over_shm() {
    a_caller_that_falls_asleep_sees_new_room_for_a_message(TransportKind::Shm);
}

#[test]
fn a_caller_that_falls_asleep_sees_new_room_for_a_message_over_tcp() {
    a_caller_that_falls_asleep_sees_new_room_for_a_message(TransportKind::Tcp);
}

fn users_hold_no_more_messages_than_the_pool_has(transport: TransportKind) {
    let receiver = engine(transport);
    let senders: Vec<_> = (0..3).map(|_| engine(transport)).collect();
    let (tell, told) = std::sync::mpsc::channel();
    receiver.receive(64, 1, move |delivery| tell.send(delivery).unwrap()).unwrap();
    let send = |sender: &TransferEngine| {
        let peer = sender.peer(receiver.address()).unwrap();
        sender.submit(&[Op::Send { peer: &peer, message: b"m" }], Submit::default()).unwrap()
    };
    for sender in &senders {
        send(sender).wait(TIMEOUT).unwrap().unwrap();
        drop(told.recv_timeout(TIMEOUT).unwrap());
    }
    // Joined: only this thread drives from now on, and finds a message of each.
    receiver.worker.lock().take().unwrap().stop(&receiver.shared);
    for _ in 0..2 {
        senders.iter().for_each(|sender| drop(send(sender)));
    }
    thread::sleep(Duration::from_millis(100));
    let mut from = Vec::new();
    for _ in 0..6 {
        let held = next_message(&receiver, &told);
        (0..100).for_each(|_| _ = receiver.poll());
        thread::sleep(Duration::from_millis(20));
        assert!(told.try_recv().is_err(), "{transport}: a second message beside the one held");
        from.push(held.from());
    }
    for turn in from.chunks(3) {
        assert!(senders.iter().all(|sender| turn.contains(&sender.id())), "{transport}: {from:?}");
    }
}

#[test]
fn users_hold_no_more_messages_than_the_pool_has_over_shm() {
    users_hold_no_more_messages_than_the_pool_has(TransportKind::Shm);
}

#[test]
fn users_hold_no_more_messages_than_the_pool_has_over_tcp() {
    users_hold_no_more_messages_than_the_pool_has(TransportKind::Tcp);
}
