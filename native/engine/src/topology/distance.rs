//! How far two devices are from each other, in tiers.

use super::{Place, Topology};

/// What lies between two devices, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// A PCIe switch (or a chain of them): no host bridge is crossed.
    Switch,
    /// The root complex (host bridge) they share.
    RootComplex,
    /// The NUMA node they share.
    Node,
    /// The link between NUMA nodes.
    System,
    /// The system doesn't say.
    Unknown,
}

impl Tier {
    /// Where the other device is, to end a sentence with.
    pub fn words(self) -> &'static str {
        match self {
            Self::Switch => "on the same PCIe switch",
            Self::RootComplex => "under the same root complex",
            Self::Node => "on the same NUMA node",
            Self::System => "on another NUMA node",
            Self::Unknown => "at an unknown distance",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distance {
    pub tier: Tier,
    /// Tells distances of one tier apart: bridges not shared, or how far the nodes are.
    within: u32,
    /// At most one bridge on each side lies outside of what they share.
    one_switch: bool,
}

impl Distance {
    /// The name that NCCL and `nvidia-smi topo` have for it.
    pub fn code(self) -> &'static str {
        match self.tier {
            Tier::Switch if self.one_switch => "PIX",
            Tier::Switch => "PXB",
            Tier::RootComplex => "PHB",
            Tier::Node => "NODE",
            Tier::System => "SYS",
            Tier::Unknown => "?",
        }
    }

    /// Less is nearer; equal is equally near.
    pub fn rank(self) -> impl Ord + Copy {
        (self.tier, self.within)
    }

    const fn new(tier: Tier, within: u32) -> Self {
        Self { tier, within, one_switch: false }
    }
}

impl Topology {
    /// Between two devices, each given by its place in the PCI tree and its NUMA node, where known.
    pub fn distance(
        &self,
        a: (Option<&Place>, Option<u32>),
        b: (Option<&Place>, Option<u32>),
    ) -> Distance {
        if let (Some(p), Some(q)) = (a.0, b.0) {
            let shared = p.shared_bridges(q);
            if shared > 0 {
                let longest = p.bridges.len().max(q.bridges.len());
                return Distance {
                    tier: Tier::Switch,
                    // The longer the common path the nearer. What either side has further down
                    // (a switch inside a NIC) is its own and says nothing.
                    within: u32::MAX - shared as u32,
                    one_switch: longest - shared <= 1,
                };
            }
            if p.root == q.root {
                return Distance::new(Tier::RootComplex, 0);
            }
        }
        match (a.1, b.1) {
            (Some(m), Some(n)) if m == n => Distance::new(Tier::Node, 0),
            (Some(m), Some(n)) => Distance::new(Tier::System, self.node_distance(m, n)),
            _ => Distance::new(Tier::Unknown, 0),
        }
    }

    /// The firmware's word (SLIT) on how far two nodes are; the same for all where it has none.
    fn node_distance(&self, from: u32, to: u32) -> u32 {
        let row = self.nodes.iter().find(|n| n.id == from).map(|n| &n.distances);
        row.and_then(|r| r.iter().find(|(id, _)| *id == to)).map_or(u32::MAX, |(_, d)| *d)
    }
}
