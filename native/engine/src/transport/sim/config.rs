use std::ops::Range;

use crate::domain::Receipts;

/// What the simulated network is like. Times are virtual nanoseconds, rates bytes per nanosecond.
#[derive(Clone, Debug)]
pub struct SimConfig {
    pub seed: u64,
    /// Latency and jitter: every delivery takes a time drawn from this range of its own.
    pub delay: Range<u64>,
    /// Links keep the order in which work was posted, as reliable connections do, and what was counted is told
    /// as a number; else every delivery finds its own way, and what came is told by number.
    pub ordered: bool,
    /// A page of a counted paged write counts when it is there; else all pages when the last one is.
    /// Without order there are no receipts then, as with a NIC that says no more than immediates.
    pub page_counts: bool,
    /// What a NIC sends, and what it takes in, at most.
    pub port_rate: Option<f64>,
    /// What one direction of a link carries at most.
    pub link_rate: Option<f64>,
    /// One connection in so many comes up at the far end only; 0: none.
    pub half_open: u32,
    /// Each engine's clock shows a time of its own, and is off by up to so many parts per million; 0: all show
    /// the same.
    pub skew: u32,
    /// Nothing has a time of its own: what happens next is chosen, see [`SimNet::choices`](crate::simulation::SimNet::choices).
    pub free: bool,
    /// Bytes of one work request; small, so that writes are cut.
    pub max_bytes: u64,
    pub max_pages: u32,
    /// The longest message.
    pub max_message: usize,
    /// Work requests that a link takes at a time.
    pub window: usize,
    /// Peers' memory can be stored to, as on one host.
    pub apertures: bool,
    /// Bytes are carried. Else only time passes: for measuring rates that no memory keeps up with.
    pub carries: bool,
}

impl SimConfig {
    pub(crate) fn receipts(&self) -> Receipts {
        match (self.ordered, self.page_counts) {
            (true, _) => Receipts::InOrder,
            (false, false) => Receipts::Numbered,
            (false, true) => Receipts::None,
        }
    }
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            delay: 500..50_000,
            ordered: false,
            page_counts: false,
            port_rate: None,
            link_rate: None,
            half_open: 0,
            skew: 0,
            free: false,
            max_bytes: 4096,
            max_pages: 4,
            max_message: 1 << 16,
            window: 16,
            apertures: false,
            carries: true,
        }
    }
}
