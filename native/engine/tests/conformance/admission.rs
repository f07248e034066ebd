//! Admission: priorities on one rail, and credits of several senders to one receiver.

use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::{EngineConfig, Priority},
    simulation::SimNet,
    transport::sim::SimConfig,
    Handle, Local, Op, Region, Remote, RemoteRegion, Submit, Time, TransferEngine,
};

const M: u64 = 1 << 20;
const MS: u64 = 1_000_000;
/// Bytes per nanosecond: 10 Gb/s.
const RATE: f64 = 1.25;

/// Several senders, one receiver.
struct World {
    net: SimNet,
    senders: Vec<(Arc<TransferEngine>, Region, RemoteRegion)>,
    receiver: (Arc<TransferEngine>, Region),
}

impl World {
    fn new(senders: usize, engine: &EngineConfig) -> Self {
        let sim = SimConfig {
            max_bytes: 1 << 30,
            max_pages: 1 << 10,
            window: 1 << 10,
            delay: 1000..2000,
            port_rate: Some(RATE),
            ordered: true,
            ..SimConfig::default()
        };
        let mut net = SimNet::new(sim);
        let receiver = net.engine(engine.clone()).unwrap();
        let dst = receiver.alloc(64 * M).unwrap();
        let senders: Vec<_> = (0..senders)
            .map(|_| {
                let sender = net.engine(engine.clone()).unwrap();
                let src = sender.alloc(64 * M).unwrap();
                let imported = sender.import(&dst.descriptor()).unwrap();
                sender.connect(imported.peer()).unwrap();
                (sender, src, imported)
            })
            .collect();
        let mut world = Self { net, senders, receiver: (receiver, dst) };
        world.until(5 * MS);
        world
    }

    fn receiver(&self) -> &TransferEngine {
        &self.receiver.0
    }

    fn now(&self) -> u64 {
        self.net.now().0
    }

    fn until(&mut self, at: u64) {
        while self.net.step_until(Time(at)) {}
        self.net.advance(Time(at));
    }

    /// `pages` pages of 1 MiB, all to the same offset: only their duration is tested.
    fn send(&self, sender: usize, pages: u64, priority: Priority) -> Handle {
        let (engine, src, imported) = &self.senders[sender];
        let ops: Vec<_> = (0..pages).map(|_| write(src, imported, M)).collect();
        engine.submit(&ops, Submit { priority: Some(priority), ..Submit::default() }).unwrap()
    }

    fn small(&self, sender: usize, priority: Priority) -> Handle {
        let (engine, src, imported) = &self.senders[sender];
        let op = write(src, imported, 4096);
        engine.submit(&[op], Submit { priority: Some(priority), ..Submit::default() }).unwrap()
    }

    /// Virtual nanoseconds until the handle is done.
    fn takes(&mut self, handle: &Handle) -> u64 {
        let start = self.now();
        while handle.poll().is_none() && self.net.step() {}
        assert_eq!(handle.poll(), Some(Ok(())));
        self.now() - start
    }
}

fn write<'a>(src: &'a Region, dst: &'a RemoteRegion, len: u64) -> Op<'a> {
    let (src, dst) = (Local { region: src, offset: 0 }, Remote { region: dst, offset: 0 });
    Op::Write { src, dst, len, imm: None }
}

fn config() -> EngineConfig {
    EngineConfig { op_timeout: Duration::from_secs(600), ..EngineConfig::default() }
}

/// Nanoseconds that `bytes` take on the wire.
fn wire(bytes: u64) -> u64 {
    (bytes as f64 / RATE) as u64
}

#[test]
fn urgent_work_waits_behind_at_most_one_window() {
    let window = 4 * M;
    let mut world = World::new(1, &EngineConfig { rail_window: window, ..config() });
    let bulk = world.send(0, 256, Priority::Bulk);
    world.until(10 * MS);
    let urgent = world.small(0, Priority::Latency);
    let took = world.takes(&urgent);
    // Slices of 1 MiB: five of them, where that is more than the window.
    assert!(took < wire(5 * M) + 2 * MS, "{took} ns");
    let queued = world.small(0, Priority::Bulk);
    let took = world.takes(&queued);
    assert!(took > wire(200 * M), "bulk keeps its place in the queue: {took} ns");
    world.takes(&bulk);
}

#[test]
fn urgent_work_waits_behind_at_most_one_window_of_long_or_short_writes() {
    for len in [64 * M, 32 << 10] {
        let mut world = World::new(1, &EngineConfig { rail_window: 4 * M, ..config() });
        let (sender, src, imported) = &world.senders[0];
        let writes: Vec<_> = (0..64 * M / len).map(|_| write(src, imported, len)).collect();
        let bulk = sender.submit(&writes, Submit::default()).unwrap();
        world.until(10 * MS);
        let urgent = world.small(0, Priority::Latency);
        let took = world.takes(&urgent);
        assert!(took < wire(5 * M) + 2 * MS, "{took} ns behind writes of {len} bytes");
        world.takes(&bulk);
    }
}

#[test]
fn background_work_uses_spare_bandwidth_and_does_not_starve() {
    let mut world = World::new(1, &config());
    let background = world.send(0, 128, Priority::Background);
    let bulk = world.send(0, 512, Priority::Bulk);
    let start = world.now();
    let took = world.takes(&bulk);
    // A busy rail admits one background page every ten milliseconds.
    let turns = took / (10 * MS) + 1;
    assert!(took < wire(512 * M) + turns * wire(M) + 20 * MS, "{took} ns");
    assert!(background.poll().is_none());
    world.takes(&background);
    let all = world.now() - start;
    assert!(all < wire(640 * M) + 20 * MS, "the rail is never idle: {all} ns");
    assert!(all < wire(640 * M - turns / 2 * M) + took, "{all} ns");
}

#[test]
fn a_deadline_raises_background_priority() {
    let mut world = World::new(1, &config());
    let bulk = world.send(0, 512, Priority::Bulk);
    let (engine, src, imported) = &world.senders[0];
    let ops: Vec<_> = (0..16).map(|_| write(src, imported, M)).collect();
    let submit = |ms| Submit {
        timeout: Some(Duration::from_millis(ms)),
        priority: Some(Priority::Background),
        ..Submit::default()
    };
    // Without its deadline it would have 16 of 512 pages after 16 turns of ten milliseconds.
    let soon = engine.submit(&ops, submit(120)).unwrap();
    let took = world.takes(&soon);
    assert!(took < 120 * MS, "{took} ns");
    world.takes(&bulk);
}

/// Many senders at once: the queue at the receiver's port is bounded.
#[test]
fn a_receiver_is_not_overrun() {
    let queue = |receive_window| {
        let mut world = World::new(17, &EngineConfig { receive_window, ..config() });
        let bulk: Vec<_> = (0..16).map(|s| world.send(s, 48, Priority::Bulk)).collect();
        let start = world.now();
        world.until(start + 300 * MS);
        let small = world.small(16, Priority::Latency);
        let took = world.takes(&small);
        for handle in &bulk {
            world.takes(handle);
        }
        let all = world.now() - start;
        // Credits cost no throughput: the port is never idle.
        assert!(all < wire(16 * 48 * M) * 11 / 10, "{all} ns");
        took
    };
    let (with, without) = (queue(24 * M), queue(u64::MAX));
    assert!(with < wire(24 * M) + 2 * MS, "{with} ns");
    assert!(without > 3 * with, "{without} ns without credits, {with} ns with them");
}

/// When the other senders' demand ends, the remaining sender has the whole receiver again.
#[test]
fn credits_come_back() {
    let mut world = World::new(8, &EngineConfig { receive_window: 8 * M, ..config() });
    for round in 0..3 {
        let many: Vec<_> = (0..8).map(|s| world.send(s, 8, Priority::Bulk)).collect();
        for handle in &many {
            world.takes(handle);
        }
        let now = world.now();
        world.until(now + 1000 * MS);
        let alone = world.send(0, 64, Priority::Bulk);
        let took = world.takes(&alone);
        assert!(took < wire(64 * M) * 11 / 10 + MS, "round {round}: {took} ns");
    }
}

/// Otherwise the engine would wake up repeatedly for operations that no longer wait.
#[test]
fn cancelling_queued_work_leaves_no_timer_behind() {
    let mut world = World::new(1, &config());
    // All of this transfer is under way, and nothing else waits.
    let bulk = world.send(0, 12, Priority::Bulk);
    let (engine, src, imported) = &world.senders[0];
    let op = write(src, imported, M);
    let options = Submit { priority: Some(Priority::Background), ..Submit::default() };
    let queued = engine.submit(&[op], options).unwrap();
    let engine = Arc::clone(engine);
    queued.cancel();
    assert!(matches!(queued.poll(), Some(Err(_))), "{:?}", queued.poll());
    // Its turn would have come in ten milliseconds; credit is requested again after a hundred.
    world.until(world.now() + MS);
    let next = engine.next_timer();
    assert!(next > Time(world.now() + 50 * MS), "{next:?} at {}", world.now());
    world.takes(&bulk);
}

/// The count of a cut write follows its bytes, not the bytes submitted after it.
#[test]
fn a_count_does_not_wait_behind_later_bytes() {
    let mut world = World::new(1, &config());
    let (len, counter) = (32 * M, world.receiver().counter().unwrap());
    let large = world.receiver().alloc(len).unwrap();
    let (engine, src, _) = &world.senders[0];
    let imported = engine.import(&large.descriptor()).unwrap();
    let op = Op::Write {
        src: Local { region: src, offset: 0 },
        dst: Remote { region: &imported, offset: 0 },
        len,
        imm: Some(counter.imm()),
    };
    let first = engine.submit(&[op], Submit::default()).unwrap();
    let rest = world.send(0, 256, Priority::Bulk);
    let took = world.takes(&first);
    assert!(took < wire(len + 32 * M), "{took} ns");
    assert_eq!(counter.arrived(), 1);
    world.takes(&rest);
}

/// A deadline raises the priority of work, but does not exempt it from the windows.
#[test]
fn background_with_a_deadline_stays_within_the_window() {
    let mut world = World::new(1, &config());
    let bulk = world.send(0, 600, Priority::Bulk);
    let (engine, src, imported) = &world.senders[0];
    let ops: Vec<_> = (0..400).map(|_| write(src, imported, M)).collect();
    let options = Submit {
        timeout: Some(Duration::from_millis(600)),
        priority: Some(Priority::Background),
        ..Submit::default()
    };
    let pressed = engine.submit(&ops, options).unwrap();
    world.until(world.now() + 60 * MS);
    let urgent = world.small(0, Priority::Latency);
    let took = world.takes(&urgent);
    assert!(took < wire(20 * M), "{took} ns");
    world.takes(&pressed);
    world.takes(&bulk);
}

/// A large transfer to one receiver leaves room for a small one to another.
#[test]
fn work_for_one_receiver_does_not_starve_another() {
    let mut world = World::new(1, &config());
    let other = world.net.engine(config()).unwrap();
    let (large, small) = (world.receiver().alloc(16 * M).unwrap(), other.alloc(M).unwrap());
    let (engine, src, _) = &world.senders[0];
    let (engine, src) = (Arc::clone(engine), src.clone());
    let [large, small] = [&large, &small].map(|r| engine.import(&r.descriptor()).unwrap());
    let ops: Vec<_> = (0..40).map(|_| write(&src, &large, 7 * M)).collect();
    let much = engine.submit(&ops, Submit::default()).unwrap();
    world.until(world.now() + 20 * MS);
    let little = engine.submit(&[write(&src, &small, 4096)], Submit::default()).unwrap();
    let took = world.takes(&little);
    assert!(took < wire(40 * M), "{took} ns");
    world.takes(&much);
}
