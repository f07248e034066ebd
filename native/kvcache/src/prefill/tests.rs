//! Requests that lie are refused with the reason, before anything of them is done.

use std::sync::Arc;

use fabric_engine::{
    api::EngineConfig, simulation::SimNet, transport::sim::SimConfig, Counter, Op, Region, Submit,
    TransferEngine,
};
use parking_lot::Mutex;

use super::{JobEvent, Prefiller};
use crate::{
    fuzzing::tests::layout,
    terms::{LocalRank, Terms},
    wire::{Grant, Hello, Message, PageTable, Request, RequestState},
};

const TAIL: u64 = 16;
const SESSION: u64 = 7;

/// A prefiller, and an engine that says whatever is to be said.
struct Talk {
    net: SimNet,
    prefiller: Prefiller,
    liar: Arc<TransferEngine>,
    memory: (Region, Region),
    counter: Counter,
    heard: Arc<Mutex<Vec<Message>>>,
    events: Arc<Mutex<Vec<(u64, JobEvent)>>>,
}

impl Talk {
    fn new() -> Self {
        Self::with(Terms { tail_nbytes: TAIL, ..Terms::default() })
    }

    fn with(terms: Terms) -> Self {
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        let liar = net.engine(EngineConfig::default()).unwrap();
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
        liar.receive(1 << 20, 64, on_message).unwrap();
        let memory = (liar.alloc(256).unwrap(), liar.alloc(2 * TAIL).unwrap());
        let counter = liar.counter().unwrap();
        let prefiller = prefiller.unwrap();
        Self { net, prefiller, liar, memory, counter, heard, events }
    }

    /// What is answered in the next tenth of a second.
    fn say(&mut self, message: &Message) -> Vec<Message> {
        let peer = self.liar.peer(self.prefiller.inner.control().address()).unwrap();
        let bytes = message.to_bytes();
        let op = Op::Send { peer: &peer, message: &bytes };
        self.liar.submit(&[op], Submit::default()).unwrap();
        let until = self.net.now().after(std::time::Duration::from_millis(100));
        self.net.run_until(until);
        std::mem::take(&mut *self.heard.lock())
    }

    fn hello(&self) -> Hello {
        let (buffers, tail) = &self.memory;
        Hello {
            session: SESSION,
            name: "liar".into(),
            address: self.liar.address().clone(),
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
fn requests_that_lie_are_refused_in_words() {
    type Lie = (&'static str, fn(&mut Request, &Talk));
    let lies: [Lie; 12] = [
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
    let mut talk = Talk::new();
    let incarnation = talk.welcome();
    for (seq, (why, lie)) in (0..).zip(lies) {
        let mut request = talk.request(seq);
        lie(&mut request, &talk);
        let request = Box::new(request);
        let answer = talk.say(&Message::Request { session: SESSION, incarnation, request });
        let [Message::Status { states, .. }] = answer.as_slice() else { panic!("{answer:?}") };
        let [(of, RequestState::Refused { why: said, elsewhere: false, .. })] = states.as_slice() else {
            panic!("{states:?}")
        };
        assert!(*of == seq && said.contains(why), "{said}, not: {why}");
    }
    assert!(talk.events.lock().is_empty() && talk.prefiller.jobs() == 0);
    let request = Box::new(talk.request(99));
    talk.say(&Message::Request { session: SESSION, incarnation, request });
    assert!(matches!(talk.events.lock().as_slice(), [(_, JobEvent::Requested(_))]));
}

#[test]
fn hellos_that_lie_are_declined_in_words() {
    type Lie = (&'static str, fn(&mut Hello, &Talk));
    let lies: [Lie; 7] = [
        ("no layout of rank 1", |h, _| h.grants[0].rank = 1),
        ("not given in rising order", |h, _| h.grants.push(h.grants[0].clone())),
        ("not given in rising order", |h, _| h.grants.clear()),
        ("its layout says [256]", |h, t| h.grants[0].buffers = vec![t.memory.1.descriptor()]),
        ("gives no room for a tail", |h, _| h.grants[0].tail = None),
        ("it takes tails of 17 bytes", |h, _| h.tail_nbytes = 17),
        ("set both alike", |h, _| h.beat_ms = 1 << 20),
    ];
    let mut talk = Talk::new();
    for (why, lie) in lies {
        let mut hello = talk.hello();
        lie(&mut hello, &talk);
        let answer = talk.say(&Message::Hello(Box::new(hello)));
        let [Message::Declined { why: said, .. }] = answer.as_slice() else { panic!("{answer:?}") };
        assert!(said.contains(why), "{said}, not: {why}");
    }
    assert_eq!(talk.prefiller.decoders(), 0);
}

#[test]
fn mr_2_a_prefiller_that_forgot_a_decoder_has_another_life_and_takes_nothing_of_the_last() {
    let mut talk = Talk::new();
    let first = talk.welcome();
    assert_eq!(talk.welcome(), first);
    let why = "gone".to_owned();
    assert_eq!(talk.say(&Message::Goodbye { session: SESSION, why }), []);
    let second = talk.welcome();
    assert_ne!(first, second);
    for (incarnation, jobs) in [(first, 0), (second, 1)] {
        let request = Box::new(talk.request(5));
        talk.say(&Message::Request { session: SESSION, incarnation, request });
        assert_eq!(talk.prefiller.jobs(), jobs);
    }
}

#[test]
fn what_a_decoder_doesnt_acknowledge_is_bounded() {
    let mut talk = Talk::new();
    talk.welcome();
    let from = talk.liar.id();
    for seq in 0..super::messages::MAX_ENDED as u64 {
        talk.prefiller.on_message(from, &Message::Cancel { session: SESSION, seq }.to_bytes());
    }
    assert_eq!(talk.prefiller.decoders(), 1);
    talk.prefiller.on_message(from, &Message::Cancel { session: SESSION, seq: 1 << 40 }.to_bytes());
    assert_eq!(talk.prefiller.decoders(), 0);
}

#[test]
fn ends_of_requests_that_a_decoder_doesnt_acknowledge_are_bounded() {
    use super::messages::{MAX_ENDED, MAX_ACCEPTED};
    let mut talk = Talk::new();
    let incarnation = talk.welcome();
    let from = talk.liar.id();
    let request = |seq| {
        let request = Box::new(talk.request(seq));
        Message::Request { session: SESSION, incarnation, request }.to_bytes()
    };
    let cancel = |seq| Message::Cancel { session: SESSION, seq }.to_bytes();
    for seq in 0..MAX_ACCEPTED as u64 {
        talk.prefiller.on_message(from, &request(seq));
        assert_eq!(talk.prefiller.jobs(), 1, "request {seq} is taken");
        talk.prefiller.on_message(from, &cancel(seq));
        assert_eq!(talk.prefiller.jobs(), 0);
    }
    // From here on nothing is taken: it is refused by name, and that is remembered up to the bound.
    for seq in MAX_ACCEPTED as u64..MAX_ENDED as u64 {
        talk.prefiller.on_message(from, &request(seq));
        assert_eq!((talk.prefiller.jobs(), talk.prefiller.decoders()), (0, 1));
    }
    let kept = |talk: &Talk| {
        let state = talk.prefiller.inner.state.lock();
        state.sessions.values().map(|m| m.ended.len()).sum::<usize>()
    };
    assert_eq!(kept(&talk), MAX_ENDED);
    talk.prefiller.on_message(from, &request(MAX_ENDED as u64));
    assert_eq!((kept(&talk), talk.prefiller.decoders()), (0, 0));
}

#[test]
fn a_decoder_that_acknowledges_is_never_too_much() {
    use super::messages::MAX_ACCEPTED;
    let mut talk = Talk::new();
    let incarnation = talk.welcome();
    // As so many requests that were cancelled leave it; their answers would take the simulator a
    // while.
    for session in talk.prefiller.inner.state.lock().sessions.values_mut() {
        session.ended.extend((0..MAX_ACCEPTED as u64).map(|seq| (seq, RequestState::Cancelled)));
    }
    let next = MAX_ACCEPTED as u64;
    let said = talk.asks(incarnation, next, 0);
    let full = |why: &str| why.contains("are not over for it");
    assert!(
        matches!(&said, Some(RequestState::Refused { why, elsewhere: true, .. }) if full(why)),
        "{said:?}"
    );
    talk.say(&Message::Beat { session: SESSION, floor: next + 1, open: Vec::new() });
    assert_eq!(talk.asks(incarnation, next + 1, 0), None);
    assert_eq!(talk.prefiller.jobs(), 1);
}

#[test]
fn payloads_of_requests_that_wait_are_bounded_together() {
    let (max_message, max_payloads) = (4096, 5000);
    let terms = Terms { tail_nbytes: TAIL, max_message, max_payloads, ..Terms::default() };
    let mut talk = Talk::with(terms);
    let incarnation = talk.welcome();
    assert_eq!(talk.asks(incarnation, 0, 3000), None);
    let said = talk.asks(incarnation, 1, 3000);
    let full = |why: &str| why.contains("would pass 5000 bytes");
    assert!(
        matches!(&said, Some(RequestState::Refused { why, elsewhere: true, .. }) if full(why)),
        "{said:?}"
    );
    assert_eq!(talk.asks(incarnation, 2, 2000), None);
    // What is over makes room.
    talk.say(&Message::Cancel { session: SESSION, seq: 0 });
    assert_eq!(talk.asks(incarnation, 3, 3000), None);
    assert_eq!(talk.prefiller.jobs(), 2);
    let terms = Terms { max_payloads: 4095, max_message, ..Terms::default() };
    assert!(terms.check().unwrap_err().to_string().contains("one request must fit"));
}
