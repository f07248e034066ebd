//! Leases that a decoder renews: a prefiller's engine keeps pages for a lease after each renewal, as
//! the one behind a prefiller does, while messages are lost, late or come twice.

use std::{
    collections::BTreeMap,
    sync::{
        atomic::{AtomicU64, Ordering::SeqCst},
        Arc,
    },
    time::Duration,
};

use fabric_engine::{
    api::EngineConfig, locks::Mutex, simulation::SimNet, transport::sim::SimConfig, EngineError,
    Time, TransferEngine,
};
use fabric_kvcache::{layout::CacheLayout, Decoder, LocalRank, Prefiller, Terms};

use crate::{
    cache::{Cache, Shape},
    schedules::{
        faulty_delivery::{FaultOdds, FaultyDelivery},
        judge::Judge,
    },
    world::{ask, TAIL},
};

const MS: u64 = 1_000_000;
const BEAT: u64 = 100 * MS;
const LEASE: u64 = 20 * BEAT;
const SHAPE: Shape = Shape { layers: 1, heads: 1, width: 8, window: None };
/// More than one beat carries.
const HELD: u64 = 300;

fn terms() -> Terms {
    let (beat, silence) = (Duration::from_nanos(BEAT), Duration::from_secs(3));
    Terms { beat, silence, tail_nbytes: TAIL, ..Terms::default() }
}

/// A decoder that renews all leases with each beat, and the prefiller that keeps them.
struct World {
    net: SimNet,
    judge: Arc<Judge>,
    delivery: Arc<FaultyDelivery>,
    prefiller: Arc<Prefiller>,
    decoder: Option<Arc<Decoder>>,
    engines: [Arc<TransferEngine>; 2],
    session: u64,
    /// When each lease ends, unless it has ended.
    ends: Arc<Mutex<BTreeMap<u64, u64>>>,
    renewals: Arc<AtomicU64>,
}

fn rank(engine: &Arc<TransferEngine>) -> (Vec<CacheLayout>, Vec<LocalRank>) {
    let cache = Cache::new(engine, SHAPE.layout(0, 1, 4, 8)).unwrap();
    let (buffers, tail) = (vec![cache.region.clone()], Some(engine.alloc(TAIL).unwrap()));
    let local = LocalRank { rank: 0, engine: Arc::clone(engine), buffers, tail };
    (vec![cache.layout], vec![local])
}

impl World {
    fn new(seed: u64, odds: FaultOdds) -> Self {
        let mut net = SimNet::new(SimConfig { seed, ..SimConfig::default() });
        let engines = [(); 2].map(|()| net.engine(EngineConfig::default()).unwrap());
        let (layouts, local) = rank(&engines[0]);
        let prefiller = Arc::new(Prefiller::new("p", layouts, local, terms(), |_, _| ()).unwrap());
        let (layouts, local) = rank(&engines[1]);
        let decoder = Decoder::new("d", layouts, local, terms(), |_, _| ()).unwrap();
        let judge = Judge::new();
        let ends: BTreeMap<u64, u64> = (0..HELD).map(|lease| (lease, LEASE)).collect();
        let (ends, renewals) = (Arc::new(Mutex::new(ends)), Arc::<AtomicU64>::default());
        let (theirs, judge_, count) =
            (Arc::clone(&ends), Arc::clone(&judge), Arc::clone(&renewals));
        prefiller.on_renewal(move |leases| {
            count.fetch_add(1, SeqCst);
            let mut ends = theirs.lock();
            for lease in leases {
                // The pages of one that has ended are gone.
                if let Some(end) = ends.get_mut(lease) {
                    *end = judge_.now() + LEASE;
                }
            }
        });
        let session = decoder.connect(&prefiller.offer()).unwrap();
        let delivery = FaultyDelivery::new(&judge, odds, seed);
        let decoder = Some(Arc::new(decoder));
        let mut world =
            Self { net, judge, delivery, prefiller, decoder, engines, session, ends, renewals };
        world.pass(BEAT);
        assert_eq!(world.prefiller.decoders(), 1);
        let weak = Arc::downgrade(&world.prefiller);
        let handler = move |from, bytes: &[u8]| {
            if let Some(prefiller) = weak.upgrade() {
                prefiller.on_message(from, bytes);
            }
        };
        world.delivery.between(&world.engines[0], Arc::new(handler));
        world
    }

    /// Lets time pass; leases end in it.
    fn pass(&mut self, ns: u64) {
        let limit = self.judge.now() + ns;
        loop {
            let next = self.delivery.next().map_or(limit, |at| at.min(limit));
            while self.net.step_until(Time(next)) {
                self.judge.at(self.net.now().0);
            }
            self.net.advance(Time(next.max(self.judge.now())));
            self.judge.at(self.net.now().0);
            self.delivery.due();
            self.ends.lock().retain(|_, end| *end > self.judge.now());
            if next >= limit {
                return;
            }
        }
    }

    /// The decoder's queue has these for so long.
    fn queue(&mut self, leases: &[u64], ns: u64) {
        for _ in 0..ns / BEAT {
            if let Some(decoder) = &self.decoder {
                decoder.renew(self.session, leases.to_vec());
            }
            self.pass(BEAT);
        }
    }

    fn held(&self) -> Vec<u64> {
        self.ends.lock().keys().copied().collect()
    }

    fn kill_decoder(&mut self) {
        self.net.kill(self.engines[1].id());
        self.decoder = None;
    }
}

/// Messages that are lost, late and come twice, one in so many.
const FAULTY: FaultOdds = FaultOdds { twice: 3, late: 4, lost: 4 };
/// The latest that a late message comes.
const LATE: u64 = 3_000 * MS;

fn all() -> Vec<u64> {
    (0..HELD).collect()
}

#[test]
fn leases_in_a_queue_do_not_end_though_messages_are_lost_late_and_come_twice() {
    for seed in 0..8 {
        let mut world = World::new(seed, FAULTY);
        world.queue(&all(), 6 * LEASE);
        assert_eq!(world.held(), all(), "seed {seed}");
    }
}

#[test]
fn leases_that_left_the_queue_end_while_the_others_stay() {
    let mut world = World::new(1, FaultOdds::default());
    world.queue(&all(), 3 * LEASE);
    let odd: Vec<u64> = (0..HELD).filter(|lease| lease % 2 == 1).collect();
    world.queue(&odd, LEASE - 2 * BEAT);
    assert_eq!(world.held(), all(), "a lease has not passed");
    world.queue(&odd, 3 * BEAT);
    assert_eq!(world.held(), odd);
}

#[test]
fn leases_of_a_decoder_that_is_killed_end_within_a_lease() {
    for (odds, late) in [(FaultOdds::default(), 0), (FAULTY, LATE)] {
        let mut world = World::new(3, odds);
        world.queue(&all(), 3 * LEASE);
        world.kill_decoder();
        world.pass(LEASE / 2);
        assert_eq!(world.held(), all());
        world.pass(LEASE / 2 + late + 1);
        assert_eq!(world.held(), [0; 0]);
    }
}

#[test]
fn renewals_carry_no_further_than_one_beat() {
    let mut world = World::new(4, FaultOdds::default());
    world.queue(&all(), BEAT);
    world.pass(BEAT);
    let seen = world.renewals.load(SeqCst);
    assert_eq!(seen, 3, "messages of one beat");
    world.pass(3 * BEAT);
    assert_eq!(world.renewals.load(SeqCst), seen, "an idle or paused engine renews nothing");
}

#[test]
fn a_prefiller_that_was_restarted_is_renewed_nothing_and_asked_for_nothing() {
    let mut world = World::new(5, FaultOdds::default());
    world.queue(&all(), LEASE);
    let engine = world.net.restart(0, EngineConfig::default(), 1).unwrap();
    let (layouts, local) = rank(&engine);
    let events = Arc::<AtomicU64>::default();
    let theirs = Arc::clone(&events);
    let next = Prefiller::new("p", layouts, local, terms(), move |_, _| {
        theirs.fetch_add(1, SeqCst);
    });
    let next = next.unwrap();
    let renewed = Arc::clone(&events);
    next.on_renewal(move |_| {
        renewed.fetch_add(1, SeqCst);
    });
    world.queue(&all(), LEASE);
    let decoder = world.decoder.take().unwrap();
    let pull = ask(4, 0, vec![0], 0);
    assert!(matches!(decoder.request(world.session, pull), Err(EngineError::Stale { .. })));
    assert_eq!((events.load(SeqCst), next.decoders()), (0, 0));
}
