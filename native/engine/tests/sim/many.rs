//! Thousands of peers at once: the protocol's work does not grow with idle peers.

use std::sync::Arc;

use fabric_engine::{
    api::{EngineConfig, Imm},
    simulation::SimNet,
    transport::sim::SimConfig,
    Counter, Local, Op, Region, Remote, Submit, Time, TransferEngine,
};

use crate::case::{MS, US};

const ENGINES: usize = 2000;
/// Writes of each engine, to near and far neighbours.
const WRITES: usize = 4;
const LEN: u64 = 1000;
const BOUND: Time = Time(60_000 * MS);

struct Node {
    engine: Arc<TransferEngine>,
    region: Region,
    counter: Counter,
}

fn node(net: &mut SimNet, i: usize) -> Node {
    let name = format!("node {i}");
    let engine = net.engine_with_rails(EngineConfig { name, ..Default::default() }, 2).unwrap();
    let mut bytes = vec![0; LEN as usize * (1 + WRITES)].into_boxed_slice();
    let (at, len) = (bytes.as_mut_ptr() as usize, bytes.len() as u64);
    // SAFETY: the registration keeps the bytes, and nothing else refers to them.
    let region = unsafe { engine.register(at, len, Some(Box::new(bytes))) }.unwrap();
    region.put(0, &pattern(i)).unwrap();
    let counter = engine.plain_counter(Imm::plain(1).unwrap());
    Node { engine, region, counter }
}

fn pattern(i: usize) -> [u8; LEN as usize] {
    [1 + (i % 251) as u8; LEN as usize]
}

fn target(from: usize, nth: usize) -> usize {
    (from + 1 + nth * 37) % ENGINES
}

fn dies(i: usize) -> bool {
    i % 100 == 99
}

#[test]
fn ic_3_rs_4_two_thousand_engines_with_faults_count_what_was_written() {
    let config = SimConfig { seed: 1, max_bytes: 256, skew: 50_000, ..SimConfig::default() };
    let mut net = SimNet::new(config);
    let nodes: Vec<_> = (0..ENGINES).map(|i| node(&mut net, i)).collect();
    let mut handles = Vec::new();
    for (from, node) in nodes.iter().enumerate() {
        for nth in 0..WRITES {
            let to = target(from, nth);
            let there = node.engine.import(&nodes[to].region.descriptor()).unwrap();
            let src = Local { region: &node.region, offset: 0 };
            let dst = Remote { region: &there, offset: LEN * (1 + nth as u64) };
            let op = Op::Write { src, dst, len: LEN, imm: Some(nodes[to].counter.imm()) };
            let handle = node.engine.submit(&[op], Submit::default()).unwrap();
            handles.push((from, nth, to, handle));
        }
    }
    net.run_until(Time(100 * US));
    let each = |nth: usize| nodes.iter().enumerate().filter(move |(i, _)| i % 50 == nth);
    each(7).for_each(|(_, n)| net.plug(n.engine.id(), 0, false));
    (0..ENGINES).filter(|i| dies(*i)).for_each(|i| net.kill(nodes[i].engine.id()));
    net.run_until(Time(5 * MS));
    each(7).for_each(|(_, n)| net.plug(n.engine.id(), 0, true));
    net.run_until(BOUND);
    let mut counted = vec![0..=0u64; ENGINES];
    for (from, nth, to, handle) in handles {
        let (first, last) = (*counted[to].start(), *counted[to].end());
        if dies(from) {
            // It may have arrived before.
            counted[to] = first..=last + 1;
            continue;
        }
        let result = handle.poll().expect("RS-4: a transfer has ended by its deadline");
        assert!(result.is_ok() || dies(to), "IC-4: {from} to {to}: {result:?}");
        counted[to] = first + 1..=last + 1;
        if result.is_ok() {
            let there = nodes[to].region.get(LEN * (1 + nth as u64), LEN).unwrap();
            assert_eq!(there, pattern(from), "IC-2");
        }
    }
    for (to, node) in nodes.iter().enumerate().filter(|(i, _)| !dies(*i)) {
        let arrived = node.counter.arrived();
        assert!(counted[to].contains(&arrived), "IC-3: {arrived} of {:?} at {to}", counted[to]);
    }
    assert!(net.group_frames() > 0, "links were lost and nothing was sent again");
}
