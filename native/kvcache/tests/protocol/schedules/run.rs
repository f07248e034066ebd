//! One schedule, drawn from its seed: decoders and prefillers on a simulated network, work and
//! faults at random moments, and everything checked as it happens.

use std::{sync::Arc, time::Duration};

use fabric_engine::{
    api::EngineConfig,
    simulation::SimNet,
    transport::sim::{Fault, SimConfig},
    Time, TransferEngine,
};
use fabric_kvcache::{wire::Offer, Terms};

use super::{
    decoding::Decoding,
    faulty_delivery::{FaultOdds, FaultyDelivery},
    judge::Judge,
    prefilling::Prefilling,
};
use crate::{
    cache::Shape,
    world::{Cut, TAIL},
};

const MS: u64 = 1_000_000;
/// After the last fault, all requests of peers that live end so soon.
const BOUND: u64 = 30_000 * MS;

/// What came of a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub ready: u32,
    pub failed: u32,
    /// Equal only if the same happened at the same times.
    pub digest: u64,
}

/// A prefiller of one or two processes.
struct Instance {
    processes: Vec<usize>,
    offer: Offer,
}

struct Run {
    net: SimNet,
    rng: fastrand::Rng,
    judge: Arc<Judge>,
    delivery: Arc<FaultyDelivery>,
    decoders: Vec<Decoding>,
    processes: Vec<Prefilling>,
    instances: Vec<Instance>,
    content: u64,
    /// Faults are drawn of these kinds only.
    kinds: Vec<Kind>,
    /// How many regions each engine has when nothing is going on.
    regions: Vec<(Arc<TransferEngine>, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cancel,
    Fail,
    Stall,
    CloseDecoder,
    ClosePrefiller,
    Leave,
    KillDecoder,
    KillPrefiller,
    KillEngine,
    Links,
    Cables,
    Partition,
}

const KINDS: [Kind; 12] = [
    Kind::Cancel,
    Kind::Fail,
    Kind::Stall,
    Kind::CloseDecoder,
    Kind::ClosePrefiller,
    Kind::Leave,
    Kind::KillDecoder,
    Kind::KillPrefiller,
    Kind::KillEngine,
    Kind::Links,
    Kind::Cables,
    Kind::Partition,
];

pub fn run(seed: u64) -> Result<Outcome, String> {
    let mut run = Run::new(seed);
    run.go()?;
    let outcomes = run.decoders.iter().filter(|d| !d.dead && !d.is_liar()).map(Decoding::outcome);
    let (ready, failed) = outcomes.fold((0, 0), |sum, o| (sum.0 + o.0, sum.1 + o.1));
    Ok(Outcome { ready, failed, digest: run.net.digest() })
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let judge = Judge::new();
        let mut odds = || if rng.bool() { 0 } else { 1 << rng.u32(2..6) };
        let (twice, late, lost) = (odds(), odds(), odds());
        let lost = if lost == 4 { 0 } else { lost * 8 };
        let delivery = FaultyDelivery::new(&judge, FaultOdds { twice, late, lost }, seed);
        let ordered = rng.bool();
        let config = SimConfig {
            seed,
            delay: 500..[5_000, 50_000, 2 * MS][rng.usize(..3)],
            ordered,
            page_counts: rng.bool(),
            half_open: if rng.u8(..4) == 0 { 8 } else { 0 },
            max_bytes: 1 << rng.u32(6..14),
            max_pages: rng.u32(1..8),
            // Some have nearly all that is said go in parts.
            max_message: if seed % 5 == 3 { 700 } else { 1 << 16 },
            window: rng.usize(4..32),
            ..SimConfig::default()
        };
        let net = SimNet::new(config);
        let mut kinds: Vec<Kind> = KINDS.to_vec();
        rng.shuffle(&mut kinds);
        kinds.truncate(rng.usize(..6));
        let mut run = Self {
            net,
            rng,
            judge,
            delivery,
            decoders: Vec::new(),
            processes: Vec::new(),
            instances: Vec::new(),
            content: seed << 20,
            kinds,
            regions: Vec::new(),
        };
        run.people();
        run
    }

    fn engines(&mut self, count: u32, what: &str) -> Vec<Arc<TransferEngine>> {
        let rails = self.rng.u8(1..=2);
        let open = |i| {
            let config = EngineConfig {
                name: format!("{what} {i}"),
                op_timeout: Duration::from_secs(3),
                ..EngineConfig::default()
            };
            self.net.engine_with_rails(config, rails).unwrap()
        };
        (0..count).map(open).collect()
    }

    fn people(&mut self) {
        let window = [None, None, Some(5)][self.rng.usize(..3)];
        let shape = Shape { layers: self.rng.u32(1..4), heads: 4, width: 4, window };
        let silence = Duration::from_secs(2);
        let beat = Duration::from_millis([50, 100, 500][self.rng.usize(..3)]);
        let terms = Terms { beat, silence, tail_nbytes: TAIL, ..Terms::default() };
        let mut cut =
            |least: u32| Cut { page_tokens: self.rng.u32(1..6), pages: self.rng.u32(least..32) };
        let (theirs, ours): (Vec<Cut>, Vec<Cut>) = (0..3).map(|_| (cut(24), cut(12))).unzip();
        for cut in theirs.iter().take(self.rng.usize(1..=3)) {
            let ranks = [1, 1, 2, 4][self.rng.usize(..4)];
            let split = ranks > 1 && self.rng.u8(..3) == 0;
            let each = if split { ranks / 2 } else { ranks };
            let mut instance = Vec::new();
            for first in (0..ranks).step_by(each as usize) {
                let engines = self.engines(each, "prefill");
                let how = (&shape, *cut, terms.clone());
                let (judge, delivery) = (&self.judge, &self.delivery);
                let one = Prefilling::new(engines, (first, ranks), how, judge, delivery);
                instance.push(self.processes.len());
                self.processes.push(one);
            }
            let offers: Vec<Offer> =
                instance.iter().filter_map(|p| self.processes[*p].offer()).collect();
            let mut offer = offers[0].clone();
            offer.ends = offers.into_iter().flat_map(|o| o.ends).collect();
            let offer = Offer::from_bytes(&offer.to_bytes()).unwrap();
            self.instances.push(Instance { processes: instance, offer });
        }
        let liar = self.rng.u8(..4) == 0;
        let honest = self.rng.usize(1..=3);
        for i in 0..honest + usize::from(liar) {
            let ranks = [1, 1, 2, 4][self.rng.usize(..4)];
            let engines = self.engines(ranks, "decode");
            let how = (&shape, ours[i % 3], terms.clone());
            let mut one = Decoding::new(engines, how, &self.judge, &self.delivery);
            if i == honest {
                one.lies();
                self.delivery.distrust(one.engines[0].id());
            }
            one.sessions = vec![Vec::new(); self.instances.len()];
            self.decoders.push(one);
        }
        let engines = self.processes.iter().map(|p| &p.engines);
        let engines = engines.chain(self.decoders.iter().map(|d| &d.engines)).flatten();
        self.regions = engines.map(|e| (Arc::clone(e), e.stats().regions)).collect();
    }

    fn go(&mut self) -> Result<(), String> {
        let steps = self.rng.usize(10..120);
        let pause = [MS / 5, 3 * MS, 40 * MS][self.rng.usize(..3)];
        for _ in 0..steps {
            let next = self.rng.u64(..pause);
            self.until(self.judge.now() + next)?;
            match self.rng.u8(..10) {
                0..3 => self.ask(),
                3..9 => self.work(),
                _ => self.fault(),
            }
        }
        self.net.plug_all();
        self.end(BOUND, true)?;
        for decoder in &self.decoders {
            if !decoder.dead {
                decoder.check();
            }
        }
        for process in &self.processes {
            process.check();
        }
        self.judge.verdict()?;
        // All processes end, and late messages come.
        self.decoders.iter().flat_map(|d| &d.decoder).for_each(|d| d.close());
        self.processes.iter().flat_map(|p| &p.prefiller).for_each(|p| p.close());
        self.end(BOUND, false)?;
        let rest = self.judge.now() + 4_000 * MS;
        self.until(rest)?;
        self.decoders.iter().filter(|d| !d.dead).for_each(Decoding::check_parted);
        self.processes.iter().for_each(Prefilling::check_parted);
        for decoder in &mut self.decoders {
            decoder.decoder = None;
        }
        for process in &mut self.processes {
            process.prefiller = None;
        }
        for decoder in self.decoders.iter().filter(|d| !d.dead) {
            decoder.check();
        }
        for (engine, before) in &self.regions {
            let stats = engine.stats();
            let here = |d: &&Decoding| d.engines.iter().any(|e| e.id() == engine.id());
            let dead = self.decoders.iter().find(here).is_some_and(|d| d.dead);
            if !dead && (stats.regions, stats.retiring) != (*before, 0) {
                self.judge.wrong("leak", format_args!("{before} regions before, now {stats:?}"));
            }
        }
        self.judge.verdict()
    }

    /// Lets things happen until then.
    fn until(&mut self, limit: u64) -> Result<(), String> {
        loop {
            let next = self.delivery.next().map_or(limit, |at| at.min(limit));
            while self.net.step_until(Time(next)) {
                self.judge.at(self.net.now().0);
                self.judge.verdict()?;
            }
            self.net.advance(Time(next.max(self.judge.now())));
            self.judge.at(self.net.now().0);
            self.delivery.due();
            if next >= limit {
                return self.judge.verdict();
            }
        }
    }

    /// Goes on until everything that must end has ended.
    fn end(&mut self, bound: u64, work: bool) -> Result<(), String> {
        let limit = self.judge.now() + bound;
        while self.judge.now() < limit {
            let over = self.decoders.iter().filter(|d| !d.dead).all(Decoding::is_over);
            let done = self.processes.iter().all(Prefilling::is_over);
            if over && done {
                break;
            }
            self.until(self.judge.now() + 5 * MS)?;
            if work {
                for process in self.processes.iter().filter(|p| !p.dead) {
                    process.work(&mut self.rng);
                }
            }
        }
        Ok(())
    }

    fn ask(&mut self) {
        let (d, p) =
            (self.rng.usize(..self.decoders.len()), self.rng.usize(..self.instances.len()));
        let decoding = &mut self.decoders[d];
        let Some(decoder) = decoding.decoder.clone().filter(|_| !decoding.dead) else { return };
        let known = decoding.sessions[p].last().copied().filter(|m| decoder.is_connected(*m));
        let known = known.filter(|_| self.rng.u8(..16) > 0);
        let session = known.or_else(|| decoder.connect(&self.instances[p].offer).ok());
        let Some(session) = session else { return };
        if known.is_none() {
            decoding.sessions[p].push(session);
        }
        self.content += 1;
        decoding.ask(p, session, self.content, &mut self.rng);
        let dead = self.instances[p].processes.iter().any(|p| self.processes[*p].dead);
        if dead {
            decoding.on_prefiller_lost(p);
        }
    }

    fn work(&mut self) {
        let p = self.rng.usize(..self.processes.len());
        if !self.processes[p].dead {
            for _ in 0..self.rng.u8(1..6) {
                self.processes[p].work(&mut self.rng);
            }
        }
    }

    fn fault(&mut self) {
        if self.kinds.is_empty() {
            return;
        }
        let d = self.rng.usize(..self.decoders.len());
        let p = self.rng.usize(..self.processes.len());
        let kind = self.kinds[self.rng.usize(..self.kinds.len())];
        // What ends an end for good comes less often.
        if kind as u8 >= Kind::CloseDecoder as u8
            && kind as u8 <= Kind::KillEngine as u8
            && self.rng.bool()
        {
            return;
        }
        match kind {
            Kind::Cancel => {
                let decoding = &self.decoders[d];
                let seq = decoding.any(&mut self.rng).filter(|_| !decoding.dead);
                if let (Some(decoder), Some(seq)) = (&decoding.decoder, seq) {
                    decoder.cancel(seq);
                }
            }
            Kind::Fail => self.processes[p].fail(&mut self.rng),
            Kind::Stall => self.processes[p].stall(&mut self.rng),
            Kind::CloseDecoder => {
                let decoder = self.decoders[d].decoder.take();
                if self.rng.bool() {
                    decoder.iter().for_each(|d| d.close());
                    self.decoders[d].decoder = decoder;
                }
            }
            Kind::ClosePrefiller => {
                let prefiller = self.processes[p].prefiller.take();
                if self.rng.bool() {
                    prefiller.iter().for_each(|p| p.close());
                    self.processes[p].prefiller = prefiller;
                }
            }
            Kind::Leave => {
                let decoding = &self.decoders[d];
                let m = self.rng.usize(..decoding.sessions.len());
                if let (Some(decoder), Some(m)) = (&decoding.decoder, decoding.sessions[m].last()) {
                    decoder.disconnect(*m);
                }
            }
            Kind::KillDecoder => {
                self.decoders[d].dead = true;
                self.decoders[d].decoder = None;
                let ids: Vec<_> = self.decoders[d].engines.iter().map(|e| e.id()).collect();
                ids.into_iter().for_each(|id| self.net.kill(id));
            }
            Kind::KillPrefiller => {
                let ids: Vec<_> = self.processes[p].engines.iter().map(|e| e.id()).collect();
                ids.into_iter().for_each(|id| self.net.kill(id));
                self.processes[p].dead = true;
                self.processes[p].prefiller = None;
                self.stop_awaiting(p);
            }
            Kind::KillEngine => {
                let any = self.rng.usize(..self.processes[p].engines.len());
                let id = self.processes[p].engines[any].id();
                self.net.kill(id);
                self.processes[p].crippled = true;
            }
            Kind::Links | Kind::Cables | Kind::Partition => self.network(kind),
        }
    }

    fn stop_awaiting(&self, process: usize) {
        let of = |i: &&Instance| i.processes.contains(&process);
        if let Some(p) = self.instances.iter().position(|i| of(&i)) {
            self.decoders.iter().for_each(|d| d.on_prefiller_lost(p));
        }
    }

    fn network(&mut self, kind: Kind) {
        let rng = &mut self.rng;
        let (node, rail, link_index) =
            (rng.u8(..self.regions.len() as u8), rng.u8(..2), rng.u8(..4));
        let mut soon = || {
            let scale = 10u64.pow(rng.u32(4..10));
            rng.u64(..scale)
        };
        let (local_delay, remote_delay, duration) = (soon(), soon(), soon() * 2);
        let fault = match (kind, rng.u8(..3)) {
            (Kind::Links, 0) => Fault::WorkFails {
                node,
                rail,
                link_index,
                work_index: rng.u32(..),
                link_down_after: local_delay,
            },
            (Kind::Links, 1) => {
                Fault::LinkLost { node, rail, link_index, local_delay, remote_delay }
            }
            (Kind::Links, _) => Fault::Stall { node, rail, link_index, duration },
            (Kind::Cables, 0) => Fault::NicUp { node, rail },
            (Kind::Cables, _) => Fault::NicDown { node, rail, local_delay, remote_delay },
            _ => {
                let notice_after = rng.bool().then_some(local_delay);
                Fault::Partition {
                    isolated: rng.u64(..),
                    notice_after,
                    permanent: rng.bool(),
                    duration,
                }
            }
        };
        self.net.inject(&fault);
    }
}
