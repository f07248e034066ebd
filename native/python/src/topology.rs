//! The topology of a machine and its pairing, as dictionaries; `fabric_ray.topology` gives them
//! types.

use std::path::PathBuf;

use fabric_engine::{
    topology::{pair, Gpu, Nic, Pairing, PciLocation, RailChoice, Rules, Topology, UnusedNic},
    EngineError,
};
use pyo3::prelude::*;

use crate::errors::OrRaise;

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(topology, m)?)
}

/// Reads the tree of sysfs at `root` and pairs what is there under `rules`.
#[pyfunction]
#[pyo3(signature = (root, rules=None))]
fn topology(py: Python<'_>, root: PathBuf, rules: Option<String>) -> PyResult<MachineView> {
    let read = || {
        let rules = Rules::parse(rules.as_deref().unwrap_or(""))?;
        let topology = Topology::read(&root)?;
        let pairing = pair(&topology, &rules)?;
        Ok(MachineView::new(&topology, pairing))
    };
    py.detach(read).map_err(EngineError::Invalid).or_raise(py)
}

#[derive(IntoPyObject)]
struct MachineView {
    nodes: Vec<NodeView>,
    gpus: Vec<GpuView>,
    nics: Vec<NicView>,
    pairs: Vec<ChoiceView>,
    left_out: Vec<LeftOutView>,
}

#[derive(IntoPyObject)]
struct NodeView {
    id: u32,
    cpus: Vec<usize>,
}

#[derive(IntoPyObject)]
struct PlaceView {
    address: String,
    root: String,
    bridges: Vec<String>,
}

#[derive(IntoPyObject)]
struct GpuView {
    name: String,
    place: PlaceView,
    numa: Option<u32>,
    vendor: u16,
    device: u16,
    distances: Vec<(String, &'static str)>,
}

#[derive(IntoPyObject)]
struct NicView {
    name: String,
    place: Option<PlaceView>,
    numa: Option<u32>,
    software: bool,
    port: u32,
    link: &'static str,
    state: String,
    gbps: f64,
    interfaces: Vec<String>,
}

#[derive(IntoPyObject)]
struct ChoiceView {
    name: String,
    rails: Vec<(String, &'static str)>,
    reason: String,
}

#[derive(IntoPyObject)]
struct LeftOutView {
    nic: String,
    reason: String,
}

impl MachineView {
    fn new(topology: &Topology, pairing: Pairing) -> Self {
        let node = |n: &fabric_engine::topology::Node| NodeView { id: n.id, cpus: n.cpus.clone() };
        let gpu = |g: &Gpu| GpuView {
            name: g.name.clone(),
            place: PlaceView::new(&g.pci),
            numa: g.numa,
            vendor: g.vendor,
            device: g.device,
            distances: topology
                .nics
                .iter()
                .map(|n| (n.name.clone(), topology.gpu_to_nic(g, n).code()))
                .collect(),
        };
        let choices = pairing.gpus.into_iter().chain(pairing.hosts);
        Self {
            nodes: topology.nodes.iter().map(node).collect(),
            gpus: topology.gpus.iter().map(gpu).collect(),
            nics: topology.nics.iter().map(NicView::new).collect(),
            pairs: choices.map(ChoiceView::new).collect(),
            left_out: pairing.left_out.into_iter().map(LeftOutView::new).collect(),
        }
    }
}

impl PlaceView {
    fn new(place: &PciLocation) -> Self {
        Self {
            address: place.address.to_string(),
            root: place.root.clone(),
            bridges: place.bridges.iter().map(ToString::to_string).collect(),
        }
    }
}

impl NicView {
    fn new(nic: &Nic) -> Self {
        Self {
            name: nic.name.clone(),
            place: nic.pci.as_ref().map(PlaceView::new),
            numa: nic.numa,
            software: nic.software,
            port: nic.port.number,
            link: nic.port.link.name(),
            state: nic.port.state.clone(),
            gbps: nic.port.gbps,
            interfaces: nic.interfaces.clone(),
        }
    }
}

impl ChoiceView {
    fn new(choice: RailChoice) -> Self {
        let rails = choice.rails.into_iter().map(|r| (r.nic, r.distance.code()));
        Self { name: choice.name, rails: rails.collect(), reason: choice.reason }
    }
}

impl LeftOutView {
    fn new(left_out: UnusedNic) -> Self {
        Self { nic: left_out.nic, reason: left_out.reason }
    }
}
