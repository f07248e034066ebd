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

/// Something to be done with rows. Places are bytes from the beginning of the rank's part.
#[derive(Clone, Debug)]
pub enum Job {
    /// Bytes to a place.
    Put { to: u64, bytes: Vec<u8> },
    /// The caller's tokens from `first` on, each behind its meta, to their slots.
    Pack { first: u32, metas: Vec<u8> },
    /// The first `nbytes` of each slot.
    Look { slots: Vec<u64>, nbytes: u64 },
    /// Tokens to rows of the caller's: of each, its slot and how many of `rows` are its.
    Take { tokens: Vec<(u64, u32)>, rows: Vec<u32> },
    /// A sum for each token.
    Sum { to: SumTarget, sums: Vec<Sum>, terms: Vec<Term> },
}

/// Where sums go, and what of.
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
    /// What the slots hold that are summed.
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
    /// How many of the terms are its.
    pub terms: u32,
}

#[derive(Clone, Copy, Debug)]
pub enum Term {
    /// A slot that a rank has sent.
    Slot { at: u64, from: u32 },
    /// The answer in a row of the caller's, times a weight. With the last of the rank's rows their
    /// sum is rounded, as if it came from another rank.
    Row { row: u32, weight: f32, last: bool },
    /// What this rank's node has summed.
    Node,
}

/// What came of a job: the bytes of [`Job::Look`], for others none.
pub type JobResult = Result<Vec<u8>, JobError>;

/// Why a job came to nothing.
#[derive(Clone, Debug)]
pub enum JobError {
    /// The slot of a rank says something else.
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

/// What a worker calls a job.
pub type JobId = u64;

/// What carries jobs out.
pub trait Worker: fmt::Debug + Send {
    /// Whether another job would be taken.
    fn has_room(&self) -> bool;

    /// Begins a job of an exchange, if there is room, under a number that no other has.
    fn begin(&mut self, job_id: JobId, job: Job, exchange: u32, io: &mut Io<'_, '_>);

    /// Goes on with what was begun.
    fn go_on(&mut self, _io: &mut Io<'_, '_>) {}

    /// What came of a job, once it is done; asked for until then.
    fn result(&mut self, job_id: JobId) -> Option<JobResult>;

    /// The sums for the caller, elements of each token behind one another, if they are on the host.
    fn totals(&self) -> &[f32];

    /// Nothing that was begun need be done any more.
    fn abort(&mut self) {}
}

/// The jobs of a rank.
#[derive(Debug)]
pub struct Jobs {
    worker: Box<dyn Worker>,
    next: JobId,
    under_way: Vec<JobId>,
    /// Nothing new is begun: the caller goes elsewhere when what was is done.
    pub resting: bool,
}

impl Jobs {
    pub fn new(worker: Box<dyn Worker>) -> Self {
        Self { worker, next: 0, under_way: Vec::new(), resting: false }
    }

    pub fn are_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Goes on with what was begun, of which nothing follows any more; whether anything was done.
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

/// A call that is under way: what the caller gives, and who works on it.
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

/// Jobs of one kind of a lane, in their order, and what follows from each.
#[derive(Debug)]
pub struct PendingJobs<T>(VecDeque<(JobId, T)>);

impl<T> Default for PendingJobs<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> PendingJobs<T> {
    /// Begins a job, for which there is room.
    pub fn begin(&mut self, call: &mut Call<'_, '_, '_>, exchange: u32, job: Job, then: T) {
        let jobs = &mut *call.jobs;
        let job_id = jobs.next;
        jobs.next += 1;
        jobs.under_way.push(job_id);
        jobs.worker.begin(job_id, job, exchange, call.io);
        self.0.push_back((job_id, then));
    }

    /// What follows from the first one, and what came of it, once it is done.
    ///
    /// # Errors
    /// It came to nothing.
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
