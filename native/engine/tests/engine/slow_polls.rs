//! Polls during which time passes, as when the polling thread loses its core: events are recorded
//! at times after their causes, and timers fire for nothing that such a poll has missed.

use std::{
    collections::VecDeque,
    sync::{
        atomic::{AtomicU64, Ordering::SeqCst},
        Arc, Mutex,
    },
    time::Duration,
};

use fabric_engine::{
    api::{Endpoint, EngineAddress, EngineConfig, EngineId, Imm, TransportKind},
    domain::{
        Caps, Completion, Count, Domain, DomainError, LinkId, MessageRoom, NicKeys, PeerIdentity,
        Pinned, Post, Receipt, Receipts, RegionRelease, Token, WorkRequest,
    },
    flight::{Cursor, Records, TransferTimes},
    memory::RegionMemory,
    Handle, Local, Op, Region, Remote, RemoteRegion, Submit, Time, TransferEngine, Transports,
};

const MS: u64 = 1_000_000;
const FOREVER: Duration = Duration::MAX;

/// A link on which the test says what the next poll finds, and how long it looks.
#[derive(Default)]
struct Wire {
    found: Vec<Completion>,
    takes: u64,
    full: bool,
    /// The link in use.
    link: LinkId,
    /// Whether it refuses work as lost, and the next poll has yet to find that it is.
    lost: bool,
    /// Whether links end with receipts.
    receipts: bool,
    /// Writes that were posted, in their order.
    posted: VecDeque<(Token, Option<Count>)>,
}

struct SlowDomain {
    wire: Arc<Mutex<Wire>>,
    clock: Arc<AtomicU64>,
}

impl Domain for SlowDomain {
    fn kind(&self) -> TransportKind {
        TransportKind::Null
    }

    fn caps(&self) -> Caps {
        Caps { max_bytes: u64::MAX, max_pages: 1, max_message: 1 << 16 }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: TransportKind::Null, data: Vec::new() }
    }

    fn announce(&mut self, _own: &EngineAddress) {}

    fn register(
        &mut self,
        _region: &Arc<RegionMemory>,
        _pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        Ok(NicKeys::new())
    }

    fn deregister(&mut self, _index: u32) -> RegionRelease {
        RegionRelease::Now
    }

    fn unfit(&self, _peer: &EngineAddress) -> Option<String> {
        None
    }

    fn connect(
        &mut self,
        _now: Time,
        peer: &EngineAddress,
        _endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        let mut wire = self.wire.lock().unwrap();
        wire.link += 1;
        let link = wire.link;
        wire.found.push(Completion::LinkUp {
            link,
            peer: PeerIdentity { address: peer.clone(), version: None },
            endpoint: 0,
            name: 0,
            description: "slow link".into(),
        });
        Ok(link)
    }

    fn receipts(&self) -> Receipts {
        match self.wire.lock().unwrap().receipts {
            true => Receipts::InOrder,
            false => Receipts::None,
        }
    }

    fn disconnect(&mut self, _link: LinkId, _cause: &str) {}

    fn post(&mut self, _: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        let mut wire = self.wire.lock().unwrap();
        if wire.lost {
            return Err(DomainError::LinkDown("by the test".into()));
        }
        if wire.full {
            return Ok(Post::Full);
        }
        let WorkRequest::Write { count, .. } = wr else { unreachable!("the tests write") };
        wire.posted.push_back((token, *count));
        Ok(Post::Queued)
    }

    fn poll(&mut self, _now: Time, _: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let mut wire = self.wire.lock().unwrap();
        self.clock.fetch_add(std::mem::take(&mut wire.takes), SeqCst);
        let n = out.len();
        out.append(&mut wire.found);
        out.len() > n
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn disarm(&mut self) {}

    fn describe(&self, _link: LinkId) -> String {
        "slow".into()
    }

    fn close(&mut self) {}
}

struct World {
    engine: TransferEngine,
    wire: Arc<Mutex<Wire>>,
    clock: Arc<AtomicU64>,
    src: Region,
    there: RemoteRegion,
    _peer: TransferEngine,
}

fn open(id: u8) -> (TransferEngine, Arc<Mutex<Wire>>, Arc<AtomicU64>) {
    let (wire, clock) = (Arc::default(), Arc::new(AtomicU64::new(MS)));
    let domain = SlowDomain { wire: Arc::clone(&wire), clock: Arc::clone(&clock) };
    let transports = Transports {
        id: EngineId([id; 16]),
        domains: vec![Box::new(domain)],
        clock: Arc::clone(&clock),
    };
    (TransferEngine::open_manual(EngineConfig::default(), transports).unwrap(), wire, clock)
}

impl World {
    fn new() -> Self {
        let ((engine, wire, clock), (peer, ..)) = (open(1), open(2));
        let src = engine.alloc(64).unwrap();
        let there = engine.import(&peer.alloc(64).unwrap().descriptor()).unwrap();
        engine.connect(there.peer()).unwrap();
        let world = Self { engine, wire, clock, src, there, _peer: peer };
        world.drive();
        world
    }

    fn drive(&self) {
        self.engine.drive(Time(self.clock.load(SeqCst)));
    }

    fn write(&self, imm: Option<Imm>, timeout: Duration) -> Handle {
        let op = Op::Write {
            src: Local { region: &self.src, offset: 0 },
            dst: Remote { region: &self.there, offset: 0 },
            len: 64,
            imm,
        };
        let options = Submit { timeout: Some(timeout), ..Submit::default() };
        self.engine.submit(&[op], options).unwrap()
    }

    /// Has the next poll find that the link is lost, and another one in its place.
    fn reconnect(&self) {
        let mut wire = self.wire.lock().unwrap();
        let (link, cause) = (wire.link, DomainError::LinkDown("by the test".into()));
        let (receipt, unfinished) = (Receipt::InOrder(0), Vec::new());
        wire.found.push(Completion::LinkDown { link, cause, receipt, unfinished });
        wire.lost = false;
        drop(wire);
        self.drive();
        self.drive();
        assert_eq!(self.wire.lock().unwrap().link, link + 1);
    }

    /// Has the next poll take a millisecond; returns the time at which it ends.
    fn slow(&self) -> Time {
        self.wire.lock().unwrap().takes = MS;
        Time(self.clock.load(SeqCst) + MS)
    }

    /// Has the next poll find that the oldest write is done, and its count as that of the peer.
    fn find_write(&self) {
        let mut wire = self.wire.lock().unwrap();
        let (token, count) = wire.posted.pop_front().unwrap();
        wire.found.extend(count.map(Completion::Count));
        let link = wire.link;
        wire.found.push(Completion::Done { link, token, result: Ok(()) });
    }

    fn records(&self) -> Records {
        self.engine.records(Cursor::default()).unwrap()
    }

    fn times_of_the_write(&self) -> TransferTimes {
        self.records().transfers.iter().find(|t| t.op == "write").unwrap().times
    }
}

#[test]
fn what_a_poll_finds_is_recorded_after_it() {
    let w = World::new();
    let counter = w.engine.counter().unwrap();
    let arrived = counter.expect(1, &[], FOREVER).unwrap();
    let done = w.write(Some(counter.imm()), FOREVER);
    let end = w.slow();
    // It may have come at any time until then.
    w.find_write();
    w.drive();
    assert_eq!((arrived.poll(), done.poll()), (Some(Ok(())), Some(Ok(()))));
    let (records, times) = (w.records(), w.times_of_the_write());
    assert_eq!((records.arrivals[0].at, records.expectations[0].notified), (end, end));
    assert_eq!((times.wire, times.notified), (end, end));
}

#[test]
fn work_that_waited_is_posted_after_the_poll_and_not_at_its_begin() {
    let w = World::new();
    w.wire.lock().unwrap().full = true;
    let done = w.write(None, FOREVER);
    let end = w.slow();
    w.wire.lock().unwrap().full = false;
    w.drive();
    w.find_write();
    w.drive();
    assert_eq!(done.poll(), Some(Ok(())));
    let times = w.times_of_the_write();
    assert_eq!((times.posted, times.all_posted), (end, end));
}

#[test]
fn a_deadline_that_passes_during_a_poll_waits_for_what_the_next_one_finds() {
    let w = World::new();
    let (counter, soon) = (w.engine.counter().unwrap(), Duration::from_nanos(MS / 2));
    let arrived = counter.expect(1, &[], soon).unwrap();
    let done = w.write(Some(counter.imm()), soon);
    w.slow();
    w.drive();
    assert_eq!((arrived.poll(), done.poll()), (None, None));
    w.find_write();
    w.drive();
    assert_eq!((arrived.poll(), done.poll()), (Some(Ok(())), Some(Ok(()))));
}

#[test]
fn what_ends_by_its_deadline_is_recorded_when_it_ends() {
    let w = World::new();
    let (counter, soon) = (w.engine.counter().unwrap(), Duration::from_nanos(MS));
    let arrived = counter.expect(1, &[], soon).unwrap();
    let done = w.write(None, soon);
    w.clock.fetch_add(MS, SeqCst);
    let end = w.slow();
    w.drive();
    let failed = |handle: &Handle| handle.poll().is_some_and(|result| result.is_err());
    assert!(failed(&arrived) && failed(&done));
    let ended = [w.records().expectations[0].notified, w.times_of_the_write().notified];
    assert_eq!(ended, [end; 2]);
}

#[test]
fn work_that_a_lost_link_refuses_waits_for_the_link_that_replaces_it() {
    let w = World::new();
    w.wire.lock().unwrap().receipts = true;
    w.reconnect();
    w.wire.lock().unwrap().lost = true;
    let done = w.write(None, FOREVER);
    w.drive();
    assert!(w.wire.lock().unwrap().posted.is_empty());
    assert!(done.poll().is_none(), "{:?}", done.poll());
    w.reconnect();
    w.find_write();
    w.drive();
    assert_eq!(done.poll(), Some(Ok(())));
}
