//! An evaluated side: which rank holds which box of which tensor at which byte.

use rustc_hash::FxHashMap;

use crate::cuts::MeshMap;
use crate::error::Role;
use crate::model::Side;
use crate::placer::Dims;

/// Marks a mesh position that holds nothing of a leaf.
pub(crate) const NOTHING: u32 = u32::MAX;

/// One evaluated leaf expression.
#[derive(Debug)]
pub(crate) struct Leaf {
    pub tensor: u32,
    pub container: u32,
    pub mesh: u32,
    pub mesh_map: u32,
    /// Cuts of each dimension, relative to `origin`.
    pub cuts: Dims<u32>,
    /// The leaf's box of the logical tensor.
    pub origin: Dims<u64>,
    pub size: Dims<u64>,
    /// First of this leaf's entries in the placement arrays, one per mesh position.
    pub first: u32,
}

/// A leaf as one rank holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HeldLeaf {
    pub leaf: u32,
    /// The rank's position in the leaf's mesh.
    pub position: u32,
}

#[derive(Debug)]
pub(crate) struct MeshRanks {
    /// Dense rank index per mesh position.
    pub at: Vec<u32>,
    pub sorted: Vec<(u32, u32)>,
}

impl MeshRanks {
    pub fn position(&self, rank: u32) -> Option<u32> {
        let found = self.sorted.binary_search_by_key(&rank, |&(r, _)| r).ok()?;
        Some(self.sorted[found].1)
    }
}

#[derive(Debug)]
pub(crate) struct Evaluated<'s> {
    pub role: Role,
    pub side: &'s Side,
    pub leaves: Vec<Leaf>,
    pub meshes: Vec<MeshRanks>,
    pub mesh_maps: Vec<MeshMap>,
    /// The leaves that each rank (dense index) holds, in container order.
    pub held: Vec<Vec<HeldLeaf>>,
    /// Per rank, each container it holds and where that begins in `held`.
    pub starts: Vec<Vec<(u32, u32)>>,
    /// Dense index per rank id.
    pub dense: FxHashMap<u32, u32>,
    /// Per placement entry (see [`Leaf::first`]), the first byte in the container.
    pub bases: Vec<u64>,
    /// Per placement entry, an index into `stride_sets` or [`NOTHING`].
    pub strides_of: Vec<u32>,
    pub stride_sets: Vec<Dims<u64>>,
}

impl Evaluated<'_> {
    /// Base byte and byte strides of a held leaf; `None` where the mesh position holds nothing.
    pub fn placed(&self, held: HeldLeaf) -> Option<(u64, &[u64])> {
        let entry = (self.leaves[held.leaf as usize].first + held.position) as usize;
        match self.strides_of[entry] {
            NOTHING => None,
            id => Some((self.bases[entry], &self.stride_sets[id as usize])),
        }
    }

    /// Offset and strides in memory: everything in which two ranks' copies could differ.
    pub fn placed_key(&self, held: HeldLeaf) -> (u64, u32) {
        let entry = (self.leaves[held.leaf as usize].first + held.position) as usize;
        (self.bases[entry], self.strides_of[entry])
    }

    /// Containers of which a rank holds at least one leaf, ascending.
    pub fn containers_of(&self, rank: u32) -> impl Iterator<Item = u32> + '_ {
        self.starts[rank as usize].iter().map(|s| s.0)
    }

    /// The leaves that a rank holds of a container.
    pub fn held_in(&self, rank: u32, container: u32) -> &[HeldLeaf] {
        let (starts, held) = (&self.starts[rank as usize], &self.held[rank as usize]);
        let Ok(at) = starts.binary_search_by_key(&container, |s| s.0) else { return &[] };
        let end = starts.get(at + 1).map_or(held.len(), |s| s.1 as usize);
        &held[starts[at].1 as usize..end]
    }

    pub fn rank_of(&self, held: HeldLeaf) -> u32 {
        let mesh = self.leaves[held.leaf as usize].mesh;
        self.meshes[mesh as usize].at[held.position as usize]
    }

    pub fn rank_id(&self, dense: u32) -> u32 {
        self.side.ranks[dense as usize]
    }

    pub fn coord(&self, held: HeldLeaf, dim: usize) -> u32 {
        let leaf = &self.leaves[held.leaf as usize];
        self.mesh_maps[leaf.mesh_map as usize].coord(dim, held.position)
    }

    pub fn tensor_name(&self, leaf: u32) -> &str {
        &self.side.tensors[self.leaves[leaf as usize].tensor as usize].name
    }

    pub fn container_name(&self, leaf: u32) -> &str {
        &self.side.containers[self.leaves[leaf as usize].container as usize].name
    }

    pub fn itemsize(&self, leaf: u32) -> u64 {
        let container = self.leaves[leaf as usize].container as usize;
        let dtype = self.side.containers[container].dtype as usize;
        u64::from(self.side.dtypes[dtype].itemsize)
    }
}
