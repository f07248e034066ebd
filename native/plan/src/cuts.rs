//! How one dimension of a box is cut over the mesh dimensions that shard it.

use rustc_hash::FxHashMap;

/// Most segments one dimension may be cut into, over all coordinates.
const MAX_SEGMENTS: u64 = 1 << 20;

/// One mesh dimension's cut, in mesh order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cut {
    /// `ways` ceil-sized chunks; late ones may be empty.
    Chunk { ways: u32 },
    /// `factor` chunks, each cut `ways` times; a coordinate owns its part of every chunk.
    Strided { ways: u32, factor: u64 },
}

/// An interval of a dimension and its place in its owner's local dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub start: u64,
    pub len: u64,
    /// Index of the interval's first element in its owner's local dimension.
    pub local: u64,
    pub coord: u32,
}

/// Every interval of one dimension, by position and by owner.
#[derive(Debug)]
pub(crate) struct Cuts {
    pub by_start: Vec<Segment>,
    by_coord: Vec<Segment>,
    first: Vec<u32>,
    /// Local length per coordinate.
    pub extents: Vec<u64>,
}

type Intervals = Vec<(u64, u64)>;

impl Cuts {
    /// `None` when the cuts would make more than [`MAX_SEGMENTS`] intervals.
    pub fn new(len: u64, cuts: &[Cut]) -> Option<Cuts> {
        let mut owned: Vec<Intervals> = vec![vec![(0, len)]];
        for &cut in cuts {
            let mut next = Vec::new();
            for intervals in &owned {
                next.extend(split(intervals, cut)?);
            }
            owned = next;
            if owned.iter().map(|o| o.len() as u64).sum::<u64>() > MAX_SEGMENTS {
                return None;
            }
        }
        let mut by_coord = Vec::new();
        let mut first = vec![0];
        let mut extents = Vec::with_capacity(owned.len());
        for (coord, intervals) in owned.iter().enumerate() {
            let mut local = 0;
            for &(start, len) in intervals {
                by_coord.push(Segment { start, len, local, coord: coord as u32 });
                local += len;
            }
            extents.push(local);
            first.push(by_coord.len() as u32);
        }
        let mut by_start = by_coord.clone();
        by_start.sort_unstable_by_key(|s| s.start);
        Some(Cuts { by_start, by_coord, first, extents })
    }

    /// The intervals of one coordinate, in the order its local dimension holds them.
    pub fn of(&self, coord: u32) -> &[Segment] {
        let c = coord as usize;
        &self.by_coord[self.first[c] as usize..self.first[c + 1] as usize]
    }
}

/// Assigns the intervals in order: both cuts give consecutive intervals to successive owners.
fn split(intervals: &[(u64, u64)], cut: Cut) -> Option<Vec<Intervals>> {
    let (ways, factor) = match cut {
        Cut::Chunk { ways } => (ways, 1),
        Cut::Strided { ways, factor } => (ways, factor),
    };
    let total: u64 = intervals.iter().map(|i| i.1).sum();
    if factor.min(total).saturating_mul(u64::from(ways)) > MAX_SEGMENTS {
        return None;
    }
    let mut owned = vec![Intervals::new(); ways as usize];
    let (mut at, mut used) = (0, 0);
    let mut hand_out = |mut len: u64, to: &mut Intervals| {
        while len > 0 {
            let (start, whole) = intervals[at];
            let take = len.min(whole - used);
            match to.last_mut() {
                Some(last) if last.0 + last.1 == start + used => last.1 += take,
                _ => to.push((start + used, take)),
            }
            len -= take;
            used += take;
            if used == whole {
                (at, used) = (at + 1, 0);
            }
        }
    };
    let outer = total.div_ceil(factor);
    let mut left = total;
    while left > 0 {
        let mut block = outer.min(left);
        left -= block;
        let inner = block.div_ceil(u64::from(ways));
        for owner in &mut owned {
            let len = inner.min(block);
            hand_out(len, owner);
            block -= len;
        }
    }
    Some(owned)
}

/// Interned cuts; a model has few distinct ones.
#[derive(Debug, Default)]
pub(crate) struct CutsTable {
    ids: FxHashMap<(u64, Vec<Cut>), u32>,
    table: Vec<Cuts>,
}

impl CutsTable {
    pub fn intern(&mut self, len: u64, cuts: Vec<Cut>) -> Option<u32> {
        if let Some(&id) = self.ids.get(&(len, cuts.clone())) {
            return Some(id);
        }
        let id = self.table.len() as u32;
        self.table.push(Cuts::new(len, &cuts)?);
        self.ids.insert((len, cuts), id);
        Some(id)
    }

    pub fn get(&self, id: u32) -> &Cuts {
        &self.table[id as usize]
    }
}

/// Maps mesh positions to tensor coordinates and back.
#[derive(Debug)]
pub(crate) struct MeshMap {
    /// `[tensor dim][mesh position]` → coordinate along that dimension.
    coords: Vec<Vec<u32>>,
    /// `[tensor dim][coordinate]` → contribution to the mesh position.
    offsets: Vec<Vec<u32>>,
    /// Mesh position offsets of the replicas of one shard.
    pub replicas: Vec<u32>,
}

impl MeshMap {
    /// `dims[m]` is the tensor dimension that mesh dimension `m` shards, or `None` if it
    /// replicates.
    pub fn new(mesh_shape: &[u32], dims: &[Option<u32>], ndim: usize) -> MeshMap {
        let mut strides = vec![1u32; mesh_shape.len()];
        for m in (0..mesh_shape.len().saturating_sub(1)).rev() {
            strides[m] = strides[m + 1] * mesh_shape[m + 1];
        }
        let size: u32 = mesh_shape.iter().product();
        let steps = |wanted: Option<u32>| -> Vec<u32> {
            let mut steps = vec![0u32];
            for m in (0..mesh_shape.len()).filter(|&m| dims[m] == wanted) {
                let stride = strides[m];
                steps = steps
                    .iter()
                    .flat_map(|s| (0..mesh_shape[m]).map(move |c| s + c * stride))
                    .collect();
            }
            steps
        };
        let offsets: Vec<Vec<u32>> = (0..ndim).map(|d| steps(Some(d as u32))).collect();
        let coords = (0..ndim as u32)
            .map(|d| {
                (0..size)
                    .map(|pos| {
                        (0..mesh_shape.len())
                            .filter(|&m| dims[m] == Some(d))
                            .fold(0, |c, m| c * mesh_shape[m] + pos / strides[m] % mesh_shape[m])
                    })
                    .collect()
            })
            .collect();
        MeshMap { coords, offsets, replicas: steps(None) }
    }

    pub fn coord(&self, dim: usize, position: u32) -> u32 {
        self.coords[dim][position as usize]
    }

    pub fn offset(&self, dim: usize, coord: u32) -> u32 {
        self.offsets[dim][coord as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(len: u64, cuts: &[Cut]) -> Vec<Vec<u64>> {
        let c = Cuts::new(len, cuts).unwrap();
        (0..c.extents.len() as u32)
            .map(|k| c.of(k).iter().flat_map(|s| s.start..s.start + s.len).collect())
            .collect()
    }

    #[test]
    fn chunks_are_ceil_sized_and_late_ones_empty() {
        assert_eq!(
            owners(5, &[Cut::Chunk { ways: 4 }]),
            vec![vec![0, 1], vec![2, 3], vec![4], vec![]]
        );
    }

    #[test]
    fn strided_shards_own_a_part_of_every_chunk() {
        // The example of torch's _StridedShard documentation.
        assert_eq!(
            owners(9, &[Cut::Strided { ways: 4, factor: 2 }]),
            vec![vec![0, 1, 5], vec![2, 3, 6], vec![4, 7], vec![8]]
        );
    }

    #[test]
    fn a_chunk_after_a_strided_shard_gives_tp_first_order() {
        let cuts = [Cut::Strided { ways: 2, factor: 2 }, Cut::Chunk { ways: 2 }];
        assert_eq!(owners(8, &cuts), vec![vec![0, 1], vec![4, 5], vec![2, 3], vec![6, 7]]);
    }

    #[test]
    fn huge_dimensions_and_factors_end_in_refusal_not_in_memory() {
        assert!(Cuts::new(1 << 63, &[Cut::Strided { ways: 2, factor: 1 << 62 }]).is_none());
        assert!(Cuts::new(u64::MAX, &[Cut::Chunk { ways: 3 }]).is_some());
    }
}
