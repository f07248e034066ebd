//! What is simulated, and what comes of it. Times are virtual nanoseconds.

/// What a step's time goes to, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From the host's memory to the GPU's
    H2d,
    /// Whole tensors from shards (`full_tensor()`)
    Gather,
    Fuse,
    Quantise,
    /// The processor hands requests to the engine
    Submit,
    /// The wire, where nothing else goes on
    Write,
}

pub const STAGES: usize = 6;

/// What one step has for one rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    pub rollout: u32,
    /// Work requests that it takes.
    pub requests: u32,
    pub bytes: u64,
}

/// Tensors that are made ready and sent together.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// What each stage up to quantising takes.
    pub ready: [u64; 4],
    /// Bytes of temporary memory, from its begin until it is sent.
    pub memory: u64,
    /// How many of the steps before must have been sent before it begins.
    pub after: usize,
    /// It begins when all trainers have made ready what is of lower groups.
    pub group: u32,
    /// In the order in which they are submitted.
    pub writes: Vec<Write>,
}

/// The steps of every trainer, and how many rollouts there are.
#[derive(Clone, Debug, Default)]
pub struct Push {
    pub trainers: Vec<Vec<Step>>,
    pub rollouts: usize,
}

/// NICs and processors, the same everywhere.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// NICs of each rank.
    pub nics: u8,
    /// What a NIC sends, and what it takes in, bytes a nanosecond.
    pub rate: f64,
    /// Of every delivery, one way.
    pub latency: u64,
    /// A call that submits what a step has for a rollout.
    pub call: u64,
    /// And each work request of it.
    pub request: u64,
    /// Bytes of a page: what a step has for a rollout goes as a paged write of pages no larger.
    pub page: u64,
}

/// What became of a push.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Until the last rollout has all of its bytes.
    pub time: u64,
    /// The same by stages, along the chain of what waited for what.
    pub path: [u64; STAGES],
    /// When each trainer had sent everything.
    pub ended: Vec<u64>,
    /// What each trainer spent on all stages but the last, whatever went on beside it.
    pub busy: Vec<[u64; STAGES]>,
    /// The most temporary memory that a trainer held, bytes.
    pub peak: u64,
    /// Work requests that NICs were given in the simulation.
    pub posted: u64,
    /// Two runs share it only if the same things happened at the same times.
    pub digest: u64,
}

/// Why there is no outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem(pub String);

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Problem {}

impl Network {
    /// Until the first request of a write is posted.
    pub(crate) fn posts(&self) -> u64 {
        self.call + self.request
    }

    /// What the processor takes to submit a write.
    pub(crate) fn submits(&self, write: &Write) -> u64 {
        self.call + self.request * u64::from(write.requests)
    }

    /// Pages of a write, and bytes of each; every NIC gets one, if there is enough for them.
    pub(crate) fn pages(&self, bytes: u64) -> (u32, u64) {
        const WORTH_SPREADING: u64 = 256 << 10;
        let least = if bytes >= WORTH_SPREADING { u64::from(self.nics) } else { 1 };
        let pages = bytes.div_ceil(self.page).max(least);
        (pages as u32, bytes.div_ceil(pages))
    }
}
