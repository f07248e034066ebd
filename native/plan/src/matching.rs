//! The source boxes that a target box consists of, and the ranks that hold each.

use smallvec::SmallVec;

use crate::cuts::CutsTable;
use crate::error::{PlanError, Result, Role};
use crate::layout::{Evaluated, HeldLeaf};
use crate::model::{Extra, Options};
use crate::overlap::{products, DimOverlap, DimQuery, Overlaps, Share};
use crate::placer::Dims;
use crate::regions::{index, Bounds, Regions};

/// Source and target layout, matched tensor by tensor.
#[derive(Debug)]
pub(crate) struct Matcher<'s> {
    pub source: Evaluated<'s>,
    pub target: Evaluated<'s>,
    cuts: CutsTable,
    regions: Vec<Regions>,
    /// Source tensor per target tensor.
    tensors: Vec<u32>,
    overlaps: Overlaps,
}

/// A target leaf on one rank, and one region of its tensor that overlaps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafRegion {
    pub to: HeldLeaf,
    pub region: u32,
}

impl<'s> Matcher<'s> {
    pub fn new(
        source: &'s crate::model::Side,
        target: &'s crate::model::Side,
        options: Options,
    ) -> Result<Self> {
        let mut cuts = CutsTable::default();
        let source = Evaluated::new(Role::Source, source, &mut cuts)?;
        let target = Evaluated::new(Role::Target, target, &mut cuts)?;
        let tensors = match_tensors(&source, &target, options)?;
        let regions = index(&source)?;
        Ok(Matcher { source, target, cuts, regions, tensors, overlaps: Overlaps::default() })
    }

    fn regions_of(&self, leaf: u32) -> &Regions {
        let tensor = self.target.leaves[leaf as usize].tensor as usize;
        &self.regions[self.tensors[tensor] as usize]
    }

    /// The smallest box of the tensor around what a rank holds of a leaf.
    pub fn bounds(&self, held: HeldLeaf, role: Role) -> Bounds {
        let side = if role == Role::Source { &self.source } else { &self.target };
        let leaf = &side.leaves[held.leaf as usize];
        let (mut lo, mut hi) = (Dims::new(), Dims::new());
        for (d, (&cut, &origin)) in leaf.cuts.iter().zip(&leaf.origin).enumerate() {
            let segments = self.cuts.get(cut).of(side.coord(held, d));
            lo.push(origin + segments.first().map_or(0, |s| s.start));
            hi.push(origin + segments.last().map_or(0, |s| s.start + s.len));
        }
        Bounds { lo, hi }
    }

    /// Index in the logical tensor of a local index of a target rank.
    pub fn global_index(&self, held: HeldLeaf, dim: usize, local: u64) -> u64 {
        let leaf = &self.target.leaves[held.leaf as usize];
        let segments = self.cuts.get(leaf.cuts[dim]).of(self.target.coord(held, dim));
        let at = segments.partition_point(|s| s.local <= local).saturating_sub(1);
        leaf.origin[dim] + segments.get(at).map_or(0, |s| s.start + local - s.local)
    }

    /// Elements a rank holds of a leaf.
    pub fn elements(&self, held: HeldLeaf) -> u64 {
        let leaf = &self.target.leaves[held.leaf as usize];
        leaf.cuts
            .iter()
            .enumerate()
            .map(|(d, &cut)| self.cuts.get(cut).extents[self.target.coord(held, d) as usize])
            .product()
    }

    /// The regions that overlap a held leaf.
    ///
    /// # Errors
    /// [`PlanError::Uncovered`] when they don't cover it.
    pub fn leaf_regions(&mut self, to: HeldLeaf) -> Result<SmallVec<[LeafRegion; 1]>> {
        let bounds = self.bounds(to, Role::Target);
        let near: SmallVec<[usize; 1]> = self.regions_of(to.leaf).near(&bounds).collect();
        let mut leaf_regions = SmallVec::new();
        let mut met = 0u64;
        for region in near {
            let leaf_region = LeafRegion { to, region: region as u32 };
            let dims = self.overlap(leaf_region, 0);
            let elements = self.volume(&dims);
            if elements > 0 {
                met += elements;
                leaf_regions.push(leaf_region);
            }
        }
        if met != self.elements(to) {
            return Err(self.uncovered(to, &bounds));
        }
        Ok(leaf_regions)
    }

    pub fn classes(&self, leaf_region: LeafRegion) -> &[Vec<u32>] {
        let regions = self.regions_of(leaf_region.to.leaf);
        &regions.regions[leaf_region.region as usize].classes
    }

    /// Whether each box has exactly one holder.
    pub fn is_fixed(&self, leaf_region: LeafRegion) -> bool {
        match self.classes(leaf_region) {
            [class] => match class.as_slice() {
                [leaf] => {
                    let mesh_map = self.source.leaves[*leaf as usize].mesh_map as usize;
                    self.source.mesh_maps[mesh_map].replicas.len() == 1
                }
                _ => false,
            },
            _ => false,
        }
    }

    /// Per-dimension overlaps with the leaves of one class.
    pub fn overlap(&mut self, leaf_region: LeafRegion, class: usize) -> Dims<u32> {
        let regions = &self.regions[self.tensors
            [self.target.leaves[leaf_region.to.leaf as usize].tensor as usize]
            as usize];
        let region = &regions.regions[leaf_region.region as usize];
        let from = &self.source.leaves[region.classes[class][0] as usize];
        let to = &self.target.leaves[leaf_region.to.leaf as usize];
        let mut ids = Dims::new();
        for d in 0..to.cuts.len() {
            let query = DimQuery {
                source: from.cuts[d],
                target: to.cuts[d],
                coord: self.target.coord(leaf_region.to, d),
                shift: i128::from(from.origin[d]) - i128::from(to.origin[d]),
                clip: (region.bounds.lo[d] - from.origin[d], region.bounds.hi[d] - from.origin[d]),
            };
            ids.push(self.overlaps.resolve(&self.cuts, query));
        }
        ids
    }

    /// Visits each source box: one share per dimension.
    pub fn boxes(&self, overlap: &[u32], visit: impl FnMut(&[&Share]) -> Result<()>) -> Result<()> {
        let dims: Dims<&DimOverlap> = overlap.iter().map(|&d| self.overlaps.get(d)).collect();
        products(&dims, visit)
    }

    /// Elements in all boxes of an overlap.
    pub fn volume(&self, overlap: &[u32]) -> u64 {
        overlap.iter().map(|&d| self.overlaps.get(d).len).product()
    }

    /// All holders of a source box, in a fixed order.
    pub fn holders(&self, class: &[u32], shares: &[&Share], found: &mut Vec<HeldLeaf>) {
        found.clear();
        for &leaf in class {
            let mesh_map =
                &self.source.mesh_maps[self.source.leaves[leaf as usize].mesh_map as usize];
            let first: u32 =
                shares.iter().enumerate().map(|(d, s)| mesh_map.offset(d, s.coord)).sum();
            for replica in &mesh_map.replicas {
                let held = HeldLeaf { leaf, position: first + replica };
                if self.source.placed(held).is_some() {
                    found.push(held);
                }
            }
        }
    }

    /// The error for a box without a holder.
    pub fn no_holder(&self, leaf_region: LeafRegion, class: usize, shares: &[&Share]) -> PlanError {
        let leaf = self.classes(leaf_region)[class][0];
        let mesh_map = &self.source.mesh_maps[self.source.leaves[leaf as usize].mesh_map as usize];
        let position = shares.iter().enumerate().map(|(d, s)| mesh_map.offset(d, s.coord)).sum();
        let bounds = self.bounds(HeldLeaf { leaf, position }, Role::Source);
        self.uncovered_box(leaf_region.to, &bounds)
    }

    fn uncovered_box(&self, to: HeldLeaf, bounds: &Bounds) -> PlanError {
        PlanError::Uncovered {
            tensor: self.target.tensor_name(to.leaf).into(),
            container: self.target.container_name(to.leaf).into(),
            rank: self.target.rank_id(self.target.rank_of(to)),
            region: bounds.describe(),
        }
    }

    /// Narrows the wanted box to its first part that lies in no region, dimension by dimension.
    fn uncovered(&self, to: HeldLeaf, wanted: &Bounds) -> PlanError {
        let regions = self.regions_of(to.leaf);
        let mut missing = wanted.clone();
        let mut rivals: Vec<&Bounds> =
            regions.near(wanted).map(|r| &regions.regions[r].bounds).collect();
        for d in 0..wanted.lo.len() {
            let mut faces: Vec<u64> = rivals.iter().flat_map(|b| [b.lo[d], b.hi[d]]).collect();
            faces.push(missing.hi[d]);
            faces.sort_unstable();
            let mut lo = missing.lo[d];
            for hi in faces.into_iter().filter(|&f| f <= wanted.hi[d]) {
                if hi <= lo {
                    continue;
                }
                let slab: Vec<&Bounds> =
                    rivals.iter().copied().filter(|b| b.lo[d] <= lo && hi <= b.hi[d]).collect();
                if volume(&slab, wanted, d + 1) < volume(&[wanted], wanted, d + 1) {
                    (missing.lo[d], missing.hi[d]) = (lo, hi);
                    rivals = slab;
                    break;
                }
                lo = hi;
            }
        }
        self.uncovered_box(to, &missing)
    }
}

/// Elements of disjoint boxes inside `within`, counted over the dimensions from `first` on.
fn volume(boxes: &[&Bounds], within: &Bounds, first: usize) -> u128 {
    boxes
        .iter()
        .map(|b| {
            (first..within.lo.len())
                .map(|d| {
                    let lo = b.lo[d].max(within.lo[d]);
                    u128::from(b.hi[d].min(within.hi[d]).saturating_sub(lo))
                })
                .product::<u128>()
        })
        .sum()
}

/// Source tensor per target tensor, by name; refuses what doesn't fit.
fn match_tensors(
    source: &Evaluated<'_>,
    target: &Evaluated<'_>,
    options: Options,
) -> Result<Vec<u32>> {
    let by_name: rustc_hash::FxHashMap<&str, u32> =
        source.side.tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), i as u32)).collect();
    let user = |side: &Evaluated<'_>, tensor: usize| {
        side.leaves.iter().position(|l| l.tensor as usize == tensor).unwrap_or(0) as u32
    };
    let mut missing = Vec::new();
    let mut used = vec![false; source.side.tensors.len()];
    let mut found = Vec::with_capacity(target.side.tensors.len());
    for (index, tensor) in target.side.tensors.iter().enumerate() {
        let Some(&from) = by_name.get(tensor.name.as_str()) else {
            missing.push(index);
            continue;
        };
        found.push(from);
        used[from as usize] = true;
        let origin = &source.side.tensors[from as usize];
        let have = &source.side.dtypes[origin.dtype as usize];
        let want = &target.side.dtypes[tensor.dtype as usize];
        let subject = || {
            let (s, t) = (user(source, from as usize), user(target, index));
            format!(
                "tensor `{}` (source container `{}`, target container `{}`)",
                tensor.name,
                source.container_name(s),
                target.container_name(t)
            )
        };
        if have != want {
            return Err(PlanError::DtypeMismatch {
                subject: subject(),
                found: format!("{} ({} bytes)", have.name, have.itemsize),
                expected: format!("{} ({} bytes)", want.name, want.itemsize),
                place: " by the target".into(),
            });
        }
        if origin.shape != tensor.shape {
            return Err(PlanError::ShapeMismatch {
                subject: subject(),
                found: origin.shape.clone(),
                expected: tensor.shape.clone(),
                place: " by the target".into(),
                advice: "give both sides the tensor's global shape".into(),
            });
        }
    }
    if let Some(&first) = missing.first() {
        let leaf = user(target, first);
        let rank = target.meshes[target.leaves[leaf as usize].mesh as usize].at[0];
        return Err(PlanError::MissingTensors {
            tensor: target.side.tensors[first].name.clone(),
            container: target.container_name(leaf).into(),
            rank: target.rank_id(rank),
            count: missing.len(),
        });
    }
    let extra = || used.iter().enumerate().filter(|(_, &u)| !u).map(|(i, _)| i);
    match extra().next() {
        Some(first) if options.extra == Extra::Refuse => Err(PlanError::ExtraTensors {
            tensor: source.side.tensors[first].name.clone(),
            container: source.container_name(user(source, first)).into(),
            count: extra().count(),
        }),
        _ => Ok(found),
    }
}
