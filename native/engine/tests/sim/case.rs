//! A test case: the shape of a network, a workload and a schedule of faults, all drawn from one
//! seed. A case is plain data: it prints as a literal, and any part of it can be left out.

use fabric_engine::{transport::sim::Fault, transport::sim::SimConfig};

/// Virtual nanoseconds.
pub type Ns = u64;

pub const US: Ns = 1_000;
pub const MS: Ns = 1_000_000;

/// Counters of each node: the last one is plain, the others are allocated.
pub const COUNTERS: u8 = 3;
pub const PLAIN: u8 = COUNTERS - 1;

#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    pub seed: u64,
    pub shape: Shape,
    pub work: Vec<(Ns, Step)>,
    pub faults: Schedule,
}

/// Faults and their times.
pub type Schedule = Vec<(Ns, Fault)>;

#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// NICs of each node.
    pub rails: Vec<u8>,
    pub ordered: bool,
    pub page_counts: bool,
    pub half_open: u32,
    pub max_bytes: u64,
    pub window: usize,
    pub longest_delay: Ns,
    /// Bytes per nanosecond.
    pub rate: Option<f64>,
    pub peer_timeout: Ns,
    /// Clock skew, parts per million.
    pub skew: u32,
    /// All nodes are connected before the first step.
    pub connected: bool,
}

/// One action of a user. Nodes and counters are named by index.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Write {
        from: u8,
        to: u8,
        len: u64,
        counter: Option<u8>,
        rail: Option<u8>,
        within: Option<Ns>,
    },
    Pages {
        from: u8,
        to: u8,
        len: u64,
        pages: u32,
        counter: Option<u8>,
        within: Option<Ns>,
    },
    Scatter {
        from: u8,
        to: Vec<u8>,
        len: u64,
        within: Option<Ns>,
    },
    Read {
        from: u8,
        of: u8,
        len: u64,
        pages: u32,
        within: Option<Ns>,
    },
    Barrier {
        from: u8,
        to: Vec<u8>,
    },
    Message {
        from: u8,
        to: u8,
        len: u64,
    },
    /// An expectation of `n` writes, with or without a named writer.
    Expect {
        at: u8,
        counter: u8,
        n: u32,
        writer: Option<u8>,
        within: Ns,
    },
    /// Releases a counter, and allocates the next generation of its slot.
    Reuse {
        at: u8,
        counter: u8,
    },
    /// Ends the node if it runs, and starts its next incarnation.
    Restart {
        node: u8,
    },
    /// A write to a node's current incarnation with a key of an earlier one.
    OldKey {
        from: u8,
        to: u8,
    },
}

impl Shape {
    pub fn config(&self, seed: u64) -> SimConfig {
        SimConfig {
            seed,
            delay: 500..self.longest_delay,
            ordered: self.ordered,
            page_counts: self.page_counts,
            half_open: self.half_open,
            max_bytes: self.max_bytes,
            window: self.window,
            port_rate: self.rate,
            skew: self.skew,
            ..SimConfig::default()
        }
    }
}

impl Case {
    /// Whether only NIC 0 of one node ever has faults, and every node has another NIC. Then no
    /// operation may fail.
    pub fn has_spare(&self) -> bool {
        // A link that reports only immediates has no receipts: what it loses fails.
        if self.shape.page_counts && !self.shape.ordered {
            return false;
        }
        use Fault::*;
        let mut hit = None;
        let one = self.faults.iter().all(|(_, f)| match f {
            WorkFails { node, rail: 0, .. }
            | LinkLost { node, rail: 0, .. }
            | NicDown { node, rail: 0, .. }
            | NicUp { node, rail: 0 } => *hit.get_or_insert(*node) == *node,
            _ => false,
        });
        let calm = self.shape.half_open == 0 && !self.work.iter().any(|(_, s)| s.may_fail());
        one && calm && self.shape.rails.iter().all(|n| *n > 1) && self.faults.len() <= 6
    }

    /// The case as a Rust literal; `use` the variants of `Fault` and `Step` to compile it.
    pub fn literal(&self) -> String {
        format!("{self:#?}").replace('[', "vec![")
    }
}

impl Step {
    /// Whether the step may fail on a network without faults. A pinned write may fail others of the
    /// same counter.
    pub fn may_fail(&self) -> bool {
        matches!(
            self,
            Self::Restart { .. } | Self::OldKey { .. } | Self::Write { rail: Some(_), .. }
        )
    }
}
