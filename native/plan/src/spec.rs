//! Layout specifications of callers: trees of values, in MessagePack from Python.
//!
//! Structs are arrays of their fields in order; layouts and placements are arrays that start with
//! their name: `["leaf", tensor, mesh, placements, slice]`, `["concat", axis, parts]`,
//! `["stack", parts]`, `["pad", part, shape]`; `["shard", dim]`,
//! `["strided_shard", dim, split_factor]`, `["replicate"]`, `["partial"]`.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::Deserialize as DeriveDeserialize;

use crate::error::{PlanError, Result, Role};
use crate::model::{DType, Mesh, Placement};

/// Deepest nesting accepted; a layout expression nests a handful of levels.
const MAX_DEPTH: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, DeriveDeserialize)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<u64>,
    pub dtype: DType,
}

/// How a rank's container is built from boxes of tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    Leaf {
        tensor: TensorSpec,
        mesh: Mesh,
        placements: Vec<Placement>,
        /// `(start, len)` per dimension.
        slice: Option<Vec<(u64, u64)>>,
    },
    Concat {
        axis: u32,
        parts: Vec<Layout>,
    },
    Stack {
        parts: Vec<Layout>,
    },
    Pad {
        part: Box<Layout>,
        shape: Vec<u64>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, DeriveDeserialize)]
pub struct ContainerSpec {
    pub name: String,
    pub dtype: DType,
    pub layout: Layout,
    pub strides: Option<Vec<u64>>,
    pub ranks: Option<Vec<u32>>,
}

#[derive(Clone, Debug, PartialEq, Eq, DeriveDeserialize)]
pub struct SideSpec {
    pub ranks: Vec<u32>,
    pub containers: Vec<ContainerSpec>,
}

impl SideSpec {
    /// Reads the MessagePack form. Nesting deeper than [`MAX_DEPTH`] is an error.
    pub fn from_msgpack(role: Role, bytes: &[u8]) -> Result<SideSpec> {
        let mut reader = rmp_serde::Deserializer::from_read_ref(bytes);
        reader.set_max_depth(MAX_DEPTH);
        SideSpec::deserialize(&mut reader).map_err(|e| {
            PlanError::invalid(
                role,
                "side",
                format!("can't be read ({e}); build it from fabric_ray.plan types"),
            )
        })
    }
}

fn field<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(
    seq: &mut A,
    what: &'static str,
) -> std::result::Result<T, A::Error> {
    seq.next_element()?.ok_or_else(|| de::Error::custom(format!("{what} is missing a field")))
}

struct LayoutVisitor;

impl<'de> Visitor<'de> for LayoutVisitor {
    type Value = Layout;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a layout: an array that starts with leaf, concat, stack or pad")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Layout, A::Error> {
        let tag: String = field(&mut seq, "layout")?;
        Ok(match tag.as_str() {
            "leaf" => Layout::Leaf {
                tensor: field(&mut seq, "leaf")?,
                mesh: field(&mut seq, "leaf")?,
                placements: field::<A, Vec<PlacementSpec>>(&mut seq, "leaf")?
                    .into_iter()
                    .map(|p| p.0)
                    .collect(),
                slice: field(&mut seq, "leaf")?,
            },
            "concat" => Layout::Concat {
                axis: field(&mut seq, "concat")?,
                parts: field(&mut seq, "concat")?,
            },
            "stack" => Layout::Stack { parts: field(&mut seq, "stack")? },
            "pad" => Layout::Pad { part: field(&mut seq, "pad")?, shape: field(&mut seq, "pad")? },
            other => {
                return Err(de::Error::custom(format!(
                    "unknown layout `{other}`; expected leaf, concat, stack or pad"
                )))
            }
        })
    }
}

impl<'de> Deserialize<'de> for Layout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_seq(LayoutVisitor)
    }
}

/// The array form of a placement; the model's own serde form is the plan's wire form.
struct PlacementVisitor;

impl<'de> Visitor<'de> for PlacementVisitor {
    type Value = PlacementSpec;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a placement: an array that starts with its name")
    }

    fn visit_seq<A: SeqAccess<'de>>(
        self,
        mut seq: A,
    ) -> std::result::Result<PlacementSpec, A::Error> {
        let tag: String = field(&mut seq, "placement")?;
        Ok(PlacementSpec(match tag.as_str() {
            "shard" => Placement::Shard { dim: field(&mut seq, "shard")? },
            "strided_shard" => Placement::StridedShard {
                dim: field(&mut seq, "strided_shard")?,
                split_factor: field(&mut seq, "strided_shard")?,
            },
            "replicate" => Placement::Replicate,
            "partial" => Placement::Partial,
            other => {
                return Err(de::Error::custom(format!(
                "unknown placement `{other}`; expected shard, strided_shard, replicate or partial"
            )))
            }
        }))
    }
}

struct PlacementSpec(Placement);

impl<'de> Deserialize<'de> for PlacementSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_seq(PlacementVisitor)
    }
}
