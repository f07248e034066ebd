//! Carries out the commands of one thread's FIFOs by an engine of its own. It has no thread and no clock: whoever
//! drives it calls [`Executor::step`], a thread of a [`Proxy`](crate::Proxy) or a simulation.
//!
//! Nothing is shared with the executors of other threads but the atomic words and who is alive. Each has an engine of
//! its own, for an engine has one lock: two threads that post through one would hand each other their requests.

mod arrivals;
mod commands;
mod losses;

use std::{collections::HashMap, sync::Arc, time::Duration};

use fabric_engine::{
    api::Priority, Handle, Op, Quiet, Region, Result as EngineResult, Submit, Time, TransferEngine,
};

use crate::{
    alive::Alive,
    command::{Scope, CHANNELS},
    config::Config,
    descriptor::ThreadDescriptor,
    fifo::Popper,
    inbox::{Inbox, News},
    order::ENTRY,
    peer::{Peer, Posted, State},
    raw::AtomicWords,
    rounds::Rounds,
    symmetric::SymmetricMemory,
    tag::EPOCHS,
    Bed, ProxyError, Result,
};
use commands::Planned;

/// What an executor has to say.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A rank is lost: commands to it are over at once from now on, and all threads have taken in what it sent before,
    /// as far as it knew that to have arrived. Told once for each life of it.
    Lost { rank: usize, incarnation: u32, error: ProxyError },
    /// The engine of a rank that was given up is gone: nothing of that life can come to this thread any more. Each thread
    /// tells it of the engine that it writes to; the life is over when all have.
    Gone { rank: usize, incarnation: u32 },
    /// A command that can't be carried out. It is completed, and nothing was sent.
    Refused { fifo: usize, index: u64, error: ProxyError },
}

pub type OnEvent = Arc<dyn Fn(Event) + Send + Sync>;

/// What all executors of a rank share.
#[derive(Clone, Debug)]
pub struct Common {
    pub words: AtomicWords,
    pub alive: Arc<Alive>,
}

impl Common {
    pub fn new(config: &Config) -> Self {
        let words = AtomicWords::allocate(config.words);
        Self { words, alive: Arc::new(Alive::new(config.ranks, config.threads)) }
    }
}

/// A FIFO and what its oldest command waits for.
#[derive(Debug)]
struct Source {
    popper: Popper,
    /// Commands of it whose bytes are under way.
    outstanding: u32,
    /// The oldest command could not be carried out in the last step.
    blocked: bool,
    /// The round of the barrier that it has entered, and when.
    barrier: Option<(u64, Time)>,
}

pub struct Executor {
    engine: Arc<TransferEngine>,
    config: Config,
    common: Common,
    memory: SymmetricMemory,
    part: Region,
    /// Where peers put atomics, then where those to be sent lie; by rank, channel and epoch.
    control: Region,
    peers: Vec<Peer>,
    /// Ranks to which something is under way.
    active: Vec<usize>,
    sources: Vec<Source>,
    rounds: HashMap<(Scope, u8), Rounds>,
    inbox: Arc<Inbox>,
    on_event: OnEvent,
    /// When `common.alive` was last looked at.
    changes: u64,
    /// Kept for their memory.
    tags: Vec<(u32, u32)>,
    plan: Vec<Planned>,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Executor(rank {} of {})", self.config.rank, self.config.ranks)
    }
}

/// Tells an executor which ranks are there, from other threads.
#[derive(Clone, Debug)]
pub struct Membership(Arc<Inbox>);

impl Membership {
    /// A rank is there, or there again: in a later life.
    pub fn join(&self, rank: usize, incarnation: u32, descriptor: ThreadDescriptor) {
        self.0.news(News::Join { rank, incarnation, descriptor: Box::new(descriptor) });
    }

    /// A rank is given up.
    pub fn mask(&self, rank: usize) {
        self.0.news(News::Mask { rank });
    }
}

/// Bytes of the atomics of all channels with one rank.
const RING: u64 = CHANNELS as u64 * EPOCHS * ENTRY;

impl Executor {
    /// `part` is this rank's part of symmetric memory, of this engine, whose address nobody has been told yet. `bed` is
    /// where the pushers of `poppers` wake the caller.
    ///
    /// # Errors
    /// See [`Config::check`]; what the engine says to one more region.
    pub fn new(
        engine: Arc<TransferEngine>,
        part: Region,
        config: &Config,
        common: Common,
        (bed, poppers): (Arc<Bed>, Vec<Popper>),
        on_event: OnEvent,
    ) -> Result<Self> {
        config.check()?;
        let control = engine.alloc(2 * RING * config.ranks as u64)?;
        let inbox = Arc::new(Inbox::new(bed));
        let theirs = Arc::clone(&inbox);
        engine.take_tags(move |value, n| theirs.tag(value, n))?;
        let source = |popper| Source { popper, outstanding: 0, blocked: false, barrier: None };
        Ok(Self {
            memory: SymmetricMemory::new(part.clone(), config.rank, config.ranks)?,
            part,
            control,
            peers: (0..config.ranks).map(|_| Peer::default()).collect(),
            active: Vec::new(),
            sources: poppers.into_iter().map(source).collect(),
            rounds: HashMap::new(),
            inbox,
            on_event,
            changes: 0,
            tags: Vec::new(),
            plan: Vec::new(),
            config: config.clone(),
            engine,
            common,
        })
    }

    /// What the peers' executors with the same number need.
    pub fn descriptor(&self) -> ThreadDescriptor {
        let control = self.control.descriptor();
        ThreadDescriptor { memory: self.part.descriptor(), control }
    }

    pub fn membership(&self) -> Membership {
        Membership(Arc::clone(&self.inbox))
    }

    /// One round: takes in what has arrived, carries out what can be, gives up what takes too long. True if
    /// anything was done.
    pub fn step(&mut self, now: Time) -> bool {
        let _ = self.engine.poll();
        let mut moved = self.take_arrivals(now);
        moved |= self.collect();
        moved |= self.follow_masks(now);
        for fifo in 0..self.sources.len() {
            moved |= self.run(fifo, now);
        }
        moved
    }

    /// Whether a step could do something that the last one couldn't, as far as this executor can see.
    pub fn has_news(&self) -> bool {
        !self.inbox.is_empty()
            || self.sources.iter().any(|s| !s.blocked && s.popper.poll(0).is_some())
    }

    /// To be called before sleeping: has the end of what commands wait for wake the sleeper. How long it may sleep.
    pub fn prepare_sleep(&mut self) -> Duration {
        let waits = self.sources.iter().any(|s| s.blocked);
        if waits {
            for rank in &self.active {
                let front = self.peers[*rank].posted.front_mut().filter(|p| !p.told);
                if let Some(posted) = front {
                    posted.told = true;
                    posted.handle.on_done_notify(self.inbox.clone(), 0);
                }
            }
        }
        match waits || !self.active.is_empty() {
            // Deadlines, and what is done but not quiet, are looked at meanwhile.
            true => self.config.nap.min(Duration::from_millis(1)),
            false => self.config.nap,
        }
    }

    /// Commands whose bytes are under way.
    pub fn outstanding(&self) -> usize {
        self.peers.iter().map(|p| p.outstanding as usize).sum()
    }

    fn post(&self, ops: &[Op<'_>]) -> EngineResult<Handle> {
        let options = Submit {
            timeout: Some(self.config.deadline),
            priority: Some(Priority::Latency),
            ..Submit::default()
        };
        self.engine.submit(ops, options)
    }

    /// Keeps a request until it is over.
    fn keep(&mut self, rank: usize, posted: Posted) {
        let peer = &mut self.peers[rank];
        if let Some(fifo) = posted.fifo {
            self.sources[fifo].outstanding += posted.commands;
        }
        peer.outstanding += posted.commands;
        if peer.posted.is_empty() {
            self.active.push(rank);
        }
        peer.posted.push_back(posted);
    }

    /// Lets go of requests that are over.
    fn collect(&mut self) -> bool {
        let mut moved = false;
        let mut i = 0;
        while i < self.active.len() {
            let rank = self.active[i];
            let mut failed = None;
            let peer = &mut self.peers[rank];
            while let Some(posted) = peer.posted.front().filter(|p| p.handle.is_done()) {
                match (posted.handle.poll(), posted.handle.quiet()) {
                    (Some(Err(error)), _) => failed = Some(ProxyError::Engine(error)),
                    (_, Quiet::Unknown) => failed = Some(ProxyError::NotQuiet { rank }),
                    (_, Quiet::NotYet) => break,
                    (_, Quiet::Quiet) => {
                        let posted = peer.posted.pop_front().expect("there is a front");
                        peer.over += 1;
                        peer.outstanding -= posted.commands;
                        peer.waits_since = None;
                        if let Some(fifo) = posted.fifo {
                            self.sources[fifo].outstanding -= posted.commands;
                        }
                        moved = true;
                        continue;
                    }
                }
                if failed.is_some() {
                    break;
                }
            }
            if let Some(error) = failed {
                // Takes it off the list.
                self.lose(rank, error);
                moved = true;
                continue;
            }
            match self.peers[rank].posted.is_empty() {
                true => drop(self.active.swap_remove(i)),
                false => i += 1,
            }
        }
        moved
    }

    /// Ranks of a scope that take part, without this one.
    fn participants(&self, scope: Scope) -> impl Iterator<Item = usize> + '_ {
        let (own, per_node) = (self.config.rank, self.config.per_node);
        let there = self.peers.iter().enumerate().filter(|(_, p)| p.state == State::Alive);
        there
            .map(|(rank, _)| rank)
            .filter(move |r| *r != own && (scope == Scope::All || r % per_node == own % per_node))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

/// Where the atomic of a rank's channel and epoch lies in a ring, bytes.
fn place(rank: usize, channel: u8, epoch: u8) -> u64 {
    ((rank as u64 * CHANNELS as u64 + u64::from(channel)) * EPOCHS + u64::from(epoch)) * ENTRY
}
