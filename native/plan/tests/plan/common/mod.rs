//! An independent, element by element model of layouts, and random pairs of sides.

pub mod arrays;
pub mod scenario;

use fabric_plan::{ContainerSpec, DType, Layout, Mesh, Placement, TensorSpec};

pub fn dtype(itemsize: u32) -> DType {
    DType { name: format!("b{itemsize}"), itemsize }
}

pub fn tensor(name: &str, shape: &[u64], itemsize: u32) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec(), dtype: dtype(itemsize) }
}

pub fn mesh(ranks: &[u32], shape: &[u32]) -> Mesh {
    Mesh { ranks: ranks.to_vec(), shape: shape.to_vec(), names: vec![] }
}

pub fn leaf(tensor: &TensorSpec, mesh: &Mesh, placements: &[Placement]) -> Layout {
    Layout::Leaf {
        tensor: tensor.clone(),
        mesh: mesh.clone(),
        placements: placements.to_vec(),
        slice: None,
    }
}

pub fn container(name: &str, layout: Layout) -> ContainerSpec {
    let dtype = dtype_of(&layout);
    ContainerSpec { name: name.into(), dtype, layout, strides: None, ranks: None }
}

fn dtype_of(layout: &Layout) -> DType {
    match layout {
        Layout::Leaf { tensor, .. } => tensor.dtype.clone(),
        Layout::Concat { parts, .. } | Layout::Stack { parts } => dtype_of(&parts[0]),
        Layout::Pad { part, .. } => dtype_of(part),
    }
}
