//! How urgent requests are.

/// How urgent a request is. Who shares a rail with more urgent work leaves room for it; nobody starves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for it: tokens, tails, control.
    Latency,
    #[default]
    Bulk,
    /// Whenever there is room: checkpoints, spilled pages.
    Background,
}

impl Priority {
    pub const ALL: [Self; 3] = [Self::Latency, Self::Bulk, Self::Background];
}
