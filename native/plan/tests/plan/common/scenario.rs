//! Random pairs of sides that fit each other.

use fabric_plan::{ContainerSpec, Layout, Mesh, Placement, SideSpec, TensorSpec};

use super::{container, leaf, mesh, tensor};

/// Draws decisions from a tape of numbers; shrinking the tape simplifies the scenario.
pub struct Draw<'t> {
    tape: &'t [u32],
    at: usize,
}

impl<'t> Draw<'t> {
    pub fn new(tape: &'t [u32]) -> Self {
        Draw { tape, at: 0 }
    }

    pub fn below(&mut self, n: usize) -> usize {
        let value = self.tape.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        value as usize % n
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    fn shuffled(&mut self, mut of: Vec<u32>) -> Vec<u32> {
        for i in (1..of.len()).rev() {
            of.swap(i, self.below(i + 1));
        }
        of
    }

    /// A one- or two-dimensional mesh over some of the ranks.
    fn mesh(&mut self, ranks: &[u32]) -> Mesh {
        let order = self.shuffled(ranks.to_vec());
        let size = 1 + self.below(order.len());
        let ways: Vec<usize> = (1..=size).filter(|w| size.is_multiple_of(*w)).collect();
        let outer = *self.pick(&ways);
        if self.below(2) == 0 {
            return mesh(&order[..size], &[size as u32]);
        }
        mesh(&order[..size], &[outer as u32, (size / outer) as u32])
    }

    fn placements(&mut self, mesh: &Mesh, ndim: usize) -> Vec<Placement> {
        let mut out = vec![];
        for _ in &mesh.shape {
            let dim = self.below(ndim.max(1)) as u32;
            out.push(match self.below(if ndim == 0 { 1 } else { 4 }) {
                0 => Placement::Replicate,
                1 => Placement::StridedShard { dim, split_factor: 1 + self.below(4) as u64 },
                _ => Placement::Shard { dim },
            });
        }
        out
    }
}

/// Tensors of one shape and dtype.
struct Family {
    shape: Vec<u64>,
    members: Vec<TensorSpec>,
}

pub struct Scenario {
    pub source: SideSpec,
    pub target: SideSpec,
}

pub fn scenario(tape: &[u32]) -> Scenario {
    let mut draw = Draw::new(tape);
    let source_ranks: Vec<u32> = (0..1 + draw.below(6) as u32).map(|i| 3 * i + 1).collect();
    let target_ranks: Vec<u32> = (0..1 + draw.below(5) as u32).collect();
    let mut families = vec![];
    for f in 0..1 + draw.below(3) {
        let shape: Vec<u64> = (0..draw.below(4)).map(|_| 1 + draw.below(9) as u64).collect();
        let itemsize = *draw.pick(&[2, 4, 1, 8, 3]);
        let members = (0..1 + draw.below(3))
            .map(|m| tensor(&format!("t{f}.{m}"), &shape, itemsize))
            .collect();
        families.push(Family { shape, members });
    }
    let side = |draw: &mut Draw<'_>, ranks: &[u32], whole: bool| {
        let mut containers = vec![];
        for (f, family) in families.iter().enumerate() {
            containers.extend(arrange(draw, family, ranks, &format!("c{f}"), whole));
        }
        SideSpec { ranks: ranks.to_vec(), containers }
    };
    let source = side(&mut draw, &source_ranks, true);
    let target = side(&mut draw, &target_ranks, false);
    Scenario { source, target }
}

/// Containers that hold a family; every element of it if `whole`.
fn arrange(
    draw: &mut Draw<'_>,
    family: &Family,
    ranks: &[u32],
    name: &str,
    whole: bool,
) -> Vec<ContainerSpec> {
    let ndim = family.shape.len();
    let m = draw.mesh(ranks);
    let p = draw.placements(&m, ndim);
    let mut layouts = vec![match draw.below(4) {
        1 if ndim > 0 => Layout::Concat {
            axis: draw.below(ndim) as u32,
            parts: family.members.iter().map(|t| leaf(t, &m, &p)).collect(),
        },
        2 => Layout::Stack { parts: family.members.iter().map(|t| leaf(t, &m, &p)).collect() },
        3 => Layout::Stack {
            // Whole tensors, each on ranks of its own choice.
            parts: family
                .members
                .iter()
                .map(|t| {
                    let own = draw.mesh(ranks);
                    leaf(t, &own, &vec![Placement::Replicate; own.shape.len()])
                })
                .collect(),
        },
        _ => leaf(&family.members[0], &m, &p),
    }];
    let first_only = matches!(layouts[0], Layout::Leaf { .. });
    let rest = if first_only && whole { &family.members[1..] } else { &[] };
    for t in rest {
        let m = draw.mesh(ranks);
        let p = draw.placements(&m, ndim);
        layouts.push(sliced(draw, t, &m, &p, true));
    }
    if draw.below(3) == 0 {
        // Further containers hold (or need) a member, or a part of it, too.
        let m = draw.mesh(ranks);
        let p = draw.placements(&m, ndim);
        let t = draw.pick(&family.members).clone();
        layouts.push(sliced(draw, &t, &m, &p, false));
    }
    let mut out = vec![];
    for (i, layout) in layouts.into_iter().enumerate() {
        out.push(dressed(draw, container(&format!("{name}.{i}"), layout)));
    }
    out
}

/// A tensor in one piece or in slices, in any order; one slice only unless `whole`.
fn sliced(
    draw: &mut Draw<'_>,
    tensor: &TensorSpec,
    mesh: &Mesh,
    placements: &[Placement],
    whole: bool,
) -> Layout {
    let ndim = tensor.shape.len();
    if ndim == 0 || draw.below(2) == 0 {
        return leaf(tensor, mesh, placements);
    }
    let dim = draw.below(ndim);
    let n = tensor.shape[dim];
    let cut = draw.below(n as usize) as u64;
    let mut parts = vec![];
    for (start, len) in [(cut, n - cut), (0, cut)] {
        if len == 0 {
            continue;
        }
        let mut slice: Vec<(u64, u64)> = tensor.shape.iter().map(|&n| (0, n)).collect();
        slice[dim] = (start, len);
        parts.push(Layout::Leaf {
            tensor: tensor.clone(),
            mesh: mesh.clone(),
            placements: placements.to_vec(),
            slice: Some(slice),
        });
        if !whole {
            break;
        }
    }
    Layout::Concat { axis: dim as u32, parts }
}

/// Sometimes padded, sometimes with strides that transpose and leave gaps.
fn dressed(draw: &mut Draw<'_>, mut container: ContainerSpec) -> ContainerSpec {
    let extents = largest(&container.layout);
    if draw.below(4) == 0 {
        let shape = extents.iter().map(|n| n + draw.below(3) as u64).collect();
        container.layout = Layout::Pad { part: Box::new(container.layout), shape };
    }
    let extents = largest(&container.layout);
    if draw.below(4) == 0 && !extents.is_empty() {
        let order = draw.shuffled((0..extents.len() as u32).collect());
        let mut strides = vec![0; extents.len()];
        let mut next = u64::from(container.dtype.itemsize);
        for d in order {
            strides[d as usize] = next;
            next = next * extents[d as usize] + draw.below(2) as u64 * 5;
        }
        container.strides = Some(strides);
    }
    container
}

/// A shape that every rank's local shape fits in.
fn largest(layout: &Layout) -> Vec<u64> {
    match layout {
        Layout::Leaf { tensor, .. } => tensor.shape.clone(),
        Layout::Concat { axis, parts } => {
            let mut shape = largest(&parts[0]);
            shape[*axis as usize] = parts.iter().map(|p| largest(p)[*axis as usize]).sum();
            shape
        }
        Layout::Stack { parts } => [&[parts.len() as u64], &largest(&parts[0])[..]].concat(),
        Layout::Pad { shape, .. } => shape.clone(),
    }
}
