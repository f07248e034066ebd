//! Has kernels execute jobs, in memory that both reach.
//!
//! Each worker, a block of a kernel that runs while its rank is in a call, has a few places for
//! jobs and two words: the number of posted jobs, which the host writes after a job, and the number
//! of completed jobs, which the worker writes after a result. A worker takes its jobs in order and
//! reads nothing else of the exchange, so everything it reads has been checked.
//!
//! A worker ends when the word of its call is set, when the number of posted jobs is all ones (no
//! more will come), or when the host's heartbeat has not changed for a deadline: the host is gone
//! (RS-4).

use std::{
    collections::HashMap,
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use fabric_engine::{EngineError, Result};
pub use fabric_proxy::raw::AtomicWords;

use super::super::{
    context::Io,
    jobs::{Job, JobError, JobId, JobResult, Sum, SumTarget, SumTerm, Worker},
    slots::HEAD,
    spec::Spec,
};

/// Words of a line, which one side writes.
const LINE: usize = 16;
/// Jobs that a worker may have at a time.
pub const DEPTH: usize = 4;
/// Words ahead of what a job is about: kind, number of things, and two more; words about it; from
/// the ninth on, what came of it.
const HEADER: usize = LINE;
const FOUND: usize = 8;
/// Words that all workers of a call look at.
const STOP: usize = 0;
const BEAT: usize = 1;

/// Layout of the memory that the host shares with its workers, in words of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLayout {
    pub workers: usize,
    /// From one job to the next.
    pub job: usize,
    /// The first job.
    pub jobs: usize,
    pub words: usize,
}

impl QueueLayout {
    /// # Errors
    /// [`EngineError::Invalid`]: no workers, or too many.
    pub fn new(spec: &Spec, workers: u32) -> Result<Self> {
        spec.check()?;
        if !(1..=1024).contains(&workers) {
            return Err(EngineError::Invalid(format!("{workers} workers; give 1 to 1024")));
        }
        // A sum has two words, and two for each of its terms, of which there are no more than a
        // token has experts. Other jobs of a chunk are shorter.
        let chunk = (spec.chunk as usize) * (2 + 2 * spec.shape.topk as usize);
        let preamble = 1 + (spec.preamble() / 8) as usize;
        let job = (HEADER + chunk.max(preamble)).next_multiple_of(LINE);
        let workers = workers as usize;
        let jobs = LINE * (1 + 2 * workers);
        Ok(Self { workers, job, jobs, words: jobs + workers * DEPTH * job })
    }

    fn posted(worker: usize) -> usize {
        LINE * (1 + 2 * worker)
    }

    fn done(worker: usize) -> usize {
        LINE * (2 + 2 * worker)
    }

    /// Index of the first word of a worker's job `i`.
    fn job_index(&self, worker: usize, i: u64) -> usize {
        self.jobs + (worker * DEPTH + i as usize % DEPTH) * self.job
    }
}

/// The workers of the current call; they run while their rank is in a call.
#[derive(Debug)]
pub struct WorkerLifecycle {
    words: AtomicWords,
    calls: AtomicU64,
}

impl WorkerLifecycle {
    /// The number of a call, for the workers that are launched for it.
    pub fn begin(&self) -> u64 {
        self.calls.fetch_add(1, Relaxed) + 1
    }

    /// The workers of a call end, and those of all before.
    pub fn end(&self, call: u64) {
        self.words[STOP].store(call, Release);
    }
}

/// A job that a worker has.
#[derive(Debug)]
struct PostedJob {
    worker: usize,
    i: u64,
    job: Job,
}

#[derive(Debug)]
pub struct Device {
    queue_layout: QueueLayout,
    words: AtomicWords,
    meta: u64,
    /// Of each worker, how many jobs were posted, and whose places are taken.
    posted: Vec<u64>,
    taken: Vec<[bool; DEPTH]>,
    under_way: HashMap<JobId, PostedJob>,
    beats: u64,
    aborted: bool,
}

impl Device {
    /// Workers that share these words, all zero.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: too few words, or no workers.
    pub fn new(spec: &Spec, workers: u32, words: AtomicWords) -> Result<(Self, WorkerLifecycle)> {
        let queue_layout = QueueLayout::new(spec, workers)?;
        if words.len() != queue_layout.words {
            let text = format!("{} words to share; give {}", words.len(), queue_layout.words);
            return Err(EngineError::Invalid(text));
        }
        let lifecycle = WorkerLifecycle { words: words.clone(), calls: AtomicU64::new(0) };
        let this = Self {
            queue_layout,
            words,
            meta: spec.meta(),
            posted: vec![0; queue_layout.workers],
            taken: vec![[false; DEPTH]; queue_layout.workers],
            under_way: HashMap::new(),
            beats: 0,
            aborted: false,
        };
        Ok((this, lifecycle))
    }

    /// The worker with room that has the fewest jobs.
    fn free(&self) -> Option<usize> {
        if self.aborted {
            return None;
        }
        let has_room = |w: &usize| !self.taken[*w][self.posted[*w] as usize % DEPTH];
        let jobs = |w: &usize| self.taken[*w].iter().filter(|taken| **taken).count();
        (0..self.queue_layout.workers).filter(has_room).min_by_key(jobs)
    }

    fn write(&self, place: usize, job: &Job, exchange: u32) {
        let mut at = place + HEADER;
        let mut put = |word: u64| {
            self.words[at].store(word, Relaxed);
            at += 1;
        };
        let header = match job {
            Job::Put { to, bytes } => {
                words_of(bytes).for_each(&mut put);
                [1, bytes.len() as u64 / 8, *to, 0]
            }
            Job::Pack { first, metas } => {
                words_of(metas).for_each(&mut put);
                [2, metas.len() as u64 / self.meta, u64::from(*first), 0]
            }
            Job::Look { slots, nbytes } => {
                slots.iter().copied().for_each(&mut put);
                [3, slots.len() as u64, nbytes / 8, 0]
            }
            Job::Take { tokens, rows } => {
                for (slot, n) in tokens {
                    put(*slot);
                    put((*n).into());
                }
                rows.chunks(2).map(pair).for_each(&mut put);
                [4, tokens.len() as u64, 0, 0]
            }
            Job::Sum { to, sums, terms } => {
                for Sum { at, token, terms } in sums {
                    put(*at);
                    put(pair(&[*token, *terms]));
                }
                for term in terms {
                    let (place, weight, how) = match term {
                        SumTerm::Slot { at, .. } => (*at, 0, 0),
                        SumTerm::Row { row, weight, last } => {
                            ((*row).into(), weight.to_bits(), 1 + u32::from(*last))
                        }
                        SumTerm::Node => (0, 0, 3),
                    };
                    put(place);
                    put(pair(&[weight, how]));
                }
                let to = match to {
                    SumTarget::Answer => 0,
                    SumTarget::Slot => 1,
                    SumTarget::Node => 2,
                    SumTarget::Total => 3,
                };
                [5, sums.len() as u64, to, exchange.into()]
            }
        };
        debug_assert!(at <= place + self.queue_layout.job, "a job is longer than its place");
        let about = (at - place - HEADER) as u64;
        for (i, word) in header.into_iter().chain([about]).enumerate() {
            self.words[place + i].store(word, Relaxed);
        }
        self.words[place + FOUND].store(u64::MAX, Relaxed);
    }

    fn read(&self, place: usize, job: Job) -> JobResult {
        let word = |i: usize| self.words[place + i].load(Relaxed);
        match job {
            Job::Look { slots, nbytes } => {
                let first = HEADER + slots.len();
                let n = slots.len() * nbytes as usize / 8;
                Ok((first..first + n).flat_map(|i| word(i).to_le_bytes()).collect())
            }
            Job::Sum { to, sums, terms } => {
                let Some(SumTerm::Slot { from, .. }) =
                    usize::try_from(word(FOUND)).ok().and_then(|fault| terms.get(fault))
                else {
                    return Ok(Vec::new());
                };
                let mut head = [0; HEAD as usize];
                head[..8].copy_from_slice(&word(FOUND + 1).to_le_bytes());
                head[8..].copy_from_slice(&word(FOUND + 2).to_le_bytes());
                let token = token_of(word(FOUND), &sums);
                Err(JobError::Slot { from: *from, kind: to.addends(), token, head })
            }
            Job::Put { .. } | Job::Pack { .. } | Job::Take { .. } => Ok(Vec::new()),
        }
    }
}

impl Worker for Device {
    fn has_room(&self) -> bool {
        self.free().is_some()
    }

    fn begin(&mut self, job_id: JobId, job: Job, exchange: u32, _io: &mut Io<'_, '_>) {
        let Some(worker) = self.free() else { return };
        let i = self.posted[worker];
        self.write(self.queue_layout.job_index(worker, i), &job, exchange);
        self.posted[worker] += 1;
        self.taken[worker][i as usize % DEPTH] = true;
        self.words[QueueLayout::posted(worker)].store(i + 1, Release);
        self.under_way.insert(job_id, PostedJob { worker, i, job });
    }

    fn go_on(&mut self, _io: &mut Io<'_, '_>) {
        self.beats += 1;
        self.words[BEAT].store(self.beats, Relaxed);
    }

    fn result(&mut self, job_id: JobId) -> Option<JobResult> {
        let PostedJob { worker, i, .. } = self.under_way.get(&job_id)?;
        if self.words[QueueLayout::done(*worker)].load(Acquire) <= *i {
            return None;
        }
        let PostedJob { worker, i, job } = self.under_way.remove(&job_id)?;
        self.taken[worker][i as usize % DEPTH] = false;
        Some(self.read(self.queue_layout.job_index(worker, i), job))
    }

    fn totals(&self) -> &[f32] {
        &[]
    }

    fn abort(&mut self) {
        self.aborted = true;
        for worker in 0..self.queue_layout.workers {
            self.words[QueueLayout::posted(worker)].store(u64::MAX, Release);
        }
    }
}

fn pair(words: &[u32]) -> u64 {
    let second = words.get(1).copied().unwrap_or(0);
    u64::from(words[0]) | u64::from(second) << 32
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().map(|word| u64::from_le_bytes(*word))
}

/// Whose the `i`th term is.
fn token_of(i: u64, sums: &[Sum]) -> u32 {
    let mut end = 0;
    let its = sums.iter().find(|sum| {
        end += u64::from(sum.terms);
        i < end
    });
    its.map_or(0, |sum| sum.token)
}

#[cfg(test)]
mod tests {
    use super::{
        super::super::slots::{head, Kind},
        *,
    };
    use crate::{kernels::Float, AnswerFormat, Shape};

    fn spec(chunk: u32, topk: u32) -> Spec {
        let back = AnswerFormat { elements: 4, float: Float::F32 };
        let shape = Shape {
            ranks: 4,
            experts: 64,
            topk,
            max_tokens: 64,
            row_nbytes: 16,
            back,
            private_rows: 0,
            shared_rows: None,
        };
        Spec { shape, ranks_per_node: 2, channels: 1, chunk, ring_chunks: 2, threads: 1 }
    }

    fn device(spec: &Spec, workers: u32) -> Device {
        let words = AtomicWords::allocate(QueueLayout::new(spec, workers).unwrap().words);
        Device::new(spec, workers, words).unwrap().0
    }

    fn put() -> Job {
        Job::Put { to: 0, bytes: vec![0; 8] }
    }

    #[test]
    fn the_longest_jobs_of_a_chunk_fit() {
        for (chunk, topk) in [(1, 1), (1, 8), (32, 8), (7, 64)] {
            let spec = spec(chunk, topk);
            let (n, k) = (chunk as usize, topk as usize);
            let sum = Sum { at: 0, token: 0, terms: topk };
            let bytes = spec.preamble() as usize;
            for (job, answer) in [
                (Job::Put { to: 0, bytes: vec![0; bytes] }, 0),
                (Job::Look { slots: vec![0], nbytes: spec.preamble() }, bytes / 8),
                (Job::Pack { first: 0, metas: vec![0; n * spec.meta() as usize] }, 0),
                (
                    Job::Look { slots: vec![0; n], nbytes: spec.meta() },
                    n * spec.meta() as usize / 8,
                ),
                (Job::Take { tokens: vec![(0, topk); n], rows: vec![0; n * k] }, 0),
                (
                    Job::Sum {
                        to: SumTarget::Node,
                        sums: vec![sum; n],
                        terms: vec![SumTerm::Node; n * k],
                    },
                    0,
                ),
            ] {
                let device = device(&spec, 1);
                let place = device.queue_layout.job_index(0, 0);
                device.write(place, &job, 1);
                let about = device.words[place + 4].load(Relaxed) as usize;
                assert!(HEADER + about + answer <= device.queue_layout.job, "{job:?}");
            }
        }
    }

    #[test]
    fn mr_1_a_place_is_taken_until_the_result_of_its_job_is_read() {
        let mut device = device(&spec(4, 2), 2);
        for job_id in 0..2 * DEPTH as u64 {
            assert!(device.has_room());
            device.begin(job_id, put(), 1, &mut Io::Nothing);
        }
        assert!(!device.has_room());
        assert!(device.result(2).is_none());
        // The second job of the first worker is the third.
        device.words[QueueLayout::done(0)].store(2, Release);
        assert!(!device.has_room());
        assert!(device.result(2).is_some() && device.result(4).is_none());
        // Its places are filled in their turn, and the first is the next.
        assert!(!device.has_room());
        assert!(device.result(0).is_some() && device.has_room());
        device.abort();
        assert!(!device.has_room());
        assert_eq!(device.words[QueueLayout::posted(1)].load(Relaxed), u64::MAX);
    }

    #[test]
    fn rs_1_the_sender_of_a_wrong_slot_is_named() {
        let mut device = device(&spec(4, 2), 1);
        let sum = |token| Sum { at: 0, token, terms: 2 };
        let term = |from| SumTerm::Slot { at: 0, from };
        let terms = vec![term(0), term(1), SumTerm::Node, term(3)];
        let job = Job::Sum { to: SumTarget::Total, sums: vec![sum(5), sum(6)], terms };
        device.begin(0, job, 9, &mut Io::Nothing);
        let found = device.queue_layout.job_index(0, 0) + FOUND;
        device.words[found].store(3, Relaxed);
        for (i, word) in words_of(&head(Kind::Sum, 9, 7)).enumerate() {
            device.words[found + 1 + i].store(word, Relaxed);
        }
        device.words[QueueLayout::done(0)].store(1, Release);
        let stop = device.result(0).unwrap().unwrap_err().stop(9);
        let said = format!("{stop:?}");
        assert!(said.contains("rank: 3") && said.contains("token 7, not of 6"), "{said}");
    }
}
