//! Builds a checked, interned [`Side`] from a caller's specification.

use rustc_hash::{FxHashMap, FxHashSet};

use crate::error::{PlanError, Result, Role};
use crate::model::{Container, DType, LeafExpr, Mesh, Node, Placement, Side, Tensor, MAX_DIMS};
use crate::spec::{ContainerSpec, Layout, SideSpec, TensorSpec};

/// Most ranks, containers or layout nodes a side may have; far above any cluster.
const MAX_COUNT: usize = 1 << 24;

struct Builder {
    role: Role,
    side: Side,
    dtypes: FxHashMap<DType, u32>,
    tensors: FxHashMap<String, (u32, u32)>,
    meshes: FxHashMap<Mesh, u32>,
}

impl Side {
    /// Interns a caller's tree and makes all checks that need no evaluation.
    pub fn from_spec(role: Role, spec: SideSpec) -> Result<Side> {
        let mut builder = Builder {
            role,
            side: Side { ranks: spec.ranks, ..Side::default() },
            dtypes: FxHashMap::default(),
            tensors: FxHashMap::default(),
            meshes: FxHashMap::default(),
        };
        for container in spec.containers {
            builder.container(container)?;
        }
        builder.side.check(role)?;
        Ok(builder.side)
    }
}

impl Builder {
    fn dtype(&mut self, dtype: DType) -> u32 {
        let next = self.side.dtypes.len() as u32;
        *self.dtypes.entry(dtype).or_insert_with_key(|key| {
            self.side.dtypes.push(key.clone());
            next
        })
    }

    fn container(&mut self, spec: ContainerSpec) -> Result<()> {
        let mut nodes = Vec::new();
        self.nodes(&spec.name, spec.layout, &mut nodes)?;
        let dtype = self.dtype(spec.dtype);
        let ContainerSpec { name, strides, ranks, .. } = spec;
        self.side.containers.push(Container { name, dtype, nodes, strides, ranks });
        Ok(())
    }

    /// Recursion is bounded by the depth the reader accepted.
    fn nodes(&mut self, container: &str, layout: Layout, out: &mut Vec<Node>) -> Result<()> {
        match layout {
            Layout::Leaf { tensor, mesh, placements, slice } => {
                let tensor = self.tensor(container, tensor)?;
                let next = self.side.meshes.len() as u32;
                let mesh = *self.meshes.entry(mesh).or_insert_with_key(|key| {
                    self.side.meshes.push(key.clone());
                    next
                });
                out.push(Node::Leaf(LeafExpr { tensor, mesh, placements, slice }));
            }
            Layout::Concat { axis, parts } => {
                let count = parts.len() as u32;
                for part in parts {
                    self.nodes(container, part, out)?;
                }
                out.push(Node::Concat { axis, parts: count });
            }
            Layout::Stack { parts } => {
                let count = parts.len() as u32;
                for part in parts {
                    self.nodes(container, part, out)?;
                }
                out.push(Node::Stack { parts: count });
            }
            Layout::Pad { part, shape } => {
                self.nodes(container, *part, out)?;
                out.push(Node::Pad { shape });
            }
        }
        Ok(())
    }

    fn tensor(&mut self, container: &str, spec: TensorSpec) -> Result<u32> {
        let dtype = self.dtype(spec.dtype);
        if let Some(&(id, first)) = self.tensors.get(&spec.name) {
            let known = &self.side.tensors[id as usize];
            let subject =
                || format!("{} container `{container}`, tensor `{}`", self.role, known.name);
            let place = || match self.side.containers.get(first as usize) {
                Some(c) => format!(" as in container `{}`", c.name),
                None => " as earlier in this container".to_string(),
            };
            if known.dtype != dtype {
                return Err(PlanError::DtypeMismatch {
                    subject: subject(),
                    found: self.side.dtypes[dtype as usize].name.clone(),
                    expected: self.side.dtypes[known.dtype as usize].name.clone(),
                    place: place(),
                });
            }
            if known.shape != spec.shape {
                return Err(PlanError::ShapeMismatch {
                    subject: subject(),
                    found: spec.shape,
                    expected: known.shape.clone(),
                    place: place(),
                    advice: "give every use of a tensor its global shape".into(),
                });
            }
            return Ok(id);
        }
        let id = self.side.tensors.len() as u32;
        self.tensors.insert(spec.name.clone(), (id, self.side.containers.len() as u32));
        self.side.tensors.push(Tensor { name: spec.name, shape: spec.shape, dtype });
        Ok(id)
    }
}

impl Side {
    /// Checks the invariants that later code relies on, for decoded sides too.
    pub(crate) fn check(&self, role: Role) -> Result<()> {
        self.check_ranks(role)?;
        for dtype in &self.dtypes {
            if dtype.itemsize == 0 || dtype.itemsize > 1 << 16 {
                return Err(PlanError::invalid(
                    role,
                    format!("dtype `{}`", dtype.name),
                    format!("itemsize is {}; give 1 to 65536 bytes", dtype.itemsize),
                ));
            }
        }
        let mut names = FxHashSet::default();
        for tensor in &self.tensors {
            self.check_tensor(role, tensor)?;
            if !names.insert(tensor.name.as_str()) {
                return Err(PlanError::invalid(
                    role,
                    format!("tensor `{}`", tensor.name),
                    "is listed twice; list a tensor once",
                ));
            }
        }
        let ranks: FxHashSet<u32> = self.ranks.iter().copied().collect();
        for mesh in &self.meshes {
            check_mesh(role, mesh, &ranks)?;
        }
        for container in &self.containers {
            self.check_container(role, container, &ranks)?;
        }
        Ok(())
    }

    fn check_ranks(&self, role: Role) -> Result<()> {
        let limited = [(self.ranks.len(), "ranks"), (self.containers.len(), "containers")];
        for (count, what) in limited {
            if count > MAX_COUNT {
                return Err(PlanError::too_large(
                    format!("{role} side"),
                    format!("{count} {what}"),
                    MAX_COUNT.to_string(),
                ));
            }
        }
        match duplicate(&self.ranks) {
            Some(rank) => Err(PlanError::invalid(
                role,
                "side",
                format!("rank {rank} is listed twice; list every rank once"),
            )),
            None => Ok(()),
        }
    }

    fn check_tensor(&self, role: Role, tensor: &Tensor) -> Result<()> {
        let subject = || format!("tensor `{}`", tensor.name);
        if tensor.shape.len() > MAX_DIMS {
            let problem = format!(
                "has {} dimensions; merge some, {MAX_DIMS} is the most",
                tensor.shape.len()
            );
            return Err(PlanError::invalid(role, subject(), problem));
        }
        if let Some(dim) = tensor.shape.iter().position(|&n| n == 0) {
            let problem =
                format!("dimension {dim} has size 0; leave empty tensors out of the side");
            return Err(PlanError::invalid(role, subject(), problem));
        }
        let dtype = self.dtypes.get(tensor.dtype as usize);
        let itemsize = dtype.map_or(0, |d| u64::from(d.itemsize));
        if itemsize == 0 {
            return Err(PlanError::invalid(
                role,
                subject(),
                "has no dtype; give name and itemsize",
            ));
        }
        match tensor.shape.iter().try_fold(itemsize, |n, &d| n.checked_mul(d)) {
            Some(_) => Ok(()),
            None => Err(PlanError::too_large(
                format!("{role} {}", subject()),
                format!("shape {:?} of {itemsize}-byte elements", tensor.shape),
                "2^64 bytes",
            )),
        }
    }

    fn check_container(
        &self,
        role: Role,
        container: &Container,
        ranks: &FxHashSet<u32>,
    ) -> Result<()> {
        let subject = format!("container `{}`", container.name);
        let invalid = |problem: String| Err(PlanError::invalid(role, subject.as_str(), problem));
        let Some(dtype) = self.dtypes.get(container.dtype as usize) else {
            return invalid("has no dtype; give name and itemsize".into());
        };
        if container.nodes.len() > MAX_COUNT {
            return invalid(format!("has more than {MAX_COUNT} layout nodes; split it"));
        }
        if let Some(only) = &container.ranks {
            if let Some(rank) = duplicate(only) {
                return invalid(format!("rank {rank} is listed twice; list every rank once"));
            }
            if let Some(rank) = only.iter().find(|r| !ranks.contains(r)) {
                return invalid(format!("rank {rank} is not a rank of the side; add it there"));
            }
        }
        let mut depth = 0usize;
        for node in &container.nodes {
            let taken = match node {
                Node::Leaf(leaf) => {
                    self.check_leaf(role, container, dtype, leaf)?;
                    0
                }
                Node::Concat { parts, .. } | Node::Stack { parts } => *parts as usize,
                Node::Pad { .. } => 1,
            };
            if !matches!(node, Node::Leaf(_)) && taken == 0 {
                return invalid("a concat or stack has no parts; give at least one".into());
            }
            if taken > depth {
                return invalid("its layout is cut short; build it from whole expressions".into());
            }
            depth = depth - taken + 1;
            if let Node::Pad { shape } = node {
                if shape.len() > MAX_DIMS {
                    return invalid(format!("pads to more than {MAX_DIMS} dimensions; merge some"));
                }
            }
        }
        if depth != 1 {
            return invalid("its layout is not one expression; give exactly one".into());
        }
        Ok(())
    }

    fn check_leaf(
        &self,
        role: Role,
        container: &Container,
        dtype: &DType,
        leaf: &LeafExpr,
    ) -> Result<()> {
        let subject = || format!("container `{}`", container.name);
        let tables = (self.tensors.get(leaf.tensor as usize), self.meshes.get(leaf.mesh as usize));
        let (Some(tensor), Some(mesh)) = tables else {
            return Err(PlanError::invalid(role, subject(), "names a tensor or mesh it lacks"));
        };
        let named = || format!("{role} container `{}`, tensor `{}`", container.name, tensor.name);
        let invalid = |problem: String| Err(PlanError::invalid(role, subject(), problem));
        let known = &self.dtypes[tensor.dtype as usize];
        if known != dtype {
            return Err(PlanError::DtypeMismatch {
                subject: named(),
                found: known.name.clone(),
                expected: dtype.name.clone(),
                place: " by the container".into(),
            });
        }
        if leaf.placements.len() != mesh.shape.len() {
            return invalid(format!(
                "tensor `{}` has {} placements on a mesh of {} dimensions; give one per dimension",
                tensor.name,
                leaf.placements.len(),
                mesh.shape.len()
            ));
        }
        for (mesh_dim, placement) in leaf.placements.iter().enumerate() {
            let dim = match *placement {
                Placement::Replicate => continue,
                Placement::Partial => {
                    return Err(PlanError::Partial {
                        role,
                        container: container.name.clone(),
                        tensor: tensor.name.clone(),
                        mesh_dim,
                    })
                }
                Placement::StridedShard { split_factor: 0, .. } => {
                    return invalid(format!(
                        "tensor `{}` has a strided shard with split factor 0; give 1 or more",
                        tensor.name
                    ))
                }
                Placement::Shard { dim } | Placement::StridedShard { dim, .. } => dim,
            };
            if dim as usize >= tensor.shape.len() {
                return invalid(format!(
                    "tensor `{}` of {} dimensions is sharded on dimension {dim}; count from 0",
                    tensor.name,
                    tensor.shape.len()
                ));
            }
        }
        let Some(slice) = &leaf.slice else { return Ok(()) };
        let fits = slice.len() == tensor.shape.len()
            && slice.iter().zip(&tensor.shape).all(|(&(start, len), &size)| {
                len > 0 && start.checked_add(len).is_some_and(|end| end <= size)
            });
        if fits {
            return Ok(());
        }
        invalid(format!(
            "slice {slice:?} (start, len) is not a box of tensor `{}` with shape {:?}; give one \
             nonempty interval per dimension",
            tensor.name, tensor.shape
        ))
    }
}

fn check_mesh(role: Role, mesh: &Mesh, ranks: &FxHashSet<u32>) -> Result<()> {
    let subject = || format!("mesh of shape {:?}", mesh.shape);
    let invalid = |problem: String| Err(PlanError::invalid(role, subject(), problem));
    let size = mesh.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(u64::from(d)));
    if mesh.ranks.is_empty() || size != Some(mesh.ranks.len() as u64) {
        return invalid(format!(
            "lists {} ranks; list as many as the shape has places",
            mesh.ranks.len()
        ));
    }
    if !mesh.names.is_empty() && mesh.names.len() != mesh.shape.len() {
        return invalid(format!("has {} names; give one per dimension", mesh.names.len()));
    }
    if let Some(rank) = duplicate(&mesh.ranks) {
        return invalid(format!("rank {rank} appears twice; list every rank once"));
    }
    match mesh.ranks.iter().find(|r| !ranks.contains(r)) {
        Some(rank) => invalid(format!("rank {rank} is not a rank of the side; add it there")),
        None => Ok(()),
    }
}

fn duplicate(ranks: &[u32]) -> Option<u32> {
    let mut seen = FxHashSet::default();
    ranks.iter().copied().find(|&r| !seen.insert(r))
}
