//! Evaluates a side: places every container on every rank that has it.

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::cuts::{Cut, CutsTable, MeshMap};
use crate::error::{PlanError, Result, Role};
use crate::layout::{Evaluated, HeldLeaf, Leaf, MeshRanks, NOTHING};
use crate::model::{Container, LeafExpr, Node, Placement, Side};
use crate::placer::{is_empty, ContainerFootprint, Dims, Placer};

type MeshMapKey = (Vec<u32>, Vec<Option<u32>>, usize);

/// The parts that containers of one form share; a model repeats a form in every layer.
struct ContainerForm {
    /// First leaf of the container that was evaluated.
    first_leaf: u32,
    /// Rank, ordinal of the leaf, mesh position; by rank.
    held: Vec<(u32, u32, u32)>,
}

#[derive(Default)]
struct InternTables {
    mesh_maps: FxHashMap<MeshMapKey, u32>,
    strides: FxHashMap<Dims<u64>, u32>,
    forms: FxHashMap<Vec<u64>, ContainerForm>,
}

impl<'s> Evaluated<'s> {
    pub fn new(role: Role, side: &'s Side, cuts: &mut CutsTable) -> Result<Self> {
        let dense: FxHashMap<u32, u32> =
            side.ranks.iter().enumerate().map(|(i, &r)| (r, i as u32)).collect();
        let meshes = side
            .meshes
            .iter()
            .map(|mesh| {
                let at: Vec<u32> = mesh.ranks.iter().map(|r| dense[r]).collect();
                let mut sorted: Vec<(u32, u32)> =
                    at.iter().enumerate().map(|(pos, &r)| (r, pos as u32)).collect();
                sorted.sort_unstable();
                MeshRanks { at, sorted }
            })
            .collect();
        let mut this = Evaluated {
            role,
            side,
            leaves: Vec::new(),
            meshes,
            mesh_maps: Vec::new(),
            held: vec![Vec::new(); side.ranks.len()],
            starts: vec![Vec::new(); side.ranks.len()],
            dense,
            bases: Vec::new(),
            strides_of: Vec::new(),
            stride_sets: Vec::new(),
        };
        let mut known = InternTables::default();
        for index in 0..side.containers.len() {
            let first = this.leaves.len() as u32;
            for node in &side.containers[index].nodes {
                if let Node::Leaf(expr) = node {
                    this.add_leaf(index as u32, expr, cuts, &mut known)?;
                }
            }
            this.place(index as u32, first, cuts, &mut known)?;
        }
        this.check_names()?;
        Ok(this)
    }

    fn add_leaf(
        &mut self,
        container: u32,
        expr: &LeafExpr,
        cuts: &mut CutsTable,
        known: &mut InternTables,
    ) -> Result<()> {
        let mesh = &self.side.meshes[expr.mesh as usize];
        let tensor = &self.side.tensors[expr.tensor as usize];
        let ndim = tensor.shape.len();
        let (origin, size): (Dims<u64>, Dims<u64>) = match &expr.slice {
            Some(slice) => slice.iter().copied().unzip(),
            None => (SmallVec::from_elem(0, ndim), Dims::from_slice(&tensor.shape)),
        };
        let mut ways: Vec<Vec<Cut>> = vec![Vec::new(); ndim];
        let mut sharded: Vec<Option<u32>> = Vec::with_capacity(mesh.shape.len());
        for (placement, &w) in expr.placements.iter().zip(&mesh.shape) {
            sharded.push(match *placement {
                Placement::Shard { dim } => {
                    ways[dim as usize].push(Cut::Chunk { ways: w });
                    Some(dim)
                }
                Placement::StridedShard { dim, split_factor } => {
                    ways[dim as usize].push(Cut::Strided { ways: w, factor: split_factor });
                    Some(dim)
                }
                Placement::Replicate | Placement::Partial => None,
            });
        }
        let mut ids = Dims::new();
        for (d, w) in ways.into_iter().enumerate() {
            ids.push(cuts.intern(size[d], w).ok_or_else(|| {
                PlanError::too_large(
                    format!("{} tensor `{}` dimension {d}", self.role, tensor.name),
                    "the number of intervals its placements cut",
                    "2^20",
                )
            })?);
        }
        let next = self.mesh_maps.len() as u32;
        let mesh_map =
            *known.mesh_maps.entry((mesh.shape.clone(), sharded, ndim)).or_insert_with_key(|key| {
                self.mesh_maps.push(MeshMap::new(&key.0, &key.1, ndim));
                next
            });
        let first = self.bases.len();
        if first + mesh.ranks.len() >= NOTHING as usize {
            return Err(PlanError::too_large(
                format!("{} side", self.role),
                "the number of shards",
                "2^32",
            ));
        }
        self.bases.resize(first + mesh.ranks.len(), 0);
        self.strides_of.resize(first + mesh.ranks.len(), NOTHING);
        self.leaves.push(Leaf {
            tensor: expr.tensor,
            container,
            mesh: expr.mesh,
            mesh_map,
            cuts: ids,
            origin,
            size,
            first: first as u32,
        });
        Ok(())
    }

    fn local_shape(&self, leaf: u32, position: u32, cuts: &CutsTable) -> Dims<u64> {
        let held = HeldLeaf { leaf, position };
        let cut = &self.leaves[leaf as usize].cuts;
        cut.iter()
            .enumerate()
            .map(|(d, &id)| cuts.get(id).extents[self.coord(held, d) as usize])
            .collect()
    }

    /// Records where the leaves of a container lie on every rank that has it.
    fn place(
        &mut self,
        index: u32,
        first_leaf: u32,
        cuts: &CutsTable,
        known: &mut InternTables,
    ) -> Result<()> {
        let key = self.form_of(index, first_leaf);
        if !known.forms.contains_key(&key) {
            let held = self.place_anew(index, first_leaf, cuts, &mut known.strides)?;
            known.forms.insert(key.clone(), ContainerForm { first_leaf, held });
        }
        let form = &known.forms[&key];
        let leaves = self.leaves.len() as u32 - first_leaf;
        for ordinal in (0..leaves).filter(|_| form.first_leaf != first_leaf) {
            let from = self.leaves[(form.first_leaf + ordinal) as usize].first as usize;
            let to = self.leaves[(first_leaf + ordinal) as usize].first as usize;
            let mesh = self.leaves[(first_leaf + ordinal) as usize].mesh as usize;
            let count = self.meshes[mesh].at.len();
            self.bases.copy_within(from..from + count, to);
            self.strides_of.copy_within(from..from + count, to);
        }
        for &(rank, ordinal, position) in &form.held {
            let (starts, list) = (&mut self.starts[rank as usize], &mut self.held[rank as usize]);
            if starts.last().is_none_or(|s| s.0 != index) {
                starts.push((index, list.len() as u32));
            }
            list.push(HeldLeaf { leaf: first_leaf + ordinal, position });
        }
        Ok(())
    }

    /// A key of everything that determines where a container's leaves lie, and on which ranks.
    fn form_of(&self, index: u32, first_leaf: u32) -> Vec<u64> {
        let container = &self.side.containers[index as usize];
        let mut key = vec![u64::from(self.side.dtypes[container.dtype as usize].itemsize)];
        let mut leaves = self.leaves[first_leaf as usize..].iter();
        for node in &container.nodes {
            match node {
                Node::Leaf(_) => {
                    let Some(leaf) = leaves.next() else { continue };
                    key.extend([0, u64::from(leaf.mesh), u64::from(leaf.mesh_map)]);
                    key.push(leaf.cuts.len() as u64);
                    key.extend(leaf.cuts.iter().map(|&c| u64::from(c)));
                }
                Node::Concat { axis, parts } => {
                    key.extend([1, u64::from(*axis), u64::from(*parts)]);
                }
                Node::Stack { parts } => key.extend([2, u64::from(*parts)]),
                Node::Pad { shape } => {
                    key.extend([3, shape.len() as u64]);
                    key.extend(shape);
                }
            }
        }
        // Lengths tell an absent list from an empty one, and where one ends.
        key.push(container.strides.as_ref().map_or(0, |s| s.len() as u64 + 1));
        key.extend(container.strides.iter().flatten());
        key.push(container.ranks.as_ref().map_or(0, |r| r.len() as u64 + 1));
        key.extend(container.ranks.iter().flatten().map(|&r| u64::from(r)));
        key
    }

    /// Evaluates a container on every rank that has it.
    fn place_anew(
        &mut self,
        index: u32,
        first_leaf: u32,
        cuts: &CutsTable,
        stride_ids: &mut FxHashMap<Dims<u64>, u32>,
    ) -> Result<Vec<(u32, u32, u32)>> {
        let container = &self.side.containers[index as usize];
        let mut placer = Placer::new(self.role, self.side, container);
        let mut found = Vec::new();
        for rank in self.ranks_of(container, first_leaf) {
            let Some(footprint) = self.evaluate(&mut placer, first_leaf, rank, cuts)? else {
                continue;
            };
            for (ordinal, node) in (0..).zip(leaf_nodes(container)) {
                let leaf = first_leaf + ordinal;
                let mesh = &self.meshes[self.leaves[leaf as usize].mesh as usize];
                let Some(position) = mesh.position(rank) else { continue };
                if is_empty(&self.local_shape(leaf, position, cuts)) {
                    continue;
                }
                let leaf_offset = placer.leaf_offset(node);
                let ndim = self.leaves[leaf as usize].cuts.len();
                let strides =
                    Dims::from_slice(&footprint.strides[leaf_offset.axis..leaf_offset.axis + ndim]);
                let next = self.stride_sets.len() as u32;
                let id = *stride_ids.entry(strides).or_insert_with_key(|key| {
                    self.stride_sets.push(key.clone());
                    next
                });
                let entry = (self.leaves[leaf as usize].first + position) as usize;
                self.bases[entry] = leaf_offset.base;
                self.strides_of[entry] = id;
                found.push((rank, ordinal, position));
            }
        }
        Ok(found)
    }

    pub(crate) fn evaluate(
        &self,
        placer: &mut Placer<'_>,
        first_leaf: u32,
        rank: u32,
        cuts: &CutsTable,
    ) -> Result<Option<ContainerFootprint>> {
        placer.place(self.rank_id(rank), |ordinal| {
            let leaf = first_leaf + ordinal;
            let mesh = &self.meshes[self.leaves[leaf as usize].mesh as usize];
            Some(self.local_shape(leaf, mesh.position(rank)?, cuts))
        })
    }

    /// Dense ranks that have a container, ascending.
    fn ranks_of(&self, container: &Container, first_leaf: u32) -> Vec<u32> {
        let mut ranks: Vec<u32> = match &container.ranks {
            Some(only) => only.iter().map(|r| self.dense[r]).collect(),
            None => {
                let last = first_leaf + leaf_nodes(container).count() as u32;
                let mut meshes: Vec<u32> =
                    (first_leaf..last).map(|l| self.leaves[l as usize].mesh).collect();
                meshes.sort_unstable();
                meshes.dedup();
                meshes.iter().flat_map(|&m| self.meshes[m as usize].at.iter().copied()).collect()
            }
        };
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Checks that a name means one container on each rank: ranks find their buffers by name.
    fn check_names(&self) -> Result<()> {
        let mut by_name: FxHashMap<&str, Vec<u32>> = FxHashMap::default();
        for (index, container) in self.side.containers.iter().enumerate() {
            by_name.entry(&container.name).or_default().push(index as u32);
        }
        if by_name.len() == self.side.containers.len() {
            return Ok(());
        }
        let mut seen: FxHashMap<(&str, u32), u32> = FxHashMap::default();
        for (rank, held) in self.held.iter().enumerate() {
            for h in held {
                let container = self.leaves[h.leaf as usize].container;
                let name = self.container_name(h.leaf);
                if by_name[name].len() < 2 {
                    continue;
                }
                if *seen.entry((name, rank as u32)).or_insert(container) != container {
                    return Err(PlanError::invalid(
                        self.role,
                        format!("container `{name}`"),
                        format!(
                            "is on rank {} twice; give the buffers of a rank distinct names",
                            self.side.ranks[rank]
                        ),
                    ));
                }
            }
        }
        Ok(())
    }
}

pub(crate) fn leaf_nodes(container: &Container) -> impl Iterator<Item = usize> + '_ {
    container.nodes.iter().enumerate().filter(|(_, n)| matches!(n, Node::Leaf(_))).map(|(i, _)| i)
}
