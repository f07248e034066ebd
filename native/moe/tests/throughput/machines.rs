//! Exchanges in the simulator, whose links deliver in any order, with ranks that die, stall or
//! sleep at any step and join again. A rank that hears of a loss begins again with its first
//! exchange. A failure prints its seed, which replays the schedule:
//!
//! `FABRIC_MOE_SEED=7 FABRIC_MOE_SCHEDULES=1 cargo test -p fabric-moe --test throughput machines`

mod newcomers;
mod suspects;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use fabric_engine::{
    api::EngineConfig, simulation::SimNet, transport::sim::SimConfig, EngineError, Region, Time,
    TransferEngine,
};
use fabric_moe::{
    kernels::Float,
    throughput::{proxy_config, CpuWorker, Io, Layout, Machine, Member, Spec, Worker},
};
use fabric_proxy::{fifo::fifo, Event, Executor, Parker, SharedState, ThreadDescriptor};

use crate::{
    grouped::{rows_of_answers, spec, sums, Batch, Handed, EXTRA, ORDERS, WIDE},
    late::Late,
};

const MS: u64 = 1_000_000;
/// How long nothing may happen.
const TIMEOUT: Duration = Duration::from_millis(200);
/// How long a rank may be elsewhere without being given up, nanoseconds.
const NAP: u64 = 100 * MS;
/// Upper bound of the time of all exchanges, with any deaths.
const BOUND: u64 = 30_000 * MS;
const EXCHANGES: usize = 3;

/// What a rank does next.
enum Turn {
    Dispatch,
    Pack,
    Arrive,
    Collect(Handed),
    Answer(Vec<u8>),
    Sum,
    /// It has done all exchanges, or others go on without it.
    Over,
}

/// What a rank's jobs are done by.
#[derive(Clone, Copy, Debug)]
enum By {
    CpuWorker,
    /// In an order that a seed says, one in so many steps.
    Late(u64, u32),
    Stalled,
}

impl By {
    fn worker(self, spec: Spec, part: &Region) -> Box<dyn Worker> {
        match self {
            Self::CpuWorker => Box::new(CpuWorker::new(spec, part.clone())),
            Self::Late(seed, steps) => Box::new(Late::new(spec, part.clone(), seed, steps)),
            Self::Stalled => Box::new(Late::new(spec, part.clone(), 0, 0)),
        }
    }
}

struct Rank {
    member: Member,
    spec: Spec,
    engine: Arc<TransferEngine>,
    executor: Executor,
    machine: Machine,
    events: Arc<Mutex<Vec<Event>>>,
    turn: Turn,
    exchange: usize,
    batches: Vec<Batch>,
    without: Vec<bool>,
    error: Option<EngineError>,
    part: Region,
    timeout: Duration,
    /// It is in no call until then; its proxy is at work.
    wakes: Time,
    /// It makes no call once it has done all exchanges.
    leaves: bool,
    /// Its proxy has lost a rank.
    has_lost: bool,
    /// What it admits before it dispatches, once it has seen to the one before it.
    newcomer: Option<(Member, Vec<u32>, ThreadDescriptor)>,
}

impl Rank {
    fn new(
        net: &mut SimNet,
        spec: Spec,
        (member, by): (Member, By),
        batches: Vec<Batch>,
        without: &[bool],
    ) -> Self {
        let engine = EngineConfig { op_timeout: Duration::from_secs(60), ..Default::default() };
        let engine = net.engine(engine).unwrap();
        let config = fabric_proxy::Config {
            capacity: 16,
            max_outstanding: 12,
            ..proxy_config(&spec, member, 4 * TIMEOUT)
        };
        let part = engine.alloc(Layout::new(spec).unwrap().nbytes()).unwrap();
        let common = SharedState::new(&config);
        let parker = Arc::new(Parker::default());
        let fifos =
            (0..=spec.channels).map(|_| fifo(config.capacity, Arc::clone(&parker)).unwrap());
        let (pushers, poppers): (Vec<_>, Vec<_>) = fifos.unzip();
        let events = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&events);
        let executor = Executor::new(
            Arc::clone(&engine),
            part.clone(),
            &config,
            common.clone(),
            (parker, poppers),
            Arc::new(move |e| told.lock().unwrap().push(e)),
        )
        .unwrap();
        let worker = by.worker(spec, &part);
        let machine = Machine::with_worker(spec, member, &part, common.words, pushers, worker);
        let machine = machine.unwrap();
        let without = without.to_vec();
        let (turn, exchange, error) = (Turn::Dispatch, 0, None);
        Self {
            member,
            spec,
            engine,
            executor,
            machine,
            events,
            turn,
            exchange,
            batches,
            without,
            error,
            part,
            timeout: TIMEOUT,
            wakes: Time(0),
            leaves: false,
            has_lost: false,
            newcomer: None,
        }
    }

    fn is_over(&self) -> bool {
        matches!(self.turn, Turn::Over)
    }

    fn descriptor(&self) -> (Member, Vec<u32>, ThreadDescriptor) {
        (self.member, self.machine.events().to_vec(), self.executor.descriptor())
    }

    fn admit(
        &mut self,
        descriptor: &(Member, Vec<u32>, ThreadDescriptor),
    ) -> Result<(), EngineError> {
        let (member, events, descriptor) = descriptor;
        self.machine.admit(*member, events)?;
        let membership = self.executor.membership();
        membership.join(member.rank as usize, member.incarnation + 1, descriptor.clone());
        Ok(())
    }

    /// Admits all others; itself, too, in its proxy.
    fn admit_all(
        &mut self,
        descriptors: &[(Member, Vec<u32>, ThreadDescriptor)],
    ) -> Result<(), String> {
        let own = self.member;
        for descriptor in descriptors.iter().filter(|descriptor| descriptor.0 != own) {
            self.admit(descriptor).map_err(|e| e.to_string())?;
        }
        let descriptor = self.executor.descriptor();
        self.executor.membership().join(own.rank as usize, own.incarnation + 1, descriptor);
        Ok(())
    }

    /// Lets the proxy and its device do what they can; whether they did anything.
    fn go_on(&mut self, now: Time) -> Result<bool, String> {
        let mut moved = self.executor.step(now);
        if self.error.is_some() || now < self.wakes || self.leaves && self.is_over() {
            return Ok(moved);
        }
        match self.device(now) {
            Ok(did) => moved |= did,
            Err(error) => {
                self.lost(error);
                return Ok(true);
            }
        }
        let turned = self.turn_over()?;
        if turned {
            self.machine.resume();
        }
        Ok(moved | turned)
    }

    /// A rank was lost, maybe this one.
    fn lost(&mut self, error: EngineError) {
        assert!(matches!(error, EngineError::PeerLost { .. }), "{error}");
        (self.exchange, self.turn) = (0, Turn::Dispatch);
        if self.machine.losses().ended().is_some() {
            (self.error, self.turn) = (Some(error), Turn::Over);
        }
    }

    fn device(&mut self, now: Time) -> Result<bool, EngineError> {
        let (timeout, rank) = (self.timeout, self.member.rank);
        let events: Vec<Event> = self.events.lock().unwrap().drain(..).collect();
        self.has_lost |= events.iter().any(|e| matches!(e, Event::Lost { .. }));
        let membership = self.executor.membership();
        let step = |machine: &mut Machine, io: &mut Io<'_, '_>| {
            for event in &events {
                match event {
                    Event::Lost { rank, error, .. } => {
                        machine.lose(*rank as u32, error.to_string())
                    }
                    Event::Joined { rank, incarnation } => machine
                        .joined_by(Member { rank: *rank as u32, incarnation: incarnation - 1 }),
                    Event::Masked { rank, incarnation } => machine
                        .masked_by(Member { rank: *rank as u32, incarnation: incarnation - 1 }),
                    Event::Gone { rank, incarnation } => {
                        machine.end(Member { rank: *rank as u32, incarnation: incarnation - 1 })
                    }
                    other => panic!("{other:?}"),
                }
            }
            machine
                .take_masked(now, timeout)
                .into_iter()
                .for_each(|rank| membership.mask(rank as usize));
            let stepped = machine.process_signals().and_then(|()| machine.step(now, timeout, io));
            if stepped.is_err() && machine.is_abandoned() {
                // What was given is in use until then.
                if !(0..10_000).any(|_| machine.finish_jobs(io)) {
                    machine.fail(rank, "its device did nothing".into());
                }
            }
            stepped
        };
        let machine = &mut self.machine;
        match &mut self.turn {
            Turn::Pack => {
                let batch = &self.batches[self.exchange];
                batch.with_parts(|p, _, _| step(machine, &mut Io::Tokens(p)))
            }
            Turn::Collect(handed) => step(machine, &mut Io::Rows(&mut handed.parts())),
            Turn::Answer(answers) => step(machine, &mut Io::Answers(rows_of_answers(answers))),
            _ => step(machine, &mut Io::Nothing),
        }
    }

    /// Makes the next call if it is time for it.
    fn turn_over(&mut self) -> Result<bool, String> {
        let rank = self.member.rank;
        let said = |e: EngineError| format!("rank {rank}: {e}");
        match &mut self.turn {
            Turn::Over => return Ok(false),
            Turn::Dispatch => {
                if let Some(newcomer) = self.newcomer.take() {
                    let member = newcomer.0;
                    self.machine.give_up_gone(member.rank);
                    let has_ended = !self.machine.here()[member.rank as usize]
                        && self.machine.has_ended(member.rank);
                    if !self.machine.is_quiet() || !has_ended {
                        self.newcomer = Some(newcomer);
                        return Ok(false);
                    }
                    self.admit(&newcomer).map_err(said)?;
                    self.exchange = 0;
                }
                if !self.machine.may_begin() {
                    return Ok(false);
                }
                let batch = &self.batches[self.exchange];
                match batch.with_parts(|p, i, w| self.machine.begin(p, i, w)) {
                    Ok(()) => self.turn = Turn::Pack,
                    Err(error) => self.lost(error),
                }
            }
            Turn::Pack => {
                if !self.machine.is_packed() || self.is_at_work() {
                    return Ok(false);
                }
                self.turn = Turn::Arrive;
            }
            Turn::Arrive => {
                let order = ORDERS[self.exchange % 2];
                let Some(placing) = self.machine.arriving(order).map_err(said)? else {
                    return Ok(false);
                };
                if self.is_at_work() {
                    return Ok(false);
                }
                let mut handed = Handed::room(placing.rows);
                self.machine.check_room(&handed.parts()).map_err(said)?;
                self.turn = Turn::Collect(handed);
            }
            Turn::Collect(handed) => {
                if !self.machine.is_collected() || rests(&mut self.machine) {
                    return Ok(false);
                }
                if self.without[self.exchange] {
                    self.next();
                    return Ok(true);
                }
                let placing = self.machine.placing().unwrap();
                let answers = handed.answers(&self.spec, rank, &placing);
                self.machine.begin_answers(&rows_of_answers(&answers)).map_err(said)?;
                self.turn = Turn::Answer(answers);
            }
            Turn::Answer(_) => {
                if !self.machine.is_answered() || self.is_at_work() {
                    return Ok(false);
                }
                self.turn = Turn::Sum;
            }
            Turn::Sum => {
                if !self.machine.is_summed() || self.is_at_work() {
                    return Ok(false);
                }
                let batch = &self.batches[self.exchange];
                let found = sums(batch.tokens(), |out| self.machine.take_sums(out, Float::F32));
                let here = self.machine.here();
                if found.map_err(said)? != batch.sums_of(&here) {
                    return Err(format!("rank {rank}: wrong sums in exchange {}", self.exchange));
                }
                if self.machine.left_out() != batch.missing(&here) {
                    return Err(format!("rank {rank}: it doesn't say whose answers are missing"));
                }
                self.next();
            }
        }
        Ok(true)
    }

    /// Whether jobs are under way that what the caller gives is needed for; none begin meanwhile.
    fn is_at_work(&mut self) -> bool {
        rests(&mut self.machine)
    }

    fn next(&mut self) {
        self.exchange += 1;
        self.turn = match self.exchange < self.batches.len() {
            true => Turn::Dispatch,
            false => Turn::Over,
        };
    }

    fn standing(&self) -> String {
        let turn = match &self.turn {
            Turn::Dispatch => "dispatches",
            Turn::Pack => "packs",
            Turn::Arrive => "awaits counts",
            Turn::Collect(_) => "collects",
            Turn::Answer(_) => "answers",
            Turn::Sum => "sums",
            Turn::Over => "is over",
        };
        format!(
            "rank {} {turn} in exchange {}, {:?}, of {:?}",
            self.member.rank,
            self.exchange,
            self.error,
            self.machine.here()
        )
    }
}

fn rests(machine: &mut Machine) -> bool {
    machine.set_resting(machine.is_at_work());
    machine.is_at_work()
}

/// What happens to one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accident {
    Dies,
    /// It incarnations, and does nothing any more.
    Stalls,
    /// It is in no call for a while, as it may be.
    Sleeps,
}

struct Run {
    net: SimNet,
    ranks: Vec<Rank>,
    /// The rank, and the number of steps before.
    accidents: Vec<(u32, Accident, u32)>,
    /// How long a rank sleeps, nanoseconds.
    nap: u64,
    gone: Vec<Rank>,
}

impl Run {
    fn new(spec: Spec, seed: u64, config: SimConfig) -> Self {
        Self::by(spec, seed, config, |_| By::CpuWorker)
    }

    /// With ranks whose jobs another worker does.
    fn by(spec: Spec, seed: u64, config: SimConfig, by: impl Fn(u32) -> By) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut net = SimNet::new(SimConfig { seed, ..config });
        let without: Vec<bool> = (0..EXCHANGES).map(|_| rng.u32(..4) == 0).collect();
        let hot = (rng.u32(..3) == 0).then(|| rng.u32(..spec.shape.experts));
        let ranks = (0..spec.shape.ranks).map(|rank| {
            let batches = (0..EXCHANGES).map(|_| Batch::random(&mut rng, &spec, hot)).collect();
            Rank::new(
                &mut net,
                spec,
                (Member { rank, incarnation: 0 }, by(rank)),
                batches,
                &without,
            )
        });
        let mut ranks: Vec<Rank> = ranks.collect();
        let descriptors: Vec<_> = ranks.iter().map(Rank::descriptor).collect();
        ranks.iter_mut().try_for_each(|rank| rank.admit_all(&descriptors)).unwrap();
        Self { net, ranks, accidents: Vec::new(), nap: NAP, gone: Vec::new() }
    }

    /// Until all exchanges are over, among all or without those that are gone; steps that it took.
    fn go(&mut self) -> Result<u32, String> {
        let steps = self.go_until(|run| run.ranks.iter().all(Rank::is_over))?;
        self.check_losses()?;
        Ok(steps)
    }

    /// Until a condition holds; steps that it took.
    fn go_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) -> Result<u32, String> {
        let (mut steps, mut since) = (0, self.net.now());
        loop {
            self.turn_all()?;
            if done(self) {
                return Ok(steps);
            }
            let now: Vec<_> =
                self.accidents.iter().copied().filter(|(.., at)| *at == steps).collect();
            for (rank, accident, _) in now {
                let Some(at) = self.ranks.iter().position(|r| r.member.rank == rank) else {
                    continue;
                };
                since = self.net.now();
                if accident == Accident::Sleeps {
                    self.ranks[at].wakes = Time(since.0 + self.nap);
                } else {
                    let gone = self.ranks.remove(at);
                    if accident == Accident::Dies {
                        self.net.kill(gone.engine.id());
                    }
                    self.gone.push(gone);
                }
            }
            steps += 1;
            self.move_on();
            if self.net.now() > Time(since.0 + BOUND) {
                let all: Vec<String> = self.ranks.iter().map(Rank::standing).collect();
                return Err(format!("it stands still after {steps} steps: {}", all.join("; ")));
            }
        }
    }

    /// Checks that only ranks that are gone were given up.
    fn check_losses(&self) -> Result<(), String> {
        for rank in &self.ranks {
            let is_gone = |number: u32| self.gone.iter().any(|r| r.member.rank == number);
            let mut given_up = rank.machine.losses().lost().into_iter().map(|lost| lost.rank);
            if rank.error.is_some() || !given_up.all(is_gone) {
                let told: Vec<_> = self
                    .ranks
                    .iter()
                    .map(|r| format!("rank {}: {:?}", r.member.rank, r.machine.losses().lost()))
                    .collect();
                return Err(format!(
                    "it gave up another rank: {}; {}",
                    rank.standing(),
                    told.join("; ")
                ));
            }
        }
        Ok(())
    }

    fn turn_all(&mut self) -> Result<(), String> {
        let now = self.net.now();
        let go_on = |moved, rank: &mut Rank| Ok::<_, String>(moved | rank.go_on(now)?);
        while self.ranks.iter_mut().try_fold(false, go_on)? {}
        Ok(())
    }

    fn move_on(&mut self) {
        // Ranks go on also while nothing happens.
        let soon = Time(self.net.now().0 + MS);
        if !self.net.step_until(soon) {
            self.net.advance(soon);
        }
    }

    /// Has those that died come again, with the tokens that they had; all then begin with their
    /// first exchange.
    fn come_again(&mut self, by: impl Fn(u32) -> By) -> Result<(), String> {
        let until = Time(self.net.now().0 + BOUND);
        let gone: Vec<u32> = self.gone.iter().map(|r| r.member.rank).collect();
        // A rank may have done all its exchanges without a rank that it didn't need.
        for rank in &mut self.ranks {
            gone.iter().for_each(|gone| rank.machine.fail(*gone, "it died".into()));
        }
        let is_seen_to =
            |r: &Rank| r.machine.is_quiet() && gone.iter().all(|gone| r.machine.has_ended(*gone));
        loop {
            self.turn_all()?;
            if self.ranks.iter().all(|r| r.is_over() || matches!(r.turn, Turn::Dispatch))
                && self.ranks.iter().all(is_seen_to)
            {
                break;
            }
            self.move_on();
            if self.net.now() > until {
                return Err("what was under way with those that died isn't over".into());
            }
        }
        let mut newcomers = Vec::new();
        for old in std::mem::take(&mut self.gone) {
            let member = Member { incarnation: old.member.incarnation + 1, ..old.member };
            let given = (member, by(member.rank));
            newcomers.push(Rank::new(&mut self.net, old.spec, given, old.batches, &old.without));
        }
        let all = self.ranks.iter().chain(&newcomers);
        let descriptors: Vec<_> = all.map(Rank::descriptor).collect();
        for rank in &mut self.ranks {
            for descriptor in descriptors.iter().filter(|d| gone.contains(&d.0.rank)) {
                rank.admit(descriptor).map_err(|e| e.to_string())?;
            }
            (rank.exchange, rank.turn) = (0, Turn::Dispatch);
        }
        newcomers.iter_mut().try_for_each(|rank| rank.admit_all(&descriptors))?;
        self.ranks.extend(newcomers);
        self.ranks.sort_by_key(|r| r.member.rank);
        self.accidents.clear();
        Ok(())
    }
}

/// Whatever shape, links and accident a seed says.
fn random(seed: u64) -> Result<bool, String> {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x7e57);
    let (nodes, per_node) = (rng.u32(1..4), rng.u32(1..4));
    let local = rng.u32(1..3);
    let topk = rng.u32(1..=(nodes * per_node * local).min(4));
    let spec = Spec {
        channels: rng.u32(1..3),
        chunk: rng.u32(1..5),
        ring_chunks: rng.u32(2..4),
        ..spec(nodes, per_node, local, topk, rng.u32(1..24))
    };
    let config = SimConfig {
        delay: 500..[2_000, 50_000, MS][rng.usize(..3)],
        ordered: rng.u32(..5) == 0,
        max_bytes: 1 << rng.u32(6..13),
        ..SimConfig::default()
    };
    let has_accident = rng.bool() && spec.shape.ranks > 1;
    let late: u32 = rng.u32(..) & rng.u32(..);
    // What a rank's device takes is time in which it says nothing of a neighbour that died:
    // timeouts are far longer.
    let slowness = if has_accident { 2 } else { [2, 8, 40][rng.usize(..3)] };
    let by = |rank: u32| match late >> rank & 1 {
        0 => By::CpuWorker,
        _ => By::Late(seed ^ u64::from(rank), slowness),
    };
    let new = |config| Run::by(spec, seed, config, by);
    let mut run = new(config.clone());
    let mut accident = |steps: u32| {
        let accident = [Accident::Dies, Accident::Stalls, Accident::Sleeps][rng.usize(..3)];
        (rng.u32(..spec.shape.ranks), accident, rng.u32(..steps.max(1)))
    };
    if has_accident {
        // At any of the steps that it takes without an accident, or soon after.
        let steps = new(config).go()?;
        run.accidents = vec![accident(steps)];
        if seed.is_multiple_of(3) {
            let second = accident(3 * steps);
            run.accidents.extend((second.0 != run.accidents[0].0).then_some(second));
        }
    }
    let accidents = run.accidents.clone();
    let about = |what| format!("{what}; {accidents:?}, {spec:?}");
    run.go().map_err(about)?;
    let some_lost = run.ranks.iter().any(|r| !r.machine.losses().lost().is_empty());
    let is_dead =
        |r: &Rank| accidents.iter().any(|a| a.0 == r.member.rank && a.1 == Accident::Dies);
    if !run.gone.is_empty() && run.gone.iter().all(is_dead) {
        run.come_again(by).map_err(about)?;
        run.go().map_err(about)?;
        assert!(run.ranks.iter().all(|r| r.machine.here().iter().all(|here| *here)));
    }
    Ok(some_lost)
}

fn env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().unwrap())
}

/// Runs schedules; how many there were, and how many said yes.
fn schedules(run: impl Fn(u64) -> Result<bool, String> + std::panic::RefUnwindSafe) -> (u64, u64) {
    let (first, runs) = (env("FABRIC_MOE_SEED", 0), env("FABRIC_MOE_SCHEDULES", 300));
    let mut yes = 0;
    for seed in first..first + runs {
        let outcome = std::panic::catch_unwind(|| run(seed));
        match outcome.unwrap_or_else(|_| Err("it panicked".into())) {
            Ok(is_yes) => yes += u64::from(is_yes),
            Err(what) => panic!("seed {seed}: {what}"),
        }
    }
    (runs, yes)
}

#[test]
fn rs_1_rs_4_random_schedules_give_the_sums_of_those_that_are_left() {
    let (runs, ended) = schedules(random);
    println!("{runs} schedules, {ended} went on without a rank");
}

/// The smallest rings there are: two chunks of one token each, and many tokens to one expert.
#[test]
fn tokens_flow_through_rings_of_two_chunks() {
    for seed in 0..10 {
        let spec = Spec { chunk: 1, ring_chunks: 2, ..spec(2, 2, 2, 3, 60) };
        let mut run = Run::new(spec, seed, SimConfig::default());
        run.go().unwrap();
        assert!(run.ranks.iter().all(|r| r.error.is_none()));
    }
}

/// A gateway goes on to the next exchange while a rank of its node has yet to read the last tokens
/// of this one. Their slots are given back all the same, fewer than a chunk though they are: a
/// source waits for room for a whole one.
#[test]
fn tokens_flow_on_though_a_rank_reads_the_last_of_an_exchange_late() {
    let spec = Spec { channels: 1, chunk: 8, ring_chunks: 2, ..spec(2, 2, 1, 2, 24) };
    let run = |seed, accident: Option<(u32, Accident, u32)>| {
        let mut run = Run::new(spec, seed, SimConfig::default());
        run.ranks.iter_mut().for_each(|r| r.without = vec![true; EXCHANGES]);
        run.accidents = accident.into_iter().collect();
        run.go().unwrap_or_else(|what| panic!("seed {seed}, {accident:?}: {what}"))
    };
    for seed in 0..env("FABRIC_MOE_SCHEDULES", 300).div_ceil(40).min(8) {
        for at in (0..run(seed, None)).step_by(3) {
            run(seed, Some((3, Accident::Sleeps, at)));
        }
    }
}

/// A rank with a longer timeout sends its in-call signals often enough for the others.
#[test]
fn rs_4_a_rank_with_a_longer_timeout_is_not_given_up_while_it_is_in_a_call() {
    let mut run = Run::new(spec(2, 2, 1, 2, 8), 1, SimConfig::default());
    // All wait for the first one; the last knows of its gateway only.
    run.ranks[0].wakes = Time(3_000 * MS);
    run.ranks.iter_mut().for_each(|r| r.timeout = Duration::from_secs(60));
    run.ranks[3].timeout = Duration::from_secs(1);
    run.go().unwrap();
}

#[test]
fn rs_4_a_rank_whose_device_does_nothing_is_named_by_all() {
    let by = |rank: u32| if rank == 1 { By::Stalled } else { By::Late(rank.into(), 2) };
    // Others may have waited for a while when it comes.
    for comes in [0, NAP] {
        let mut run = Run::by(spec(2, 2, 2, 3, 12), 4, SimConfig::default(), by);
        run.ranks[1].wakes = Time(comes);
        assert!(run.go().is_err());
        for rank in run.ranks.iter().filter(|r| r.member.rank != 1) {
            assert_eq!(rank.machine.losses().lost()[0].rank, 1);
            assert!(rank.error.is_none() && rank.is_over());
        }
        let said = run.ranks[1].error.as_ref().unwrap().to_string();
        assert!(said.contains("its device did nothing"), "{said}");
    }
}

/// Equal tokens, all to the same experts.
fn batch_to(spec: &Spec, tokens: usize, experts: &[i64]) -> Batch {
    let mut batch = Batch::random(&mut fastrand::Rng::with_seed(0), spec, None);
    batch.values = vec![0.5; tokens * WIDE];
    batch.extra = vec![1; tokens * EXTRA];
    batch.indices = experts.repeat(tokens);
    batch.weights = vec![1.0; tokens * experts.len()];
    batch
}

/// A source that announces a row more than it sends, to a rank of its node, to a gateway, and
/// through that.
#[test]
fn rs_1_a_rank_that_announced_rows_which_never_come_is_named() {
    let spec = Spec { channels: 1, ..spec(2, 2, 2, 2, 4) };
    for target in 1..4u32 {
        let mut run = Run::new(spec, 0, SimConfig::default());
        let batch =
            |tokens: usize| vec![batch_to(&spec, tokens, &[i64::from(2 * target), -1]); EXCHANGES];
        run.ranks.iter_mut().for_each(|r| r.batches = batch(2 * usize::from(r.member.rank == 0)));
        while !run.ranks[0].machine.may_begin() {
            let now = run.net.now();
            run.ranks.iter_mut().for_each(|rank| while rank.executor.step(now) {});
            run.ranks[0].device(now).unwrap();
            run.move_on();
        }
        let source = &mut run.ranks[0];
        assert!(source.turn_over().unwrap(), "it has dispatched");
        // Behind a head of four words and the tokens of two ranks: the rows of the node's experts.
        let word = 4 + 2 + (2 * target + 1) % spec.node_experts();
        let preamble = Layout::new(spec).unwrap().preamble(0, target / 2);
        source.part.put(preamble + 4 * u64::from(word), &1u32.to_le_bytes()).unwrap();
        assert!(run.go().is_err());
        let lost = run.ranks[target as usize].machine.losses().lost();
        assert!(lost[0].rank == 0 && lost[0].cause.contains("never came"), "{lost:?}");
        assert_eq!(run.ranks[0].machine.losses().ended().unwrap().rank, 0);
    }
}

/// The same tokens, whatever order their bytes arrive in: the same bits, which are those of the
/// order written down.
#[test]
fn sums_do_not_depend_on_what_arrives_first() {
    for network in 0..12 {
        let mut run = Run::new(spec(2, 2, 2, 4, 20), 5, SimConfig::default());
        let config =
            SimConfig { seed: network, delay: 500..MS, max_bytes: 64, ..SimConfig::default() };
        let batches: Vec<Vec<Batch>> = run.ranks.iter().map(|r| r.batches.clone()).collect();
        run = Run::new(spec(2, 2, 2, 4, 20), network, config);
        for (rank, batches) in run.ranks.iter_mut().zip(batches) {
            rank.batches = batches;
        }
        run.go().unwrap();
        assert!(run.ranks.iter().all(|r| r.error.is_none()));
    }
}

#[test]
fn a_token_goes_once_to_each_node_and_one_sum_comes_back() {
    let spec = spec(3, 2, 2, 6, 30);
    let mut run = Run::new(spec, 11, SimConfig::default());
    run.ranks.iter_mut().for_each(|r| r.without = vec![false; EXCHANGES]);
    run.go().unwrap();
    let mut crossings = 0;
    for rank in &run.ranks {
        let node = rank.member.rank / spec.ranks_per_node;
        let out: u64 = rank.batches.iter().map(|b| b.crossings(node)).sum();
        assert_eq!(rank.machine.traffic().rail_tokens, out);
        crossings += out;
    }
    let sums: u64 = run.ranks.iter().map(|r| r.machine.traffic().rail_sums).sum();
    assert_eq!(sums, crossings);
    assert!(crossings > 0);
}

/// A rank closes its engines one after another, and each thread hears of one.
#[test]
fn mr_1_an_incarnation_has_ended_when_all_proxy_threads_report_it() {
    let spec = Spec { channels: 2, threads: 2, ..spec(2, 1, 2, 2, 4) };
    let mut run = Run::new(spec, 0, SimConfig::default());
    let (machine, old) = (&mut run.ranks[0].machine, Member { rank: 1, incarnation: 0 });
    machine.fail(1, "it left".into());
    machine.end(old);
    machine.end(Member { incarnation: 1, ..old });
    assert!(!machine.has_ended(1));
    machine.end(old);
    assert!(machine.has_ended(1));
}

#[test]
fn what_is_wrong_is_refused_before_anything_is_sent() {
    let mut run = Run::new(spec(2, 1, 2, 2, 4), 0, SimConfig::default());
    let machine = &mut run.ranks[0].machine;
    let said = |e: EngineError| e.to_string();
    let narrow = [fabric_moe::kernels::Part { bytes: &[0; 40], stride: 4, width: 4 }];
    assert!(said(machine.begin(&narrow, &[0, 1], None).unwrap_err()).contains("4 bytes"));
    assert!(said(machine.begin(&narrow, &[0, 9], None).unwrap_err()).contains("expert 9"));
    let batch = Batch::random(&mut fastrand::Rng::with_seed(3), &spec(2, 1, 2, 2, 4), None);
    batch.with_parts(|parts, indices, _| {
        let weights = fabric_moe::kernels::Part { bytes: &[0; 400], stride: 4, width: 4 };
        let wrong = machine.begin(parts, indices, Some(weights)).unwrap_err();
        assert!(said(wrong).contains("2 32-bit floats"));
    });
    let none = fabric_moe::kernels::Part { bytes: &[], stride: 0, width: 0 };
    assert!(said(machine.begin_answers(&none).unwrap_err()).contains("dispatch_send"));
    for (wrong, word) in [
        (Spec { ranks_per_node: 2, ..spec(3, 1, 1, 1, 1) }, "whole number"),
        (Spec { ring_chunks: 1, ..spec(2, 1, 1, 1, 1) }, "ring_chunks"),
        (Spec { channels: 9, ..spec(2, 1, 1, 1, 1) }, "channels"),
        (Spec { threads: 3, ..spec(2, 1, 1, 1, 1) }, "threads"),
    ] {
        let error = said(Layout::new(wrong).unwrap_err());
        assert!(error.contains(word), "{error}");
    }
}
