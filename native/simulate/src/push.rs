//! Input and result of a simulation. Times are virtual nanoseconds.

/// Stages of a step, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From the host's memory to the GPU's
    H2d,
    /// Whole tensors from shards (`full_tensor()`)
    Gather,
    Fuse,
    Quantise,
    /// The processor passes requests to the engine
    Submit,
    /// The wire, while no other stage runs
    Write,
}

pub const STAGES: usize = 6;

/// The data of one step for one rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    pub rollout: u32,
    /// Work requests of the write.
    pub requests: u64,
    pub bytes: u64,
}

/// Tensors that are prepared and sent together.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Duration of each stage up to quantising.
    pub ready: [u64; 4],
    /// Bytes of temporary memory, held from the begin until the step is sent.
    pub memory: u64,
    /// Number of earlier steps that must have been sent before this one begins.
    pub after: usize,
    /// The step begins when all trainers have prepared the lower groups.
    pub group: u32,
    /// In the order of submission.
    pub writes: Vec<Write>,
}

/// The steps of every trainer, and the number of rollouts.
#[derive(Clone, Debug, Default)]
pub struct Push {
    pub trainers: Vec<Vec<Step>>,
    pub rollouts: usize,
}

/// NICs and processors; all ranks have the same.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// NICs of each rank.
    pub nics: u8,
    /// Rate of a NIC in each direction, bytes per nanosecond.
    pub rate: f64,
    /// One-way latency of every delivery.
    pub latency: u64,
    /// Cost of a call that submits one step's data for one rollout.
    pub call: u64,
    /// Cost of each work request of the call.
    pub request: u64,
    /// Bytes of a page. A write is a paged write with pages of at most this size.
    pub page: u64,
}

/// The result of a simulated push.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Time until the last rollout has all of its bytes.
    pub time: u64,
    /// That time divided by stages, along the critical path.
    pub path: [u64; STAGES],
    /// Time at which each trainer had sent everything.
    pub ended: Vec<u64>,
    /// Time of each trainer in each stage but the last, including overlapped time.
    pub busy: Vec<[u64; STAGES]>,
    /// Peak temporary memory of any trainer, bytes.
    pub peak: u64,
    /// Work requests posted to the simulated NICs.
    pub posted: u64,
    /// Digest of all events and their times; equal only for equal runs.
    pub digest: u64,
}

/// The reason why there is no outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushError(pub String);

impl std::fmt::Display for PushError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for PushError {}

impl Network {
    /// Time until the first request of a write is posted.
    pub(crate) fn posts(&self) -> u64 {
        self.call + self.request
    }

    /// Time of the processor to submit a write.
    pub(crate) fn submits(&self, write: &Write) -> u64 {
        self.call + self.request * write.requests
    }

    /// Pages of a write, and bytes of each. Every NIC gets at least one page where there are
    /// enough.
    pub(crate) fn pages(&self, bytes: u64) -> (u64, u64) {
        const WORTH_SPREADING: u64 = 256 << 10;
        let least = if bytes >= WORTH_SPREADING { u64::from(self.nics) } else { 1 };
        let pages = bytes.div_ceil(self.page).max(least);
        (pages, bytes.div_ceil(pages))
    }
}
