//! RDMA libraries and NICs of this machine, as dictionaries; `fabric_ray.doctor` gives them types.

use fabric_engine::{
    api::{EngineConfig, NicConfig},
    transport::{libfabric, verbs},
};
use pyo3::prelude::*;

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(survey, m)?)
}

/// Looks at everything and opens nothing; `provider` is libfabric's to judge by.
#[pyfunction]
#[pyo3(signature = (names, provider=None))]
fn survey(py: Python<'_>, names: Vec<String>, provider: Option<String>) -> Survey {
    py.detach(|| {
        let nics = NicConfig { names, provider, ..NicConfig::default() };
        let ports = verbs::discover(&nics).into_iter().map(PortView::from).collect();
        let config =
            EngineConfig { nics, token: Some(b"survey".to_vec()), ..EngineConfig::default() };
        let offers = libfabric::discover(&config).unwrap_or_default();
        Survey {
            verbs: LibraryView::from(verbs::version()),
            ports,
            libfabric: LibraryView::from(libfabric::version()),
            offers: offers.into_iter().map(OfferView::from).collect(),
        }
    })
}

#[derive(IntoPyObject)]
struct Survey {
    verbs: LibraryView,
    ports: Vec<PortView>,
    libfabric: LibraryView,
    offers: Vec<OfferView>,
}

#[derive(IntoPyObject)]
struct LibraryView {
    found: bool,
    /// Name and version, or why it can't be used.
    what: String,
}

impl From<Result<String, String>> for LibraryView {
    fn from(result: Result<String, String>) -> Self {
        let found = result.is_ok();
        let what = result.unwrap_or_else(|why| why);
        Self { found, what }
    }
}

#[derive(IntoPyObject)]
struct PortView {
    device: String,
    port: u8,
    state: String,
    link_layer: String,
    chosen: bool,
    why: String,
    gids: Vec<GidView>,
}

#[derive(IntoPyObject)]
struct GidView {
    index: u8,
    address: String,
    kind: &'static str,
    netdev: Option<String>,
    chosen: bool,
    why: String,
}

impl From<verbs::DeviceReport> for PortView {
    fn from(r: verbs::DeviceReport) -> Self {
        let gid = |g: verbs::GidReport| GidView {
            index: g.index,
            address: g.address,
            kind: g.kind,
            netdev: g.netdev,
            chosen: g.chosen,
            why: g.why,
        };
        Self {
            device: r.device,
            port: r.port,
            state: r.state,
            link_layer: r.link_layer,
            chosen: r.chosen,
            why: r.why,
            gids: r.gids.into_iter().map(gid).collect(),
        }
    }
}

#[derive(IntoPyObject)]
struct OfferView {
    provider: String,
    fabric: String,
    domain: String,
    pci: Option<String>,
    rdma: bool,
    chosen: bool,
    why: String,
}

impl From<libfabric::NicReport> for OfferView {
    fn from(f: libfabric::NicReport) -> Self {
        let libfabric::NicReport { provider, fabric, domain, pci, rdma, chosen, why, .. } = f;
        Self { provider, fabric, domain, pci, rdma, chosen, why }
    }
}
