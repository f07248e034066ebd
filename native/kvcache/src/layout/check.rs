//! Checks a rank's description of its cache.

use std::fmt;

use rustc_hash::FxHashSet;

use super::overlap::shared;
use super::{BufferOffset, CacheGroup, CacheLayout, CacheTensor};

pub const MAX_MODEL_BYTES: usize = 4096;
pub const MAX_NAME_BYTES: usize = 256;
pub const MAX_BUFFERS: usize = 1 << 14;
/// With [`MAX_PLACES`] it keeps every sum of bytes and every count of writes below 2^63.
pub const MAX_BUFFER_BYTES: u64 = 1 << 46;
pub const MAX_GROUPS: usize = 64;
/// Of a group.
pub const MAX_LAYERS: usize = 1 << 12;
/// Of a group.
pub const MAX_TENSORS: usize = 64;
/// Layers times tensors, of all groups together.
pub const MAX_PLACES: usize = 1 << 12;
/// Of a tensor.
pub const MAX_HEADS: u32 = 4096;
pub const MAX_PAGE_TOKENS: u32 = 1 << 16;

/// A description that is inconsistent or exceeds a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutError {
    pub group: Option<String>,
    pub tensor: Option<String>,
    /// Number of the layer in the model.
    pub layer: Option<u32>,
    pub problem: LayoutProblem,
}

/// The problem of a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutProblem {
    #[error("there are no {0}; give at least one")]
    Missing(&'static str),
    #[error("{count} {what} pass the limit of {limit}")]
    TooMany { what: &'static str, count: u64, limit: u64 },
    #[error("{0} is zero; it must be at least 1")]
    Zero(&'static str),
    #[error("{what} {value:?} appears twice; each must have its own")]
    Twice { what: &'static str, value: String },
    #[error("heads {first} to {first}+{held} aren't among the model's {heads}; count from 0")]
    Heads { first: u32, held: u32, heads: u32 },
    #[error("dtype {0:?} has no known size; give what torch calls it, or uint8 and more width")]
    Dtype(String),
    #[error("there are {places} places for {layers} layers; give one for each layer")]
    Places { places: usize, layers: usize },
    #[error(
        "neighbouring {what} overlap: they are {stride} bytes apart and take {needed}; give \
         strides in bytes, of pages, heads and tokens each beyond what the smaller ones span"
    )]
    Overlap { what: &'static str, stride: u64, needed: u64 },
    #[error("blocks of {block} tokens aren't whole pages of {page}; give both in tokens")]
    Block { block: u32, page: u32 },
    #[error("a page with a state counts as one token and has no window; leave both so")]
    State,
    #[error(
        "it shares bytes with tensor {tensor:?} of layer {layer}; give each a place of its own, and \
         list layers that share one cache once"
    )]
    Shared { tensor: String, layer: u32 },
    #[error("buffer {buffer} isn't among the {buffers} buffers; count from 0")]
    NoBuffer { buffer: u32, buffers: usize },
    #[error(
        "its last page ends at byte {} of a buffer of {len}; register the whole cache or give \
         fewer pages", .end.map_or("2^64 or beyond".to_string(), |e| e.to_string())
    )]
    Outside { end: Option<u64>, len: u64 },
}

impl LayoutProblem {
    fn twice(what: &'static str, value: impl ToString) -> Self {
        Self::Twice { what, value: value.to_string() }
    }
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cache layout")?;
        if let Some(group) = &self.group {
            write!(f, ", group {group:?}")?;
        }
        if let Some(tensor) = &self.tensor {
            write!(f, ", tensor {tensor:?}")?;
        }
        if let Some(layer) = self.layer {
            write!(f, ", layer {layer}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

impl std::error::Error for LayoutError {}

impl From<LayoutProblem> for LayoutError {
    fn from(problem: LayoutProblem) -> Self {
        Self { group: None, tensor: None, layer: None, problem }
    }
}

impl CacheLayout {
    /// Whether the description is consistent in itself and within the limits.
    ///
    /// Checks the layout: every page of every tensor lies in its buffer, rows of a tensor do not
    /// overlap, nor do tensors and layers of a group with the same strides, names are unique, and
    /// sums of offsets do not overflow. Groups may overlap: an engine may lend the same memory to
    /// pages of either.
    ///
    /// # Errors
    /// The first problem, with the group, tensor and layer that has it.
    pub fn check(&self) -> Result<(), LayoutError> {
        at_most("bytes of the model's name", self.model.len(), MAX_MODEL_BYTES)?;
        check_count("groups", self.groups.len(), MAX_GROUPS)?;
        at_most("buffers", self.buffers.len(), MAX_BUFFERS)?;
        if let Some(&len) = self.buffers.iter().find(|&&len| len > MAX_BUFFER_BYTES) {
            let what = "bytes of a buffer";
            return Err(LayoutProblem::TooMany { what, count: len, limit: MAX_BUFFER_BYTES }.into());
        }
        let mut layers = FxHashSet::default();
        let mut places = 0usize;
        for group in &self.groups {
            at_most("bytes of a group's name", group.name.len(), MAX_NAME_BYTES)?;
            let named = |e: LayoutError| LayoutError { group: Some(group.name.clone()), ..e };
            group.check(&self.buffers).map_err(named)?;
            for &layer in &group.layers {
                if !layers.insert((&group.name, layer)) {
                    return Err(named(LayoutProblem::twice("layer", layer).into()));
                }
            }
            places += group.layers.len() * group.tensors.len();
        }
        Ok(at_most("layers times tensors", places, MAX_PLACES)?)
    }
}

impl CacheGroup {
    fn check(&self, buffers: &[u64]) -> Result<(), LayoutError> {
        check_count("layers", self.layers.len(), MAX_LAYERS)?;
        check_count("tensors", self.tensors.len(), MAX_TENSORS)?;
        at_most("tokens of a page", self.page_tokens as usize, MAX_PAGE_TOKENS as usize)?;
        positive("the number of tokens of a page", self.page_tokens)?;
        positive("the number of pages", self.pages)?;
        positive("the window", self.window.unwrap_or(1))?;
        let (block, page) = (self.block_tokens.unwrap_or(self.page_tokens), self.page_tokens);
        positive("the number of tokens of a block", block)?;
        if block % page != 0 {
            return Err(LayoutProblem::Block { block, page }.into());
        }
        if self.is_state && (self.page_tokens != 1 || self.window.is_some()) {
            return Err(LayoutProblem::State.into());
        }
        let mut names = FxHashSet::default();
        for tensor in &self.tensors {
            at_most("bytes of a tensor's name", tensor.name.len(), MAX_NAME_BYTES)?;
            let named = |e: LayoutError| LayoutError { tensor: Some(tensor.name.clone()), ..e };
            if !names.insert(tensor.name.as_str()) {
                return Err(named(LayoutProblem::twice("the name", &tensor.name).into()));
            }
            tensor.check(self, buffers).map_err(named)?;
        }
        let places = self.layers.len() * self.tensors.len();
        at_most("layers times tensors", places, MAX_PLACES)?;
        match shared(self) {
            None => Ok(()),
            Some([(t, l), (tensor, layer)]) => Err(LayoutError {
                group: None,
                tensor: Some(self.tensors[t].name.clone()),
                layer: Some(self.layers[l]),
                problem: LayoutProblem::Shared {
                    tensor: self.tensors[tensor].name.clone(),
                    layer: self.layers[layer],
                },
            }),
        }
    }
}

impl CacheTensor {
    fn check(&self, group: &CacheGroup, buffers: &[u64]) -> Result<(), LayoutError> {
        at_most("heads", self.heads as usize, MAX_HEADS as usize)?;
        positive("the number of heads", self.heads)?;
        positive("the number of held heads", self.held_heads)?;
        positive("the width", self.width)?;
        if self.first_head.checked_add(self.held_heads).is_none_or(|end| end > self.heads) {
            let (first, held, heads) = (self.first_head, self.held_heads, self.heads);
            return Err(LayoutProblem::Heads { first, held, heads }.into());
        }
        let row = self.row_bytes().ok_or_else(|| LayoutProblem::Dtype(self.dtype.clone()))?;
        if self.places.len() != group.layers.len() {
            let (places, layers) = (self.places.len(), group.layers.len());
            return Err(LayoutProblem::Places { places, layers }.into());
        }
        let span = self.span(group, row)?;
        for (place, &layer) in self.places.iter().zip(&group.layers) {
            check_range(*place, span, buffers)
                .map_err(|problem| LayoutError { layer: Some(layer), ..problem.into() })?;
        }
        Ok(())
    }

    /// Bytes from the begin of page 0 to the end of whatever ends last; `None` if they pass 2^64.
    ///
    /// Whatever the order of the dimensions is, each stride steps over all that the smaller ones
    /// span.
    fn span(&self, group: &CacheGroup, row: u64) -> Result<Option<u64>, LayoutProblem> {
        let mut steps = [
            ("pages", group.pages, self.page_stride),
            ("heads", self.held_heads, self.head_stride),
            ("tokens", group.page_tokens, self.token_stride),
        ];
        steps.sort_by_key(|&(_, _, stride)| stride);
        let mut span = row;
        for (what, count, stride) in steps.into_iter().filter(|&(_, count, _)| count > 1) {
            if stride < span {
                return Err(LayoutProblem::Overlap { what, stride, needed: span });
            }
            let longer = stride.checked_mul(u64::from(count - 1)).and_then(|s| s.checked_add(span));
            match longer {
                Some(longer) => span = longer,
                None => return Ok(None),
            }
        }
        Ok(Some(span))
    }
}

fn check_range(
    place: BufferOffset,
    span: Option<u64>,
    buffers: &[u64],
) -> Result<(), LayoutProblem> {
    let &len = buffers
        .get(place.buffer as usize)
        .ok_or(LayoutProblem::NoBuffer { buffer: place.buffer, buffers: buffers.len() })?;
    let end = span.and_then(|span| span.checked_add(place.offset));
    if end.is_none_or(|end| end > len) {
        return Err(LayoutProblem::Outside { end, len });
    }
    Ok(())
}

fn at_most(what: &'static str, count: usize, limit: usize) -> Result<(), LayoutProblem> {
    if count > limit {
        return Err(LayoutProblem::TooMany { what, count: count as u64, limit: limit as u64 });
    }
    Ok(())
}

fn check_count(what: &'static str, count: usize, limit: usize) -> Result<(), LayoutProblem> {
    if count == 0 {
        return Err(LayoutProblem::Missing(what));
    }
    at_most(what, count, limit)
}

fn positive(what: &'static str, count: u32) -> Result<(), LayoutProblem> {
    if count == 0 {
        return Err(LayoutProblem::Zero(what));
    }
    Ok(())
}
