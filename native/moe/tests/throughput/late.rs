//! A worker that does its jobs late and in any order, and shows their results at any moment, as
//! kernels do.

use fabric_engine::Region;
use fabric_moe::throughput::{CpuWorker, Io, Job, JobId, JobResult, Spec, Worker};

#[derive(Debug)]
pub struct Late {
    cpu: CpuWorker,
    rng: fastrand::Rng,
    /// Jobs that it takes at a time.
    room: usize,
    steps: u32,
    jobs: Vec<(JobId, Job, u32)>,
}

impl Late {
    /// One that does a job in one of so many steps; with none, never.
    pub fn new(spec: Spec, region: Region, seed: u64, steps: u32) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let room = rng.usize(1..5);
        Self { cpu: CpuWorker::new(spec, region), rng, room, steps, jobs: Vec::new() }
    }
}

impl Worker for Late {
    fn has_room(&self) -> bool {
        self.jobs.len() < self.room
    }

    fn begin(&mut self, job_id: JobId, job: Job, exchange: u32, _io: &mut Io<'_, '_>) {
        assert!(self.has_room());
        self.jobs.push((job_id, job, exchange));
    }

    fn go_on(&mut self, io: &mut Io<'_, '_>) {
        while self.steps > 0 && !self.jobs.is_empty() && self.rng.u32(..self.steps) == 0 {
            let one = self.rng.usize(..self.jobs.len());
            let (job_id, job, exchange) = self.jobs.swap_remove(one);
            self.cpu.begin(job_id, job, exchange, io);
        }
    }

    fn result(&mut self, job_id: JobId) -> Option<JobResult> {
        self.rng.bool().then(|| self.cpu.result(job_id)).flatten()
    }

    fn totals(&self) -> &[f32] {
        self.cpu.totals()
    }
}
