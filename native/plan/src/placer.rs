//! Where each leaf of a container lies in one rank's memory.
//!
//! Shapes are found bottom-up (postfix order), offsets top-down (the reverse), both without
//! recursion. A part that a rank lacks has no shape; an empty one has a zero in its shape.

use smallvec::SmallVec;

use crate::error::{PlanError, Result, Role};
use crate::model::{Container, Node, Side, MAX_DIMS};

/// Per-dimension values of something with at most [`MAX_DIMS`] dimensions.
pub(crate) type Dims<T> = SmallVec<[T; 4]>;

/// A container as one rank has it.
#[derive(Debug)]
pub(crate) struct ContainerFootprint {
    pub shape: Dims<u64>,
    /// Bytes between neighbours, per dimension.
    pub strides: Dims<u64>,
    /// Bytes from the first to past the last element.
    pub bytes: u64,
}

/// A leaf's first byte in its container and the axis its dimension 0 lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafOffset {
    pub base: u64,
    pub axis: usize,
}

/// Evaluates one container for one rank after another, reusing its scratch space.
#[derive(Debug)]
pub(crate) struct Placer<'s> {
    role: Role,
    container: &'s Container,
    itemsize: u64,
    /// Children of each operator, in order.
    children: Vec<SmallVec<[u32; 2]>>,
    shapes: Vec<Option<Dims<u64>>>,
    leaf_offsets: Vec<LeafOffset>,
}

impl<'s> Placer<'s> {
    pub fn new(role: Role, side: &'s Side, container: &'s Container) -> Self {
        let mut children = vec![SmallVec::new(); container.nodes.len()];
        let mut stack: Vec<u32> = Vec::new();
        for (at, node) in container.nodes.iter().enumerate() {
            let taken = match node {
                Node::Leaf(_) => 0,
                Node::Concat { parts, .. } | Node::Stack { parts } => *parts as usize,
                Node::Pad { .. } => 1,
            };
            children[at] = stack.drain(stack.len() - taken..).collect();
            stack.push(at as u32);
        }
        Placer {
            role,
            container,
            itemsize: u64::from(side.dtypes[container.dtype as usize].itemsize),
            children,
            shapes: Vec::new(),
            leaf_offsets: Vec::new(),
        }
    }

    /// `leaf_shape(n)` is the local shape of the n-th leaf on this rank, `None` where it has none.
    ///
    /// Returns `None` when the rank has no part of the container. Afterwards [`Self::leaf_offset`]
    /// gives the offset of each present leaf.
    pub fn place(
        &mut self,
        rank: u32,
        leaf_shape: impl Fn(u32) -> Option<Dims<u64>>,
    ) -> Result<Option<ContainerFootprint>> {
        self.shapes.clear();
        let mut leaves = 0..;
        for at in 0..self.container.nodes.len() {
            let shape = match &self.container.nodes[at] {
                Node::Leaf(_) => leaves.next().and_then(&leaf_shape),
                Node::Concat { axis, .. } => self.concat(rank, at, *axis as usize)?,
                Node::Stack { .. } => self.stack(rank, at)?,
                Node::Pad { shape } => self.pad(rank, at, shape)?,
            };
            self.shapes.push(shape);
        }
        let Some(shape) = self.shapes.last().cloned().flatten() else { return Ok(None) };
        let footprint = self.footprint(rank, shape)?;
        self.locate(&footprint.strides);
        Ok(Some(footprint))
    }

    /// Valid after [`Self::place`] for leaves with a nonempty shape.
    pub fn leaf_offset(&self, node: usize) -> LeafOffset {
        self.leaf_offsets[node]
    }

    fn parts(&self, at: usize) -> impl Iterator<Item = &Dims<u64>> {
        self.children[at].iter().filter_map(|&c| self.shapes[c as usize].as_ref())
    }

    fn concat(&self, rank: u32, at: usize, axis: usize) -> Result<Option<Dims<u64>>> {
        let mut whole: Option<Dims<u64>> = None;
        for part in self.parts(at) {
            if axis >= part.len() {
                let problem = format!("concatenates {} dimensions along axis {axis}", part.len());
                return Err(self.invalid(rank, problem));
            }
            let Some(sum) = whole.as_mut() else {
                whole = Some(part.clone());
                continue;
            };
            let fits =
                sum.len() == part.len() && (0..part.len()).all(|d| d == axis || sum[d] == part[d]);
            if !fits {
                return Err(self.mismatch(
                    rank,
                    part,
                    sum,
                    format!(" to concatenate along axis {axis}"),
                ));
            }
            sum[axis] = sum[axis].checked_add(part[axis]).ok_or_else(|| self.too_large(rank))?;
        }
        Ok(whole)
    }

    fn stack(&self, rank: u32, at: usize) -> Result<Option<Dims<u64>>> {
        let mut first: Option<&Dims<u64>> = None;
        let mut count = 0;
        for part in self.parts(at) {
            let one = *first.get_or_insert(part);
            if is_empty(part) {
                continue;
            }
            if is_empty(one) {
                first = Some(part);
            } else if one != part {
                return Err(self.mismatch(rank, part, one, " to stack".into()));
            }
            count += 1;
        }
        let Some(part) = first else { return Ok(None) };
        if part.len() == MAX_DIMS {
            let problem = format!("stacks to more than {MAX_DIMS} dimensions");
            return Err(self.invalid(rank, problem));
        }
        let mut whole = Dims::from_slice(&[count]);
        whole.extend_from_slice(part);
        Ok(Some(whole))
    }

    fn pad(&self, rank: u32, at: usize, to: &[u64]) -> Result<Option<Dims<u64>>> {
        let Some(part) = self.parts(at).next() else {
            // A rank in `ranks` has the container, even if all of it is padding.
            let named = self.container.ranks.as_ref().is_some_and(|only| only.contains(&rank));
            return Ok(named.then(|| Dims::from_slice(to)));
        };
        if part.len() != to.len() || part.iter().zip(to).any(|(have, room)| have > room) {
            return Err(self.mismatch(rank, part, to, " at most, to pad".into()));
        }
        Ok(Some(Dims::from_slice(to)))
    }

    fn footprint(&self, rank: u32, shape: Dims<u64>) -> Result<ContainerFootprint> {
        let empty = is_empty(&shape);
        let strides = match &self.container.strides {
            Some(given) if given.len() != shape.len() => {
                let problem = format!(
                    "has {} strides for local shape {:?}; give one per dimension",
                    given.len(),
                    shape.as_slice()
                );
                return Err(self.invalid(rank, problem));
            }
            Some(given) => Dims::from_slice(given),
            None => {
                let mut strides: Dims<u64> = SmallVec::from_elem(self.itemsize, shape.len());
                for d in (1..shape.len()).rev().filter(|_| !empty) {
                    strides[d - 1] =
                        strides[d].checked_mul(shape[d]).ok_or_else(|| self.too_large(rank))?;
                }
                strides
            }
        };
        if empty {
            return Ok(ContainerFootprint { shape, strides, bytes: 0 });
        }
        let mut order: Dims<usize> = (0..shape.len()).filter(|&d| shape[d] > 1).collect();
        order.sort_by_key(|&d| strides[d]);
        let mut bytes = self.itemsize;
        for d in order {
            // Nested spans are the layouts that slicing and transposing dense buffers makes.
            if strides[d] < bytes {
                return Err(PlanError::Overlap {
                    role: self.role,
                    container: self.container.name.clone(),
                    rank,
                    shape: shape.to_vec(),
                    strides: strides.to_vec(),
                });
            }
            bytes = (shape[d] - 1)
                .checked_mul(strides[d])
                .and_then(|span| span.checked_add(bytes))
                .ok_or_else(|| self.too_large(rank))?;
        }
        Ok(ContainerFootprint { shape, strides, bytes })
    }

    /// Offsets stay within the footprint, so this arithmetic can't overflow for present parts.
    fn locate(&mut self, strides: &[u64]) {
        self.leaf_offsets.clear();
        self.leaf_offsets.resize(self.container.nodes.len(), LeafOffset { base: 0, axis: 0 });
        for at in (0..self.container.nodes.len()).rev() {
            let LeafOffset { mut base, axis } = self.leaf_offsets[at];
            for &child in &self.children[at] {
                let child = child as usize;
                let step = match (&self.container.nodes[at], &self.shapes[child]) {
                    (_, None) => continue,
                    (Node::Concat { axis: along, .. }, Some(shape)) => {
                        let along = *along as usize;
                        self.leaf_offsets[child] = LeafOffset { base, axis };
                        match strides.get(axis + along) {
                            Some(stride) if !is_empty(shape) => shape[along].wrapping_mul(*stride),
                            _ => 0,
                        }
                    }
                    (Node::Stack { .. }, Some(shape)) => {
                        self.leaf_offsets[child] = LeafOffset { base, axis: axis + 1 };
                        if is_empty(shape) {
                            0
                        } else {
                            strides[axis]
                        }
                    }
                    (Node::Pad { .. } | Node::Leaf(_), Some(_)) => {
                        self.leaf_offsets[child] = LeafOffset { base, axis };
                        0
                    }
                };
                base = base.wrapping_add(step);
            }
        }
    }

    fn invalid(&self, rank: u32, problem: String) -> PlanError {
        PlanError::invalid(
            self.role,
            format!("container `{}` on rank {rank}", self.container.name),
            problem,
        )
    }

    fn mismatch(&self, rank: u32, found: &[u64], expected: &[u64], place: String) -> PlanError {
        PlanError::ShapeMismatch {
            subject: format!("{} container `{}` on rank {rank}", self.role, self.container.name),
            found: found.to_vec(),
            expected: expected.to_vec(),
            place,
            advice: "make the parts of the layout fit each other".into(),
        }
    }

    fn too_large(&self, rank: u32) -> PlanError {
        PlanError::too_large(
            format!("{} container `{}` on rank {rank}", self.role, self.container.name),
            "its size",
            "2^64 bytes",
        )
    }
}

pub(crate) fn is_empty(shape: &[u64]) -> bool {
    shape.contains(&0)
}
