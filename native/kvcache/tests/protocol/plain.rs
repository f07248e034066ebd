//! What should happen when nothing goes wrong, and when one thing does.

use std::time::{Duration, Instant};

use fabric_kvcache::{Cause, Event, JobEvent, LayerTimes};

use crate::{
    cache::Shape,
    world::{ask, engines, Cut, DecodeNode, PrefillNode, TAIL},
};

pub fn until<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(value) = f() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what} didn't happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn timeline(prefill: &PrefillNode, of: u64) -> Vec<LayerTimes> {
    let events = prefill.events.lock();
    let found = events.iter().find_map(|(job, event)| match event {
        JobEvent::Requested(asked) if *job == of => Some(asked.timeline.layers()),
        _ => None,
    });
    found.unwrap()
}

pub fn asked(prefill: &PrefillNode, nth: usize) -> u64 {
    until("a request", || {
        let events = prefill.events.lock();
        let mut asked = events.iter().filter(|(_, e)| matches!(e, JobEvent::Requested(_)));
        asked.nth(nth).map(|(job, _)| *job)
    })
}

const SHAPE: Shape = Shape { layers: 3, heads: 4, width: 16, window: None };

#[test]
fn pages_come_from_any_ranks_to_any_ranks_and_both_ends_let_go() {
    for (sources, targets) in [(1, 1), (2, 4), (4, 1), (1, 2), (8, 4)] {
        let (p, d) = (engines(sources, "prefill"), engines(targets, "decode"));
        let prefill = PrefillNode::new(&p, &SHAPE, Cut { page_tokens: 4, pages: 16 }).unwrap();
        let decode = DecodeNode::new(&d, &SHAPE, Cut { page_tokens: 8, pages: 8 }).unwrap();
        let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
        let theirs = vec![7, 2, 5];
        let ours = vec![9, 0, 3, 4, 12];
        let seq = decode.decoder.request(to, ask(19, 0, theirs.clone(), 3)).unwrap();
        let job = asked(&prefill, 0);
        prefill.prefiller.accept(job, vec![ours.clone()], 0).unwrap();
        prefill.pass(job, 77, 0..11, &ours);
        prefill.pass(job, 77, 11..19, &ours);
        prefill.tail(job, 77).unwrap();
        until("the end", || (decode.events(seq).len() == 2).then_some(()));
        assert_eq!(decode.events(seq), [Event::Ready, Event::Released]);
        for cache in &decode.caches {
            cache.holds(77, 0..19, &theirs).unwrap();
        }
        assert_eq!(decode.tail.get(0, TAIL).unwrap(), [77; TAIL as usize]);
        until("release", || (prefill.prefiller.jobs() == 0).then_some(()));
        assert_eq!(decode.decoder.open(), 0);
    }
}

#[test]
fn a_request_is_cancelled_and_its_pages_are_released_when_the_prefiller_has_said_so() {
    let (p, d) = (engines(1, "prefill"), engines(1, "decode"));
    let cut = Cut { page_tokens: 4, pages: 16 };
    let prefill = PrefillNode::new(&p, &SHAPE, cut).unwrap();
    let decode = DecodeNode::new(&d, &SHAPE, cut).unwrap();
    let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
    let seq = decode.decoder.request(to, ask(16, 0, vec![0, 1, 2, 3], 0)).unwrap();
    let job = asked(&prefill, 0);
    prefill.prefiller.accept(job, vec![vec![0, 1, 2, 3]], 0).unwrap();
    prefill.pass(job, 1, 0..8, &[0, 1, 2, 3]);
    decode.decoder.cancel(seq);
    until("release", || (decode.events(seq).len() == 2).then_some(()));
    assert_eq!(decode.events(seq), [Event::Failed(Cause::Cancelled), Event::Released]);
    until("the job's end", || (prefill.prefiller.jobs() == 0).then_some(()));
    // What is still computed for it goes nowhere.
    prefill.pass(job, 2, 8..16, &[0, 1, 2, 3]);
    assert!(prefill.prefiller.finish(job, 0).is_err());
}

#[test]
fn a_prefiller_that_dies_is_told_and_asked_for_nothing_more() {
    let (p, d) = (engines(1, "prefill"), engines(1, "decode"));
    let cut = Cut { page_tokens: 4, pages: 16 };
    let prefill = PrefillNode::new(&p, &SHAPE, cut).unwrap();
    let decode = DecodeNode::new(&d, &SHAPE, cut).unwrap();
    let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
    let seq = decode.decoder.request(to, ask(16, 0, vec![0, 1, 2, 3], 0)).unwrap();
    asked(&prefill, 0);
    p[0].close();
    until("release", || (decode.events(seq).len() == 2).then_some(()));
    assert!(matches!(&decode.events(seq)[0], Event::Failed(Cause::Lost(_))));
    assert!(decode.decoder.request(to, ask(4, 0, vec![0], 0)).is_err());
}

#[test]
fn a_request_in_vain_ends_at_its_deadline() {
    let (p, d) = (engines(1, "prefill"), engines(1, "decode"));
    let cut = Cut { page_tokens: 4, pages: 16 };
    let prefill = PrefillNode::new(&p, &SHAPE, cut).unwrap();
    let decode = DecodeNode::new(&d, &SHAPE, cut).unwrap();
    let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
    let mut short = ask(16, 0, vec![0, 1, 2, 3], 0);
    short.timeout = Duration::from_millis(50);
    let seq = decode.decoder.request(to, short).unwrap();
    until("release", || (decode.events(seq).len() == 2).then_some(()));
    assert!(matches!(&decode.events(seq)[0], Event::Failed(Cause::TimedOut(_))));
    until("the job's end", || (prefill.prefiller.jobs() == 0).then_some(()));
}

#[test]
fn ic_2_layers_of_a_pass_that_was_not_begun_send_nothing_of_the_next() {
    let (p, d) = (engines(1, "prefill"), engines(1, "decode"));
    let cut = Cut { page_tokens: 4, pages: 16 };
    let prefill = PrefillNode::new(&p, &SHAPE, cut).unwrap();
    let decode = DecodeNode::new(&d, &SHAPE, cut).unwrap();
    let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
    let table = vec![0, 1, 2, 3];
    let seq = decode.decoder.request(to, ask(16, 0, table.clone(), 0)).unwrap();
    let job = asked(&prefill, 0);
    prefill.prefiller.accept(job, vec![table.clone()], 0).unwrap();
    let word = prefill.prefiller.advancer();
    // A pass that failed before it was begun has counted two layers, which are seen late: together
    // with the next one's.
    prefill.prefiller.begin(&[(job, 16)], 2).unwrap();
    for layer in 0..3 {
        prefill.caches[0].compute(5, layer, 0..16, &table);
        let count = layer as u64 + 3;
        word(if layer == 0 { 0 } else { count - 1 }, count);
        let posted = timeline(&prefill, job).iter().filter(|at| at.posted.is_some()).count();
        assert_eq!(posted, layer + 1, "layers are sent when they are computed, and not before");
    }
    prefill.tail(job, 5).unwrap();
    until("the end", || (decode.events(seq).len() == 2).then_some(()));
    assert_eq!(decode.events(seq), [Event::Ready, Event::Released]);
    decode.caches[0].holds(5, 0..16, &table).unwrap();
}

#[test]
fn rs_1_a_pass_that_ends_in_the_middle_takes_its_requests_along() {
    let (p, d) = (engines(1, "prefill"), engines(1, "decode"));
    let cut = Cut { page_tokens: 4, pages: 16 };
    let prefill = PrefillNode::new(&p, &SHAPE, cut).unwrap();
    let decode = DecodeNode::new(&d, &SHAPE, cut).unwrap();
    let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
    let seqs: Vec<u64> =
        (0..2).map(|i| decode.decoder.request(to, ask(4, 0, vec![i], 0)).unwrap()).collect();
    let jobs: Vec<u64> = (0..2).map(|nth| asked(&prefill, nth)).collect();
    for (job, page) in jobs.iter().zip([3, 4]) {
        prefill.prefiller.accept(*job, vec![vec![page]], 0).unwrap();
    }
    prefill.prefiller.begin(&[(jobs[0], 4)], 0).unwrap();
    prefill.prefiller.advance(1);
    prefill.pass(jobs[1], 6, 0..4, &[4]);
    prefill.tail(jobs[1], 6).unwrap();
    until("both ends", || seqs.iter().all(|seq| decode.events(*seq).len() == 2).then_some(()));
    let why = "a pass that computes it was given up in the middle: another began".to_owned();
    let failed = [Event::Failed(Cause::Failed(why.clone())), Event::Released];
    assert_eq!(decode.events(seqs[0]), failed);
    assert_eq!(decode.events(seqs[1]), [Event::Ready, Event::Released]);
    let stopped = (jobs[0], JobEvent::Stopped(Cause::Failed(why)));
    assert!(prefill.events.lock().contains(&stopped));
}

#[test]
fn a_timeline_says_when_each_layer_was_computed_posted_and_delivered() {
    let (p, d) = (engines(2, "prefill"), engines(1, "decode"));
    let cut = Cut { page_tokens: 4, pages: 16 };
    let prefill = PrefillNode::new(&p, &SHAPE, cut).unwrap();
    let decode = DecodeNode::new(&d, &SHAPE, cut).unwrap();
    let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
    let table = vec![0, 1, 2, 3];
    let begin = p[0].now();
    let whole = decode.decoder.request(to, ask(16, 0, table.clone(), 0)).unwrap();
    let job = asked(&prefill, 0);
    assert!(timeline(&prefill, job).iter().all(|l| l.computed.is_none()));
    prefill.prefiller.accept(job, vec![table.clone()], 0).unwrap();
    prefill.pass(job, 1, 0..8, &table);
    prefill.pass(job, 1, 8..16, &table);
    prefill.tail(job, 1).unwrap();
    until("the end", || (decode.events(whole).len() == 2).then_some(()));
    let end = p[0].now();
    let times = timeline(&prefill, job);
    assert_eq!(times.iter().map(|l| l.layer).collect::<Vec<_>>(), [0, 1, 2]);
    let mut before = begin;
    for layer in &times {
        let steps = [layer.computed, layer.posted, layer.delivered].map(Option::unwrap);
        assert!(before <= steps[0] && steps.is_sorted() && steps[2] <= end, "{times:?}");
        before = steps[0];
    }

    // Of a request that is cancelled after its first layer, there is nothing of the others.
    let broken = decode.decoder.request(to, ask(16, 0, table.clone(), 0)).unwrap();
    let job = asked(&prefill, 1);
    prefill.prefiller.accept(job, vec![table.clone()], 0).unwrap();
    prefill.prefiller.begin(&[(job, 16)], prefill.prefiller.counted()).unwrap();
    prefill.prefiller.advance(1);
    decode.decoder.cancel(broken);
    until("release", || (prefill.prefiller.jobs() == 0).then_some(()));
    prefill.prefiller.advance(2);
    let times = timeline(&prefill, job);
    assert!(times[0].computed.is_some() && times[0].posted.is_some());
    for layer in &times[1..] {
        assert_eq!((layer.computed, layer.posted, layer.delivered), (None, None, None));
    }
}

#[test]
fn mr_1_pages_are_released_when_an_engine_of_either_end_is_closed() {
    for closed in ["decode", "prefill"] {
        let (p, d) = (engines(1, "prefill"), engines(1, "decode"));
        let cut = Cut { page_tokens: 4, pages: 16 };
        let prefill = PrefillNode::new(&p, &SHAPE, cut).unwrap();
        let decode = DecodeNode::new(&d, &SHAPE, cut).unwrap();
        let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
        let seq = decode.decoder.request(to, ask(16, 0, vec![0, 1, 2, 3], 0)).unwrap();
        let job = asked(&prefill, 0);
        prefill.prefiller.accept(job, vec![vec![0, 1, 2, 3]], 8).unwrap();
        let closing = if closed == "decode" { &d } else { &p };
        closing[0].close();
        until("release", || (decode.events(seq).len() == 2).then_some(()));
        let [Event::Failed(cause), Event::Released] = &decode.events(seq)[..] else { panic!() };
        assert_eq!(*cause == Cause::Closed, closed == "decode", "{cause}");
        // A prefiller that hears no more of its decoder waits for the silence.
        if closed == "prefill" {
            until("the job's end", || (prefill.prefiller.jobs() == 0).then_some(()));
        }
        assert_eq!((decode.decoder.open(), decode.decoder.prefillers()), (0, 0));
    }
}
