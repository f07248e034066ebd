//! Layouts evaluated the slow way: as arrays of element names, one per rank.

use std::collections::HashMap;

use fabric_plan::{ContainerSpec, Layout, Placement, SideSpec};

pub const UNTOUCHED: u8 = 0xEE;

/// An element of a logical tensor: the tensor's name and its flat index; `None` is padding.
pub type Element = Option<(String, u64)>;

#[derive(Clone, Debug)]
pub struct Array {
    pub shape: Vec<u64>,
    pub data: Vec<Element>,
}

pub fn indices(shape: &[u64]) -> Vec<Vec<u64>> {
    let mut all = vec![vec![]];
    for &n in shape {
        all = all.iter().flat_map(|i| (0..n).map(move |k| [&i[..], &[k]].concat())).collect();
    }
    all
}

fn flat(index: &[u64], shape: &[u64]) -> u64 {
    index.iter().zip(shape).fold(0, |f, (i, n)| f * n + i)
}

impl Array {
    fn build(shape: Vec<u64>, at: impl Fn(&[u64]) -> Element) -> Array {
        let data = indices(&shape).iter().map(|i| at(i)).collect();
        Array { shape, data }
    }

    fn get(&self, index: &[u64]) -> Element {
        self.data[flat(index, &self.shape) as usize].clone()
    }
}

/// `torch.chunk`, with empty chunks at the end.
fn chunks(of: &[u64], ways: usize) -> Vec<Vec<u64>> {
    let size = of.len().div_ceil(ways).max(1);
    let mut out: Vec<Vec<u64>> = of.chunks(size).map(|c| c.to_vec()).collect();
    out.resize(ways, vec![]);
    out
}

/// What a rank has of a layout, `None` if nothing.
pub fn evaluate(layout: &Layout, rank: u32) -> Option<Array> {
    match layout {
        Layout::Leaf { tensor, mesh, placements, slice } => {
            let mut position = mesh.ranks.iter().position(|&r| r == rank)?;
            let mut coords = vec![];
            for &n in mesh.shape.iter().rev() {
                coords.insert(0, position % n as usize);
                position /= n as usize;
            }
            let mut kept: Vec<Vec<u64>> = match slice {
                None => tensor.shape.iter().map(|&n| (0..n).collect()).collect(),
                Some(slice) => slice.iter().map(|&(s, n)| (s..s + n).collect()).collect(),
            };
            for (m, placement) in placements.iter().enumerate() {
                let ways = mesh.shape[m] as usize;
                match *placement {
                    Placement::Shard { dim } => {
                        kept[dim as usize] = chunks(&kept[dim as usize], ways)[coords[m]].clone();
                    }
                    Placement::StridedShard { dim, split_factor } => {
                        kept[dim as usize] = chunks(&kept[dim as usize], split_factor as usize)
                            .iter()
                            .flat_map(|c| chunks(c, ways)[coords[m]].clone())
                            .collect();
                    }
                    _ => {}
                }
            }
            let shape: Vec<u64> = kept.iter().map(|k| k.len() as u64).collect();
            Some(Array::build(shape, |i| {
                let global: Vec<u64> = i.iter().zip(&kept).map(|(&x, k)| k[x as usize]).collect();
                Some((tensor.name.clone(), flat(&global, &tensor.shape)))
            }))
        }
        Layout::Concat { axis, parts } => {
            let axis = *axis as usize;
            let parts: Vec<Array> = parts.iter().filter_map(|p| evaluate(p, rank)).collect();
            let mut shape = parts.first()?.shape.clone();
            shape[axis] = parts.iter().map(|p| p.shape[axis]).sum();
            Some(Array::build(shape, |i| {
                let mut i = i.to_vec();
                for part in &parts {
                    if i[axis] < part.shape[axis] {
                        return part.get(&i);
                    }
                    i[axis] -= part.shape[axis];
                }
                None
            }))
        }
        Layout::Stack { parts } => {
            let present: Vec<Array> = parts.iter().filter_map(|p| evaluate(p, rank)).collect();
            let first = present.first()?.shape.clone();
            let kept: Vec<Array> = present.into_iter().filter(|p| !p.shape.contains(&0)).collect();
            let inner = kept.first().map_or(first, |p| p.shape.clone());
            let shape = [&[kept.len() as u64], &inner[..]].concat();
            Some(Array::build(shape, |i| kept[i[0] as usize].get(&i[1..])))
        }
        Layout::Pad { part, shape } => {
            let part = evaluate(part, rank)?;
            Some(Array::build(shape.clone(), |i| {
                let inside = i.iter().zip(&part.shape).all(|(x, n)| x < n);
                inside.then(|| part.get(i)).flatten()
            }))
        }
    }
}

/// Where each element of a container lies: byte offset and name.
pub fn elements(container: &ContainerSpec, rank: u32) -> Vec<(u64, (String, u64))> {
    if container.ranks.as_ref().is_some_and(|only| !only.contains(&rank)) {
        return vec![];
    }
    let Some(array) = evaluate(&container.layout, rank) else { return vec![] };
    let mut dense = vec![u64::from(container.dtype.itemsize); array.shape.len()];
    for d in (1..dense.len()).rev() {
        dense[d - 1] = dense[d] * array.shape[d];
    }
    let strides = container.strides.clone().unwrap_or(dense);
    indices(&array.shape)
        .iter()
        .zip(array.data)
        .filter_map(|(i, e)| {
            let offset = i.iter().zip(&strides).map(|(x, s)| x * s).sum();
            Some((offset, e?))
        })
        .collect()
}

fn content(element: &(String, u64), itemsize: u32) -> Vec<u8> {
    let mut mix = element.1.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5555;
    for b in element.0.bytes() {
        mix = (mix ^ u64::from(b)).wrapping_mul(0x100_0000_01B3);
    }
    (mix ^ (mix >> 29)).to_le_bytes().iter().copied().cycle().take(itemsize as usize).collect()
}

/// `(rank, container index)` → bytes; elements hold their content, all else is untouched.
pub fn buffers(side: &SideSpec, filled: bool) -> HashMap<(u32, u32), Vec<u8>> {
    let mut out = HashMap::new();
    for (index, container) in side.containers.iter().enumerate() {
        for &rank in &side.ranks {
            let itemsize = container.dtype.itemsize;
            let found = elements(container, rank);
            let Some(end) = found.iter().map(|(o, _)| o + u64::from(itemsize)).max() else {
                continue;
            };
            let mut bytes = vec![UNTOUCHED; end as usize + 3];
            for (offset, element) in found.iter().filter(|_| filled) {
                let offset = *offset as usize;
                bytes[offset..offset + itemsize as usize]
                    .copy_from_slice(&content(element, itemsize));
            }
            out.insert((rank, index as u32), bytes);
        }
    }
    out
}
