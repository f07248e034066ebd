//! A request reports why it has ended: each row of the table in `docs/kvcache.md`.

use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::EngineConfig, locks::Mutex, simulation::SimNet, transport::sim::SimConfig, Op, Submit,
    TransferEngine,
};

use super::{Decoder, Event, Pull};
use crate::{
    fuzzing::tests::layout,
    terms::{Cause, LocalRank, Terms},
    wire::{Message, Offer, OfferEnd, RefusalReason, RequestState},
};

const INCARNATION: u64 = 9;

/// A decoder, and an engine that answers as a prefiller may.
struct TestDecoder {
    net: SimNet,
    decoder: Decoder,
    engine: Arc<TransferEngine>,
    prefiller: Arc<TransferEngine>,
    met: u64,
    events: Arc<Mutex<Vec<Event>>>,
}

impl TestDecoder {
    fn new() -> Self {
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        let prefiller = net.engine(EngineConfig::default()).unwrap();
        prefiller.receive(1 << 20, 64, |_| ()).unwrap();
        let buffers = vec![engine.alloc(256).unwrap()];
        let local = vec![LocalRank { rank: 0, engine: Arc::clone(&engine), buffers, tail: None }];
        let events: Arc<Mutex<Vec<Event>>> = Arc::default();
        let theirs = Arc::clone(&events);
        let told = move |_, event| theirs.lock().push(event);
        let decoder = Decoder::new("d", vec![layout()], local, Terms::default(), told).unwrap();
        let address = prefiller.address().clone();
        let offer = Offer {
            name: "p".into(),
            layouts: vec![layout()],
            ends: vec![OfferEnd { address: address.clone(), ranks: vec![(0, address)] }],
            tail_nbytes: 0,
            max_message: 1 << 20,
        };
        let met = decoder.connect(&offer).unwrap();
        let mut test = Self { net, decoder, engine, prefiller, met, events };
        test.passes(1);
        test
    }

    fn passes(&mut self, ms: u64) {
        let until = self.net.now().after(Duration::from_millis(ms));
        self.net.run_until(until);
    }

    fn say(&mut self, message: &Message) {
        let peer = self.prefiller.peer(self.engine.address()).unwrap();
        let bytes = message.to_bytes();
        let op = Op::Send { peer: &peer, message: &bytes };
        self.prefiller.submit(&[op], Submit::default()).unwrap();
        self.passes(1);
    }

    fn ask(&self, timeout: Duration) -> u64 {
        let tables = vec![vec![3, 4, 5, 1]];
        let pull = Pull { tokens: 13, have: 4, tables, timeout, ..Pull::default() };
        self.decoder.request(self.met, pull).unwrap()
    }
}

/// Returns the last events of a request: the prefiller accepts it if `welcome`, then `happens`
/// runs.
fn ends_with(welcome: bool, happens: impl FnOnce(&mut TestDecoder, u64)) -> Vec<Event> {
    let mut test = TestDecoder::new();
    if welcome {
        test.say(&Message::Welcome { session: test.met, incarnation: INCARNATION });
    }
    let seq = test.ask(Duration::from_secs(1));
    test.passes(1);
    happens(&mut test, seq);
    test.passes(1);
    let events = test.events.lock().clone();
    events
}

fn told(state: RequestState) -> Vec<Event> {
    ends_with(true, |test, seq| {
        let (session, states) = (test.met, vec![(seq, state)]);
        test.say(&Message::Status { session, incarnation: INCARNATION, states });
    })
}

#[test]
fn what_a_prefiller_refuses_is_refused_and_says_whether_to_ask_another() {
    for (elsewhere, reason) in [(false, RefusalReason::TooLong), (true, RefusalReason::Busy)] {
        let events = told(RequestState::Refused { why: "too many".into(), elsewhere, reason });
        let why = "prefiller p refused the request: too many".into();
        let cause = Cause::Refused { why, elsewhere, reason };
        assert_eq!(events, [Event::Failed(cause), Event::Released]);
    }
}

#[test]
fn what_a_prefillers_engine_gives_up_has_failed_there() {
    let events = told(RequestState::Failed("out of pages".into()));
    assert_eq!(events, [Event::Failed(Cause::Failed("out of pages".into())), Event::Released]);
}

#[test]
fn a_prefiller_that_declines_or_parts_is_lost_by_name() {
    let why = || "it has 64 decoders".to_owned();
    let declined = ends_with(false, |test, _| {
        let session = test.met;
        test.say(&Message::Declined { session, why: why() });
    });
    let lost = |said: &str| Event::Failed(Cause::Lost(said.into()));
    let text = "prefiller p: it declined this decoder: it has 64 decoders";
    assert_eq!(declined, [lost(text), Event::Released]);
    let parted = ends_with(true, |test, _| {
        let session = test.met;
        test.say(&Message::Goodbye { session, why: why() });
    });
    assert_eq!(parted, [lost("prefiller p: it has 64 decoders"), Event::Released]);
    let left = ends_with(true, |test, _| test.decoder.disconnect(test.met));
    assert_eq!(left, [lost("prefiller p: this decoder has left it"), Event::Released]);
}

#[test]
fn a_decoder_that_is_closed_says_so() {
    for welcome in [false, true] {
        let closed = ends_with(welcome, |test, _| test.decoder.close());
        assert_eq!(closed, [Event::Failed(Cause::Closed), Event::Released]);
    }
}

#[test]
fn what_its_user_ends_says_so() {
    let unheard = |test: &mut TestDecoder, seq| assert!(test.decoder.cancel(seq));
    let cancelled = ends_with(false, unheard);
    assert_eq!(cancelled, [Event::Failed(Cause::Cancelled), Event::Released]);
    let heard = |test: &mut TestDecoder, seq| assert!(!test.decoder.cancel(seq));
    assert_eq!(ends_with(true, heard), [Event::Failed(Cause::Cancelled)]);
    let late = ends_with(false, |test, _| test.passes(1_500));
    assert!(matches!(late.as_slice(), [Event::Failed(Cause::TimedOut(_)), Event::Released]));
}
