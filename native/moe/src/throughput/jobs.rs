//! Jobs: all work on rows, executed by a worker. The host decides, wherever rows lie.
//!
//! A job covers up to a chunk of tokens. Jobs are unordered: the input of a job is complete before
//! it begins, and the memory that it reads or writes is in use until it ends (MR-1).

use std::{cmp::Ordering, collections::VecDeque, fmt};

use fabric_engine::EngineError;

use super::{
    context::{by, Io, StopCause},
    slots::{compare_era, read_head, Kind, HEAD},
};

/// Work on rows. Offsets are bytes from the beginning of the rank's part.
#[derive(Clone, Debug)]
pub enum Job {
    /// Stores bytes at an offset.
    Put { to: u64, bytes: Vec<u8> },
    /// Copies the caller's tokens from `first` on, each behind its meta, to their slots.
    Pack { first: u32, metas: Vec<u8> },
    /// Reads the first `nbytes` of each slot.
    Look { slots: Vec<u64>, nbytes: u64 },
    /// Copies tokens to rows of the caller: for each its slot, and its number of `rows`.
    Take { tokens: Vec<(u64, u32)>, rows: Vec<u32> },
    /// Computes a sum for each token.
    Sum { to: SumTarget, sums: Vec<Sum>, terms: Vec<SumTerm> },
}

/// The destination of sums, and their addends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumTarget {
    /// A rank's answer, of rows, to a slot.
    Answer,
    /// A node's sum of its ranks' answers, to a slot.
    Slot,
    /// The same for a token of this rank, which stays here.
    Node,
    /// The sum of the nodes' sums, for the caller.
    Total,
}

impl SumTarget {
    /// The kind of the summed slots.
    pub fn addends(self) -> Kind {
        match self {
            Self::Total => Kind::Sum,
            _ => Kind::Answer,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Sum {
    /// The slot, if it goes to one.
    pub at: u64,
    pub token: u32,
    /// Number of terms of this sum.
    pub terms: u32,
}

#[derive(Clone, Copy, Debug)]
pub enum SumTerm {
    /// A slot that a rank has sent.
    Slot { at: u64, from: u32 },
    /// The answer in a row of the caller's, times a weight. With the last of the rank's rows their
    /// sum is rounded, as if it came from another rank.
    Row { row: u32, weight: f32, last: bool },
    /// The sum of this rank's node.
    Node,
}

/// The result of a job: the bytes of [`Job::Look`]; none for others.
pub type JobResult = Result<Vec<u8>, JobError>;

/// The error of a job.
#[derive(Clone, Debug)]
pub enum JobError {
    /// The slot of a rank has another head.
    Slot {
        from: u32,
        kind: Kind,
        token: u32,
        head: [u8; HEAD as usize],
    },
    Engine(EngineError),
}

impl JobError {
    pub fn stop(self, exchange: u32) -> StopCause {
        let (from, kind, token, head) = match self {
            Self::Slot { from, kind, token, head } => (from, kind, token, head),
            Self::Engine(error) => return error.into(),
        };
        if compare_era(&head, exchange) == Ordering::Greater {
            return StopCause::Ahead { rank: from };
        }
        let cause = match read_head(&head, kind, exchange) {
            Ok(said) if kind == Kind::Sum => {
                format!("it sent the sum of token {said}, not of {token}")
            }
            Ok(said) => format!("it answered to token {said}, not {token}"),
            Err(cause) => cause,
        };
        by(from)(cause)
    }
}

/// Identifies a job of a worker.
pub type JobId = u64;

/// Executes jobs.
pub trait Worker: fmt::Debug + Send {
    /// Whether it accepts another job.
    fn has_room(&self) -> bool;

    /// Begins a job of an exchange, under a unique id. There must be room.
    fn begin(&mut self, job_id: JobId, job: Job, exchange: u32, io: &mut Io<'_, '_>);

    /// Advances begun jobs.
    fn go_on(&mut self, _io: &mut Io<'_, '_>) {}

    /// The result of a job, once it is done.
    fn result(&mut self, job_id: JobId) -> Option<JobResult>;

    /// The sums for the caller, elements of each token behind one another, if they are on the host.
    fn totals(&self) -> &[f32];

    /// Cancels begun jobs.
    fn abort(&mut self) {}
}

/// The jobs of a rank.
#[derive(Debug)]
pub struct Jobs {
    worker: Box<dyn Worker>,
    next: JobId,
    under_way: Vec<JobId>,
    /// No job begins, because the caller leaves once begun jobs are done.
    pub resting: bool,
}

impl Jobs {
    pub fn new(worker: Box<dyn Worker>) -> Self {
        Self { worker, next: 0, under_way: Vec::new(), resting: false }
    }

    pub fn are_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Advances begun jobs, and drops their results; whether anything was done.
    pub fn discard(&mut self, io: &mut Io<'_, '_>) -> bool {
        self.worker.go_on(io);
        let before = self.under_way.len();
        let worker = &mut self.worker;
        self.under_way.retain(|job_id| worker.result(*job_id).is_none());
        self.under_way.len() < before
    }

    pub fn go_on(&mut self, io: &mut Io<'_, '_>) {
        self.worker.go_on(io);
    }

    pub fn totals(&self) -> &[f32] {
        self.worker.totals()
    }

    pub fn abort(&mut self) {
        self.worker.abort();
    }
}

/// A call under way: the caller's rows, and the jobs.
#[derive(Debug)]
pub struct Call<'c, 'a, 'b> {
    pub jobs: &'c mut Jobs,
    pub io: &'c mut Io<'a, 'b>,
}

impl Call<'_, '_, '_> {
    /// Whether another job may begin.
    pub fn may_begin(&self) -> bool {
        !self.jobs.resting && self.jobs.worker.has_room()
    }
}

/// Jobs of one kind of a lane, in order, and the value that follows each.
#[derive(Debug)]
pub struct PendingJobs<T>(VecDeque<(JobId, T)>);

impl<T> Default for PendingJobs<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> PendingJobs<T> {
    /// Begins a job. There must be room.
    pub fn begin(&mut self, call: &mut Call<'_, '_, '_>, exchange: u32, job: Job, then: T) {
        let jobs = &mut *call.jobs;
        let job_id = jobs.next;
        jobs.next += 1;
        jobs.under_way.push(job_id);
        jobs.worker.begin(job_id, job, exchange, call.io);
        self.0.push_back((job_id, then));
    }

    /// The value of the first job and its bytes, once it is done.
    ///
    /// # Errors
    /// The job failed.
    pub fn done(
        &mut self,
        call: &mut Call<'_, '_, '_>,
        exchange: u32,
    ) -> Result<Option<(T, Vec<u8>)>, StopCause> {
        let Some((job_id, _)) = self.0.front() else { return Ok(None) };
        let Some(result) = call.jobs.worker.result(*job_id) else { return Ok(None) };
        let job_id = *job_id;
        call.jobs.under_way.retain(|t| *t != job_id);
        let then = self.0.pop_front().map(|(_, then)| then);
        let bytes = result.map_err(|fault| fault.stop(exchange))?;
        Ok(then.map(|then| (then, bytes)))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, then)| then)
    }
}
