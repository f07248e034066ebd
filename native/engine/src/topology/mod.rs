//! Which NICs are near which GPU, and which of them each should use.
//!
//! [`Topology::read`] takes down what the kernel knows, from `/sys` or from a recorded copy of it.
//! From that and the user's [`Rules`] the pure function [`pair()`] chooses rails for every GPU and
//! every NUMA node and says why. [`pairing_for`] does so for one of them, among the devices that a
//! transport can open, and [`cpus_near`] names CPUs for the thread that drives them.

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
pub use pair::{pair, pairing_for, tiers, Choice, LeftOut, Location, Pairing, Rail};
pub use pci::{PciAddress, Place};
pub use rules::{Rules, MOST_RAILS};

/// What one machine has, in the order of PCI addresses.
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
    /// Empty where the node is memory alone, as a GPU's may be.
    pub cpus: Vec<usize>,
    /// To each node, in the firmware's measure (10 is local).
    pub distances: Vec<(u32, u32)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// `gpu0` has the lowest PCI address: the order of `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    pub name: String,
    pub place: Place,
    pub vendor: u16,
    pub device: u16,
    pub numa: Option<u32>,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq)]
pub struct Nic {
    /// As libibverbs names it.
    pub name: String,
    /// None for a device of software on an interface that isn't a PCI device's.
    pub place: Option<Place>,
    /// Soft-RoCE and the like: made by a driver over an interface, no hardware of its own.
    pub software: bool,
    pub numa: Option<u32>,
    /// The CPUs that the kernel calls local to it.
    pub cpus: Vec<usize>,
    /// Of the fastest port that is up, or of the fastest of all.
    pub port: Port,
    /// The interfaces that share its ports.
    pub interfaces: Vec<String>,
    /// The device that this one is a virtual function of.
    pub parent: Option<PciAddress>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    pub number: u32,
    pub link: Link,
    /// As the kernel names it: `ACTIVE`, `DOWN`, `INIT`.
    pub state: String,
    pub gbps: f64,
}

impl Port {
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// What a port speaks. Devices of different links can't reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    InfiniBand,
    /// RoCE.
    Ethernet,
    /// Neither: EFA.
    Other,
}

impl Link {
    pub fn words(self) -> &'static str {
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
    pub place: Option<Place>,
    pub numa: Option<u32>,
}

impl Topology {
    /// By its name (`gpu0`) or its PCI address, in any spelling.
    pub fn gpu(&self, which: &str) -> Option<&Gpu> {
        let address = which.parse().ok();
        self.gpus.iter().find(|g| g.name == which || Some(g.place.address) == address)
    }

    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|n| n.name == name)
    }
}
