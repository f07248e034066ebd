//! The vocabulary of the algebra: tensors, meshes, placements, layout expressions, sides.
//!
//! A layout expression is kept as a flat list in postfix order, so that reading, checking and
//! evaluating one never recurses, at any depth.

use serde::{Deserialize, Serialize};

/// Most dimensions a tensor or container may have, stacked axes included.
pub const MAX_DIMS: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DType {
    pub name: String,
    /// Bytes of one element.
    pub itemsize: u32,
}

/// A logical tensor: what all its shards together are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    pub name: String,
    pub shape: Vec<u64>,
    /// Index into [`Side::dtypes`].
    pub dtype: u32,
}

/// An n-dimensional array of rank ids, row-major.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mesh {
    pub ranks: Vec<u32>,
    pub shape: Vec<u32>,
    /// One name per dimension, or empty.
    pub names: Vec<String>,
}

/// What one mesh dimension does to a tensor; torch's placements, with torch's uneven chunks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Placement {
    Shard { dim: u32 },
    StridedShard { dim: u32, split_factor: u64 },
    Replicate,
    Partial,
}

/// A box of a logical tensor, placed over a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeafExpr {
    /// Index into [`Side::tensors`].
    pub tensor: u32,
    /// Index into [`Side::meshes`].
    pub mesh: u32,
    pub placements: Vec<Placement>,
    /// `(start, len)` per dimension; the whole tensor when absent.
    pub slice: Option<Vec<(u64, u64)>>,
}

/// One node of a layout expression; operators follow their parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Node {
    Leaf(LeafExpr),
    /// The preceding `parts` values side by side along `axis`.
    Concat {
        axis: u32,
        parts: u32,
    },
    /// The preceding `parts` values under a new leading axis; parts a rank lacks vanish.
    Stack {
        parts: u32,
    },
    /// The preceding value at the origin of a larger box.
    Pad {
        shape: Vec<u64>,
    },
}

/// One named local buffer, and how each rank's copy of it is built from boxes of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    pub name: String,
    /// Index into [`Side::dtypes`].
    pub dtype: u32,
    pub nodes: Vec<Node>,
    /// Bytes between neighbours per dimension; row-major and gapless when absent.
    pub strides: Option<Vec<u64>>,
    /// The only ranks that have this container; every rank of its leaves' meshes when absent.
    pub ranks: Option<Vec<u32>>,
}

/// All source or target ranks and the containers they hold, most urgent container first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    pub ranks: Vec<u32>,
    pub dtypes: Vec<DType>,
    pub tensors: Vec<Tensor>,
    pub meshes: Vec<Mesh>,
    pub containers: Vec<Container>,
}

/// Handling of source tensors that no target needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Extra {
    #[default]
    Refuse,
    Ignore,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    pub extra: Extra,
    /// Only boxes of more bytes are cut over several replicas.
    pub min_split_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { extra: Extra::Refuse, min_split_bytes: 256 << 10 }
    }
}
