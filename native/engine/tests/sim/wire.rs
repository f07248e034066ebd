//! Tests of the simulated network.

use std::sync::Arc;

use fabric_engine::{
    api::{EngineConfig, Imm},
    simulation::SimNet,
    transport::sim::{Fault, SimConfig},
    Counter, EngineError, Handle, Local, Op, Region, Remote, RemoteRegion, Result, Submit, Time,
    TransferEngine,
};

const LEN: u64 = 8192;
const US: u64 = 1_000;
const MS: u64 = 1_000_000;

struct Pair {
    net: SimNet,
    a: Arc<TransferEngine>,
    _b: Arc<TransferEngine>,
    src: Region,
    dst: Region,
    there: RemoteRegion,
    counter: Counter,
}

fn pair(config: SimConfig, rails: u8) -> Pair {
    let mut net = SimNet::new(SimConfig { delay: 1000..1001, ..config });
    let named = |name: &str| EngineConfig { name: name.into(), ..Default::default() };
    let a = net.engine_with_rails(named("a"), rails).unwrap();
    let b = net.engine_with_rails(named("b"), rails).unwrap();
    let (src, dst) = (a.alloc(LEN).unwrap(), b.alloc(LEN).unwrap());
    src.put(0, &[7; LEN as usize]).unwrap();
    let there = a.import(&dst.descriptor()).unwrap();
    a.connect(there.peer()).unwrap();
    let counter = b.plain_counter(Imm::plain(1).unwrap());
    let mut pair = Pair { net, a, _b: b, src, dst, there, counter };
    pair.until(MS);
    pair
}

impl Pair {
    fn until(&mut self, at: u64) {
        while self.net.step_until(Time(at)) {}
        self.net.advance(Time(at));
    }

    fn write(&self, len: u64) -> Handle {
        let src = Local { region: &self.src, offset: 0 };
        let dst = Remote { region: &self.there, offset: 0 };
        let op = Op::Write { src, dst, len, imm: Some(self.counter.imm()) };
        self.a.submit(&[op], Submit::default()).unwrap()
    }

    /// The result, and its time in virtual nanoseconds.
    fn wait(&mut self, handle: &Handle) -> (Result<()>, u64) {
        let start = self.net.now();
        while !handle.is_done() && self.net.step() {}
        (handle.poll().unwrap(), self.net.now().since(start).as_nanos() as u64)
    }

    fn landed(&self) -> bool {
        self.dst.get(0, 64).unwrap() == [7; 64]
    }
}

#[test]
fn a_nic_carries_no_more_than_its_rate() {
    let config = || SimConfig { max_bytes: LEN, ..Default::default() };
    let free = pair(config(), 1);
    let mut slow = pair(SimConfig { port_rate: Some(0.5), ..config() }, 1);
    let mut link = pair(SimConfig { link_rate: Some(0.5), ..config() }, 1);
    let took = |p: &mut Pair| {
        let done = p.write(LEN);
        p.wait(&done).1
    };
    assert_eq!(took(&mut { free }), 2000, "there and back");
    // The bytes leave one NIC and enter the other; the second half queues behind the first.
    assert_eq!(took(&mut slow), 2000 + 3 * LEN);
    assert_eq!(took(&mut link), 2000 + 2 * LEN);
    slow.net.inject(&Fault::Slow { node: 0, rail: 0, rate: 250 });
    assert_eq!(took(&mut slow), 2000 + 5 * LEN);
}

#[test]
fn a_stalled_link_is_silent_and_goes_on() {
    let mut p = pair(SimConfig::default(), 1);
    p.net.inject(&Fault::Stall { node: 0, rail: 0, link_index: 0, duration: 500 * US });
    let done = p.write(64);
    p.until(MS + 400 * US);
    assert!(!done.is_done() && !p.landed());
    assert_eq!(p.wait(&done).0, Ok(()));
    assert!(p.landed());
}

#[test]
fn bytes_under_way_land_after_the_sender_has_seen_the_loss() {
    let mut p = pair(SimConfig::default(), 1);
    drop(p.write(64));
    p.net.inject(&Fault::LinkLost {
        node: 0,
        rail: 0,
        link_index: 0,
        local_delay: 0,
        remote_delay: MS,
    });
    // Before another link can be up.
    p.until(MS + 1500);
    assert_eq!((p.landed(), p.counter.arrived()), (true, 1));
}

#[test]
fn a_partition_is_silent_then_reported_and_heals() {
    for (notice_after, permanent) in
        [(None, false), (Some(200 * US), false), (Some(200 * US), true)]
    {
        let mut p = pair(SimConfig::default(), 1);
        p.net.inject(&Fault::Partition { isolated: 1, notice_after, permanent, duration: MS });
        let cut = p.write(64);
        p.until(MS + 150 * US);
        assert!(!cut.is_done());
        let (result, _) = p.wait(&cut);
        match permanent {
            true => assert!(matches!(result, Err(EngineError::PeerLost { .. })), "{result:?}"),
            // A node that sees the loss may have reconnected and sent it again.
            false => assert!(notice_after.is_some() || result.is_ok(), "{result:?}"),
        }
        p.until(3 * MS);
        let again = p.write(64);
        assert_eq!(p.wait(&again).0, Ok(()));
    }
}

#[test]
fn a_partition_divides_more_nodes_than_it_has_bits_for() {
    let mut net = SimNet::new(SimConfig { delay: 1000..1001, ..SimConfig::default() });
    let open = |_| net.engine(EngineConfig::default()).unwrap();
    let engines: Vec<_> = (0..70).map(open).collect();
    let src = engines[0].alloc(64).unwrap();
    let write = |to: usize| {
        let there = engines[to].alloc(64).unwrap();
        let region = engines[0].import(&there.descriptor()).unwrap();
        let (src, dst) = (Local { region: &src, offset: 0 }, Remote { region: &region, offset: 0 });
        let op = Op::Write { src, dst, len: 64, imm: None };
        engines[0].submit(&[op], Submit::default()).unwrap()
    };
    let reached = |net: &mut SimNet, within: u64, to: usize| {
        let handle = write(to);
        let until = net.now().0 + within;
        net.run_until(Time(until));
        handle.is_done()
    };
    let nodes = [8, 9, 41, 63, 64, 69];
    assert!(nodes.iter().all(|to| reached(&mut net, MS, *to)));
    let isolated = 1 << 9 | 1 << 41 | 1 << 63;
    net.inject(&Fault::Partition {
        isolated,
        notice_after: None,
        permanent: false,
        duration: 100 * MS,
    });
    let there: Vec<usize> =
        nodes.iter().filter(|to| reached(&mut net, MS, **to)).copied().collect();
    assert_eq!(there, [8, 64, 69]);
}

#[test]
fn a_nic_that_is_down_carries_nothing_until_it_is_up() {
    let mut p = pair(SimConfig::default(), 1);
    p.net.inject(&Fault::NicDown {
        node: 1,
        rail: 0,
        local_delay: 10 * MS,
        remote_delay: 100_000 * MS,
    });
    let done = p.write(64);
    p.until(5 * MS);
    assert!(!done.is_done() && !p.landed(), "no node has seen the fault yet");
    p.net.inject(&Fault::NicUp { node: 1, rail: 0 });
    assert_eq!(p.wait(&done).0, Ok(()));
}

#[test]
fn a_failed_work_request_ends_its_link_and_is_sent_again() {
    for ordered in [false, true] {
        let mut p = pair(SimConfig { ordered, ..Default::default() }, 2);
        let writes: Vec<_> = (0..4).map(|_| p.write(64)).collect();
        p.net.inject(&Fault::WorkFails {
            node: 0,
            rail: 0,
            link_index: 0,
            work_index: 1,
            link_down_after: 5 * US,
        });
        let results: Vec<_> = writes.iter().map(|w| p.wait(w).0).collect();
        assert_eq!(results, [Ok(()), Ok(()), Ok(()), Ok(())]);
        assert_eq!(p.counter.arrived(), 4);
        assert!(p.net.group_frames() >= 2, "a query and its receipt");
    }
}

#[test]
fn another_incarnation_of_a_node_is_another_engine() {
    let mut p = pair(SimConfig::default(), 1);
    p.net.inject(&Fault::Crash { node: 1, remote_delay: 0 });
    let lost = p.write(64);
    assert!(p.wait(&lost).0.is_err() && !p.landed());
    let next = p.net.restart(1, EngineConfig::default(), 1).unwrap();
    let dst = next.alloc(LEN).unwrap();
    p.there = p.a.import(&dst.descriptor()).unwrap();
    let done = p.write(64);
    assert_eq!(p.wait(&done).0, Ok(()));
    assert_eq!(dst.get(0, 64).unwrap(), [7; 64]);
}
