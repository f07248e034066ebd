//! Carries a scenario out: the engine and its group are the real ones, the clock and the wires are
//! not.

use std::sync::Arc;

use fabric_engine::{
    api::{EngineConfig, NicConfig, PageIndices, Pages, Spray},
    simulation::SimNet,
    transport::sim::{Fault, SimConfig, TracedWork, Work},
    Counter, Handle, Local, Op, Region, Remote, RemoteRegion, Submit, Time, TransferEngine,
};
use serde::Serialize;

use super::scenario::{Change, Load, RailChange, Scenario, Transfer};
use crate::lines::TextResult;

const MS: f64 = 1e6;
/// The simulator's numbers for the two nodes.
const SENDER: u8 = 0;
/// Links are up long before.
const CONNECT_TIME: u64 = 5_000_000;
/// Work requests that a reliable queue pair of the verbs transport accepts.
const WINDOW: usize = 256;
const MAX_PAGES: u32 = 32;
/// A cable that is out for good, as far as its ends are told.
const NEVER: u64 = 1 << 50;

/// The end of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SliceEnd {
    Done,
    /// Its link was lost first
    Lost,
    /// It was still under way at the end
    UnderWay,
}

/// One work request with bytes; times are ns since the run began.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Slice {
    pub rail: u8,
    pub posted: u64,
    pub ended: u64,
    pub bytes: u64,
    pub fate: SliceEnd,
    /// Its bytes had been on a link that was lost
    pub again: bool,
    #[serde(skip)]
    offset: u64,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct EndedTransfer {
    pub thread: u32,
    pub submitted: u64,
    pub ended: u64,
}

/// The events of a run.
#[derive(Debug)]
pub struct Run {
    /// In the order in which they were posted
    pub slices: Vec<Slice>,
    /// In the order in which they ended
    pub transfers: Vec<EndedTransfer>,
    /// Begun by the end, and not over
    pub unfinished: Vec<u64>,
    /// A number that two runs share only if the same things happened at the same times
    pub digest: u64,
}

/// Runs `scenario` by a policy.
pub fn run(scenario: &Scenario, spray: Spray) -> TextResult<Run> {
    let mut sim = Sim::open(scenario, spray)?;
    sim.go(scenario)?;
    Ok(sim.end())
}

struct Slot {
    thread: u32,
    flying: Option<(u64, Handle)>,
}

struct Sim {
    net: SimNet,
    a: Arc<TransferEngine>,
    _b: Arc<TransferEngine>,
    src: Region,
    dst: RemoteRegion,
    _there: Region,
    counter: Counter,
    /// The pages of one prompt's layers, by slot
    pages: Vec<Vec<Pages>>,
    slots: Vec<Slot>,
    began: u64,
    transfers: Vec<EndedTransfer>,
    slices: Vec<TracedWork>,
}

impl Sim {
    fn open(scenario: &Scenario, spray: Spray) -> TextResult<Self> {
        let us = |us: f64| (us * 1e3) as u64;
        let (least, most) = scenario.latency_us;
        let mut net = SimNet::new(SimConfig {
            seed: scenario.seed,
            delay: us(least)..us(most).max(us(least) + 1),
            ordered: true,
            max_bytes: 1 << 30,
            max_pages: MAX_PAGES,
            window: WINDOW,
            carries: false,
            ..SimConfig::default()
        });
        let rails = scenario.rails.len() as u8;
        let mut engine = |name: &str| {
            let nics = NicConfig { spray, ..NicConfig::default() };
            let config = EngineConfig { name: name.into(), nics, ..EngineConfig::default() };
            net.engine_with_rails(config, rails).map_err(text)
        };
        let (a, b) = (engine("sender")?, engine("receiver")?);
        for end in [&a, &b] {
            for (rail, gbits) in scenario.rails.iter().enumerate() {
                net.set_rate(end.id(), rail as u8, Some(gbits / 8.0));
            }
        }
        let Load { transfer, .. } = scenario.load;
        let slots = scenario.load.slots();
        let len = transfer.bytes() * u64::from(slots);
        let (src, dst) = (a.alloc(len).map_err(text)?, b.alloc(len).map_err(text)?);
        let there = a.import(&dst.descriptor()).map_err(text)?;
        let counter = b.counter().map_err(text)?;
        let pages = (0..slots).map(|slot| layers(transfer, slot)).collect::<TextResult<_>>()?;
        a.connect(there.peer()).map_err(text)?;
        let until = Time(net.now().0 + CONNECT_TIME);
        while net.step_until(until) {}
        net.advance(until);
        net.trace();
        let slot = |n| Slot { thread: n / scenario.load.in_flight, flying: None };
        Ok(Self {
            began: until.0,
            net,
            a,
            _b: b,
            src,
            dst: there,
            _there: dst,
            counter,
            pages,
            slots: (0..slots).map(slot).collect(),
            transfers: Vec::new(),
            slices: Vec::new(),
        })
    }

    fn now(&self) -> u64 {
        self.net.now().0 - self.began
    }

    fn go(&mut self, scenario: &Scenario) -> TextResult<()> {
        let mut changes = scenario.changes.iter().peekable();
        let end = (scenario.run_ms * MS) as u64;
        loop {
            while let Some(change) = changes.next_if(|c| (c.at_ms * MS) as u64 <= self.now()) {
                self.change(change);
            }
            let stop = changes.peek().map_or(end, |c| ((c.at_ms * MS) as u64).min(end));
            self.submit(scenario.load.transfer)?;
            while self.now() < stop {
                if !self.net.step_until(Time(self.began + stop)) {
                    self.net.advance(Time(self.began + stop));
                }
                self.collect(scenario.load.transfer)?;
            }
            if stop == end {
                return Ok(());
            }
        }
    }

    fn change(&mut self, change: &Change) {
        let (node, rail) = (SENDER, change.rail);
        let fault = match change.what {
            RailChange::Rate(gbits) => Fault::Slow { node, rail, rate: (gbits * 125.0) as u32 },
            RailChange::Lost(ms) => {
                let delay = (ms * MS) as u64;
                Fault::NicDown { node, rail, local_delay: delay, remote_delay: delay }
            }
            RailChange::Silent => {
                Fault::NicDown { node, rail, local_delay: NEVER, remote_delay: NEVER }
            }
            RailChange::Back => Fault::NicUp { node, rail },
        };
        self.net.inject(&fault);
    }

    /// Every slot that is free begins its next transfer.
    fn submit(&mut self, transfer: Transfer) -> TextResult<()> {
        for slot in 0..self.slots.len() {
            if self.slots[slot].flying.is_none() {
                let handle = self.begin(transfer, slot)?;
                self.slots[slot].flying = Some((self.now(), handle));
            }
        }
        Ok(())
    }

    fn begin(&self, transfer: Transfer, slot: usize) -> TextResult<Handle> {
        let imm = Some(self.counter.imm());
        let ops: Vec<Op<'_>> = match transfer {
            Transfer::Write { bytes } => {
                let offset = slot as u64 * bytes;
                let src = Local { region: &self.src, offset };
                let dst = Remote { region: &self.dst, offset };
                vec![Op::Write { src, dst, len: bytes, imm }]
            }
            Transfer::Kv { bytes, .. } => {
                let layer = |pages| Op::WritePages {
                    page_len: bytes,
                    src: &self.src,
                    src_pages: pages,
                    dst: &self.dst,
                    dst_pages: pages,
                    imm,
                };
                self.pages[slot].iter().map(layer).collect()
            }
        };
        self.a.submit(&ops, Submit::default()).map_err(text)
    }

    /// Notes what has ended, and has its threads go on.
    fn collect(&mut self, transfer: Transfer) -> TextResult<()> {
        self.slices.append(&mut self.net.ended());
        let now = self.now();
        let mut over = false;
        for slot in &mut self.slots {
            let Some((submitted, handle)) = &slot.flying else { continue };
            let Some(result) = handle.poll() else { continue };
            result.map_err(|e| format!("a transfer failed at {} ms: {e}", now as f64 / MS))?;
            self.transfers.push(EndedTransfer {
                thread: slot.thread,
                submitted: *submitted,
                ended: now,
            });
            slot.flying = None;
            over = true;
        }
        match over {
            true => self.submit(transfer),
            false => Ok(()),
        }
    }

    fn end(mut self) -> Run {
        self.slices.extend(self.net.under_way());
        let (began, now) = (self.began, self.now());
        let mut slices: Vec<Slice> = self
            .slices
            .iter()
            .filter(|t| t.engine == self.a.id() && t.work == Work::Write)
            .map(|t| Slice {
                rail: t.rail,
                posted: t.posted - began,
                ended: t.ended.map_or(now, |(at, _)| at - began),
                bytes: t.bytes,
                fate: match t.ended {
                    Some((_, true)) => SliceEnd::Done,
                    Some((_, false)) => SliceEnd::Lost,
                    None => SliceEnd::UnderWay,
                },
                again: false,
                offset: t.offset,
            })
            .collect();
        slices.sort_by_key(|s| (s.posted, s.rail, s.offset));
        mark(&mut slices);
        Run {
            slices,
            transfers: self.transfers,
            unfinished: self.slots.iter().filter_map(|s| Some(s.flying.as_ref()?.0)).collect(),
            digest: self.net.digest(),
        }
    }
}

/// Finds the slices that bring what others lost: the first to the same place since.
fn mark(slices: &mut [Slice]) {
    let lost: Vec<Slice> = slices.iter().filter(|s| s.fate == SliceEnd::Lost).copied().collect();
    for l in lost {
        let first = slices.partition_point(|s| s.posted < l.ended);
        if let Some(again) = slices[first..].iter_mut().find(|s| s.offset == l.offset && !s.again) {
            again.again = true;
        }
    }
}

/// The blocks of each layer of one slot.
fn layers(transfer: Transfer, slot: u32) -> TextResult<Vec<Pages>> {
    let Transfer::Kv { layers, blocks, bytes } = transfer else { return Ok(Vec::new()) };
    let first = slot * layers;
    (first..first + layers)
        .map(|layer| {
            let range = PageIndices::range(layer * blocks, blocks).map_err(text)?;
            Ok(Pages::new(range, bytes, 0))
        })
        .collect()
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
