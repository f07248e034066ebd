//! Invalid requests are refused with the reason, before any of their work is done.

use std::sync::Arc;

use fabric_engine::{
    api::EngineConfig, locks::Mutex, simulation::SimNet, transport::sim::SimConfig, Counter, Op,
    Region, Submit, TransferEngine,
};

use super::{JobEvent, Prefiller};
use crate::{
    fuzzing::tests::layout,
    terms::{LocalRank, Terms},
    wire::{Grant, Hello, Message, PageTable, Request, RequestState},
};

const TAIL: u64 = 16;
const SESSION: u64 = 7;

/// A prefiller, and an engine that sends it the messages of a test.
struct TestPrefiller {
    net: SimNet,
    prefiller: Prefiller,
    decoder: Arc<TransferEngine>,
    memory: (Region, Region),
    counter: Counter,
    heard: Arc<Mutex<Vec<Message>>>,
    events: Arc<Mutex<Vec<(u64, JobEvent)>>>,
}

impl TestPrefiller {
    fn new() -> Self {
        Self::with(Terms { tail_nbytes: TAIL, ..Terms::default() })
    }

    fn with(terms: Terms) -> Self {
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        let decoder = net.engine(EngineConfig::default()).unwrap();
        let buffers = vec![engine.alloc(256).unwrap()];
        let tail = Some(engine.alloc(TAIL).unwrap());
        let events: Arc<Mutex<Vec<(u64, JobEvent)>>> = Arc::default();
        let theirs = Arc::clone(&events);
        let local = vec![LocalRank { rank: 0, engine, buffers, tail }];
        let prefiller = Prefiller::new("p", vec![layout()], local, terms, move |job, event| {
            theirs.lock().push((job, event));
        });
        let heard: Arc<Mutex<Vec<Message>>> = Arc::default();
        let theirs = Arc::clone(&heard);
        let on_message = move |delivery: fabric_engine::Delivery| {
            theirs.lock().push(Message::from_bytes(delivery.message()).unwrap());
        };
        decoder.receive(1 << 20, 64, on_message).unwrap();
        let memory = (decoder.alloc(256).unwrap(), decoder.alloc(2 * TAIL).unwrap());
        let counter = decoder.counter().unwrap();
        let prefiller = prefiller.unwrap();
        Self { net, prefiller, decoder, memory, counter, heard, events }
    }

    /// Returns the answers of the next 100 ms.
    fn say(&mut self, message: &Message) -> Vec<Message> {
        let peer = self.decoder.peer(self.prefiller.inner.control().address()).unwrap();
        let bytes = message.to_bytes();
        let op = Op::Send { peer: &peer, message: &bytes };
        self.decoder.submit(&[op], Submit::default()).unwrap();
        let until = self.net.now().after(std::time::Duration::from_millis(100));
        self.net.run_until(until);
        std::mem::take(&mut *self.heard.lock())
    }

    fn hello(&self) -> Hello {
        let (buffers, tail) = &self.memory;
        Hello {
            session: SESSION,
            name: "decoder".into(),
            address: self.decoder.address().clone(),
            layouts: vec![layout()],
            grants: vec![Grant {
                rank: 0,
                buffers: vec![buffers.descriptor()],
                tail: Some(tail.descriptor()),
            }],
            tail_nbytes: TAIL,
            beat_ms: 500,
        }
    }

    fn welcome(&mut self) -> u64 {
        let hello = Message::Hello(Box::new(self.hello()));
        match self.say(&hello).as_slice() {
            [Message::Welcome { session: SESSION, incarnation }] => *incarnation,
            other => panic!("{other:?}"),
        }
    }

    /// Asks with so many bytes beside; how the request is then, if that is said at once.
    fn asks(&mut self, incarnation: u64, seq: u64, payload: usize) -> Option<RequestState> {
        let request = Box::new(Request { payload: vec![0; payload], ..self.request(seq) });
        match self.say(&Message::Request { session: SESSION, incarnation, request }).as_slice() {
            [] => None,
            [Message::Status { states, .. }] => Some(states[0].1.clone()),
            other => panic!("{other:?}"),
        }
    }

    fn request(&self, seq: u64) -> Request {
        Request {
            seq,
            tokens: 13,
            have: 4,
            salt: 0,
            tables: vec![PageTable::of(&[3, 4, 5, 1])],
            counters: vec![self.counter.reference()],
            tail_slot: 1,
            payload: Vec::new(),
        }
    }
}

#[test]
fn invalid_requests_are_refused_with_the_reason() {
    type InvalidChange = (&'static str, fn(&mut Request, &TestPrefiller));
    let changes: [InvalidChange; 12] = [
        ("page 8 of 8 pages", |r, _| r.tables = vec![PageTable::of(&[3, 4, 8, 1])]),
        ("page 4 twice", |r, _| r.tables = vec![PageTable::of(&[3, 4, 4, 1])]),
        ("a table of 3 pages", |r, _| r.tables = vec![PageTable::of(&[3, 4, 5])]),
        ("a table of 5 pages", |r, _| r.tables = vec![PageTable::of(&[3, 4, 5, 1, 2])]),
        ("0 page tables for 1 groups", |r, _| r.tables.clear()),
        ("fill more than 4194304 pages", |r, _| r.tokens = u64::MAX),
        ("0 tokens", |r, _| (r.tokens, r.have) = (0, 0)),
        ("13 tokens of which it has 13", |r, _| r.have = 13),
        ("isn't whole pages of 4", |r, _| r.have = 3),
        ("no slot 2 for tails", |r, _| r.tail_slot = 2),
        ("0 counters for 1 ranks", |r, _| r.counters.clear()),
        ("a counter is of another engine", |r, t| {
            r.counters = vec![t.prefiller.inner.control().counter().unwrap().reference()];
        }),
    ];
    let mut test = TestPrefiller::new();
    let incarnation = test.welcome();
    for (seq, (why, change)) in (0..).zip(changes) {
        let mut request = test.request(seq);
        change(&mut request, &test);
        let request = Box::new(request);
        let answer = test.say(&Message::Request { session: SESSION, incarnation, request });
        let [Message::Status { states, .. }] = answer.as_slice() else { panic!("{answer:?}") };
        let [(of, RequestState::Refused { why: said, elsewhere: false, .. })] = states.as_slice()
        else {
            panic!("{states:?}")
        };
        assert!(*of == seq && said.contains(why), "{said}, not: {why}");
    }
    assert!(test.events.lock().is_empty() && test.prefiller.jobs() == 0);
    let request = Box::new(test.request(99));
    test.say(&Message::Request { session: SESSION, incarnation, request });
    assert!(matches!(test.events.lock().as_slice(), [(_, JobEvent::Requested(_))]));
}

#[test]
fn invalid_hellos_are_declined_with_the_reason() {
    type InvalidChange = (&'static str, fn(&mut Hello, &TestPrefiller));
    let changes: [InvalidChange; 7] = [
        ("no layout of rank 1", |h, _| h.grants[0].rank = 1),
        ("not given in rising order", |h, _| h.grants.push(h.grants[0].clone())),
        ("not given in rising order", |h, _| h.grants.clear()),
        ("its layout says [256]", |h, t| h.grants[0].buffers = vec![t.memory.1.descriptor()]),
        ("gives no room for a tail", |h, _| h.grants[0].tail = None),
        ("it takes tails of 17 bytes", |h, _| h.tail_nbytes = 17),
        ("set both alike", |h, _| h.beat_ms = 1 << 20),
    ];
    let mut test = TestPrefiller::new();
    for (why, change) in changes {
        let mut hello = test.hello();
        change(&mut hello, &test);
        let answer = test.say(&Message::Hello(Box::new(hello)));
        let [Message::Declined { why: said, .. }] = answer.as_slice() else { panic!("{answer:?}") };
        assert!(said.contains(why), "{said}, not: {why}");
    }
    assert_eq!(test.prefiller.decoders(), 0);
}

#[test]
fn mr_2_a_prefiller_that_forgot_a_decoder_has_another_incarnation_and_takes_nothing_of_the_last() {
    let mut test = TestPrefiller::new();
    let first = test.welcome();
    assert_eq!(test.welcome(), first);
    let why = "gone".to_owned();
    assert_eq!(test.say(&Message::Goodbye { session: SESSION, why }), []);
    let second = test.welcome();
    assert_ne!(first, second);
    for (incarnation, jobs) in [(first, 0), (second, 1)] {
        let request = Box::new(test.request(5));
        test.say(&Message::Request { session: SESSION, incarnation, request });
        assert_eq!(test.prefiller.jobs(), jobs);
    }
}

#[test]
fn what_a_decoder_doesnt_acknowledge_is_bounded() {
    let mut test = TestPrefiller::new();
    test.welcome();
    let from = test.decoder.id();
    for seq in 0..super::messages::MAX_ENDED as u64 {
        test.prefiller.on_message(from, &Message::Cancel { session: SESSION, seq }.to_bytes());
    }
    assert_eq!(test.prefiller.decoders(), 1);
    test.prefiller.on_message(from, &Message::Cancel { session: SESSION, seq: 1 << 40 }.to_bytes());
    assert_eq!(test.prefiller.decoders(), 0);
}

#[test]
fn ends_of_requests_that_a_decoder_doesnt_acknowledge_are_bounded() {
    use super::messages::{MAX_ACCEPTED, MAX_ENDED};
    let mut test = TestPrefiller::new();
    let incarnation = test.welcome();
    let from = test.decoder.id();
    let request = |seq| {
        let request = Box::new(test.request(seq));
        Message::Request { session: SESSION, incarnation, request }.to_bytes()
    };
    let cancel = |seq| Message::Cancel { session: SESSION, seq }.to_bytes();
    for seq in 0..MAX_ACCEPTED as u64 {
        test.prefiller.on_message(from, &request(seq));
        assert_eq!(test.prefiller.jobs(), 1, "request {seq} is taken");
        test.prefiller.on_message(from, &cancel(seq));
        assert_eq!(test.prefiller.jobs(), 0);
    }
    // From here on nothing is taken: it is refused by name, and that is remembered up to the bound.
    for seq in MAX_ACCEPTED as u64..MAX_ENDED as u64 {
        test.prefiller.on_message(from, &request(seq));
        assert_eq!((test.prefiller.jobs(), test.prefiller.decoders()), (0, 1));
    }
    let kept = |test: &TestPrefiller| {
        let state = test.prefiller.inner.state.lock();
        state.sessions.values().map(|m| m.ended.len()).sum::<usize>()
    };
    assert_eq!(kept(&test), MAX_ENDED);
    test.prefiller.on_message(from, &request(MAX_ENDED as u64));
    assert_eq!((kept(&test), test.prefiller.decoders()), (0, 0));
}

#[test]
fn a_decoder_that_acknowledges_is_never_too_much() {
    use super::messages::MAX_ACCEPTED;
    let mut test = TestPrefiller::new();
    let incarnation = test.welcome();
    // As so many requests that were cancelled leave it; their answers would take the simulator a
    // while.
    for session in test.prefiller.inner.state.lock().sessions.values_mut() {
        session.ended.extend((0..MAX_ACCEPTED as u64).map(|seq| (seq, RequestState::Cancelled)));
    }
    let next = MAX_ACCEPTED as u64;
    let said = test.asks(incarnation, next, 0);
    let full = |why: &str| why.contains("are not over for it");
    assert!(
        matches!(&said, Some(RequestState::Refused { why, elsewhere: true, .. }) if full(why)),
        "{said:?}"
    );
    test.say(&Message::Beat {
        session: SESSION,
        floor: next + 1,
        open: Vec::new(),
        leases: Vec::new(),
    });
    assert_eq!(test.asks(incarnation, next + 1, 0), None);
    assert_eq!(test.prefiller.jobs(), 1);
}

#[test]
fn mr_1_a_cancellation_is_not_confirmed_while_writes_of_a_lost_link_may_still_land() {
    let mut test = TestPrefiller::new();
    let incarnation = test.welcome();
    assert_eq!(test.asks(incarnation, 0, 0), None);
    let job = test.prefiller.inner.job(0).unwrap();
    // Another thread has just learned that the quiescence of the job's last write is unknown.
    job.state.lock().unproven = true;
    let cancel = Message::Cancel { session: SESSION, seq: 0 };
    let said = [test.say(&cancel), test.say(&cancel)].concat();
    assert!(matches!(said.as_slice(), [Message::Goodbye { session: SESSION, .. }]), "{said:?}");
    assert_eq!((test.prefiller.jobs(), test.prefiller.decoders()), (0, 0));
}

#[test]
fn payloads_of_requests_that_wait_are_bounded_together() {
    let (max_message, max_payloads) = (4096, 5000);
    let terms = Terms { tail_nbytes: TAIL, max_message, max_payloads, ..Terms::default() };
    let mut test = TestPrefiller::with(terms);
    let incarnation = test.welcome();
    assert_eq!(test.asks(incarnation, 0, 3000), None);
    let said = test.asks(incarnation, 1, 3000);
    let full = |why: &str| why.contains("would pass 5000 bytes");
    assert!(
        matches!(&said, Some(RequestState::Refused { why, elsewhere: true, .. }) if full(why)),
        "{said:?}"
    );
    assert_eq!(test.asks(incarnation, 2, 2000), None);
    // What is over makes room.
    test.say(&Message::Cancel { session: SESSION, seq: 0 });
    assert_eq!(test.asks(incarnation, 3, 3000), None);
    assert_eq!(test.prefiller.jobs(), 2);
    let terms = Terms { max_payloads: 4095, max_message, ..Terms::default() };
    assert!(terms.check().unwrap_err().to_string().contains("one request must fit"));
}

#[test]
fn leases_are_renewed_by_decoders_with_a_session_and_no_more_than_a_beat_carries() {
    let mut test = TestPrefiller::new();
    let renewed: Arc<Mutex<Vec<Vec<u64>>>> = Arc::default();
    let theirs = Arc::clone(&renewed);
    test.prefiller.on_renewal(move |leases| theirs.lock().push(leases.to_vec()));
    let beat = |leases| Message::Beat { session: SESSION, floor: 0, open: Vec::new(), leases };
    assert_eq!(test.say(&beat(vec![1])), []);
    assert_eq!(*renewed.lock(), [[0; 0]; 0]);
    test.welcome();
    test.say(&beat(Vec::new()));
    test.say(&beat(vec![u64::MAX, 1]));
    test.say(&beat(vec![u64::MAX, 1]));
    assert_eq!(*renewed.lock(), [[u64::MAX, 1], [u64::MAX, 1]]);
    test.say(&beat((0..1000).collect()));
    assert_eq!(renewed.lock()[2].len(), 128);
    assert_eq!(test.say(&Message::Goodbye { session: SESSION, why: "gone".into() }), []);
    test.say(&beat(vec![2]));
    assert_eq!(renewed.lock().len(), 3);
}
