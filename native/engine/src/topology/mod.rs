//! Distances between NICs and GPUs, and the NICs that each GPU uses.
//!
//! [`Topology::read`] reads `/sys`, or a recorded copy of it. From that and the user's [`Rules`]
//! the pure function [`pair()`] chooses rails for every GPU and NUMA node, with reasons.
//! [`pairing_for`] does so for one of them among the devices that a transport can open.
//! [`cpus_near`] names CPUs for the thread that drives them.

mod cpus;
mod distance;
mod glob;
mod pair;
mod pci;
mod rules;
mod share;
mod sysfs;
mod usable;

pub use cpus::{cpus_near, cpus_near_within};
pub use distance::{Distance, Tier};
pub(crate) use glob::matches as matches_glob;
pub use pair::{pair, pairing_for, tiers, Location, Pairing, Rail, RailChoice, UnusedNic};
pub use pci::{PciAddress, PciLocation};
pub use rules::{Rules, DEFAULT_MAX_RAILS};

/// The devices of one machine, in the order of PCI addresses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Topology {
    pub nodes: Vec<Node>,
    pub gpus: Vec<Gpu>,
    pub nics: Vec<Nic>,
    /// Network interfaces, for transports that open them rather than RDMA devices.
    pub interfaces: Vec<Interface>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: u32,
    /// Empty if the node has memory only, such as a GPU's.
    pub cpus: Vec<usize>,
    /// Distance to each node as the firmware reports it (10 is local).
    pub distances: Vec<(u32, u32)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// `gpu0` has the lowest PCI address: the order of `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    pub name: String,
    pub pci: PciLocation,
    pub vendor: u16,
    pub device: u16,
    pub numa: Option<u32>,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq)]
pub struct Nic {
    /// The name in libibverbs.
    pub name: String,
    /// `None` for a software device on an interface without a PCI device.
    pub pci: Option<PciLocation>,
    /// Whether it is a software device over an interface, such as soft-RoCE.
    pub software: bool,
    pub numa: Option<u32>,
    /// CPUs that the kernel reports as local to it.
    pub cpus: Vec<usize>,
    /// The fastest active port, or else the fastest port.
    pub port: Port,
    /// The interfaces that share its ports.
    pub interfaces: Vec<String>,
    /// The physical function, if this device is a virtual one.
    pub parent: Option<PciAddress>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    pub number: u32,
    pub link: LinkLayer,
    /// The state's name in sysfs: `ACTIVE`, `DOWN`, `INIT`.
    pub state: String,
    pub gbps: f64,
}

impl Port {
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// The link layer of a port. Devices of different layers can't communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkLayer {
    InfiniBand,
    /// RoCE.
    Ethernet,
    /// Neither: EFA.
    Other,
}

impl LinkLayer {
    pub fn name(self) -> &'static str {
        match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
            Self::Other => "EFA",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub pci: Option<PciLocation>,
    pub numa: Option<u32>,
}

impl Topology {
    /// Finds a GPU by its name (`gpu0`) or its PCI address in any spelling.
    pub fn gpu(&self, which: &str) -> Option<&Gpu> {
        let address = which.parse().ok();
        self.gpus.iter().find(|g| g.name == which || Some(g.pci.address) == address)
    }

    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|n| n.name == name)
    }
}
