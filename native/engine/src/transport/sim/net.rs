use std::{
    collections::{BinaryHeap, HashMap, VecDeque},
    ops::Range,
    sync::{
        atomic::{AtomicU64, Ordering::SeqCst},
        Arc, Weak,
    },
};

use parking_lot::Mutex;

use super::SimDomain;
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, RegionKey},
    domain::{Caps, Completion, Count, Domain, DomainError, LinkId, PeerIdentity, Receipt, Token},
    engine::{TransferEngine, Transports},
    memory::RegionBook,
    time::Time,
    transport::tally::Tally,
    Result,
};

/// What the simulated network is like. Times are virtual nanoseconds.
#[derive(Clone, Debug)]
pub struct SimConfig {
    pub seed: u64,
    /// Every delivery takes a time drawn from this range of its own: order is not kept.
    pub delay: Range<u64>,
    /// Bytes of one work request; small, so that writes are cut.
    pub max_bytes: u64,
    pub max_pages: u32,
    /// Work requests that a link takes at a time.
    pub window: usize,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self { seed: 0, delay: 500..50_000, max_bytes: 4096, max_pages: 4, window: 16 }
    }
}

/// One NIC of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Port {
    pub engine: EngineId,
    pub rail: u8,
}

/// Something that will happen.
pub(super) enum Event {
    /// A piece of a work request reaches its place.
    Land {
        job: Arc<Job>,
        piece: usize,
    },
    /// Tells one side something.
    Tell {
        port: Port,
        completion: Completion,
    },
    LinkUp {
        from: Port,
        to: Port,
        link: LinkId,
    },
    /// One end finds out that its link is lost.
    Cut {
        port: Port,
        link: LinkId,
        cause: String,
    },
}

/// A work request under way: its bytes were taken when it was posted.
pub(super) struct Job {
    pub from: (Port, LinkId),
    /// The peer's port, and its name for the link.
    pub to: (Port, LinkId),
    pub token: Token,
    pub key: RegionKey,
    /// Offset in the region and bytes. For a read, the bytes are filled when it lands.
    pub pieces: Vec<Piece>,
    /// Where a read's bytes go here.
    pub into: Option<Vec<usize>>,
    pub count: Option<Count>,
    pub left: Mutex<(usize, Option<DomainError>)>,
}

/// A message that waits for room: the link it came by, and whom to tell when it is taken.
pub(super) struct Held {
    pub link: LinkId,
    pub message: Arc<[u8]>,
    pub sender: (Port, LinkId),
    pub token: Token,
}

/// Where a piece goes in its region, and its bytes.
pub(super) type Piece = (u64, Mutex<Vec<u8>>);

struct Scheduled {
    at: u64,
    order: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    /// The earliest is the greatest.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// One end of a link that is up here.
pub(super) struct End {
    /// The peer's port, and its name for the link.
    pub there: (Port, LinkId),
    pub tally: Tally,
}

#[derive(Default)]
pub(super) struct Node {
    pub book: RegionBook,
    pub inbox: VecDeque<Completion>,
    pub address: Option<EngineAddress>,
    pub links: HashMap<LinkId, End>,
    /// Its cable is out.
    pub unplugged: bool,
    /// Work posted on each link and not completed.
    pub posted: HashMap<LinkId, Vec<Token>>,
    /// Work requests posted ever.
    pub posts: u64,
    /// Messages that found no room.
    pub held: VecDeque<Held>,
    next_link: LinkId,
}

impl Node {
    pub fn new_link(&mut self) -> LinkId {
        self.next_link += 1;
        self.next_link
    }
}

pub(super) struct World {
    pub config: SimConfig,
    pub nodes: HashMap<Port, Node>,
    events: BinaryHeap<Scheduled>,
    order: u64,
    rng: fastrand::Rng,
    clock: Arc<AtomicU64>,
}

impl World {
    pub fn now(&self) -> u64 {
        self.clock.load(SeqCst)
    }

    /// Has something happen after a delay of its own.
    pub fn later(&mut self, event: Event) {
        let at = self.now() + self.rng.u64(self.config.delay.clone());
        self.order += 1;
        self.events.push(Scheduled { at, order: self.order, event });
    }

    pub fn caps(&self) -> Caps {
        let SimConfig { max_bytes, max_pages, .. } = self.config;
        Caps { max_bytes, max_pages, max_message: 1 << 16 }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Tell { port, completion } => self.tell(port, completion),
            Event::LinkUp { from, to, link } => self.link_up(from, to, link),
            Event::Land { job, piece } => self.land(&job, piece),
            Event::Cut { port, link, cause } => self.cut(port, link, &cause),
        }
    }

    fn tell(&mut self, port: Port, completion: Completion) {
        let Some(node) = self.nodes.get_mut(&port) else { return };
        if let Completion::Done { link, token, .. } = &completion {
            // Already failed with its link: told once.
            let Some(posted) = node.posted.get_mut(link) else { return };
            let Some(at) = posted.iter().position(|t| t == token) else { return };
            posted.swap_remove(at);
        }
        node.inbox.push_back(completion);
    }

    fn link_up(&mut self, from: Port, to: Port, link: LinkId) {
        let address = |w: &Self, port| {
            let node: Option<&Node> = w.nodes.get(&port);
            node.filter(|n| !n.unplugged).and_then(|n| n.address.clone())
        };
        let (Some(ours), Some(theirs)) = (address(self, from), address(self, to)) else {
            let cause = DomainError::LinkDown("nobody answers at its address".into());
            let receipt = Receipt::Unknown;
            return self.tell(from, Completion::LinkDown { link, cause, receipt });
        };
        let note = || "simulated".to_owned();
        let name = self.rng.u64(1..);
        let end = |there| End { there, tally: Tally::default() };
        let Some(there) = self.nodes.get_mut(&to) else { return };
        let back = there.new_link();
        there.links.insert(back, end((from, link)));
        there.posted.insert(back, Vec::new());
        let peer = PeerIdentity { address: ours };
        there.inbox.push_back(Completion::LinkUp {
            link: back,
            peer,
            endpoint: from.rail.into(),
            name,
            note: note(),
        });
        let Some(here) = self.nodes.get_mut(&from) else { return };
        here.links.insert(link, end((to, back)));
        here.posted.insert(link, Vec::new());
        let peer = PeerIdentity { address: theirs };
        here.inbox.push_back(Completion::LinkUp {
            link,
            peer,
            endpoint: to.rail.into(),
            name,
            note: note(),
        });
    }

    /// One piece lands; the last one brings the count (IC-2) and the acknowledgement.
    fn land(&mut self, job: &Job, piece: usize) {
        // What is on its way lands as long as the receiver's end is up, whatever the sender's does.
        let (to, back) = job.to;
        let Some(target) = self.nodes.get(&to).filter(|n| n.links.contains_key(&back)) else {
            return;
        };
        let mut error = None;
        if let Some((offset, bytes)) = job.pieces.get(piece) {
            let mut bytes = bytes.lock();
            match target.book.resolve(job.key, *offset, bytes.len() as u64) {
                Err(e) => error = Some(e),
                Ok(addr) => {
                    let (ptr, n) = (addr as *mut u8, bytes.len());
                    // SAFETY: the book holds the region registered, and the range lies inside.
                    // Everything in a simulation runs on one thread.
                    unsafe {
                        match job.into {
                            None => std::ptr::copy_nonoverlapping(bytes.as_ptr(), ptr, n),
                            Some(_) => std::ptr::copy_nonoverlapping(ptr, bytes.as_mut_ptr(), n),
                        }
                    }
                }
            }
        }
        let mut left = job.left.lock();
        left.0 -= 1;
        if let Some(e) = error {
            left.1.get_or_insert(e);
        }
        if left.0 > 0 {
            return;
        }
        let result = left.1.take().map_or(Ok(()), Err);
        drop(left);
        if let (Ok(()), Some(count)) = (&result, job.count) {
            if let Some(node) = self.nodes.get_mut(&to) {
                if let Some(end) = node.links.get_mut(&back) {
                    end.tally.add(count);
                }
                node.inbox.push_back(Completion::Count(count));
            }
        }
        if let (Ok(()), Some(into)) = (&result, &job.into) {
            for ((_, bytes), addr) in job.pieces.iter().zip(into) {
                let bytes = bytes.lock();
                // SAFETY: the request keeps its local region registered until it is told.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), *addr as *mut u8, bytes.len());
                }
            }
        }
        let (port, link) = job.from;
        let completion = Completion::Done { link, token: job.token, result };
        self.later(Event::Tell { port, completion });
    }

    /// A port's life ends: its links go down at the other ends.
    pub fn die(&mut self, port: Port, cause: &str) {
        let Some(node) = self.nodes.remove(&port) else { return };
        for End { there: (peer, back), .. } in node.links.into_values() {
            self.cut(peer, back, cause);
        }
    }

    /// A cable is pulled: the links over it go down here at once, at their other ends some time later,
    /// and none comes up.
    pub fn unplug(&mut self, port: Port, cause: &str) {
        let Some(node) = self.nodes.get_mut(&port) else { return };
        node.unplugged = true;
        let links: Vec<_> = node.links.iter().map(|(ours, end)| (*ours, end.there)).collect();
        for (ours, (peer, back)) in links {
            self.cut(port, ours, cause);
            self.later(Event::Cut { port: peer, link: back, cause: cause.into() });
        }
    }

    /// Ends a link at one end: nothing lands there any more.
    pub fn cut(&mut self, port: Port, link: LinkId, cause: &str) {
        let Some(node) = self.nodes.get_mut(&port) else { return };
        let Some(end) = node.links.remove(&link) else { return };
        let cause = DomainError::LinkDown(cause.into());
        for token in node.posted.remove(&link).unwrap_or_default() {
            let result = Err(cause.clone());
            node.inbox.push_back(Completion::Done { link, token, result });
        }
        node.inbox.push_back(Completion::LinkDown { link, cause, receipt: end.tally.receipt() });
    }
}

/// A simulated network, its clock and the engines on it. Single-threaded by nature: everything
/// happens inside [`SimNet::step`].
pub struct SimNet {
    world: Arc<Mutex<World>>,
    clock: Arc<AtomicU64>,
    engines: Vec<Weak<TransferEngine>>,
    ids: fastrand::Rng,
}

impl std::fmt::Debug for SimNet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimNet(at {} ns)", self.clock.load(SeqCst))
    }
}

impl SimNet {
    pub fn new(config: SimConfig) -> Self {
        let clock = Arc::new(AtomicU64::new(0));
        let seed = config.seed;
        let world = World {
            config,
            nodes: HashMap::new(),
            events: BinaryHeap::new(),
            order: 0,
            rng: fastrand::Rng::with_seed(seed),
            clock: Arc::clone(&clock),
        };
        Self {
            world: Arc::new(Mutex::new(world)),
            clock,
            engines: Vec::new(),
            ids: fastrand::Rng::with_seed(!seed),
        }
    }

    /// An engine whose only transport is this network, over one NIC.
    pub fn engine(&mut self, config: EngineConfig) -> Result<Arc<TransferEngine>> {
        self.engine_with_rails(config, 1)
    }

    /// As `engine`, over several NICs.
    pub fn engine_with_rails(
        &mut self,
        config: EngineConfig,
        rails: u8,
    ) -> Result<Arc<TransferEngine>> {
        let id = EngineId(self.ids.u128(..).to_le_bytes());
        let mut domains: Vec<Box<dyn Domain>> = Vec::new();
        for rail in 0..rails {
            let port = Port { engine: id, rail };
            self.world.lock().nodes.insert(port, Node::default());
            domains.push(Box::new(SimDomain::new(port, Arc::clone(&self.world))));
        }
        let transports = Transports { id, domains, clock: Arc::clone(&self.clock) };
        let engine = Arc::new(TransferEngine::open_manual(config, transports)?);
        self.engines.push(Arc::downgrade(&engine));
        Ok(engine)
    }

    /// Ends a node's life as `kill -9` would: nothing is said, peers find out.
    pub fn kill(&mut self, engine: EngineId) {
        let mut world = self.world.lock();
        let ports: Vec<_> = world.nodes.keys().filter(|p| p.engine == engine).copied().collect();
        ports.into_iter().for_each(|p| world.die(p, "its process has ended"));
    }

    /// Pulls the cable of one NIC, or plugs it in again.
    pub fn plug(&mut self, engine: EngineId, rail: u8, plugged: bool) {
        let port = Port { engine, rail };
        let mut world = self.world.lock();
        if !plugged {
            return world.unplug(port, "its cable is out");
        }
        if let Some(node) = world.nodes.get_mut(&port) {
            node.unplugged = false;
        }
    }

    /// Work requests that a NIC has been given so far.
    pub fn posted(&self, engine: EngineId, rail: u8) -> u64 {
        self.world.lock().nodes.get(&Port { engine, rail }).map_or(0, |n| n.posts)
    }

    /// Virtual time.
    pub fn now(&self) -> Time {
        Time(self.clock.load(SeqCst))
    }

    /// Lets the next thing happen and all engines act on it; false if nothing will ever happen.
    pub fn step(&mut self) -> bool {
        self.step_until(Time::NEVER)
    }

    /// As `step`, but only if it happens by `limit`.
    pub fn step_until(&mut self, limit: Time) -> bool {
        // What users did since the last step comes before anything that takes time.
        if self.drive_all() {
            return true;
        }
        let next = {
            let mut world = self.world.lock();
            let timer = self.next_timer();
            match world.events.peek().map(|s| s.at) {
                Some(at) if at <= timer.0 && at <= limit.0 => world.events.pop(),
                _ if timer == Time::NEVER || timer > limit => None,
                _ => {
                    self.clock.fetch_max(timer.0, SeqCst);
                    drop(world);
                    self.drive_all();
                    return true;
                }
            }
        };
        let Some(Scheduled { at, event, .. }) = next else { return false };
        self.clock.fetch_max(at, SeqCst);
        self.world.lock().happen(event);
        self.drive_all();
        true
    }

    fn next_timer(&self) -> Time {
        let engines = self.engines.iter().filter_map(Weak::upgrade);
        engines.map(|e| e.next_timer()).fold(Time::NEVER, Time::min)
    }

    fn drive_all(&mut self) -> bool {
        self.engines.retain(|e| e.strong_count() > 0);
        let now = self.now();
        let engines: Vec<_> = self.engines.iter().filter_map(Weak::upgrade).collect();
        engines.iter().fold(false, |moved, e| e.drive(now) | moved)
    }
}
