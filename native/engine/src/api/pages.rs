//! The pages of a region that a request names.

use std::sync::Arc;

use crate::{EngineError, Result};

/// Pages of a region, in order: page `i` of the request lies at
/// `offset + indices[i] * stride` bytes from the region's start.
#[derive(Clone, Debug)]
pub struct Pages {
    pub indices: PageIndices,
    /// Bytes between neighbouring indices.
    pub stride: u64,
    /// Bytes before index 0.
    pub offset: u64,
}

#[derive(Clone, Debug)]
pub enum PageIndices {
    /// `first, first + 1, ...`
    Range {
        first: u32,
        count: u32,
    },
    List(Arc<IndexList>),
}

/// An index list and its largest entry, so that bounds are checked once and not per submit.
#[derive(Debug)]
pub struct IndexList {
    pub(crate) indices: Box<[u32]>,
    max: u32,
}

impl IndexList {
    pub(crate) fn max(&self) -> u32 {
        self.max
    }
}

impl PageIndices {
    pub fn list(indices: impl Into<Box<[u32]>>) -> Result<Self> {
        let indices = indices.into();
        if u32::try_from(indices.len()).is_err() {
            return Err(EngineError::Invalid("a page list holds at most 2^32 - 1 indices".into()));
        }
        let max = indices.iter().copied().max().unwrap_or(0);
        Ok(Self::List(Arc::new(IndexList { indices, max })))
    }

    pub fn range(first: u32, count: u32) -> Result<Self> {
        if first.checked_add(count).is_none() {
            return Err(EngineError::Invalid(format!(
                "page range {first}..{first}+{count} passes index 2^32 - 1"
            )));
        }
        Ok(Self::Range { first, count })
    }

    pub fn len(&self) -> u32 {
        match self {
            Self::Range { count, .. } => *count,
            Self::List(l) => l.indices.len() as u32,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn max(&self) -> u32 {
        match self {
            Self::Range { first, count } => first + count.saturating_sub(1),
            Self::List(l) => l.max,
        }
    }
}

impl Pages {
    pub fn new(indices: PageIndices, stride: u64, offset: u64) -> Self {
        Self { indices, stride, offset }
    }

    /// The index list, unless it is a range.
    pub fn list(&self) -> Option<&[u32]> {
        match &self.indices {
            PageIndices::Range { .. } => None,
            PageIndices::List(l) => Some(&l.indices),
        }
    }

    /// Bytes from the region's start to the end of the furthest page; `None` if that overflows.
    pub fn end(&self, page_len: u64) -> Option<u64> {
        u64::from(self.indices.max())
            .checked_mul(self.stride)?
            .checked_add(self.offset)?
            .checked_add(page_len)
    }
}
