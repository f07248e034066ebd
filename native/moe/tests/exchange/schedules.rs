//! Exchanges under random faults, on simulated links and a virtual clock. A failure prints its
//! seed, which replays the schedule:
//!
//! `FABRIC_MOE_SEED=7 FABRIC_MOE_SCHEDULES=1 cargo test -p fabric-moe --test exchange schedules`

use std::{cell::RefCell, sync::Arc, time::Duration};

use fabric_engine::{
    api::{EngineConfig, EngineId},
    simulation::SimNet,
    transport::sim::{Fault, SimConfig},
    Time, TransferEngine,
};
use fabric_moe::{routes::Order, AllToAll, Dispatched, LostPeer, Shape};

use crate::{
    kernels::{Kernels, Outcome},
    model::{check_rows, rows_of_answers, shape, sums, Batch, Handed},
};

pub const MS: u64 = 1_000_000;
/// How long ranks wait for one another.
pub const TIMEOUT: Duration = Duration::from_millis(200);
/// Upper bound of the time of all exchanges, with any deaths.
const BOUND: u64 = 60_000 * MS;
const EXCHANGES: u32 = 3;

/// What a rank does next.
enum Turn {
    Dispatch,
    Collect { placing: Option<Dispatched>, handed: Handed },
    Combine { answers: Vec<u8> },
    Sum,
    Over,
}

/// Calls of a rank go to its exchanges in turn.
struct Turns {
    all: AllToAll,
    /// Carries the exchange out, on some ranks.
    kernels: Option<Kernels>,
}

pub struct Rank {
    pub rank: u32,
    engine: Arc<TransferEngine>,
    /// Until it leaves.
    exchanges: Vec<Turns>,
    /// The ranks it had lost by then.
    lost: Vec<LostPeer>,
    /// A device is busy until then.
    wakes: Time,
    turn: Turn,
    exchange: u32,
    /// Of each exchange so far.
    batches: Vec<Batch>,
    dead: bool,
    left_out: u32,
    /// What it has done so far, and after how much of that it does nothing for a while, if it ever
    /// does.
    steps: u32,
    pub stall: Option<Stall>,
    /// Ranks that it has given up, as far as was noted.
    known_lost: RefCell<Vec<u32>>,
}

impl Drop for Rank {
    /// Exchanges that linger for others would wait forever: their engine is not driven any more.
    fn drop(&mut self) {
        self.exchanges.clear();
        self.engine.close();
    }
}

/// A caller, or a device, that stands still while its engine lives.
#[derive(Clone, Copy, Debug)]
pub struct Stall {
    pub after: u32,
    /// For good without.
    pub lasts: Option<u64>,
}

impl Stall {
    /// Whether the rank's caller or device does nothing any more. One that stores to peers' memory
    /// ends that first: what it may still write can't be used again (MR-1).
    fn begins(&self, rank: &Rank) -> bool {
        self.after <= rank.steps && !rank.kernels().any(Kernels::is_storing)
    }
}

/// What schedules came to.
#[derive(Debug, Default)]
pub struct Sum {
    ranks: u64,
    left_out: u64,
    /// Rows and answers that devices stored at peers.
    stored: u64,
}

impl Rank {
    /// Its exchanges; none when it has left.
    fn all(&self) -> impl Iterator<Item = &AllToAll> {
        self.exchanges.iter().map(|one| &one.all)
    }

    fn kernels(&self) -> impl Iterator<Item = &Kernels> {
        self.exchanges.iter().filter_map(|one| one.kernels.as_ref())
    }

    /// The exchange that its calls go to.
    fn turns(&self) -> Option<&Turns> {
        self.exchanges.get(self.exchange as usize % self.exchanges.len().max(1))
    }

    /// The ranks it has lost, in any exchange.
    pub fn lost(&self) -> Vec<LostPeer> {
        let mut lost = self.lost.clone();
        for one in self.all().flat_map(AllToAll::lost) {
            if lost.iter().all(|l| l.rank != one.rank) {
                lost.push(one);
            }
        }
        lost
    }

    /// Gives up in all exchanges the ranks that it has lost in one, before a call.
    fn follow(&self) {
        for lost in self.lost() {
            for all in self.all().filter(|all| all.present()[lost.rank as usize]) {
                all.mask(lost.rank, &lost.cause).unwrap();
            }
        }
    }

    /// It has what it wants.
    fn leave(&mut self) {
        self.lost = self.lost();
        self.exchanges.clear();
    }

    fn batch(&self) -> &Batch {
        &self.batches[self.exchange as usize]
    }

    /// Nothing of it comes any more.
    pub fn has_stopped(&self) -> bool {
        self.dead || self.stall.is_some_and(|s| s.lasts.is_none() && s.begins(self))
    }
}

pub struct Run {
    pub net: SimNet,
    rng: fastrand::Rng,
    pub shape: Shape,
    /// All ranks leave combine out of these exchanges.
    pub without: Vec<bool>,
    /// These ranks alone leave it out of the first one.
    pub differ: Vec<usize>,
    pub ranks: Vec<Rank>,
    killed: Vec<u32>,
    pub faults: bool,
    /// Ranks leave as soon as they have their last sums.
    leaves: bool,
    /// There was a fault other than a death.
    links: bool,
    /// A device stalls at one step in so many, if there are faults.
    steady: u32,
    /// A death is known long before any rank is given up for being late.
    prompt: bool,
    /// Whatever a rank does takes up to so long.
    pub pace: u64,
    /// When ranks stopped for good, and how long others took at most to give them up.
    stopped: Vec<Option<Time>>,
    pub slowest: u64,
}

impl Run {
    fn new(seed: u64, with_kernels: bool) -> Self {
        Self::of(seed, with_kernels, None)
    }

    /// With so many ranks, if that is given.
    pub fn of(seed: u64, with_kernels: bool, ranks: Option<u32>) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let exchanges = rng.usize(1..=2);
        let config = SimConfig {
            seed,
            delay: 500..[2_000, 50_000, MS][rng.usize(..3)],
            ordered: rng.bool(),
            page_counts: rng.bool(),
            max_bytes: 1 << rng.u32(6..13),
            window: rng.usize(2..16),
            peer_mappings: with_kernels && rng.u32(..4) > 0,
            ..SimConfig::default()
        };
        let mut net = SimNet::new(config);
        let (any, local) = (rng.u32(1..5), rng.u32(1..3));
        let ranks = ranks.unwrap_or(any);
        let shape = Shape {
            private_rows: rng.u32(..4),
            shared_rows: rng.bool().then(|| rng.u32(1..9)),
            ..shape(ranks, local, rng.u32(1..=(ranks * local).min(4)), rng.u32(1..7))
        };
        let (rails, prompt) = (rng.u8(1..=2), rng.bool());
        let on_kernels: Vec<u32> =
            (0..ranks).filter(|_| with_kernels && rng.u32(..3) > 0).collect();
        let open = |rank: u32| {
            let config = EngineConfig {
                name: format!("rank {rank}"),
                op_timeout: Duration::from_secs(2),
                peer_timeout: if prompt { TIMEOUT / 8 } else { Duration::from_secs(2) },
                ..EngineConfig::default()
            };
            let engine = net.engine_with_rails(config, rails).unwrap();
            let stores = rng.u32(..4) > 0;
            let open = |_| {
                let (all, kernels) = match on_kernels.contains(&rank) {
                    true => {
                        let (all, kernels) = Kernels::new(Arc::clone(&engine), shape, rank, stores);
                        (all, Some(kernels))
                    }
                    false => (AllToAll::new(Arc::clone(&engine), shape, rank).unwrap(), None),
                };
                all.set_timeout(TIMEOUT);
                Turns { all, kernels }
            };
            let exchanges = (0..exchanges).map(open).collect();
            let batches = vec![Batch::random(&mut rng, &shape, None)];
            let turn = Turn::Dispatch;
            Rank {
                rank,
                engine,
                exchanges,
                lost: Vec::new(),
                wakes: Time(0),
                turn,
                exchange: 0,
                batches,
                dead: false,
                left_out: 0,
                steps: 0,
                stall: None,
                known_lost: RefCell::default(),
            }
        };
        let ranks: Vec<Rank> = (0..ranks).map(open).collect();
        for which in 0..exchanges {
            let all = |rank: &Rank| rank.all().nth(which).unwrap().descriptor(None).unwrap();
            let descriptors: Vec<Vec<u8>> = ranks.iter().map(all).collect();
            for rank in &ranks {
                let all = rank.all().nth(which).unwrap();
                for (_, descriptor) in
                    descriptors.iter().enumerate().filter(|(i, _)| *i != rank.rank as usize)
                {
                    all.admit(descriptor).unwrap();
                }
            }
        }
        let without = (0..EXCHANGES).map(|_| rng.u32(..4) == 0).collect();
        let (faults, steady) = (rng.u32(..4) > 0, [80, 10][rng.usize(..2)]);
        Self {
            net,
            rng,
            shape,
            without,
            differ: Vec::new(),
            ranks,
            killed: Vec::new(),
            faults,
            leaves: seed % 2 == 1,
            links: false,
            steady,
            prompt,
            pace: 0,
            stopped: Vec::new(),
            slowest: 0,
        }
    }

    pub fn go(&mut self, sum: &mut Sum) -> Result<(), String> {
        let mut steps = 0u32;
        loop {
            for i in 0..self.ranks.len() {
                while self.ranks[i].wakes <= self.net.now() && self.advance(i)? {
                    self.ranks[i].steps += 1;
                    let now = self.net.now().0;
                    if self.pace > 0 {
                        self.ranks[i].wakes = Time(now + self.rng.u64(..self.pace));
                    }
                    let stall = self.ranks[i].stall.filter(|s| s.after == self.ranks[i].steps);
                    if let Some(lasts) = stall.and_then(|s| s.lasts) {
                        self.ranks[i].wakes = Time(now + lasts);
                    }
                    // A device does its work when it comes to it.
                    if self.pace == 0 && self.ranks[i].kernels().next().is_some() {
                        let stalls = self.faults && self.rng.u32(..self.steady) == 0;
                        self.links |= stalls;
                        let busy = if stalls { 400 * MS } else { MS };
                        self.ranks[i].wakes = Time(self.net.now().0 + self.rng.u64(..busy));
                    }
                }
            }
            self.note();
            if self.ranks.iter().all(|r| r.has_stopped() || matches!(r.turn, Turn::Over)) {
                break;
            }
            steps += 1;
            if self.faults && self.rng.u32(..60) == 0 {
                self.fault();
            }
            let now = self.net.now();
            let busy = self.ranks.iter().filter(|r| !r.has_stopped() && r.wakes > now);
            let stands = match busy.map(|r| r.wakes).min() {
                Some(wakes) => {
                    if !self.net.step_until(wakes) {
                        self.net.advance(wakes);
                    }
                    false
                }
                None => !self.net.step(),
            };
            let all_stopped = self.ranks.iter().all(Rank::has_stopped);
            if stands && !all_stopped || self.net.now() > Time(BOUND) {
                return Err(format!("it stands still after {steps} steps: {}", self.standing()));
            }
        }
        let alive = self.ranks.iter().filter(|r| !r.has_stopped());
        sum.ranks += self.ranks.len() as u64;
        sum.left_out += alive.clone().map(|r| u64::from(r.left_out)).sum::<u64>();
        let kernels = self.ranks.iter().flat_map(Rank::kernels);
        sum.stored += kernels.map(|k| k.stored).sum::<u64>();
        for rank in alive {
            let lost = rank.lost();
            let blameless = |l: &fabric_moe::LostPeer| {
                let of = &self.ranks[l.rank as usize];
                !self.killed.contains(&l.rank) && !of.has_stopped() && !of.exchanges.is_empty()
            };
            if !self.faults && rank.left_out > 0 && self.ranks.iter().all(|r| !r.has_stopped()) {
                return Err(format!("rank {} went without answers: {lost:?}", rank.rank));
            }
            if !self.links && (self.prompt || !self.faults) && lost.iter().any(blameless) {
                let (standing, killed) = (self.standing(), &self.killed);
                return Err(format!(
                    "rank {} gave up without a fault: {lost:?}; killed {killed:?}; {standing}",
                    rank.rank
                ));
            }
        }
        Ok(())
    }

    /// Records the stopped ranks, and the ranks given up since.
    fn note(&mut self) {
        let now = self.net.now();
        self.stopped.resize(self.ranks.len(), None);
        for (rank, since) in self.ranks.iter().zip(&mut self.stopped) {
            *since = since.or(rank.has_stopped().then_some(now));
        }
        for rank in self.ranks.iter().filter(|r| !r.has_stopped()) {
            let mut known = rank.known_lost.borrow_mut();
            for l in rank.lost().iter().filter(|l| !known.contains(&l.rank)) {
                let since = self.stopped[l.rank as usize].unwrap_or(now);
                self.slowest = self.slowest.max(now.0 - since.0);
            }
            *known = rank.lost().iter().map(|l| l.rank).collect();
        }
    }

    fn standing(&self) -> String {
        let one = |r: &Rank| {
            let turn = match r.turn {
                Turn::Dispatch => "dispatches",
                Turn::Collect { .. } => "collects",
                Turn::Combine { .. } => "answers",
                Turn::Sum => "sums",
                Turn::Over => "is over",
            };
            let kernels = r.turns().and_then(|one| one.kernels.as_ref());
            let turn = kernels.map_or(turn.to_owned(), |k| format!("is to {:?}", k.next));
            let quiet = r.all().all(AllToAll::is_quiesced);
            let quiet = if quiet { "" } else { ", not quiet" };
            let lost = r.lost();
            format!("rank {} {turn} in exchange {}{quiet}, lost {lost:?}", r.rank, r.exchange)
        };
        self.ranks.iter().filter(|r| !r.dead).map(one).collect::<Vec<_>>().join("; ")
    }

    /// Lets a rank do what it can; whether it did something.
    fn advance(&mut self, i: usize) -> Result<bool, String> {
        let shape = self.shape;
        let exchange = self.ranks[i].exchange as usize;
        let all_leave_out = self.without.get(exchange).copied().unwrap_or_default();
        let combine = !(all_leave_out || exchange == 0 && self.differ.contains(&i));
        let rank = &mut self.ranks[i];
        if rank.has_stopped() {
            return Ok(false);
        }
        let said = |e: fabric_engine::EngineError| format!("rank {i}: {e}");
        if matches!(rank.turn, Turn::Over) {
            return Ok(false);
        }
        rank.follow();
        let at = exchange % rank.exchanges.len().max(1);
        let Some(Turns { all, kernels }) = rank.exchanges.get_mut(at) else { return Ok(false) };
        if let Some(kernels) = kernels {
            all.check().map_err(said)?;
            match kernels.step(all, &rank.batches[rank.exchange as usize], combine) {
                Outcome::Waits => return Ok(false),
                Outcome::Collected => {
                    self.collected(i)?;
                    if !combine {
                        self.next(i);
                    }
                }
                Outcome::Went => {}
                Outcome::Summed(sums, left_out) => self.summed(i, &sums, &left_out)?,
            }
            return Ok(true);
        }
        match &mut rank.turn {
            Turn::Over => return Ok(false),
            Turn::Dispatch => {
                if !all.may_dispatch() {
                    return Ok(false);
                }
                rank.batches[exchange].send(all).map_err(said)?;
                rank.turn = Turn::Collect { placing: None, handed: Handed::default() };
            }
            Turn::Collect { placing, handed } => {
                let order = Order::Packed { multiple: 1 + rank.exchange };
                if placing.is_none() {
                    let Some(known) = all.arriving(order).map_err(said)? else {
                        return Ok(false);
                    };
                    *handed = Handed::room(known.rows);
                    *placing = Some(known);
                }
                let Some(placing) = placing else { return Ok(false) };
                if !all.collect(&mut handed.parts()).map_err(said)? {
                    return Ok(false);
                }
                let answers = handed.answers(&shape, i as u32, &placing.counts, &placing.starts);
                self.collected(i)?;
                match combine {
                    true => self.ranks[i].turn = Turn::Combine { answers },
                    false => self.next(i),
                }
            }
            Turn::Combine { answers } => {
                if !all.combine_some(rows_of_answers(answers)).map_err(said)? {
                    return Ok(false);
                }
                rank.turn = Turn::Sum;
            }
            Turn::Sum => {
                if !all.answered() {
                    return Ok(false);
                }
                let (sums, left_out) = sums(all, &rank.batches[exchange]).map_err(said)?;
                self.summed(i, &sums, &left_out)?;
            }
        }
        Ok(true)
    }

    /// What a rank was handed is what others sent.
    fn collected(&self, i: usize) -> Result<(), String> {
        let rank = &self.ranks[i];
        let handed = match (rank.turns().and_then(|one| one.kernels.as_ref()), &rank.turn) {
            (Some(kernels), _) => kernels.handed(),
            (None, Turn::Collect { placing: Some(placing), handed }) => {
                (handed, placing.counts.as_slice(), placing.starts.as_slice())
            }
            _ => return Ok(()),
        };
        let exchange = rank.exchange as usize;
        let sent: Vec<_> = self.ranks.iter().map(|r| r.batches.get(exchange)).collect();
        let lost: Vec<u32> = rank.lost().iter().map(|l| l.rank).collect();
        check_rows(&self.shape, i as u32, handed, &sent, &lost)
            .map_err(|what| format!("rank {i} in exchange {exchange}: {what}; lost {lost:?}"))
    }

    /// Checks that sums are right, and that missing ranks are named.
    fn summed(&mut self, i: usize, sums: &[f32], left_out: &[u32]) -> Result<(), String> {
        let rank = &mut self.ranks[i];
        if *sums != rank.batch().sums(&self.shape, left_out) {
            let what = format!("rank {i}: wrong sums in exchange {}", rank.exchange);
            return Err(format!("{what}, left out {left_out:?}"));
        }
        let lost: Vec<u32> = rank.lost().iter().map(|l| l.rank).collect();
        if left_out.iter().any(|r| !lost.contains(r)) {
            return Err(format!("rank {i}: left out {left_out:?}, lost {lost:?}"));
        }
        rank.left_out += left_out.len() as u32;
        self.next(i);
        Ok(())
    }

    fn next(&mut self, i: usize) {
        let rank = &mut self.ranks[i];
        rank.exchange += 1;
        rank.turn = match rank.exchange < EXCHANGES {
            true => Turn::Dispatch,
            false => Turn::Over,
        };
        rank.batches.push(Batch::random(&mut self.rng, &self.shape, None));
        if self.leaves && matches!(rank.turn, Turn::Over) {
            rank.leave();
        }
    }

    fn fault(&mut self) {
        let node = self.rng.usize(..self.ranks.len());
        let ms = |rng: &mut fastrand::Rng| rng.u64(..50) * MS;
        let (rail, link_index) = (self.rng.u8(..2), self.rng.u8(..4));
        let kind = self.rng.u32(..6);
        self.links |= kind > 0;
        let fault = match kind {
            0 => {
                let lives: EngineId = self.ranks[node].engine.id();
                self.net.kill(lives);
                self.ranks[node].dead = true;
                self.killed.push(node as u32);
                return;
            }
            1 => Fault::Stall {
                node: node as u8,
                rail,
                link_index,
                duration: self.rng.u64(..400) * MS,
            },
            2 => {
                let (work_index, link_down_after) = (self.rng.u32(..), ms(&mut self.rng));
                Fault::WorkFails { node: node as u8, rail, link_index, work_index, link_down_after }
            }
            3 => Fault::Partition {
                isolated: self.rng.u64(..),
                notice_after: self.rng.bool().then(|| ms(&mut self.rng)),
                permanent: self.rng.bool(),
                duration: self.rng.u64(..400) * MS,
            },
            _ => {
                let (local_delay, remote_delay) = (ms(&mut self.rng), ms(&mut self.rng));
                Fault::LinkLost { node: node as u8, rail, link_index, local_delay, remote_delay }
            }
        };
        self.net.inject(&fault);
    }
}

pub fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().unwrap())
}

#[test]
fn mr_1_rs_1_rs_4_random_schedules_give_right_sums_or_name_who_is_left_out() {
    schedules(false);
}

#[test]
fn mr_1_rs_1_rs_4_and_so_they_do_where_kernels_carry_the_exchange_out() {
    schedules(true);
}

fn schedules(with_kernels: bool) {
    let (first, runs) = (env("FABRIC_MOE_SEED", 0), env("FABRIC_MOE_SCHEDULES", 400));
    let mut sum = Sum::default();
    for seed in first..first + runs {
        let run = || Run::new(seed, with_kernels).go(&mut sum);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        if let Err(what) = outcome.unwrap_or_else(|_| Err("it panicked".into())) {
            panic!("seed {seed}: {what}");
        }
    }
    assert!(!with_kernels || runs < 100 || sum.stored > 0, "no device stored anything at a peer");
    println!("{runs} schedules: {sum:?}");
}
