//! Priorities of requests.

/// The priority of a request. Lower classes on a rail leave room for higher ones; no class starves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// A caller waits for it: tokens, tails, control.
    Latency,
    #[default]
    Bulk,
    /// Whenever there is room: checkpoints, spilled pages.
    Background,
}

impl Priority {
    pub const ALL: [Self; 3] = [Self::Latency, Self::Bulk, Self::Background];
}
