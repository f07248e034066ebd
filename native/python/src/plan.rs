//! The planner's classes. Layouts come in as MessagePack, copies go out as columns of numbers.

use fabric_plan::{Extra, Options, Plan, PlanError, Role, Side, SideSpec, Transfer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict};

use crate::engine::checked_int;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PlanCore>()?;
    m.add_function(wrap_pyfunction!(holders, m)?)
}

type RankLists = Vec<Vec<u32>>;

/// The ranks that hold anything of each container, and the ranks in groups that hold the same.
#[pyfunction]
fn holders(py: Python<'_>, target: &[u8]) -> PyResult<(RankLists, RankLists)> {
    py.detach(|| {
        let spec = SideSpec::from_msgpack(Role::Target, target)?;
        Side::from_spec(Role::Target, spec)?.holders(Role::Target)
    })
    .map(|found| (found.by_container, found.replicas))
    .map_err(|e| raise(py, &e))
}

/// The exception of `fabric_ray.plan.errors` for an error, with what it names as attributes.
pub(crate) fn raise(py: Python<'_>, error: &PlanError) -> PyErr {
    build(py, error).unwrap_or_else(|failed| failed)
}

fn build(py: Python<'_>, error: &PlanError) -> PyResult<PyErr> {
    let module = ERRORS
        .get_or_try_init(py, || PyModule::import(py, "fabric_ray.plan.errors").map(Bound::unbind))?
        .bind(py);
    let fields = PyDict::new(py);
    let class = match error {
        PlanError::Invalid { .. } => "InvalidLayout",
        PlanError::Partial { tensor, container, .. } => {
            fields.set_item("tensor", tensor)?;
            fields.set_item("container", container)?;
            "PartialPlacement"
        }
        PlanError::DtypeMismatch { .. } => "DtypeMismatch",
        PlanError::ShapeMismatch { .. } => "ShapeMismatch",
        PlanError::MissingTensors { tensor, container, rank, .. } => {
            fields.set_item("tensor", tensor)?;
            fields.set_item("container", container)?;
            fields.set_item("rank", rank)?;
            "MissingTensors"
        }
        PlanError::ExtraTensors { tensor, container, .. } => {
            fields.set_item("tensor", tensor)?;
            fields.set_item("container", container)?;
            "ExtraTensors"
        }
        PlanError::Uncovered { tensor, container, rank, .. } => {
            fields.set_item("tensor", tensor)?;
            fields.set_item("container", container)?;
            fields.set_item("rank", rank)?;
            "Uncovered"
        }
        PlanError::Overlap { container, rank, .. } => {
            fields.set_item("container", container)?;
            fields.set_item("rank", rank)?;
            "OverlappingElements"
        }
        PlanError::TooLarge { .. } => "PlanTooLarge",
        PlanError::Decode { .. } => "PlanDecodeError",
        PlanError::UnknownRank { rank, .. } => {
            fields.set_item("rank", rank)?;
            "UnknownRank"
        }
        PlanError::Buffer { container, rank, .. } => {
            fields.set_item("container", container)?;
            fields.set_item("rank", rank)?;
            "BufferMismatch"
        }
        _ => "PlanError",
    };
    let exception = module.getattr(class)?.call((error.to_string(),), Some(&fields))?;
    Ok(PyErr::from_value(exception))
}

fn role(side: &str) -> PyResult<Role> {
    match side {
        "source" => Ok(Role::Source),
        "target" => Ok(Role::Target),
        _ => Err(PyValueError::new_err(format!("side is `{side}`; say `source` or `target`"))),
    }
}

/// `(rank, bytes)` per rank of a side.
type RankBytes = Vec<(u32, u64)>;

/// Copies as columns of little-endian numbers, one entry per copy, then the loops of all copies.
type Columns<'py> =
    ([Bound<'py, PyBytes>; 2], [Bound<'py, PyBytes>; 4], Bound<'py, PyBytes>, Bound<'py, PyBytes>);

#[pyclass(frozen, module = "fabric_ray._native")]
#[derive(Debug)]
pub struct PlanCore {
    pub(crate) plan: Plan,
}

#[pymethods]
impl PlanCore {
    #[staticmethod]
    fn build(
        py: Python<'_>,
        source: &[u8],
        target: &[u8],
        ignore_extra: bool,
        #[pyo3(from_py_with = checked_int)] min_split_bytes: u64,
    ) -> PyResult<Self> {
        let extra = if ignore_extra { Extra::Ignore } else { Extra::Refuse };
        let options = Options { extra, min_split_bytes };
        py.detach(|| {
            let side = |role, bytes| Side::from_spec(role, SideSpec::from_msgpack(role, bytes)?);
            let (source, target) = (side(Role::Source, source)?, side(Role::Target, target)?);
            fabric_plan::plan(source, target, options)
        })
        .map(|plan| PlanCore { plan })
        .map_err(|e| raise(py, &e))
    }

    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        py.detach(|| Plan::from_bytes(data))
            .map(|plan| PlanCore { plan })
            .map_err(|e| raise(py, &e))
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.plan.to_bytes()))
    }

    fn digest(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.plan.digest())
    }

    fn ranks(&self, side: &str) -> PyResult<Vec<u32>> {
        Ok(self.side(role(side)?).ranks.clone())
    }

    /// `(name, dtype)` of each container.
    fn containers(&self, side: &str) -> PyResult<Vec<(String, String)>> {
        let side = self.side(role(side)?);
        let dtype = |c: &fabric_plan::Container| side.dtypes[c.dtype as usize].name.clone();
        Ok(side.containers.iter().map(|c| (c.name.clone(), dtype(c))).collect())
    }

    /// `(index, shape, strides in bytes, bytes)` of each container that a rank has.
    #[allow(clippy::type_complexity)]
    fn local_containers(
        &self,
        py: Python<'_>,
        side: &str,
        #[pyo3(from_py_with = checked_int)] rank: u32,
    ) -> PyResult<Vec<(u32, Vec<u64>, Vec<u64>, u64)>> {
        let role = role(side)?;
        let found = py
            .detach(|| self.side(role).local_containers(role, rank))
            .map_err(|e| raise(py, &e))?;
        Ok(found.into_iter().map(|c| (c.index, c.shape, c.strides, c.bytes)).collect())
    }

    /// `(source, target, bytes, pages, copies)` per pair of ranks that exchange anything.
    fn links(&self) -> Vec<(u32, u32, u64, u64, u64)> {
        self.plan.links().map(|l| (l.src, l.dst, l.bytes, l.pages, l.copies)).collect()
    }

    fn bytes_on_link(
        &self,
        #[pyo3(from_py_with = checked_int)] src: u32,
        #[pyo3(from_py_with = checked_int)] dst: u32,
    ) -> u64 {
        self.plan.bytes_on_link(src, dst)
    }

    fn expected_pages(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] dst: u32,
    ) -> PyResult<u64> {
        self.plan.expected_pages(dst).map_err(|e| raise(py, &e))
    }

    fn counts(&self) -> (u64, u64) {
        (self.plan.total_copies(), self.plan.stored_copies())
    }

    /// Total, bytes sent and received per rank, and the three imbalances.
    fn balance(&self) -> (u64, RankBytes, RankBytes, (f64, f64, f64)) {
        let b = self.plan.balance();
        let ratios = (b.sender_imbalance, b.receiver_imbalance, b.link_imbalance);
        (b.total, b.sent, b.received, ratios)
    }

    fn for_source<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = checked_int)] rank: u32,
    ) -> PyResult<Columns<'py>> {
        let transfers = self.plan.for_source(rank).map_err(|e| raise(py, &e))?;
        Ok(columns(py, transfers))
    }

    fn sending_order(
        &self,
        #[pyo3(from_py_with = checked_int)] rank: u32,
        py: Python<'_>,
    ) -> PyResult<Vec<u32>> {
        py.detach(|| self.plan.sending_order(rank)).map_err(|e| raise(py, &e))
    }

    fn for_target<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = checked_int)] rank: u32,
    ) -> PyResult<Columns<'py>> {
        let transfers = self.plan.for_target(rank).map_err(|e| raise(py, &e))?;
        Ok(columns(py, transfers))
    }

    #[pyo3(signature = (name=None, rank=None))]
    fn explain(
        &self,
        py: Python<'_>,
        name: Option<&str>,
        #[pyo3(from_py_with = checked_int)] rank: Option<u32>,
    ) -> PyResult<String> {
        py.detach(|| self.plan.explain(name, rank)).map_err(|e| raise(py, &e))
    }

    fn equals(&self, py: Python<'_>, other: &Self) -> bool {
        py.detach(|| self.plan == other.plan)
    }
}

impl PlanCore {
    fn side(&self, role: Role) -> &Side {
        match role {
            Role::Source => self.plan.source(),
            Role::Target => self.plan.target(),
        }
    }
}

/// Peers and loop counts are u32, containers and offsets u64, as are run, loops.
fn columns<'p, 'py>(
    py: Python<'py>,
    transfers: impl Iterator<Item = Transfer<'p>>,
) -> Columns<'py> {
    let mut narrow: [Vec<u8>; 2] = Default::default();
    let mut wide: [Vec<u8>; 4] = Default::default();
    let (mut runs, mut loops) = (Vec::new(), Vec::new());
    for Transfer { peer, copy } in transfers {
        narrow[0].extend_from_slice(&peer.to_le_bytes());
        narrow[1].extend_from_slice(&(copy.loops.len() as u32).to_le_bytes());
        let fields = [
            u64::from(copy.src_container),
            copy.src_offset,
            u64::from(copy.dst_container),
            copy.dst_offset,
        ];
        for (column, field) in wide.iter_mut().zip(fields) {
            column.extend_from_slice(&field.to_le_bytes());
        }
        runs.extend_from_slice(&copy.run.to_le_bytes());
        for l in copy.loops {
            for field in [l.count, l.src_stride, l.dst_stride] {
                loops.extend_from_slice(&field.to_le_bytes());
            }
        }
    }
    let bytes = |column: Vec<u8>| PyBytes::new(py, &column);
    (narrow.map(bytes), wide.map(bytes), bytes(runs), bytes(loops))
}
