//! Executes the commands of one thread's FIFOs through an engine of its own. It has no thread and
//! no clock: a thread of a [`Proxy`](crate::Proxy) or a simulation calls [`Executor::step`].
//!
//! Executors of one rank share only the atomic words and the ranks' liveness. Each has its own
//! engine: an engine has one lock, and two threads on one engine would pass each other their
//! requests.

mod arrivals;
mod commands;
mod losses;

use std::{collections::HashMap, sync::Arc, time::Duration};

use fabric_engine::{
    api::Priority, Handle, Op, Quiescence, Region, Result as EngineResult, Submit, Time,
    TransferEngine,
};

use crate::{
    barrier::BarrierRounds,
    command::{Scope, CHANNELS},
    config::Config,
    descriptor::ThreadDescriptor,
    fifo::Popper,
    inbox::{Inbox, MembershipChange},
    liveness::Liveness,
    order::ENTRY,
    peer::{Peer, PostedRequest, RankState},
    raw::AtomicWords,
    symmetric::SymmetricMemory,
    tag::EPOCHS,
    Parker, ProxyError, Result,
};
use commands::PlannedCommand;

/// Events that an executor reports.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A rank has joined this one: it takes what this one sends, and nothing of an earlier
    /// incarnation of this one. Each thread reports it.
    Joined { rank: usize, incarnation: u32 },
    /// A rank has masked this one: it goes on without it. Each thread reports it.
    Masked { rank: usize, incarnation: u32 },
    /// A rank is lost. Commands to it complete at once, and all threads have applied what is known
    /// to have arrived from it. Reported once per incarnation.
    Lost { rank: usize, incarnation: u32, error: ProxyError },
    /// The engine of a lost rank is gone: nothing of that incarnation can reach this thread any
    /// more. Each thread reports it; the incarnation is over when all have.
    Gone { rank: usize, incarnation: u32 },
    /// A command that can't be executed. It is completed without sending anything.
    Refused { fifo: usize, index: u64, error: ProxyError },
}

pub type OnEvent = Arc<dyn Fn(Event) + Send + Sync>;

/// State that all executors of a rank share.
#[derive(Clone, Debug)]
pub struct SharedState {
    pub words: AtomicWords,
    pub alive: Arc<Liveness>,
}

impl SharedState {
    pub fn new(config: &Config) -> Self {
        let words = AtomicWords::allocate(config.words);
        Self { words, alive: Arc::new(Liveness::new(config.ranks, config.threads)) }
    }
}

/// A FIFO and the state of its oldest command.
#[derive(Debug)]
struct CommandSource {
    popper: Popper,
    /// Commands of the FIFO that are in flight.
    outstanding: u32,
    /// The oldest command could not be executed in the last step.
    blocked: bool,
    /// The round of the barrier that the FIFO has entered, and the time of entry.
    barrier: Option<(u64, Time)>,
}

pub struct Executor {
    engine: Arc<TransferEngine>,
    config: Config,
    common: SharedState,
    memory: SymmetricMemory,
    part: Region,
    /// Receives atomics of peers, then holds atomics to be sent; by rank, channel and epoch.
    control: Region,
    peers: Vec<Peer>,
    /// Ranks with requests in flight.
    active: Vec<usize>,
    sources: Vec<CommandSource>,
    rounds: HashMap<(Scope, u8), BarrierRounds>,
    inbox: Arc<Inbox>,
    on_event: OnEvent,
    /// Value of `common.alive.changes()` at the last check.
    changes: u64,
    /// Reused allocations.
    tags: Vec<(u32, u32)>,
    plan: Vec<PlannedCommand>,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Executor(rank {} of {})", self.config.rank, self.config.ranks)
    }
}

/// Changes the membership of an executor from other threads.
#[derive(Clone, Debug)]
pub struct Membership(Arc<Inbox>);

impl Membership {
    /// A rank has joined, or joined again with a later incarnation.
    pub fn join(&self, rank: usize, incarnation: u32, descriptor: ThreadDescriptor) {
        self.0.push(MembershipChange::Join { rank, incarnation, descriptor: Box::new(descriptor) });
    }

    /// A rank is excluded.
    pub fn mask(&self, rank: usize) {
        self.0.push(MembershipChange::Mask { rank });
    }
}

/// Bytes of the atomics of all channels with one rank.
const RING: u64 = CHANNELS as u64 * EPOCHS * ENTRY;

impl Executor {
    /// `part` is this rank's part of symmetric memory, registered with this engine. The pushers of
    /// `poppers` wake the caller through the parker.
    ///
    /// # Errors
    /// See [`Config::check`]; the engine's error when it can't register memory.
    pub fn new(
        engine: Arc<TransferEngine>,
        part: Region,
        config: &Config,
        common: SharedState,
        (parker, poppers): (Arc<Parker>, Vec<Popper>),
        on_event: OnEvent,
    ) -> Result<Self> {
        config.check()?;
        let control = engine.alloc(2 * RING * config.ranks as u64)?;
        let inbox = Arc::new(Inbox::new(parker));
        let tag_inbox = Arc::clone(&inbox);
        engine.take_tags(move |value, n| tag_inbox.tag(value, n))?;
        let source =
            |popper| CommandSource { popper, outstanding: 0, blocked: false, barrier: None };
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

    /// The descriptor for executors with the same number on other ranks.
    pub fn descriptor(&self) -> ThreadDescriptor {
        let control = self.control.descriptor();
        ThreadDescriptor { memory: self.part.descriptor(), control }
    }

    pub fn membership(&self) -> Membership {
        Membership(Arc::clone(&self.inbox))
    }

    /// One round: applies arrivals, executes commands and drops peers that exceed their timeout.
    /// Returns whether it did anything.
    pub fn step(&mut self, now: Time) -> bool {
        let _ = self.engine.poll();
        let mut moved = self.take_arrivals(now);
        moved |= self.collect();
        moved |= self.follow_masks(now);
        for fifo in 0..self.sources.len() {
            moved |= self.run_fifo(fifo, now);
        }
        moved
    }

    /// Whether a step has new input, as far as this executor can see.
    pub fn has_work(&self) -> bool {
        !self.inbox.is_empty()
            || self.sources.iter().any(|s| !s.blocked && s.popper.poll(0).is_some())
    }

    /// Call before sleeping. Arranges that completions wake the sleeper, and returns the longest
    /// sleep.
    pub fn prepare_sleep(&mut self) -> Duration {
        let waits = self.sources.iter().any(|s| s.blocked);
        if waits {
            for rank in &self.active {
                let front = self.peers[*rank].posted.front_mut().filter(|p| !p.wakes);
                if let Some(posted) = front {
                    posted.wakes = true;
                    posted.handle.on_done_notify(self.inbox.clone(), 0);
                }
            }
        }
        match waits || !self.active.is_empty() {
            // Timeouts, and completed but not quiesced requests, are polled.
            true => self.config.nap.min(Duration::from_millis(1)),
            false => self.config.nap,
        }
    }

    /// Commands in flight.
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

    /// Stores a request until it has ended.
    fn track(&mut self, rank: usize, posted: PostedRequest) {
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

    /// Removes requests that have ended.
    fn collect(&mut self) -> bool {
        let mut moved = false;
        let mut i = 0;
        while i < self.active.len() {
            let rank = self.active[i];
            let mut failed = None;
            let peer = &mut self.peers[rank];
            while let Some(posted) = peer.posted.front().filter(|p| p.handle.is_done()) {
                match (posted.handle.poll(), posted.handle.quiescence()) {
                    (Some(Err(error)), _) => failed = Some(ProxyError::Engine(error)),
                    (_, Quiescence::Unknown) => failed = Some(ProxyError::NotQuiesced { rank }),
                    (_, Quiescence::InFlight) => break,
                    (_, Quiescence::Quiesced) => {
                        let posted = peer.posted.pop_front().expect("there is a front");
                        peer.ended += 1;
                        peer.outstanding -= posted.commands;
                        peer.waiting_since = None;
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
                // Removes the rank from `active`.
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

    /// The other ranks of a scope that take part.
    fn participants(&self, scope: Scope) -> impl Iterator<Item = usize> + '_ {
        let (own, per_node) = (self.config.rank, self.config.per_node);
        let there = self.peers.iter().enumerate().filter(|(_, p)| p.state == RankState::Alive);
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

/// Byte offset of an atomic in a ring, by rank, channel and epoch.
fn control_offset(rank: usize, channel: u8, epoch: u8) -> u64 {
    ((rank as u64 * CHANNELS as u64 + u64::from(channel)) * EPOCHS + u64::from(epoch)) * ENTRY
}
