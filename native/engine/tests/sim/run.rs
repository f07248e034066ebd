//! Runs a case, and checks after every step.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use fabric_engine::{
    api::{EngineConfig, Imm},
    locks::Mutex,
    simulation::SimNet,
    transport::sim::Fault,
    Time, TransferEngine,
};

use crate::{
    case::{Case, Ns, COUNTERS, MS, PLAIN},
    check::{broken, Checked, Count, Transfer, Violation, Wait},
    memory::Memory,
};

/// Deadline of operations without their own.
pub const OP_TIMEOUT: Ns = 60_000 * MS;
/// Time after which nothing is under way.
const QUIET: Ns = 50 * MS;
/// Time after the last fault by which every operation with a live peer ends, beside the peer
/// timeout.
const BOUND: Ns = 300 * MS;

/// To make them takes asking the system for the number of cores.
static DEFAULTS: LazyLock<EngineConfig> = LazyLock::new(EngineConfig::default);

/// One incarnation of a node.
pub struct Incarnation {
    /// `None` once it has crashed or was closed.
    pub engine: Option<Arc<TransferEngine>>,
    pub ended: Option<Ns>,
    pub address: fabric_engine::api::EngineAddress,
    pub memory: Memory,
    /// The index of the current generation of each of its counters.
    pub counts: [usize; COUNTERS as usize],
}

/// The result of a run without a violation.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    pub digest: u64,
    pub succeeded: u32,
    pub failed: u32,
    pub met: u32,
    pub unmet: u32,
    /// Frames between groups, which healing sends.
    pub group_frames: u64,
}

pub struct Run<'a> {
    pub case: &'a Case,
    pub net: SimNet,
    pub incarnations: Vec<Incarnation>,
    /// The current incarnation of each node.
    pub nodes: Vec<usize>,
    pub counts: Vec<Count>,
    pub transfers: Vec<Transfer>,
    pub waits: Vec<Wait>,
    /// How often each message was delivered, and the incarnation that it was sent to.
    pub messages: Arc<Mutex<Vec<u32>>>,
    pub sent_to: Vec<usize>,
    pub next_id: u64,
    pub outcome: Outcome,
    /// No operation may fail; see `Case::has_spare`.
    pub must_succeed: bool,
    /// Messages are not sent again, because their sender can't know whether they were taken.
    pub messages_may_fail: bool,
}

pub fn run(case: &Case) -> Result<Outcome, Violation> {
    let mut run = Run::new(case);
    run.go()?;
    let (digest, group_frames) = (run.net.digest(), run.net.group_frames());
    Ok(Outcome { digest, group_frames, ..run.outcome })
}

impl<'a> Run<'a> {
    fn new(case: &'a Case) -> Self {
        let mut run = Self::on(case, SimNet::new(case.shape.config(case.seed)));
        if case.shape.connected {
            run.connect_all();
        }
        run
    }

    /// A run on the given network.
    pub fn on(case: &'a Case, net: SimNet) -> Self {
        let mut run = Self {
            case,
            net,
            incarnations: Vec::new(),
            nodes: Vec::new(),
            counts: Vec::new(),
            transfers: Vec::new(),
            waits: Vec::new(),
            messages: Arc::default(),
            sent_to: Vec::new(),
            next_id: case.seed << 16,
            outcome: Outcome::default(),
            must_succeed: case.has_spare(),
            messages_may_fail: !case.faults.is_empty(),
        };
        for node in 0..case.shape.rails.len() {
            let config = run.config();
            let engine = run.net.engine_with_rails(config, case.shape.rails[node]).unwrap();
            let incarnation = run.begin(engine);
            run.nodes.push(incarnation);
        }
        run
    }

    fn config(&self) -> EngineConfig {
        EngineConfig {
            name: format!("life {}", self.incarnations.len()),
            op_timeout: Duration::from_nanos(OP_TIMEOUT),
            peer_timeout: Duration::from_nanos(self.case.shape.peer_timeout),
            ..DEFAULTS.clone()
        }
    }

    pub fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn begin(&mut self, engine: Arc<TransferEngine>) -> usize {
        let id = self.id();
        let memory = Memory::new(&engine, id);
        let incarnation = self.incarnations.len();
        let messages = Arc::clone(&self.messages);
        let on_message = move |d: fabric_engine::Delivery| {
            let id: [u8; 8] = d.message()[..8].try_into().unwrap();
            let mut messages = messages.lock();
            if let Some(n) = messages.get_mut(u64::from_le_bytes(id) as usize) {
                *n += 1;
            }
        };
        engine.receive(4096, 4, on_message).unwrap();
        let counts = std::array::from_fn(|i| {
            let counter = match i as u8 == PLAIN {
                true => engine.plain_counter(plain()),
                false => engine.counter().unwrap(),
            };
            self.counts.push(Count::new(incarnation, counter));
            self.counts.len() - 1
        });
        let address = engine.address().clone();
        self.incarnations.push(Incarnation {
            engine: Some(engine),
            ended: None,
            address,
            memory,
            counts,
        });
        incarnation
    }

    fn connect_all(&mut self) {
        (0..self.incarnations.len()).for_each(|from| self.connect_from(from));
        while self.net.step_until(Time(MS)) {}
        self.net.advance(Time(MS));
    }

    /// Connects one incarnation to all others.
    pub fn connect_from(&self, from: usize) {
        let Some(engine) = &self.incarnations[from].engine else { return };
        for other in self.incarnations.iter().filter(|o| o.address.id != engine.id()) {
            let peer = engine.peer(&other.address).unwrap();
            engine.connect(&peer).unwrap();
        }
    }

    /// Ends the current incarnation of a node.
    pub fn end(&mut self, node: u8) {
        let incarnation = self.nodes[usize::from(node)];
        // Its regions and counters stay for the checks.
        self.incarnations[incarnation].engine = None;
        self.incarnations[incarnation].ended.get_or_insert(self.net.now().0);
    }

    pub fn restart(&mut self, node: u8) {
        self.end(node);
        let config = self.config();
        let rails = self.case.shape.rails[usize::from(node)];
        let engine = self.net.restart(usize::from(node), config, rails).unwrap();
        let incarnation = self.begin(engine);
        self.nodes[usize::from(node)] = incarnation;
    }

    fn go(&mut self) -> Checked {
        let start = self.net.now().0;
        let (mut work, mut faults) = (self.case.work.iter(), self.case.faults.iter());
        let (mut step, mut fault) = (work.next(), faults.next());
        loop {
            let times = [step.map(|s| s.0), fault.map(|f| f.0)];
            let Some(next) = times.into_iter().flatten().min() else { break };
            self.until(start + next)?;
            if let Some((_, what)) = step.filter(|s| s.0 == next) {
                self.step(what)?;
                step = work.next();
            } else if let Some((_, what)) = fault {
                self.net.inject(what);
                if let Fault::Crash { node, .. } = what {
                    self.end(*node);
                }
                fault = faults.next();
            }
            self.check()?;
        }
        // The longest duration of a fault.
        self.until(self.net.now().0 + 20 * MS)?;
        self.net.plug_all();
        let bound = self.net.now().0 + BOUND + 4 * self.case.shape.peer_timeout;
        while self.is_busy() {
            if self.net.now().0 > bound {
                return broken("RS-4", bound, format!("no result: {:?}", self.still()));
            }
            if !self.net.step_until(Time(bound + 1)) {
                return broken("IC-4", self.net.now().0, format!("never ends: {:?}", self.still()));
            }
            self.check()?;
        }
        self.until(self.net.now().0 + QUIET)?;
        self.check_end()
    }

    /// Runs all events until then.
    fn until(&mut self, at: Ns) -> Checked {
        while self.net.step_until(Time(at)) {
            self.check()?;
        }
        self.net.advance(Time(at));
        Ok(())
    }

    pub fn is_busy(&self) -> bool {
        self.transfers.iter().any(|t| !t.over) || self.waits.iter().any(|w| !w.over)
    }

    pub fn still(&self) -> Vec<String> {
        let transfers =
            self.transfers.iter().filter(|t| !t.over).map(|t| format!("{:?}", t.handle));
        let waits = self.waits.iter().filter(|w| !w.over).map(|w| format!("{:?}", w.handle));
        transfers.chain(waits).collect()
    }
}

pub fn plain() -> Imm {
    Imm::plain(7).unwrap()
}
