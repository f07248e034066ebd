use std::ops::Range;

use crate::domain::Receipts;

/// Properties of the simulated network. Times are virtual nanoseconds, rates bytes per nanosecond.
#[derive(Clone, Debug)]
pub struct SimConfig {
    pub seed: u64,
    /// Latency and jitter: each delivery takes a time drawn from this range.
    pub delay: Range<u64>,
    /// Whether links keep the order of posts, as reliable connections do; receipts are then numbers
    /// of counted writes. Otherwise each delivery has its own delay, and receipts list numbers.
    pub ordered: bool,
    /// Whether each page of a counted paged write counts when it has arrived, rather than all pages
    /// with the last one. Without order there are no receipts then, as with a NIC that reports only
    /// immediates.
    pub page_counts: bool,
    /// Largest rate at which a NIC sends, and at which it receives.
    pub port_rate: Option<f64>,
    /// Largest rate of one direction of a link.
    pub link_rate: Option<f64>,
    /// One connection in so many comes up at the acceptor only; 0: none.
    pub half_open: u32,
    /// Each engine's clock shows a different time and is off by up to this many parts per million;
    /// 0: all show the same.
    pub skew: u32,
    /// Nothing has a time; the caller chooses the next event, see
    /// [`SimNet::choices`](crate::simulation::SimNet::choices).
    pub free: bool,
    /// Largest work request, bytes; small, so that writes are cut.
    pub max_bytes: u64,
    pub max_pages: u32,
    /// Longest message, bytes.
    pub max_message: usize,
    /// Work requests that a link accepts at a time.
    pub window: usize,
    /// Whether peers' memory can be stored to, as on one host.
    pub peer_mappings: bool,
    /// Whether bytes are copied. Otherwise only time passes, for rates that no memory sustains.
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
            peer_mappings: false,
            carries: true,
        }
    }
}
