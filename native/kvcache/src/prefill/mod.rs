//! The prefiller: accepts requests, and writes pages layer by layer as they are computed.

mod job;
mod messages;
mod pass_queue;
mod push;
#[cfg(test)]
mod tests;
mod timeline;

use std::{
    collections::BTreeMap,
    sync::{atomic::AtomicU32, Arc, OnceLock},
};

use fabric_engine::{api::EngineId, locks::Mutex, EngineError, Region, Result, TransferEngine};

pub use self::timeline::{LayerTimes, Timeline};
use self::{
    job::{DecoderInfo, Job},
    pass_queue::PassQueue,
    timeline::CountTimes,
};
use crate::{
    events::Events,
    layout::{CacheGroup, CacheLayout},
    parts::Parts,
    terms::{check_local, common_groups, Cause, LocalRank, Terms},
    timer::after,
    wire::{reason, Offer, OfferEnd, RefusalReason, RequestState},
};

/// Events of a request. `Released` comes last, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEvent {
    /// A decoder requests pages: answer with [`Prefiller::accept`] or [`Prefiller::fail`].
    Requested(JobRequest),
    /// The request ended early, not by this prefiller: its pages are not needed any more.
    Stopped(Cause),
    /// Nothing reads its pages any more: they may be reused (MR-1).
    Released,
}

/// A request of a decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRequest {
    /// The decoder's name.
    pub decoder: String,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Number of leading tokens that are not sent but computed.
    pub have: u64,
    pub payload: Vec<u8>,
    /// The progress of its layers.
    pub timeline: Arc<Timeline>,
}

/// A prefiller instance's process.
pub struct Prefiller {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Prefiller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Prefiller({}, {} jobs)", self.inner.name, self.jobs())
    }
}

/// Takes the leases that a decoder renews.
type OnRenewal = Box<dyn Fn(&[u64]) + Send + Sync>;

struct Inner {
    name: String,
    layouts: Vec<CacheLayout>,
    local: Vec<LocalRank>,
    terms: Terms,
    /// Layers in the order in which they are computed: group, layer within it.
    steps: Vec<(usize, usize)>,
    /// The groups, with the pages that every local rank has.
    groups: Vec<CacheGroup>,
    state: Mutex<PrefillerState>,
    pass_queue: Mutex<PassQueue>,
    counts: CountTimes,
    events: Events<JobEvent>,
    on_renewal: OnceLock<OnRenewal>,
    parts: Parts,
}

#[derive(Default)]
struct PrefillerState {
    sessions: BTreeMap<(EngineId, u64), Session>,
    jobs: BTreeMap<u64, Arc<Job>>,
    next_job: u64,
    /// Entries of the tables of all jobs.
    entries: u64,
    /// Bytes of their payloads.
    payloads: u64,
    closed: bool,
}

/// One session with a decoder.
struct Session {
    info: Arc<DecoderInfo>,
    /// All requests before this are over for the decoder, and are ignored.
    floor: u64,
    /// By the decoder's numbers.
    jobs: BTreeMap<u64, u64>,
    /// The final states of ended requests, until the decoder has acknowledged them.
    ended: BTreeMap<u64, RequestState>,
    /// Local beats since its last message.
    silent: u32,
    /// Answers to its beats that it has not received.
    answers: Arc<AtomicU32>,
}

impl Session {
    /// The number of requests that are kept until the decoder's floor has passed them: jobs, and
    /// final states.
    fn remembers(&self) -> usize {
        self.jobs.len() + self.ended.len()
    }

    /// Whether a request has arrived, was cancelled before it arrived, or is below the floor.
    fn is_known(&self, seq: u64) -> bool {
        seq < self.floor || self.jobs.contains_key(&seq) || self.ended.contains_key(&seq)
    }
}

impl Prefiller {
    /// `layouts` are those of all ranks of the instance, `local` the ranks of this process. The
    /// first of them takes messages: its engine's receive pool is opened here. Rank 0 sends the
    /// tail.
    ///
    /// Callback threads of an engine call `on_event` with a job's number and event.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if layouts, ranks and regions don't fit together.
    pub fn new(
        name: &str,
        layouts: Vec<CacheLayout>,
        local: Vec<LocalRank>,
        terms: Terms,
        on_event: impl Fn(u64, JobEvent) + Send + Sync + 'static,
    ) -> Result<Self> {
        check_local(&layouts, &local, &terms)?;
        let mut steps: Vec<(u32, (usize, usize))> = Vec::new();
        for (g, group) in layouts[0].groups.iter().enumerate() {
            steps.extend(group.layers.iter().enumerate().map(|(l, number)| (*number, (g, l))));
        }
        steps.sort_unstable();
        let groups = common_groups(&layouts, local.iter().map(|r| r.rank));
        let inner = Arc::new(Inner {
            name: name.to_owned(),
            parts: Parts::new(&terms),
            groups,
            layouts,
            local,
            terms,
            steps: steps.into_iter().map(|(_, step)| step).collect(),
            state: Mutex::default(),
            pass_queue: Mutex::default(),
            counts: CountTimes::default(),
            events: Events::new(on_event),
            on_renewal: OnceLock::new(),
        });
        let weak = Arc::downgrade(&inner);
        inner.control().receive(inner.terms.max_message, Terms::MESSAGES, move |delivery| {
            if let Some(inner) = weak.upgrade() {
                inner.on_message(delivery.from(), delivery.message());
            }
        })?;
        inner.schedule_tick();
        Ok(Self { inner })
    }

    /// Has callback threads of an engine call `f` with the leases that a decoder renews: it will
    /// request their pages. Numbers are the decoder's engine's, and may be of no lease. The first
    /// `f` stays.
    pub fn on_renewal(&self, f: impl Fn(&[u64]) + Send + Sync + 'static) {
        let _ = self.inner.on_renewal.set(Box::new(f));
    }

    /// Handles a message of a decoder, for callers that opened the receive pool of the first rank's
    /// engine themselves. A message that is no decoder's is ignored, with a warning.
    pub fn on_message(&self, from: EngineId, message: &[u8]) {
        self.inner.on_message(from, message);
    }

    /// This process's entry of its instance's [`Offer`].
    pub fn end(&self) -> OfferEnd {
        let ranks = self.inner.local.iter().map(|r| (r.rank, r.engine.address().clone()));
        OfferEnd { address: self.inner.control().address().clone(), ranks: ranks.collect() }
    }

    /// The offer of an instance of one process. For several processes, join their `ends`.
    pub fn offer(&self) -> Offer {
        Offer {
            name: self.inner.name.clone(),
            layouts: self.inner.layouts.clone(),
            ends: vec![self.end()],
            tail_nbytes: self.inner.terms.tail_nbytes,
            max_message: self.inner.terms.max_message as u64,
        }
    }

    /// Layers of a pass, over all groups.
    pub fn layers(&self) -> usize {
        self.inner.steps.len()
    }

    /// Accepts a request: for each group, the local pages of all its tokens in order. The first
    /// `computed` tokens of all layers are in the pages already, and are sent at once.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if the tables don't fit; [`EngineError::Cancelled`] if the request
    /// is over.
    pub fn accept(&self, job: u64, tables: Vec<Vec<u32>>, computed: u64) -> Result<()> {
        let inner = &self.inner;
        let job = inner.job(job)?;
        inner.check_tables(&job, &tables)?;
        if computed > job.tokens {
            let what = format!("{computed} tokens are computed of {}", job.tokens);
            return Err(EngineError::Invalid(what));
        }
        {
            let mut progress = job.state.lock();
            if progress.local_pages.is_some() {
                return Err(EngineError::Invalid("the request was accepted before".into()));
            }
            progress.local_pages = Some(Arc::new(tables));
        }
        for step in 0..inner.steps.len() {
            inner.push(&job, step, computed, inner.control().now());
        }
        Ok(())
    }

    /// Begins a pass through all layers that computes each of these requests up to the given number
    /// of tokens, when that many layers have been counted by [`Prefiller::counted`] or the watched
    /// word. The pass has the counts that follow, one for each layer. Uncounted layers of the pass
    /// before will never be counted: its requests fail, because the contents of their pages are
    /// unknown.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if an earlier pass begins after more layers than this one.
    pub fn begin(&self, requests: &[(u64, u64)], counted: u64) -> Result<()> {
        let state = self.inner.state.lock();
        let jobs = requests.iter().filter_map(|(id, done)| {
            // A stopped request is still computed with the others, but not sent.
            state.jobs.get(id).map(|job| (Arc::clone(job), *done))
        });
        let jobs = jobs.collect();
        drop(state);
        self.inner.begin(counted, jobs)
    }

    /// The number of counted layers, over all passes.
    pub fn counted(&self) -> u64 {
        self.inner.counted()
    }

    /// Counts further layers that are in the cache, and sends them. The computing engine calls this
    /// unless it counts in a watched word.
    pub fn advance(&self, layers: u64) {
        self.inner.advance(layers);
    }

    /// Announces the next value of the watched word. The [`Timeline`] then has the time of the
    /// computation, and not only the time when it was seen.
    pub fn mark(&self, count: u64) {
        self.inner.mark(count);
    }

    /// A callback for [`TransferEngine::watch`] that takes the values of a word that counts layers.
    /// It does not keep the prefiller alive.
    pub fn advancer(&self) -> impl Fn(u64, u64) + Send + Sync + 'static {
        let weak = Arc::downgrade(&self.inner);
        move |_, count| {
            if let Some(inner) = weak.upgrade() {
                inner.advance_to(count);
            }
        }
    }

    /// Sends the tail, from a slot of rank 0. The job ends when everything is sent.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if there is no such slot, or it was called before.
    pub fn finish(&self, job: u64, slot: u32) -> Result<()> {
        let job = self.inner.job(job)?;
        self.inner.push_tail(&job, slot)
    }

    /// Fails a request; the decoder is told the reason when nothing of it is in flight any more.
    pub fn fail(&self, job: u64, why: &str) {
        if let Ok(job) = self.inner.job(job) {
            self.inner.stop(&job, RequestState::Failed(reason(why)), None);
        }
    }

    /// Refuses a request that was not accepted. After [`RefusalReason::TooLong`] a decoder asks no
    /// other prefiller.
    pub fn refuse(&self, job: u64, kind: RefusalReason, why: &str) {
        if let Ok(job) = self.inner.job(job) {
            let elsewhere = kind != RefusalReason::TooLong;
            let at = RequestState::Refused { why: reason(why), elsewhere, reason: kind };
            self.inner.stop(&job, at, None);
        }
    }

    /// Jobs that aren't released.
    pub fn jobs(&self) -> usize {
        self.inner.state.lock().jobs.len()
    }

    /// Number of decoders with a session.
    pub fn decoders(&self) -> usize {
        self.inner.state.lock().sessions.len()
    }

    /// Accepts nothing new, stops all jobs and reports so to the decoders.
    pub fn close(&self) {
        let sessions: Vec<(EngineId, u64)> = {
            let mut state = self.inner.state.lock();
            state.closed = true;
            state.sessions.keys().copied().collect()
        };
        for session in sessions {
            self.inner.end_session(session, "the prefiller is closed", true);
        }
    }
}

impl Drop for Prefiller {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn control(&self) -> &Arc<TransferEngine> {
        &self.local[0].engine
    }

    fn job(&self, id: u64) -> Result<Arc<Job>> {
        let cause = || "it is over, or was stopped by its decoder".to_owned();
        let job = self.state.lock().jobs.get(&id).cloned();
        job.ok_or_else(|| EngineError::Cancelled { what: "prefill job", cause: cause() })
    }

    fn check_tables(&self, job: &Job, tables: &[Vec<u32>]) -> Result<()> {
        let groups = &self.groups;
        if tables.len() != groups.len() {
            return Err(EngineError::Invalid(format!(
                "{} page tables for {} groups of layers",
                tables.len(),
                groups.len()
            )));
        }
        for (group, table) in groups.iter().zip(tables) {
            crate::table::check(group, job.tokens, table)
                .map_err(|e| EngineError::Invalid(format!("group {}: {e}", group.name)))?;
        }
        Ok(())
    }

    fn schedule_tick(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        let tick = move || {
            if let Some(inner) = weak.upgrade() {
                inner.tick();
                inner.schedule_tick();
            }
        };
        if let Err(error) = after(self.control(), self.terms.beat, tick) {
            // The loss of a decoder would go unnoticed.
            let all: Vec<_> = self.state.lock().sessions.keys().copied().collect();
            all.into_iter()
                .for_each(|m| self.end_session(m, &format!("no more beats: {error}"), true));
        }
    }

    /// Gives up decoders that have been silent for too long.
    fn tick(self: &Arc<Self>) {
        let limit = self.terms.silent_beats();
        let silent: Vec<(EngineId, u64)> = {
            let mut state = self.state.lock();
            state.sessions.values_mut().for_each(|m| m.silent += 1);
            let silent = state.sessions.iter().filter(|(_, m)| m.silent > limit);
            silent.map(|(key, _)| *key).collect()
        };
        self.parts.expire(self.control().now());
        for session in silent {
            self.end_session(session, "it has not been heard for too long", true);
        }
    }

    fn tail(&self) -> Option<&Region> {
        self.local[0].tail.as_ref().filter(|_| self.local[0].rank == 0)
    }
}
