//! The distance between two devices, in tiers.

use super::{PciLocation, Topology};

/// The part of the machine between two devices, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// A PCIe switch, or a chain of them; no host bridge.
    Switch,
    /// A shared root complex (host bridge).
    RootComplex,
    /// A shared NUMA node.
    Node,
    /// The link between NUMA nodes.
    System,
    /// Unknown to the system.
    Unknown,
}

impl Tier {
    /// The tier as the end of a sentence about the other device.
    pub fn description(self) -> &'static str {
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
    /// Order within a tier: bridges not shared, or the distance of the nodes.
    within: u32,
    /// Whether at most one bridge on each side is not shared.
    one_switch: bool,
}

impl Distance {
    /// The abbreviation that NCCL and `nvidia-smi topo` use.
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

    /// Sort key: less is nearer.
    pub fn rank(self) -> impl Ord + Copy {
        (self.tier, self.within)
    }

    const fn new(tier: Tier, within: u32) -> Self {
        Self { tier, within, one_switch: false }
    }
}

impl Topology {
    /// The distance between two devices, each given by its PCI location and NUMA node, where known.
    pub fn distance(
        &self,
        a: (Option<&PciLocation>, Option<u32>),
        b: (Option<&PciLocation>, Option<u32>),
    ) -> Distance {
        if let (Some(p), Some(q)) = (a.0, b.0) {
            let shared = p.shared_bridges(q);
            if shared > 0 {
                let longest = p.bridges.len().max(q.bridges.len());
                return Distance {
                    tier: Tier::Switch,
                    // The longer the shared path the nearer. Bridges below it (a switch inside a
                    // NIC) belong to one device and are ignored.
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

    /// The distance of two nodes in the firmware's table (SLIT); the same for all without a table.
    fn node_distance(&self, from: u32, to: u32) -> u32 {
        let row = self.nodes.iter().find(|n| n.id == from).map(|n| &n.distances);
        row.and_then(|r| r.iter().find(|(id, _)| *id == to)).map_or(u32::MAX, |(_, d)| *d)
    }
}
