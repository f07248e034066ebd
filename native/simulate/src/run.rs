//! Drives trainers and network. Engines and groups are the real ones; clock and wires are
//! simulated.

use std::{
    cmp::Reverse,
    collections::{hash_map::Entry, BinaryHeap, HashMap},
    sync::Arc,
    time::Duration,
};

use fabric_engine::{
    api::{EngineConfig, PageIndices, Pages},
    simulation::{Running, SimNet},
    transport::sim::SimConfig,
    Counter, Handle, Op, Region, RemoteRegion, Submit, Time, TransferEngine,
};

use crate::{
    completions::{Completions, OperationKey},
    path::critical_path,
    pipeline::{Cause, Pipeline},
    push::{Network, Outcome, Push, PushError, Stage, STAGES},
};

/// Virtual time after which all links are up, ns.
const CONNECT_TIME: u64 = 5_000_000;
/// Window of a reliable queue pair of the verbs transport.
const WINDOW: usize = 256;
const MAX_PAGES: u32 = 32;
const NEVER: Duration = Duration::MAX;
/// Slices in flight from each trainer to a rollout by each NIC, independent of other trainers.
const SLICES: u64 = 4;

/// Simulates a push.
///
/// # Errors
/// Invalid sizes, and errors that the engines report.
pub fn simulate(push: &Push, network: &Network) -> Result<Outcome, PushError> {
    check(push, network)?;
    let mut net = SimNet::new(SimConfig {
        delay: network.latency..network.latency.saturating_add(1),
        ordered: true,
        port_rate: Some(network.rate),
        max_bytes: 1 << 30,
        max_pages: MAX_PAGES,
        window: WINDOW,
        carries: false,
        ..SimConfig::default()
    });
    let cluster = Cluster::open(push, network, &mut net)?;
    let mut run = Simulation::new(push, network, &cluster, net.now().0);
    run.run_to_end(&mut net.running())?;
    Ok(run.outcome(&net))
}

fn check(push: &Push, network: &Network) -> Result<(), PushError> {
    let wrong = match () {
        _ if !(1..=4).contains(&network.nics) => "nics is out of range [1, 4]",
        _ if !(network.rate > 0.0 && network.rate.is_finite()) => "rate must be finite and above 0",
        _ if network.page == 0 => "page must be at least 1 byte",
        _ if push.trainers.len() >= OperationKey::TRAINERS => {
            "the number of trainers is out of range [0, 32768)"
        }
        _ => return steps(push),
    };
    Err(PushError(wrong.into()))
}

fn steps(push: &Push) -> Result<(), PushError> {
    const MOST: usize = OperationKey::STEPS;
    for (trainer, steps) in push.trainers.iter().enumerate() {
        if steps.len() > MOST {
            let number = steps.len();
            return Err(PushError(format!(
                "trainer {trainer} has {number} steps; at most {MOST} are simulated"
            )));
        }
        for (number, step) in steps.iter().enumerate() {
            let known = |w: &crate::Write| (w.rollout as usize) < push.rollouts && w.bytes > 0;
            let wrong = match () {
                _ if step.after > number => "has an `after` that exceeds its index",
                _ if step.writes.is_empty() => "has no writes",
                _ if step.writes.len() > MOST => "has more than 2^24 writes",
                _ if !step.writes.iter().all(known) => {
                    "has a write of 0 bytes or to an unknown rollout"
                }
                _ if steps[..number].last().is_some_and(|s| s.group > step.group) => {
                    "has a lower group than the step before it"
                }
                _ => continue,
            };
            return Err(PushError(format!("step {number} of trainer {trainer} {wrong}")));
        }
    }
    Ok(())
}

/// Number of pages that each rollout receives. A counter counts them in 32 bits.
fn expected_pages(push: &Push, network: &Network) -> Result<Vec<u32>, PushError> {
    let mut pages = vec![0u64; push.rollouts];
    for write in push.trainers.iter().flatten().flat_map(|s| &s.writes) {
        let sum = &mut pages[write.rollout as usize];
        *sum = sum.saturating_add(network.pages(write.bytes).0);
    }
    let of = |(rollout, n): (usize, u64)| {
        u32::try_from(n).map_err(|_| {
            PushError(format!(
                "rollout {rollout} receives {n} pages of at most {} bytes; at most {} are \
                 simulated: use a larger page",
                network.page,
                u32::MAX
            ))
        })
    };
    pages.into_iter().enumerate().map(of).collect()
}

/// The engines of all ranks, connected.
struct Cluster {
    trainers: Vec<(Arc<TransferEngine>, Region)>,
    rollouts: Vec<(Arc<TransferEngine>, Region, Counter)>,
    /// By trainer and rollout that exchange data.
    regions: HashMap<(usize, u32), RemoteRegion>,
    /// One expectation per rollout, for all of its data.
    waits: Vec<Handle>,
}

impl Cluster {
    fn open(push: &Push, network: &Network, net: &mut SimNet) -> Result<Self, PushError> {
        let largest = network.page.max(1);
        let mut engine = |name: String| -> Result<_, PushError> {
            // No reader needs records, and there may be thousands of engines.
            let mut config = EngineConfig { name, records: 0, ..EngineConfig::default() };
            let slices = SLICES * u64::from(network.nics) * push.trainers.len() as u64;
            config.receive_window = config.receive_window.max(slices.saturating_mul(network.page));
            let engine = net.engine_with_rails(config, network.nics).map_err(text)?;
            let memory = net.blank_memory(&engine, largest).map_err(text)?;
            Ok((engine, memory))
        };
        let trainers = (0..push.trainers.len())
            .map(|rank| engine(format!("trainer {rank}")))
            .collect::<Result<Vec<_>, _>>()?;
        let mut rollouts = Vec::new();
        for rank in 0..push.rollouts {
            let (engine, memory) = engine(format!("rollout {rank}"))?;
            let counter = engine.counter().map_err(text)?;
            rollouts.push((engine, memory, counter));
        }
        let mut regions = HashMap::new();
        let pages = expected_pages(push, network)?;
        for (trainer, steps) in push.trainers.iter().enumerate() {
            for write in steps.iter().flat_map(|s| &s.writes) {
                let to = write.rollout as usize;
                if let Entry::Vacant(entry) = regions.entry((trainer, write.rollout)) {
                    let engine = &trainers[trainer].0;
                    let region = engine.import(&rollouts[to].1.descriptor()).map_err(text)?;
                    engine.connect(region.peer()).map_err(text)?;
                    entry.insert(region);
                }
            }
        }
        net.run_until(Time(net.now().0 + CONNECT_TIME));
        let waits = pages
            .iter()
            .zip(&rollouts)
            .map(|(n, (_, _, counter))| counter.expect(*n, &[], NEVER).map_err(text))
            .collect::<Result<_, _>>()?;
        Ok(Self { trainers, rollouts, regions, waits })
    }
}

/// A timed event of a trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The trainer has made a group ready.
    Ready(u32),
    Submit,
}

struct Simulation<'p> {
    network: &'p Network,
    cluster: &'p Cluster,
    pipelines: Vec<Pipeline<'p>>,
    events: BinaryHeap<Reverse<(u64, usize, Event)>>,
    /// Trainers whose next write is among the events.
    submitting: Vec<bool>,
    /// Number of trainers that have not made each group ready.
    unready: Vec<usize>,
    ended: Arc<Completions>,
    outstanding: HashMap<u64, Handle>,
    began: u64,
    end: u64,
}

impl<'p> Simulation<'p> {
    fn new(push: &'p Push, network: &'p Network, cluster: &'p Cluster, began: u64) -> Self {
        let pipelines: Vec<_> = push.trainers.iter().map(|s| Pipeline::new(s)).collect();
        let groups = push.trainers.iter().flatten().map(|s| s.group as usize + 1).max();
        let mut unready = vec![0; groups.unwrap_or(0)];
        for steps in &push.trainers {
            for group in steps.chunk_by(|a, b| a.group == b.group) {
                unready[group[0].group as usize] += 1;
            }
        }
        Self {
            network,
            cluster,
            submitting: vec![false; pipelines.len()],
            pipelines,
            events: BinaryHeap::new(),
            unready,
            ended: Arc::default(),
            outstanding: HashMap::new(),
            began,
            end: 0,
        }
    }

    fn run_to_end(&mut self, net: &mut Running<'_>) -> Result<(), PushError> {
        for (rollout, wait) in self.cluster.waits.iter().enumerate() {
            wait.on_done_notify(self.ended.clone(), OperationKey::rollout(rollout));
        }
        self.begin_all(0, Cause::Start);
        let mut waits = self.cluster.waits.len();
        while waits > 0 || !self.outstanding.is_empty() || !self.events.is_empty() {
            let due = self.events.peek().map_or(u64::MAX, |Reverse((at, ..))| *at);
            let ended = self.ended.clone();
            let limit = Time(due.saturating_add(self.began));
            let passed = net.until(limit, || !ended.is_empty());
            let now = net.now().0 - self.began;
            for key in self.ended.take() {
                match OperationKey::parts(key) {
                    Err(rollout) => {
                        result(&self.cluster.waits[rollout])?;
                        (waits, self.end) = (waits - 1, now);
                    }
                    Ok((trainer, step, index)) => {
                        let handle = self.outstanding.remove(&key);
                        handle.as_ref().map_or(Ok(()), result)?;
                        if self.pipelines[trainer].on_write_done(now, step, index, self.network) {
                            self.begin(now, trainer, Cause::Sent(step));
                        }
                        self.end = now;
                    }
                }
            }
            if passed && due == u64::MAX {
                return Err(PushError(
                    "no event is due and the push is not complete; this is a bug, please report it"
                        .into(),
                ));
            }
            while let Some(Reverse((at, trainer, event))) = self.events.peek().copied() {
                if at > now {
                    break;
                }
                self.events.pop();
                match event {
                    Event::Ready(group) => self.made_ready(now, trainer, group),
                    Event::Submit => self.submit(net, at, trainer)?,
                }
            }
        }
        Ok(())
    }

    fn begin_all(&mut self, now: u64, cause: Cause) {
        (0..self.pipelines.len()).for_each(|trainer| self.begin(now, trainer, cause));
    }

    /// Begins all steps that the trainer may begin.
    fn begin(&mut self, now: u64, trainer: usize, cause: Cause) {
        let open = self.unready.iter().position(|n| *n > 0).unwrap_or(self.unready.len()) as u32;
        let pipeline = &mut self.pipelines[trainer];
        while let Some(times) = pipeline.begin(now, open, cause, self.network) {
            let number = pipeline.times.len();
            let group = pipeline.steps[number - 1].group;
            if pipeline.steps.get(number).map(|s| s.group) != Some(group) {
                self.events.push(Reverse((times.prepared, trainer, Event::Ready(group))));
            }
        }
        self.schedule(trainer);
    }

    fn made_ready(&mut self, now: u64, trainer: usize, group: u32) {
        self.unready[group as usize] -= 1;
        if self.unready[group as usize] == 0 {
            self.begin_all(now, Cause::Group(trainer));
        }
    }

    fn schedule(&mut self, trainer: usize) {
        if self.submitting[trainer] {
            return;
        }
        if let Some(at) = self.pipelines[trainer].next(self.network) {
            self.submitting[trainer] = true;
            self.events.push(Reverse((at, trainer, Event::Submit)));
        }
    }

    /// Submits the next write of a trainer.
    fn submit(&mut self, net: &mut Running<'_>, at: u64, trainer: usize) -> Result<(), PushError> {
        let (step, index, write) = self.pipelines[trainer].take(at, self.network);
        let (engine, src) = &self.cluster.trainers[trainer];
        let counter = &self.cluster.rollouts[write.rollout as usize].2;
        let (count, page_len) = self.network.pages(write.bytes);
        let count = u32::try_from(count).map_err(|e| PushError(e.to_string()))?;
        let indices = PageIndices::range(0, count).map_err(text)?;
        // The simulated cost does not depend on addresses.
        let pages = Pages::new(indices, 0, 0);
        net.wake(engine.id());
        let op = Op::WritePages {
            page_len,
            src,
            src_pages: &pages,
            dst: &self.cluster.regions[&(trainer, write.rollout)],
            dst_pages: &pages,
            imm: Some(counter.imm()),
        };
        let submit = Submit { timeout: Some(NEVER), ..Submit::default() };
        let handle = engine.submit(&[op], submit).map_err(text)?;
        let key = OperationKey::write(trainer, step, index);
        handle.on_done_notify(self.ended.clone(), key);
        self.outstanding.insert(key, handle);
        self.submitting[trainer] = false;
        self.schedule(trainer);
        Ok(())
    }

    fn outcome(&self, net: &SimNet) -> Outcome {
        let busy = |p: &Pipeline<'_>| {
            let mut busy = [0; STAGES];
            for step in p.steps {
                (0..4).for_each(|stage| busy[stage] += step.ready[stage]);
                let calls = step.writes.iter().map(|w| self.network.submits(w));
                busy[Stage::Submit as usize] += calls.sum::<u64>();
            }
            busy
        };
        let sent = |p: &Pipeline<'_>| p.times.iter().map(|t| t.sent).max().unwrap_or(0);
        let posted = |e: &Arc<TransferEngine>| -> u64 {
            (0..self.network.nics).map(|rail| net.posted(e.id(), rail)).sum()
        };
        Outcome {
            time: self.end,
            path: critical_path(&self.pipelines, self.end),
            ended: self.pipelines.iter().map(sent).collect(),
            busy: self.pipelines.iter().map(busy).collect(),
            peak: self.pipelines.iter().map(peak).max().unwrap_or(0),
            posted: self.cluster.trainers.iter().map(|(e, _)| posted(e)).sum(),
            digest: net.digest(),
        }
    }
}

/// Peak temporary memory of a trainer.
fn peak(pipeline: &Pipeline<'_>) -> u64 {
    let mut changes: Vec<(u64, i64)> = Vec::new();
    for (step, times) in pipeline.steps.iter().zip(&pipeline.times) {
        let memory = step.memory as i64;
        changes.extend([(times.begun, memory), (times.sent, -memory)]);
    }
    // Memory that is released at an instant is available to steps that begin then.
    changes.sort_unstable();
    let mut held = 0;
    changes
        .iter()
        .map(|(_, change)| {
            held += change;
            held
        })
        .max()
        .unwrap_or(0) as u64
}

fn result(handle: &Handle) -> Result<(), PushError> {
    handle.poll().unwrap_or(Ok(())).map_err(text)
}

fn text(error: impl std::fmt::Display) -> PushError {
    PushError(error.to_string())
}
