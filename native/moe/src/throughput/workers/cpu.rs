//! Executes each job at once, on rows in host memory: the reference for kernels.

use std::collections::HashMap;

use fabric_engine::Region;

use super::super::{
    context::Io,
    jobs::{Job, JobError, JobId, JobResult, Sum, SumTarget, SumTerm, Worker},
    slots::{head, read_head, Kind, HEAD},
    spec::Spec,
};
use crate::kernels::{add, store, Part, PartMut};

#[derive(Debug)]
pub struct CpuWorker {
    spec: Spec,
    region: Region,
    done: HashMap<JobId, JobResult>,
    /// This node's sums of this rank's tokens, as they would come from another: by token.
    of_node: Vec<u8>,
    totals: Vec<f32>,
}

impl Worker for CpuWorker {
    fn has_room(&self) -> bool {
        true
    }

    fn begin(&mut self, job_id: JobId, job: Job, exchange: u32, io: &mut Io<'_, '_>) {
        let result = self.work(job, exchange, io);
        self.done.insert(job_id, result);
    }

    fn result(&mut self, job_id: JobId) -> Option<JobResult> {
        self.done.remove(&job_id)
    }

    fn totals(&self) -> &[f32] {
        &self.totals
    }
}

impl CpuWorker {
    pub fn new(spec: Spec, region: Region) -> Self {
        Self { spec, region, done: HashMap::new(), of_node: Vec::new(), totals: Vec::new() }
    }

    fn work(&mut self, job: Job, exchange: u32, io: &mut Io<'_, '_>) -> JobResult {
        match job {
            Job::Put { to, bytes } => self.put(to, &bytes)?,
            Job::Pack { first, metas } => match io {
                Io::Tokens(parts) => self.pack(first, &metas, parts)?,
                _ => unreachable!("tokens are packed while they are given"),
            },
            Job::Look { slots, nbytes } => return self.look(&slots, nbytes),
            Job::Take { tokens, rows } => match io {
                Io::Rows(out) => self.take(&tokens, &rows, out)?,
                _ => unreachable!("tokens are taken while there is room for their rows"),
            },
            Job::Sum { to, sums, terms } => {
                let answers = match io {
                    Io::Answers(answers) => Some(*answers),
                    _ => None,
                };
                self.sum(to, &sums, &terms, answers.as_ref(), exchange)?;
            }
        }
        Ok(Vec::new())
    }

    fn put(&self, to: u64, bytes: &[u8]) -> Result<(), JobError> {
        self.region.put(to, bytes).map_err(JobError::Engine)
    }

    fn pack(&self, first: u32, metas: &[u8], parts: &[Part<'_>]) -> Result<(), JobError> {
        for (token, meta) in (first..).zip(metas.chunks_exact(self.spec.meta() as usize)) {
            let mut place = u64::from(token) * self.spec.out_stride();
            self.put(place, meta)?;
            place += meta.len() as u64;
            for part in parts {
                let bytes = part.row(token as usize);
                self.put(place, bytes)?;
                place += bytes.len() as u64;
            }
        }
        Ok(())
    }

    fn look(&self, slots: &[u64], nbytes: u64) -> JobResult {
        let mut found = Vec::with_capacity(slots.len() * nbytes as usize);
        for slot in slots {
            let read = self.region.with_bytes(*slot, nbytes, |bytes| found.extend(bytes));
            read.map_err(JobError::Engine)?;
        }
        Ok(found)
    }

    fn take(
        &self,
        tokens: &[(u64, u32)],
        rows: &[u32],
        out: &mut [PartMut<'_>],
    ) -> Result<(), JobError> {
        let mut rows = rows.iter();
        for (slot, n) in tokens {
            let (from, nbytes) = (slot + self.spec.meta(), u64::from(self.spec.shape.row_nbytes));
            let taken = self.region.with_bytes(from, nbytes, |bytes| {
                for row in rows.by_ref().take(*n as usize) {
                    let mut begin = 0;
                    for part in out.iter_mut() {
                        let to = part.row(*row as usize);
                        let n = to.len();
                        to.copy_from_slice(&bytes[begin..begin + n]);
                        begin += n;
                    }
                }
            });
            taken.map_err(JobError::Engine)?;
        }
        Ok(())
    }

    fn sum(
        &mut self,
        to: SumTarget,
        sums: &[Sum],
        terms: &[SumTerm],
        answers: Option<&Part<'_>>,
        exchange: u32,
    ) -> Result<(), JobError> {
        let back = self.spec.shape.back;
        let (wide, nbytes) = (back.elements as usize, self.spec.shape.back_nbytes() as usize);
        let tokens = self.spec.shape.max_tokens as usize;
        match to {
            SumTarget::Node => self.of_node.resize(tokens * nbytes, 0),
            SumTarget::Total => self.totals.resize(tokens * wide, 0.0),
            SumTarget::Answer | SumTarget::Slot => {}
        }
        let (mut total, mut of_rank) = (vec![0.0; wide], vec![0.0; wide]);
        let mut rounded = vec![0; nbytes];
        let mut terms = terms.iter();
        for sum in sums {
            let token = sum.token as usize;
            total.fill(0.0);
            of_rank.fill(0.0);
            for term in terms.by_ref().take(sum.terms as usize) {
                match term {
                    SumTerm::Slot { at, from } => {
                        self.add_slot(&mut total, *at, (*from, to.addends(), sum.token), exchange)?;
                    }
                    SumTerm::Row { row, weight, last } => {
                        let answer = answers.map_or(&[][..], |a| a.row(*row as usize));
                        add(&mut of_rank, answer, back.float, *weight, true);
                        if *last && to != SumTarget::Answer {
                            store(&of_rank, &mut rounded, back.float);
                            add(&mut total, &rounded, back.float, 1.0, false);
                            of_rank.fill(0.0);
                        }
                    }
                    SumTerm::Node => {
                        let bytes = &self.of_node[token * nbytes..][..nbytes];
                        add(&mut total, bytes, back.float, 1.0, false);
                    }
                }
            }
            match to {
                SumTarget::Answer => {
                    store(&of_rank, &mut rounded, back.float);
                    self.put(sum.at, &head(Kind::Answer, exchange, sum.token))?;
                    self.put(sum.at + HEAD, &rounded)?;
                }
                SumTarget::Slot => {
                    store(&total, &mut rounded, back.float);
                    self.put(sum.at, &head(Kind::Sum, exchange, sum.token))?;
                    self.put(sum.at + HEAD, &rounded)?;
                }
                SumTarget::Node => {
                    store(&total, &mut self.of_node[token * nbytes..][..nbytes], back.float)
                }
                SumTarget::Total => self.totals[token * wide..][..wide].copy_from_slice(&total),
            }
        }
        Ok(())
    }

    fn add_slot(
        &self,
        total: &mut [f32],
        at: u64,
        (from, kind, token): (u32, Kind, u32),
        exchange: u32,
    ) -> Result<(), JobError> {
        let nbytes = HEAD + self.spec.shape.back_nbytes();
        let added = self.region.with_bytes(at, nbytes, |slot| {
            let (head_bytes, bytes) = slot.split_at(HEAD as usize);
            if read_head(head_bytes, kind, exchange) == Ok(token) {
                add(total, bytes, self.spec.shape.back.float, 1.0, false);
                return Ok(());
            }
            let mut head = [0; HEAD as usize];
            head.copy_from_slice(head_bytes);
            Err(JobError::Slot { from, kind, token, head })
        });
        added.map_err(JobError::Engine)?
    }
}
