//! What the flight recorder tells of simulated transfers is what became of them, and the same in
//! every run.

use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::{EngineConfig, Priority, Span, TransportKind},
    flight::{Cursor, EventKind, Records, TransferRecord},
    simulation::SimNet,
    transport::sim::SimConfig,
    Counter, Local, Op, Region, Remote, RemoteRegion, Submit, Time, TransferEngine,
};

use super::engine;

const SOON: Duration = Duration::from_secs(10);
const BYTES: u64 = 1 << 20;

struct Pair {
    net: SimNet,
    a: Arc<TransferEngine>,
    b: Arc<TransferEngine>,
    src: Region,
    there: RemoteRegion,
    counter: Counter,
    _dst: Region,
}

impl Pair {
    fn new(seed: u64, config: &EngineConfig) -> Self {
        let mut net = SimNet::new(SimConfig { seed, ..Default::default() });
        let named = |name: &str| EngineConfig { name: name.into(), ..config.clone() };
        let a = net.engine_with_rails(named("a"), 2).unwrap();
        let b = net.engine_with_rails(named("b"), 2).unwrap();
        let (src, dst) = (a.alloc(BYTES).unwrap(), b.alloc(BYTES).unwrap());
        let there = a.import(&dst.descriptor()).unwrap();
        let counter = b.counter().unwrap();
        a.connect(there.peer()).unwrap();
        let mut pair = Self { net, a, b, src, there, counter, _dst: dst };
        pair.ms(1000);
        pair
    }

    fn ms(&mut self, ms: u64) {
        let limit = Time(self.net.now().0 + ms * 1_000_000);
        while self.net.step_until(limit) {}
    }

    /// Writes everything, counted, and loses a rail after so many steps if told to.
    fn write(&mut self, lost_after: Option<u64>) {
        let op = Op::Write {
            src: Local { region: &self.src, offset: 0 },
            dst: Remote { region: &self.there, offset: 0 },
            len: BYTES,
            imm: Some(self.counter.imm()),
        };
        let span = Span::named("a request");
        let arrived = self.counter.expect_for(span, 1, &[], SOON).unwrap();
        let done = self.a.submit(&[op], Submit { span, ..Submit::default() }).unwrap();
        if let Some(steps) = lost_after {
            (0..steps).for_each(|_| _ = self.net.step());
            let id = self.a.id();
            self.net.plug(id, 1, false);
        }
        while (done.poll().is_none() || arrived.poll().is_none()) && self.net.step() {}
        assert_eq!((done.poll(), arrived.poll()), (Some(Ok(())), Some(Ok(()))));
        self.ms(100);
    }

    fn records(&self) -> (Records, Records) {
        (self.a.records(Cursor::default()).unwrap(), self.b.records(Cursor::default()).unwrap())
    }
}

fn the_write(records: &Records) -> &TransferRecord {
    records.transfers.iter().find(|t| t.op == "write").expect("it is kept")
}

#[test]
fn records_are_the_same_in_every_run() {
    let run = |seed| {
        let mut p = Pair::new(seed, &EngineConfig::default());
        p.write(Some(10));
        p.write(None);
        format!("{:?}", p.records())
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn a_write_over_two_rails_is_one_record_with_its_moments_in_order() {
    let mut p = Pair::new(1, &EngineConfig::default());
    p.write(None);
    let (at_a, at_b) = p.records();
    let write = the_write(&at_a);
    let m = write.times;
    assert!(m.queued <= m.posted && m.posted <= m.all_posted && m.all_posted < m.wire);
    assert!(m.wire <= m.notified && m.notified != Time::NEVER);
    assert_eq!((write.rails, write.again, write.over), (0b11, 0, true));
    assert!(write.slices > 2, "slices and their count");
    let [part] = &write.parts[..] else { panic!("{:?}", write.parts) };
    assert_eq!((part.counts, part.bytes), (1, BYTES));
    assert_eq!(at_a.peers[part.peer as usize].0, p.b.id());
    // The other end: counted once, by the counter that the write names, before its sender knows.
    let counted: Vec<_> = at_b.arrivals.iter().filter(|a| a.imm == part.imm).collect();
    assert_eq!(counted.iter().map(|a| a.counts).sum::<u32>(), 1);
    assert!(m.posted < counted[0].at && counted[0].at <= m.notified);
    let [met] = &at_b.expectations[..] else { panic!("one was met") };
    assert_eq!((met.imm, met.span, met.notified), (part.imm, write.span, counted[0].at));
}

#[test]
fn what_was_sent_again_says_so_on_both_sides_of_the_loss() {
    let mut again = 0;
    for steps in 0..40 {
        let mut p = Pair::new(steps, &EngineConfig::default());
        p.write(Some(steps));
        let (at_a, at_b) = p.records();
        let write = the_write(&at_a);
        assert_eq!(write.failure, None);
        let counted = at_b.arrivals.iter().map(|a| a.counts).sum::<u32>();
        assert_eq!(counted, 1, "it was counted once, after {steps} steps");
        assert!(at_a.events.iter().any(|e| e.kind == EventKind::LinkDown && e.rail == Some(1)));
        let metrics = p.a.metrics().unwrap();
        let tally = &metrics.peers[0].tally;
        assert_eq!(tally.rails[1].excluded, 1);
        let bulk = |r: usize| tally.rails[r].classes[Priority::Bulk as usize];
        assert_eq!(bulk(0).again + bulk(1).again, u64::from(write.again));
        again += write.again;
    }
    assert!(again > 0, "some of them were under way on the rail");
}

#[test]
fn who_finds_no_room_waits_and_that_is_counted() {
    let window = EngineConfig { rail_window: 64 << 10, ..EngineConfig::default() };
    let mut p = Pair::new(5, &window);
    for _ in 0..2 {
        p.write(None);
    }
    let (at_a, _) = p.records();
    let waits: u32 = at_a.transfers.iter().map(|t| t.waits).sum();
    assert!(waits > 0);
    assert_eq!(
        p.a.metrics().unwrap().peers[0].tally.waits[Priority::Bulk as usize],
        u64::from(waits)
    );
}

#[test]
fn what_goes_on_is_told_without_an_end() {
    let mut p = Pair::new(6, &EngineConfig::default());
    let op = Op::Write {
        src: Local { region: &p.src, offset: 0 },
        dst: Remote { region: &p.there, offset: 0 },
        len: BYTES,
        imm: None,
    };
    let done = p.a.submit(&[op], Submit::default()).unwrap();
    let (at_a, _) = p.records();
    let write = the_write(&at_a);
    assert!(!write.over && write.times.notified == Time::NEVER);
    assert_eq!(p.a.metrics().unwrap().going_on, 1);
    while done.poll().is_none() && p.net.step() {}
    let (at_a, _) = p.records();
    assert!(the_write(&at_a).over);
    assert_eq!(p.a.metrics().unwrap().going_on, 0);
}

#[test]
fn small_writes_over_one_link_add_up() {
    const WRITES: u64 = 160;
    let (a, b) = (engine(TransportKind::Shm), engine(TransportKind::Shm));
    let (src, dst) = (a.alloc(8).unwrap(), b.alloc(8).unwrap());
    let (counter, there) = (b.counter().unwrap(), a.import(&dst.descriptor()).unwrap());
    let write = |span| {
        let src = Local { region: &src, offset: 0 };
        let dst = Remote { region: &there, offset: 0 };
        let op = Op::Write { src, dst, len: 8, imm: Some(counter.imm()) };
        let written = a.submit(&[op], Submit { span, ..Submit::default() }).unwrap();
        written.wait(SOON).unwrap().unwrap();
    };
    (0..WRITES).for_each(|_| write(Span::default()));
    let span = Span::named("a request");
    write(span);
    counter.expect(WRITES as u32 + 1, &[], SOON).unwrap().wait(SOON).unwrap().unwrap();
    let metrics = a.metrics().unwrap();
    let classes = metrics.peers.iter().flat_map(|p| &p.tally.rails).flat_map(|r| r.classes);
    let posted = classes.fold((0, 0), |(n, bytes), t| (n + t.slices, bytes + t.bytes));
    assert_eq!(posted, (WRITES + 1, (WRITES + 1) * 8));
    let transfers = a.records(Cursor::default()).unwrap().transfers;
    let of_span: Vec<_> = transfers.iter().filter(|t| t.span == span).collect();
    assert!(matches!(of_span[..], [one] if one.weight == 1), "{of_span:?}");
    // One in 16 of those that were over within their call is kept.
    let known: u64 = transfers.iter().map(|t| u64::from(t.weight)).sum();
    assert!(known.abs_diff(WRITES) < 16, "{known} of {WRITES} writes");
    for t in &transfers {
        let parts: Vec<_> = t.parts.iter().map(|p| (p.counts, p.bytes)).collect();
        assert_eq!(parts, [(1, 8)]);
        assert_eq!((t.op, t.slices, t.over), ("write", 1, true), "{t:?}");
    }
}

#[test]
fn small_writes_of_one_request_are_recorded_as_one_by_one() {
    const REQUESTS: u64 = 16;
    const WRITES: u32 = 20;
    let (a, b) = (engine(TransportKind::Shm), engine(TransportKind::Shm));
    let (src, dst) = (a.alloc(8).unwrap(), b.alloc(8).unwrap());
    let (counter, there) = (b.counter().unwrap(), a.import(&dst.descriptor()).unwrap());
    let other = b.counter().unwrap();
    let write = |imm| Op::Write {
        src: Local { region: &src, offset: 0 },
        dst: Remote { region: &there, offset: 0 },
        len: 8,
        imm: Some(imm),
    };
    let submit = |ops: &[Op<'_>]| {
        a.submit(ops, Submit::default()).unwrap().wait(SOON).unwrap().unwrap();
    };
    submit(&[write(counter.imm())]);
    let before = a.records(Cursor::default()).unwrap().cursor;
    let ops = vec![write(counter.imm()); WRITES as usize];
    (0..REQUESTS).for_each(|_| submit(&ops));
    submit(&[write(counter.imm()), write(other.imm())]);
    let transfers = a.records(before).unwrap().transfers;
    let seen = transfers.iter().map(|t| {
        let parts: Vec<_> = t.parts.iter().map(|p| (p.counts, p.bytes)).collect();
        (t.op, t.weight, t.slices, parts)
    });
    let small = ("batch", 16, WRITES, vec![(WRITES, u64::from(WRITES) * 8)]);
    // A request to two counters is always kept.
    assert_eq!(seen.collect::<Vec<_>>(), [small, ("batch", 1, 2, vec![(1, 8), (1, 8)])]);
    let metrics = a.metrics().unwrap();
    let classes = metrics.peers.iter().flat_map(|p| &p.tally.rails).flat_map(|r| r.classes);
    let posted = classes.fold((0, 0), |(n, bytes), t| (n + t.slices, bytes + t.bytes));
    let writes = REQUESTS * u64::from(WRITES) + 3;
    assert_eq!(posted, (writes, writes * 8));
}
