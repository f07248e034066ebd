//! One process of a prefiller and the engine behind it: takes requests when there are pages,
//! computes several in a pass and chunk by chunk, fails some and forgets others.

use std::{collections::BTreeMap, sync::Arc};

use fabric_engine::{locks::Mutex, EngineError, Region, TransferEngine};
use fabric_kvcache::{wire::Offer, JobEvent, LocalRank, Prefiller, Terms};

use super::{faulty_delivery::FaultyDelivery, judge::Judge};
use crate::{
    cache::{Cache, Shape},
    world::{tail_of, Cut, SLOTS, TAIL},
};

/// Contents of pages that belong to no request: the decoder must never see them.
const NOBODYS: u8 = 0xa5;

#[derive(Debug)]
struct Work {
    /// `None`: what was asked makes no sense, as a liar's may.
    content: Option<u64>,
    tokens: u64,
    table: Vec<u32>,
    slot: Option<u32>,
    accepted: bool,
    done: u64,
    finished: bool,
    stopped: bool,
    /// The engine behind has forgotten it.
    stalled: bool,
}

struct Pass {
    jobs: Vec<(u64, u64)>,
    layer: usize,
}

#[derive(Default)]
struct UserState {
    jobs: BTreeMap<u64, Work>,
    /// Those that were released.
    over: std::collections::BTreeSet<u64>,
    pages: Vec<u32>,
    slots: Vec<u32>,
    pass: Option<Pass>,
}

pub struct Prefilling {
    pub engines: Vec<Arc<TransferEngine>>,
    pub prefiller: Option<Arc<Prefiller>>,
    pub dead: bool,
    /// One of its engines is dead, and never says what became of its writes: only others are to end
    /// well.
    pub crippled: bool,
    caches: Vec<Cache>,
    tail: Region,
    cut: Cut,
    user: Arc<Mutex<UserState>>,
    judge: Arc<Judge>,
}

fn told(user: &mut UserState, job: u64, event: JobEvent, judge: &Judge, clear: &dyn Fn(&[u32])) {
    let known = user.jobs.contains_key(&job);
    match event {
        JobEvent::Requested(_) if known || user.over.contains(&job) => {
            judge.wrong("events", format_args!("job {job} comes twice"));
        }
        JobEvent::Requested(asked) => {
            let content = <[u8; 8]>::try_from(asked.payload.as_slice()).ok();
            let work = Work {
                content: content.map(u64::from_le_bytes),
                tokens: asked.tokens,
                table: Vec::new(),
                slot: None,
                accepted: false,
                done: 0,
                finished: false,
                stopped: false,
                stalled: false,
            };
            user.jobs.insert(job, work);
        }
        JobEvent::Stopped(cause) => match user.jobs.get_mut(&job).filter(|w| !w.stopped) {
            Some(work) => work.stopped = true,
            None => judge.wrong("events", format_args!("job {job} is not there to stop: {cause}")),
        },
        JobEvent::Released => match user.jobs.remove(&job) {
            Some(work) => {
                user.over.insert(job);
                clear(&work.table);
                user.pages.extend(work.table);
                user.slots.extend(work.slot);
            }
            None => judge.wrong("events", format_args!("job {job} is not there to release")),
        },
    }
}

impl Prefilling {
    /// The process that has the ranks from `first` of `ranks`.
    pub fn new(
        engines: Vec<Arc<TransferEngine>>,
        (first, ranks): (u32, u32),
        (shape, cut, terms): (&Shape, Cut, Terms),
        judge: &Arc<Judge>,
        delivery: &Arc<FaultyDelivery>,
    ) -> Self {
        let tail = engines[0].alloc(TAIL * u64::from(SLOTS)).unwrap();
        let layouts: Vec<_> =
            (0..ranks).map(|r| shape.layout(r, ranks, cut.page_tokens, cut.pages)).collect();
        let mut caches = Vec::new();
        let mut local = Vec::new();
        for (i, engine) in engines.iter().enumerate() {
            let rank = first + i as u32;
            let cache = Cache::new(engine, layouts[rank as usize].clone()).unwrap();
            let (engine, buffers) = (Arc::clone(engine), vec![cache.region.clone()]);
            let tail = (i == 0).then(|| tail.clone());
            local.push(LocalRank { rank, engine, buffers, tail });
            caches.push(cache);
        }
        let user = UserState {
            pages: (0..cut.pages).collect(),
            slots: (0..SLOTS).collect(),
            ..UserState::default()
        };
        let user = Arc::new(Mutex::new(user));
        let (theirs, judge_) = (Arc::clone(&user), Arc::clone(judge));
        let memory = caches.clone();
        let clear = move |pages: &[u32]| {
            for cache in &memory {
                for (at, len) in cache.pages(pages) {
                    cache.region.put(at, &vec![NOBODYS; len as usize]).unwrap();
                }
            }
        };
        let prefiller = Prefiller::new("prefiller", layouts, local, terms, move |job, event| {
            told(&mut theirs.lock(), job, event, &judge_, &clear);
        });
        let prefiller = Arc::new(prefiller.unwrap());
        let weak = Arc::downgrade(&prefiller);
        delivery.between(
            &engines[0],
            Arc::new(move |from, bytes| {
                if let Some(prefiller) = weak.upgrade() {
                    prefiller.on_message(from, bytes);
                }
            }),
        );
        let (judge, prefiller) = (Arc::clone(judge), Some(prefiller));
        Self { engines, prefiller, dead: false, crippled: false, caches, tail, cut, user, judge }
    }

    pub fn offer(&self) -> Option<Offer> {
        self.prefiller.as_ref().map(|p| p.offer())
    }

    /// The engine behind does one thing.
    pub fn work(&self, rng: &mut fastrand::Rng) {
        let Some(prefiller) = &self.prefiller else { return };
        if self.layer(prefiller) {
            return;
        }
        self.accept(prefiller, rng);
        self.begin(prefiller, rng);
        self.finish(prefiller);
    }

    /// Computes the next layer of a pass; false if there is none.
    fn layer(&self, prefiller: &Prefiller) -> bool {
        {
            let mut user = self.user.lock();
            let Some(mut pass) = user.pass.take() else { return false };
            for (job, to) in &pass.jobs {
                // What was released has pages of others.
                let Some(work) = user.jobs.get_mut(job) else { continue };
                for cache in &self.caches {
                    cache.compute(
                        work.content.unwrap_or(0),
                        pass.layer,
                        work.done..*to,
                        &work.table,
                    );
                }
                if pass.layer + 1 == prefiller.layers() {
                    work.done = *to;
                }
            }
            pass.layer += 1;
            if pass.layer < prefiller.layers() {
                user.pass = Some(pass);
            }
        }
        prefiller.advance(1);
        true
    }

    /// Takes one that waits, if there are pages.
    fn accept(&self, prefiller: &Prefiller, rng: &mut fastrand::Rng) {
        let page = u64::from(self.cut.page_tokens);
        let (job, table, computed) = {
            let mut user = self.user.lock();
            let waits = |(_, w): &(&u64, &Work)| !w.accepted && !w.stalled && !w.stopped;
            let Some((job, tokens)) =
                user.jobs.iter().find(waits).map(|(job, work)| (*job, work.tokens))
            else {
                return;
            };
            let count = tokens.div_ceil(page) as usize;
            if count > self.cut.pages as usize {
                drop(user);
                return prefiller.fail(job, "it is longer than the cache");
            }
            if count > user.pages.len() || user.slots.is_empty() {
                return;
            }
            let left = user.pages.len() - count;
            let table = user.pages.split_off(left);
            let slot = user.slots.pop();
            // What is in the cache already is sent at once.
            let computed = if rng.bool() { 0 } else { rng.u64(..=tokens) };
            let Some(work) = user.jobs.get_mut(&job) else { return };
            (work.table, work.slot, work.done) = (table.clone(), slot, computed);
            work.accepted = true;
            for cache in &self.caches {
                for layer in 0..prefiller.layers() {
                    cache.compute(work.content.unwrap_or(0), layer, 0..computed, &table);
                }
            }
            (job, table, computed)
        };
        match prefiller.accept(job, vec![table], computed) {
            Ok(()) | Err(EngineError::Cancelled { .. }) => {}
            Err(error) => self.judge.wrong("accept", format_args!("job {job}: {error}")),
        }
    }

    fn begin(&self, prefiller: &Prefiller, rng: &mut fastrand::Rng) {
        let mut user = self.user.lock();
        let goes_on = |w: &Work| w.accepted && !w.stalled && w.done < w.tokens;
        let mut jobs = Vec::new();
        for (job, work) in user.jobs.iter().filter(|(_, w)| goes_on(w)) {
            if rng.u8(..3) > 0 {
                jobs.push((*job, rng.u64(work.done + 1..=work.tokens)));
            }
        }
        if !jobs.is_empty() {
            user.pass = Some(Pass { jobs: jobs.clone(), layer: 0 });
            drop(user);
            if let Err(error) = prefiller.begin(&jobs, prefiller.counted()) {
                self.judge.wrong("begin", error);
            }
        }
    }

    fn finish(&self, prefiller: &Prefiller) {
        let ready: Vec<(u64, u32)> = {
            let mut user = self.user.lock();
            let mut ready = Vec::new();
            for (job, work) in &mut user.jobs {
                let whole = work.accepted && !work.stalled && work.done == work.tokens;
                if let Some(slot) = work.slot.filter(|_| whole && !work.finished) {
                    work.finished = true;
                    let tail = tail_of(work.content.unwrap_or(0));
                    self.tail.put(u64::from(slot) * TAIL, &tail).unwrap();
                    ready.push((*job, slot));
                }
            }
            ready
        };
        for (job, slot) in ready {
            match prefiller.finish(job, slot) {
                Ok(()) | Err(EngineError::Cancelled { .. }) => {}
                Err(error) => self.judge.wrong("finish", format_args!("job {job}: {error}")),
            }
        }
    }

    fn any(&self, rng: &mut fastrand::Rng) -> Option<u64> {
        let user = self.user.lock();
        let jobs: Vec<u64> = user.jobs.keys().copied().collect();
        (!jobs.is_empty()).then(|| jobs[rng.usize(..jobs.len())])
    }

    /// Gives one up.
    pub fn fail(&self, rng: &mut fastrand::Rng) {
        if let (Some(prefiller), Some(job)) = (&self.prefiller, self.any(rng)) {
            prefiller.fail(job, "out of luck");
        }
    }

    /// Never goes on with one.
    pub fn stall(&self, rng: &mut fastrand::Rng) {
        if let Some(job) = self.any(rng) {
            if let Some(work) = self.user.lock().jobs.get_mut(&job) {
                work.stalled = true;
            }
        }
    }

    pub fn is_over(&self) -> bool {
        self.dead || self.crippled || self.user.lock().jobs.is_empty()
    }

    /// After all sessions have ended: no state of a session is left.
    pub fn check_parted(&self) {
        let left = self.prefiller.as_ref().map_or(0, |p| p.decoders());
        if left > 0 && !self.dead && !self.crippled {
            self.judge.wrong("leak", format_args!("a closed prefiller keeps {left} decoders"));
        }
    }

    pub fn check(&self) {
        if self.dead || self.crippled {
            return;
        }
        let user = self.user.lock();
        if !user.jobs.is_empty() {
            let jobs = &user.jobs;
            let at = self.prefiller.as_ref().map(|p| (p.jobs(), p.decoders()));
            self.judge.wrong("MR-1", format_args!("{at:?}: {jobs:?} are never released"));
        }
        if self.prefiller.as_ref().is_some_and(|p| p.jobs() > 0) {
            self.judge.wrong("leak", "a prefiller has jobs");
        }
    }
}
