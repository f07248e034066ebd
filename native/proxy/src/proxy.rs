//! The threads of a rank's proxy.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        Arc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use fabric_engine::{
    api::EngineConfig, locks::Mutex, EngineError, ProcessLocal, Region, Time, TransferEngine,
};

use crate::{
    config::Config,
    descriptor::RankDescriptor,
    executor::{Executor, Membership, OnEvent, SharedState},
    fifo::{fifo_in, Popper, Pusher},
    liveness::Liveness,
    raw::{Area, AtomicWords},
    symmetric::check_rank,
    Parker, ProxyError, Result,
};

/// A rank's proxy: threads that execute the commands in their FIFOs. Dropping it closes it; peers
/// then see the rank as lost.
pub struct Proxy {
    threads: Vec<Thread>,
    pushers: Vec<Vec<Pusher>>,
    common: SharedState,
    descriptor: RankDescriptor,
    memory: Region,
    ranks: usize,
    stop: Arc<AtomicBool>,
    ended: Mutex<bool>,
}

struct Thread {
    membership: Membership,
    parker: Arc<Parker>,
    engine: Arc<TransferEngine>,
    handle: Mutex<Option<ProcessLocal<JoinHandle<()>>>>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, threads) = (self.descriptor.rank, self.threads.len());
        write!(f, "Proxy(rank {rank} of {}, {threads} threads)", self.ranks)
    }
}

/// One engine per thread, and this rank's part of symmetric memory, registered with each.
#[derive(Debug)]
pub struct Engines(pub Vec<(Arc<TransferEngine>, Region)>);

impl Engines {
    /// Opens `threads` engines and allocates one part of `len` bytes of host memory for all of
    /// them.
    ///
    /// # Errors
    /// The engine's error.
    pub fn open(config: &EngineConfig, threads: usize, len: u64) -> Result<Self> {
        let mut all: Vec<(Arc<TransferEngine>, Region)> = Vec::new();
        for i in 0..threads {
            let name = format!("{}.{i}", config.name);
            let engine = Arc::new(TransferEngine::open(EngineConfig { name, ..config.clone() })?);
            let part = match all.first() {
                Some((_, first)) => engine.register_again(first)?,
                None => engine.alloc(len)?,
            };
            all.push((engine, part));
        }
        Ok(Self(all))
    }
}

/// Memory that a device and its proxy share.
#[derive(Debug)]
pub struct DeviceMemory {
    /// By thread and FIFO.
    pub fifos: Vec<Vec<Area>>,
    pub words: AtomicWords,
}

impl DeviceMemory {
    /// Memory of this process, for a device that consists of CPU threads.
    ///
    /// # Errors
    /// [`Config::check`].
    pub fn host(config: &Config) -> Result<Self> {
        config.check()?;
        let of_one = || (0..config.fifos).map(|_| Area::allocate(config.capacity)).collect();
        let fifos = (0..config.threads).map(|_| of_one()).collect();
        Ok(Self { fifos, words: AtomicWords::allocate(config.words) })
    }
}

impl Proxy {
    /// Starts the threads. Each has its own engine, for its exclusive use. The threads call
    /// `on_event`, which must be quick. The capacity and number of words of `device` apply, not
    /// those of `config`.
    ///
    /// # Errors
    /// [`Config::check`]; [`ProxyError::Invalid`] when the number of engines or FIFOs differs from
    /// the configuration; errors of an engine or the system.
    pub fn open(
        config: &Config,
        engines: Engines,
        device: DeviceMemory,
        on_event: OnEvent,
    ) -> Result<Self> {
        config.check()?;
        let DeviceMemory { fifos, words } = device;
        let (threads, each) = (config.threads, config.fifos);
        if engines.0.len() != threads
            || fifos.len() != threads
            || fifos.iter().any(|of| of.len() != each)
        {
            let (engines, fifos) = (engines.0.len(), fifos.iter().map(Vec::len).sum::<usize>());
            return Err(ProxyError::Invalid(format!(
                "got {engines} engines and {fifos} FIFOs for {threads} threads; expected one engine and {each} FIFOs per thread"
            )));
        }
        let common = SharedState { words, ..SharedState::new(config) };
        let stop = Arc::new(AtomicBool::new(false));
        let memory = engines.0[0].1.clone();
        let (mut threads, mut pushers, mut executors, mut descriptors) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for ((engine, part), areas) in engines.0.into_iter().zip(fifos) {
            let parker = Arc::new(Parker::default());
            let ends = areas.into_iter().map(|area| fifo_in(area, Arc::clone(&parker)));
            let (ours, descriptor): (Vec<Pusher>, Vec<Popper>) =
                ends.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
            let executor = Executor::new(
                Arc::clone(&engine),
                part,
                config,
                common.clone(),
                (Arc::clone(&parker), descriptor),
                Arc::clone(&on_event),
            )?;
            pushers.push(ours);
            descriptors.push(executor.descriptor());
            let membership = executor.membership();
            threads.push(Thread { membership, parker, engine, handle: Mutex::new(None) });
            executors.push(executor);
        }
        let (rank, incarnation) = (config.rank as u16, config.incarnation);
        let this = Self {
            pushers,
            common,
            descriptor: RankDescriptor { rank, incarnation, threads: descriptors },
            memory,
            ranks: config.ranks,
            stop,
            ended: Mutex::new(false),
            threads,
        };
        for (i, (thread, executor)) in this.threads.iter().zip(executors).enumerate() {
            let (stop, parker) = (Arc::clone(&this.stop), Arc::clone(&thread.parker));
            let spin = config.spin;
            let handle = std::thread::Builder::new()
                .name(format!("fabric-proxy-{i}"))
                .spawn(move || work(executor, &parker, &stop, spin))
                .map_err(|e| EngineError::Resource {
                    call: "pthread_create",
                    cause: e.to_string(),
                    hint: "raise the limit of threads or processes (ulimit -u)".into(),
                })?;
            *thread.handle.lock() = Some(ProcessLocal::new(handle));
        }
        let own = this.descriptor.clone();
        this.join(&own)?;
        Ok(this)
    }

    /// The descriptor for peers; it doesn't change.
    pub fn descriptor(&self) -> &RankDescriptor {
        &self.descriptor
    }

    /// This rank's part of symmetric memory.
    pub fn memory(&self) -> &Region {
        &self.memory
    }

    /// The words that peers' atomics are added to.
    pub fn words(&self) -> &AtomicWords {
        &self.common.words
    }

    /// Liveness of the ranks.
    pub fn alive(&self) -> &Arc<Liveness> {
        &self.common.alive
    }

    /// The device's end of a FIFO.
    ///
    /// # Errors
    /// [`ProxyError::Invalid`] for numbers out of range.
    pub fn pusher(&self, thread: usize, fifo: usize) -> Result<Pusher> {
        let pusher = self.pushers.get(thread).and_then(|of| of.get(fifo));
        pusher.cloned().ok_or_else(|| {
            ProxyError::Invalid(format!(
                "FIFO {fifo} of thread {thread} is out of range: {} threads have {} FIFOs each",
                self.pushers.len(),
                self.pushers.first().map_or(0, Vec::len)
            ))
        })
    }

    /// Adds a rank, or adds it again with a larger incarnation. What it has sent already is
    /// applied. Commands that are pushed after the call reach it.
    ///
    /// A rank that replaces a lost one must join on all ranks between the same two barriers.
    ///
    /// # Errors
    /// [`ProxyError::Rank`], [`ProxyError::StaleIncarnation`], [`ProxyError::Invalid`]; threads
    /// report errors as [`Event::Lost`](crate::Event::Lost).
    pub fn join(&self, descriptor: &RankDescriptor) -> Result<()> {
        let (rank, given) = (usize::from(descriptor.rank), descriptor.incarnation);
        check_rank(rank, self.ranks)?;
        if descriptor.threads.len() != self.threads.len() {
            return Err(ProxyError::Invalid(format!(
                "rank {rank} has {} proxy threads, this rank has {}; open the same number on all ranks",
                descriptor.threads.len(),
                self.threads.len()
            )));
        }
        let had = self.common.alive.incarnation(rank);
        if given <= had {
            return Err(ProxyError::StaleIncarnation { rank, given, had });
        }
        self.common.alive.begin(rank, given);
        for (thread, descriptor) in self.threads.iter().zip(&descriptor.threads) {
            thread.membership.join(rank, given, descriptor.clone());
        }
        Ok(())
    }

    /// Excludes a rank, which is told: commands to it complete at once, and its messages are
    /// ignored.
    ///
    /// # Errors
    /// [`ProxyError::Rank`]; [`ProxyError::Invalid`] for this rank itself.
    pub fn mask(&self, rank: usize) -> Result<()> {
        check_rank(rank, self.ranks)?;
        if rank == usize::from(self.descriptor.rank) {
            return Err(ProxyError::Invalid("a rank can't mask itself; close its proxy".into()));
        }
        self.threads.iter().for_each(|t| t.membership.mask(rank));
        Ok(())
    }

    /// Stops the threads and closes their engines. Waiters for commands that aren't completed get
    /// an error.
    pub fn close(&self) {
        let mut ended = self.ended.lock();
        if std::mem::replace(&mut *ended, true) {
            return;
        }
        self.stop.store(true, SeqCst);
        for thread in &self.threads {
            thread.parker.wake();
        }
        for thread in &self.threads {
            let handle = thread.handle.lock().take().and_then(ProcessLocal::into_inner);
            if let Some(handle) = handle.filter(|h| h.thread().id() != std::thread::current().id())
            {
                let _ = handle.join();
            }
            thread.engine.close();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.close();
    }
}

fn work(mut executor: Executor, parker: &Parker, stop: &AtomicBool, spin: Duration) {
    let mut quiet_since = None;
    let mut idle = 0u32;
    while !stop.load(SeqCst) {
        if executor.step(Time::now()) {
            (quiet_since, idle) = (None, 0);
            continue;
        }
        idle += 1;
        // With few cores, the awaited thread may need this core.
        match idle % 16 {
            0 => std::thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
        if quiet_since.get_or_insert_with(Instant::now).elapsed() < spin {
            continue;
        }
        let limit = executor.prepare_sleep();
        parker.park(limit, || executor.has_work() || stop.load(SeqCst));
        quiet_since = None;
    }
}
