//! How many writes an exchange posts to each peer (fabric-lib §6.1): what goes over a network is
//! paid for by the write.

use std::{collections::BTreeMap, sync::Arc};

use fabric_engine::{
    api::EngineConfig, flight::Cursor, simulation::SimNet, transport::sim::SimConfig,
    TransferEngine,
};
use fabric_moe::{routes::Order, AllToAll, Dispatched, Shape};

use crate::model::{rows_of_answers, shape, sums, Batch, Handed};

const RANKS: u32 = 4;
const SEEDS: u64 = 40;

struct Rank {
    engine: Arc<TransferEngine>,
    all: AllToAll,
    read: Cursor,
}

/// Writes, and their bytes.
type Posted = (u32, u64);

impl Rank {
    fn new(net: &mut SimNet, shape: Shape, rank: u32) -> Self {
        let config = EngineConfig { name: format!("rank {rank}"), ..EngineConfig::default() };
        let engine = net.engine(config).unwrap();
        let all = AllToAll::new(Arc::clone(&engine), shape, rank).unwrap();
        Self { engine, all, read: Cursor::default() }
    }

    /// What was posted since the last time, of rows or answers, by the peers' names. They are told
    /// from blocks and mere counts by their length: all that goes to one counter of a peer is one
    /// row long at least.
    fn payload(&mut self, shape: &Shape) -> BTreeMap<String, Posted> {
        let records = self.engine.records(self.read).unwrap();
        self.read = records.cursor;
        assert_eq!(records.missed, 0);
        let mut counters: BTreeMap<(u32, u32), Posted> = BTreeMap::new();
        for one in &records.transfers {
            assert!(one.over, "{one:?}");
            assert_eq!((one.weight, one.parts_lost, one.again), (1, 0, 0));
            // Each write is one work request, and counts.
            assert_eq!(one.slices, one.parts.iter().map(|p| p.counts).sum::<u32>());
            for part in &one.parts {
                let (writes, bytes) = counters.entry((part.peer, part.imm)).or_default();
                *writes += part.counts;
                *bytes += part.bytes;
            }
        }
        let longer = counters.into_iter().filter(|(_, (_, bytes))| *bytes >= shape.back_stride());
        longer.map(|((peer, _), posted)| (records.peers[peer as usize].1.clone(), posted)).collect()
    }
}

/// Steps until each rank's work is done.
fn all_of<T>(
    net: &mut SimNet,
    ranks: &[Rank],
    mut work: impl FnMut(usize, &AllToAll) -> Option<T>,
) -> Vec<T> {
    let mut done: Vec<Option<T>> = ranks.iter().map(|_| None).collect();
    loop {
        for (i, rank) in ranks.iter().enumerate() {
            if done[i].is_none() {
                done[i] = work(i, &rank.all);
            }
        }
        if done.iter().all(Option::is_some) {
            // Acknowledgements and fences are on their way.
            let soon = net.now().after(std::time::Duration::from_millis(1));
            net.run_until(soon);
            return done.into_iter().flatten().collect();
        }
        assert!(net.step(), "it stands still");
    }
}

fn rows_to(shape: &Shape, batch: &Batch, rank: u32) -> u64 {
    let there = |e: &&i64| **e >= 0 && shape.rank_of(**e as u32) == rank;
    batch.indices.iter().filter(there).count() as u64
}

/// Two writes of rows at most, the second for those that don't fit into the private slot, and one
/// of answers.
fn check(seed: u64) -> (u32, u32) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let local = rng.u32(1..3);
    let private_rows = [0, 1, 2, 8][rng.usize(..4)];
    let shape = Shape { private_rows, ..shape(RANKS, local, rng.u32(1..=4), 6) };
    // A block, of routes or of a grant, is shorter than a row.
    assert!(u64::from(4 + local) * 4 < shape.back_stride());
    let mut net = SimNet::new(SimConfig { seed, ..SimConfig::default() });
    let mut ranks: Vec<Rank> = (0..RANKS).map(|rank| Rank::new(&mut net, shape, rank)).collect();
    let descriptors: Vec<_> = ranks.iter().map(|r| r.all.descriptor(None).unwrap()).collect();
    for (i, rank) in ranks.iter().enumerate() {
        for (_, descriptor) in descriptors.iter().enumerate().filter(|(j, _)| *j != i) {
            rank.all.admit(descriptor).unwrap();
        }
    }
    let mut most = (0, 0);
    for _ in 0..3 {
        let batches: Vec<_> =
            (0..RANKS).map(|_| Batch::random(&mut rng, &shape, Some(1))).collect();
        all_of(&mut net, &ranks, |_, all| all.may_dispatch().then_some(()));
        ranks.iter_mut().for_each(|r| drop(r.payload(&shape)));
        all_of(&mut net, &ranks, |i, all| batches[i].send(all).map(Some).unwrap());
        let mut placed: Vec<Option<(Dispatched, Handed)>> = (0..RANKS).map(|_| None).collect();
        let came = all_of(&mut net, &ranks, |i, all| {
            if placed[i].is_none() {
                let known = all.arriving(Order::Packed { multiple: 1 }).unwrap()?;
                let handed = Handed::room(known.rows);
                placed[i] = Some((known, handed));
            }
            let all_came = all.collect(&mut placed[i].as_mut()?.1.parts()).unwrap();
            all_came.then(|| placed[i].take()).flatten()
        });
        for (i, rank) in ranks.iter_mut().enumerate() {
            let posted = rank.payload(&shape);
            for to in (0..RANKS).filter(|to| *to != i as u32) {
                let rows = rows_to(&shape, &batches[i], to);
                let writes = u32::from(rows > 0 && private_rows > 0)
                    + u32::from(rows > u64::from(private_rows));
                let found = posted.get(&format!("rank {to}")).copied().unwrap_or_default();
                assert_eq!(found, (writes, rows * shape.row_stride()), "{i} to {to}, seed {seed}");
                most.0 = writes.max(most.0);
            }
        }
        let answers: Vec<_> = (0..)
            .zip(&came)
            .map(|(i, (placing, handed))| {
                handed.answers(&shape, i, &placing.counts, &placing.starts)
            })
            .collect();
        all_of(&mut net, &ranks, |i, all| {
            all.combine_some(rows_of_answers(&answers[i])).unwrap().then_some(())
        });
        all_of(&mut net, &ranks, |_, all| all.answered().then_some(()));
        for (i, rank) in ranks.iter_mut().enumerate() {
            let posted = rank.payload(&shape);
            for to in (0..RANKS).filter(|to| *to != i as u32) {
                let rows = rows_to(&shape, &batches[to as usize], i as u32);
                let writes = u32::from(rows > 0);
                let found = posted.get(&format!("rank {to}")).copied().unwrap_or_default();
                assert_eq!(found, (writes, rows * shape.back_stride()), "{i} to {to}, seed {seed}");
                most.1 = writes.max(most.1);
            }
            let (found, left_out) = sums(&rank.all, &batches[i]).unwrap();
            assert_eq!((found, left_out), (batches[i].sums(&shape, &[]), vec![]));
        }
    }
    most
}

#[test]
fn two_writes_of_rows_and_one_of_answers_go_to_a_peer_at_most() {
    let most: Vec<_> = (0..SEEDS).map(check).collect();
    assert_eq!(most.iter().max(), Some(&(2, 1)));
}
