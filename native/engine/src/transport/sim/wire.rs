//! Events under way and their arrival times: latency, jitter, bandwidth, order and faults.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap, HashMap},
    sync::{
        atomic::{AtomicU64, Ordering::SeqCst},
        Arc,
    },
};

use slab::Slab;

use super::{
    free_schedule::FreeSchedule,
    land::Job,
    node::{ByName, LinkEnd, Nodes, Port},
    peer_mappings::PeerMappings,
    trace::Trace,
    SimConfig,
};
use crate::{
    api::EngineId,
    domain::{Caps, DomainError, LinkId, LinkName, Token},
};

/// An event of the simulation.
pub(crate) enum Event {
    /// A chunk of a work request arrives at the peer; for a read, at the memory to read.
    Land {
        job: Arc<Job>,
        chunk: usize,
    },
    /// A chunk that was read arrives at the reader.
    Fetched {
        job: Arc<Job>,
        chunk: usize,
    },
    /// The sender of a work request is notified.
    Done {
        to: LinkEnd,
        token: Token,
        result: Result<(), DomainError>,
    },
    Message {
        from: LinkEnd,
        to: LinkEnd,
        token: Token,
        number: u64,
        message: Arc<[u8]>,
    },
    GroupFrame {
        to: LinkEnd,
        frame: Vec<u8>,
    },
    Connect {
        from: Port,
        to: Port,
        link: LinkId,
    },
    /// One end learns that its link is lost.
    Cut {
        at: LinkEnd,
        cause: DomainError,
    },
    /// One work request fails, and its link some time later.
    WorkFails {
        at: LinkEnd,
        work_index: u32,
    },
}

/// Sender, receiver and link of a delivery. Events within one node have no route.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub from: Port,
    pub to: Port,
    pub name: LinkName,
}

pub(crate) struct ScheduledEvent {
    pub at: u64,
    order: u64,
    route: Option<Route>,
    bytes: usize,
    /// Whether the receiving NIC has accepted it.
    is_in: bool,
    pub event: Event,
}

/// Time of an event in `World::scheduled`. The heap moves its entries, so they are small.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct EventTime {
    at: u64,
    order: u64,
    place: usize,
}

/// One direction of a link.
#[derive(Default)]
struct LinkDirection {
    sent_at: u64,
    /// Lower bounds for arrivals on an ordered link, and for group frames of any link.
    last: u64,
    last_group_frame: u64,
}

/// Two parts of the network that can't communicate.
pub(crate) struct Partition {
    pub one_side: Vec<EngineId>,
    pub until: u64,
}

pub(crate) struct World {
    pub config: SimConfig,
    pub nodes: Nodes,
    pub rng: fastrand::Rng,
    pub stalls: HashMap<LinkName, u64>,
    pub partitions: Vec<Partition>,
    /// Number of frames between groups that have arrived.
    pub group_frames: u64,
    pub trace: Option<Trace>,
    /// Engines that have something to process.
    pub stirred: BTreeSet<EngineId>,
    /// The events under way if nothing has a time.
    pub free: Option<FreeSchedule>,
    pub peer_mappings: PeerMappings,
    scheduled: Slab<ScheduledEvent>,
    events: BinaryHeap<Reverse<EventTime>>,
    directions: HashMap<(LinkName, Port), LinkDirection, ByName>,
    order: u64,
    digest: u64,
    clock: Arc<AtomicU64>,
}

impl World {
    pub fn new(config: SimConfig, clock: Arc<AtomicU64>) -> Self {
        Self {
            rng: fastrand::Rng::with_seed(config.seed),
            free: config.free.then(FreeSchedule::default),
            config,
            nodes: Nodes::default(),
            stalls: HashMap::new(),
            partitions: Vec::new(),
            group_frames: 0,
            trace: None,
            stirred: BTreeSet::new(),
            peer_mappings: PeerMappings::default(),
            scheduled: Slab::new(),
            events: BinaryHeap::new(),
            directions: HashMap::default(),
            order: 0,
            digest: 0,
            clock,
        }
    }

    pub fn now(&self) -> u64 {
        self.clock.load(SeqCst)
    }

    pub fn caps(&self) -> Caps {
        let SimConfig { max_bytes, max_pages, max_message, .. } = self.config;
        Caps { max_bytes, max_pages, max_message }
    }

    /// A number that two runs share only if the same events happened at the same times.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    pub fn delay(&mut self) -> u64 {
        match self.free {
            Some(_) => 0,
            None => self.rng.u64(self.config.delay.clone()),
        }
    }

    /// Schedules an event at one node after a time, independent of the network.
    pub fn after(&mut self, time: u64, event: Event) {
        let at = self.now() + time;
        self.push(at, None, 0, event);
    }

    fn push(&mut self, at: u64, route: Option<Route>, bytes: usize, event: Event) {
        if let Some(free) = &mut self.free {
            let by = route.map_or(event.at().engine, |w| w.from.engine);
            return free.add(by, route, event);
        }
        self.order += 1;
        let scheduled = ScheduledEvent { at, order: self.order, route, bytes, is_in: false, event };
        // A connect fails at an unplugged NIC; other events wait until it is plugged in.
        let waits = !matches!(scheduled.event, Event::Connect { .. });
        let unplugged = |w: &Route| self.nodes.get(&w.from).is_some_and(|n| n.unplugged);
        match route.filter(|w| waits && unplugged(w)) {
            Some(route) => {
                if let Some(node) = self.nodes.get_mut(&route.from) {
                    node.parked.push(scheduled);
                }
            }
            None => self.schedule(scheduled),
        }
    }

    fn schedule(&mut self, scheduled: ScheduledEvent) {
        let (at, order) = (scheduled.at, scheduled.order);
        let place = self.scheduled.insert(scheduled);
        self.events.push(Reverse(EventTime { at, order, place }));
    }

    /// Sends something over the network.
    pub fn send(&mut self, route: Route, bytes: usize, event: Event) {
        let now = self.now();
        let delay = self.delay();
        let rate = self.nodes.get(&route.from).and_then(|n| n.rate);
        let direction = self.directions.entry((route.name, route.from)).or_default();
        let mut sent = now;
        if let Some(rate) = rate.filter(|_| bytes > 0) {
            if let Some(node) = self.nodes.get_mut(&route.from) {
                node.sent_at = node.sent_at.max(now) + time(bytes, rate);
                sent = sent.max(node.sent_at);
            }
        }
        if let Some(rate) = self.config.link_rate.filter(|_| bytes > 0) {
            direction.sent_at = direction.sent_at.max(now) + time(bytes, rate);
            sent = sent.max(direction.sent_at);
        }
        let mut at = sent + delay;
        if self.config.ordered {
            at = at.max(direction.last);
            direction.last = at;
        }
        if matches!(event, Event::GroupFrame { .. }) {
            at = at.max(direction.last_group_frame);
            direction.last_group_frame = at;
        }
        self.push(at, Some(route), bytes, event);
    }

    /// Time of the next event.
    pub fn next(&self) -> Option<u64> {
        self.events.peek().map(|Reverse(due)| due.at)
    }

    /// The next event; `None` if it is delayed.
    pub fn pop(&mut self) -> Option<Event> {
        let Reverse(due) = self.events.pop()?;
        let mut next = self.scheduled.remove(due.place);
        self.clock.fetch_max(next.at, SeqCst);
        let Some(route) = next.route else {
            self.record(&next);
            return Some(next.event);
        };
        if !matches!(next.event, Event::Connect { .. }) {
            if let Some(node) = self.nodes.get_mut(&route.to).filter(|n| n.unplugged) {
                node.parked.push(next);
                return None;
            }
        }
        let free_at = self.blocked(route);
        if free_at > next.at {
            // Ordered deliveries keep their order among those that wait.
            let jitter = match self.config.ordered || matches!(next.event, Event::GroupFrame { .. })
            {
                true => 0,
                false => self.delay(),
            };
            next.at = free_at + jitter;
            self.schedule(next);
            return None;
        }
        if let Some(node) = self.nodes.get_mut(&route.to).filter(|_| !next.is_in) {
            if let Some(rate) = node.rate {
                // Deliveries without bytes too, or they would overtake.
                node.in_at = node.in_at.max(next.at) + time(next.bytes, rate);
                (next.at, next.is_in) = (node.in_at, true);
                self.schedule(next);
                return None;
            }
        }
        self.record(&next);
        Some(next.event)
    }

    fn record(&mut self, happened: &ScheduledEvent) {
        let rail = happened.route.map_or(0, |w| u64::from(w.to.rail) + 1);
        for word in [happened.at, happened.order, rail] {
            self.digest = (self.digest.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }

    /// Time until which nothing gets through.
    pub fn blocked(&self, route: Route) -> u64 {
        let stall = self.stalls.get(&route.name).copied().unwrap_or(0);
        let apart = |p: &&Partition| {
            p.one_side.contains(&route.from.engine) != p.one_side.contains(&route.to.engine)
        };
        let until = self.partitions.iter().filter(apart).map(|p| p.until);
        until.fold(stall, u64::max)
    }

    /// Plugs a NIC in, and schedules what waited for it.
    pub fn unpark(&mut self, port: Port) {
        let Some(node) = self.nodes.get_mut(&port) else { return };
        node.unplugged = false;
        let parked = std::mem::take(&mut node.parked);
        for mut scheduled in parked {
            scheduled.at = scheduled.at.max(self.now());
            self.schedule(scheduled);
        }
    }

    pub fn apply_event(&mut self, event: Event) {
        self.stirred.insert(event.at().engine);
        if let Event::Connect { from, .. } = event {
            self.stirred.insert(from.engine);
        }
        match event {
            Event::Land { job, chunk } => self.land(&job, chunk),
            Event::Fetched { job, chunk } => self.fetched(&job, chunk),
            Event::Done { to, token, result } => {
                if let Some(node) = self.nodes.get_mut(&to.0) {
                    node.complete(to.1, token, result);
                }
            }
            Event::Message { from, to, token, number, message } => {
                self.deliver_message((from, to), (token, number), message)
            }
            Event::GroupFrame { to, frame } => self.deliver_group_frame(to, frame),
            Event::Connect { from, to, link } => self.link_up(from, to, link),
            Event::Cut { at, cause } => self.cut(at, &cause),
            Event::WorkFails { at, work_index } => self.work_fails(at, work_index),
        }
    }
}

/// Time that so many bytes take.
fn time(bytes: usize, rate: f64) -> u64 {
    (bytes as f64 / rate).ceil() as u64
}
