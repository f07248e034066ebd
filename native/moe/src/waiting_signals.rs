//! The signals of a peer that it waits or is in a call, in all exchanges of the two engines, of
//! either mode.
//!
//! A rank makes calls of several exchanges in turn. One that waits in an exchange signals there,
//! while a peer that needs nothing more of that one waits in the next: the peer looks in all.

use std::{
    fmt::Debug,
    sync::{Arc, Weak},
};

use fabric_engine::{api::EngineId, locks::Mutex, PerProcess};

/// Where a peer counts its signals in one exchange.
pub trait SignalCount: Debug + Send + Sync {
    /// Their number so far.
    fn signals(&self) -> u64;
}

/// Where a peer counts them in each exchange.
#[derive(Debug, Default)]
pub struct WaitingSignals(Mutex<Vec<Weak<dyn SignalCount>>>);

/// The engines with which this rank and the peer make their exchanges.
type Engines = (EngineId, EngineId);
type Peers = Vec<(Engines, Weak<WaitingSignals>)>;

static PEERS: PerProcess<Mutex<Peers>> = PerProcess::empty();

impl WaitingSignals {
    /// Those of a peer, which counts them at `count` from now on as well.
    pub fn of(engines: Engines, count: Weak<dyn SignalCount>) -> Arc<Self> {
        let mut peers = PEERS.get_or_default().lock();
        peers.retain(|(_, signals)| signals.strong_count() > 0);
        let known = peers.iter().find(|(known, _)| *known == engines);
        let signals = known.and_then(|(_, signals)| signals.upgrade()).unwrap_or_else(|| {
            let signals = Arc::new(Self::default());
            peers.push((engines, Arc::downgrade(&signals)));
            signals
        });
        drop(peers);
        let mut all = signals.0.lock();
        all.retain(|count| count.strong_count() > 0);
        all.push(count);
        drop(all);
        signals
    }

    /// Their number in exchanges that there still are.
    pub fn count(&self) -> u64 {
        let all: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().map(|count| count.signals()).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        thread,
        time::{Duration, Instant},
    };

    use fabric_engine::{
        api::{EngineConfig, TransportKind},
        Result, TransferEngine,
    };

    use super::*;
    use crate::{
        kernels::Part,
        routes::Order,
        shape::Shape,
        throughput::{Member, Spec, Throughput},
        AllToAll,
    };

    /// Longer than any wait of the test.
    const T: Duration = Duration::from_secs(60);

    /// A rank of an exchange in either mode.
    struct Rank {
        engine: EngineId,
        direct: AllToAll,
        throughput: Throughput,
    }

    fn open(rank: u32) -> Rank {
        let shape = Shape { private_rows: 0, shared_rows: None, ..Shape::small(2) };
        let spec =
            Spec { shape, ranks_per_node: 1, channels: 1, chunk: 4, ring_chunks: 2, threads: 1 };
        let config = EngineConfig {
            name: format!("rank-{rank}"),
            transports: vec![TransportKind::Shm],
            ..EngineConfig::default()
        };
        let engine = Arc::new(TransferEngine::open(config.clone()).unwrap());
        let member = Member { rank, incarnation: 0 };
        let throughput = Throughput::open(&config, spec, member, T).unwrap();
        let id = engine.id();
        let throughput = throughput.of_engine(id);
        let direct = AllToAll::new(engine, shape, rank).unwrap();
        direct.set_timeout(T);
        Rank { engine: id, direct, throughput }
    }

    fn pair() -> [Rank; 2] {
        let ranks = [open(0), open(1)];
        let direct = ranks.each_ref().map(|rank| rank.direct.descriptor(None).unwrap());
        let throughput = ranks.each_ref().map(|rank| rank.throughput.descriptor());
        for (i, rank) in ranks.iter().enumerate() {
            rank.direct.admit(&direct[1 - i]).unwrap();
            rank.throughput.admit(&throughput[1 - i]).unwrap();
        }
        ranks
    }

    /// The signals of rank 1, as rank 0 counts them.
    fn signals(ranks: &[Rank; 2]) -> Arc<WaitingSignals> {
        let known = PEERS.get_or_default().lock();
        let ids = ranks.each_ref().map(|rank| rank.engine);
        let (_, signals) = known.iter().find(|(of, _)| *of == (ids[0], ids[1])).unwrap();
        signals.upgrade().unwrap()
    }

    fn within(what: &str, mut there: impl FnMut() -> bool) {
        let end = Instant::now() + T;
        while !there() {
            assert!(Instant::now() < end, "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn rs_4_a_rank_in_a_call_of_either_mode_signals_in_the_other() {
        let ranks = pair();
        let waiting = signals(&ranks);
        let before = waiting.count();
        let [this, other] = ranks.each_ref().map(|rank| &rank.throughput);
        thread::scope(|threads| {
            // It waits for rank 0 until that one takes part, too.
            let call = |rank: &Throughput| -> Result<()> {
                rank.dispatch_send(&[Part { bytes: &[], stride: 16, width: 16 }], &[], None)?;
                rank.wait_arriving(Order::Packed { multiple: 1 }).map(|_| ())
            };
            let busy = threads.spawn(move || call(other));
            within("rank 1 signals in the high-throughput mode", || waiting.count() > before);
            call(this).unwrap();
            busy.join().unwrap().unwrap();
        });
    }
}
