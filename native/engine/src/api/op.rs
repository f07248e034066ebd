//! What can be asked of an engine.

use std::sync::Arc;

use super::Imm;
use crate::{
    engine::{Peer, PeerGroup, Region, RemoteRegion},
    EngineError, Result,
};

/// Which pages of a region, in order: page `i` of the request lies at
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

/// An index list with its largest entry known, so that bounds are checked once and not per submit.
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

/// `offset` bytes into a local region.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a> {
    pub region: &'a Region,
    pub offset: u64,
}

/// `offset` bytes into a peer's region.
#[derive(Clone, Copy, Debug)]
pub struct Remote<'a> {
    pub region: &'a RemoteRegion,
    pub offset: u64,
}

/// One destination of a scatter: `len` bytes from `src_offset` go to `dst_offset` of `dst`.
#[derive(Clone, Debug)]
pub struct ScatterDst {
    pub len: u64,
    pub src_offset: u64,
    pub dst: RemoteRegion,
    pub dst_offset: u64,
}

/// Bytes between a local region and a peer's, cut out of a request on segments.
#[derive(Clone, Debug)]
pub struct SegmentPiece {
    pub local: Region,
    pub local_offset: u64,
    pub remote: RemoteRegion,
    pub remote_offset: u64,
    pub len: u64,
}

/// One operation; a request is a slice of them, which may mix kinds and peers.
///
/// There is no order among operations, not even of one request. Counts (IC-1): a write counts 1, a
/// paged write 1 for each page, a write in pieces 1, a scatter 1 at each destination, a barrier 1 at each peer.
#[derive(Clone, Debug)]
pub enum Op<'a> {
    Write {
        src: Local<'a>,
        dst: Remote<'a>,
        /// Bytes; may be 0 if an immediate is given.
        len: u64,
        imm: Option<Imm>,
    },
    Read {
        src: Remote<'a>,
        dst: Local<'a>,
        len: u64,
    },
    WritePages {
        /// Bytes per page.
        page_len: u64,
        src: &'a Region,
        src_pages: &'a Pages,
        dst: &'a RemoteRegion,
        dst_pages: &'a Pages,
        imm: Option<Imm>,
    },
    ReadPages {
        page_len: u64,
        src: &'a RemoteRegion,
        src_pages: &'a Pages,
        dst: &'a Region,
        dst_pages: &'a Pages,
    },
    /// One logical write in several pieces, all to regions of one peer: it counts 1, when all of them
    /// are in place.
    WritePieces {
        pieces: &'a [SegmentPiece],
        imm: Option<Imm>,
    },
    /// One logical read in several pieces.
    ReadPieces {
        pieces: &'a [SegmentPiece],
    },
    /// With a group, `parts[i]` must belong to the group's peer `i`.
    Scatter {
        group: Option<&'a PeerGroup>,
        src: &'a Region,
        parts: &'a [ScatterDst],
        imm: Option<Imm>,
    },
    /// An immediate, and nothing else, to every peer of the group.
    Barrier {
        group: &'a PeerGroup,
        imm: Imm,
    },
    /// A small message into the peer's receive pool; copied before the call returns.
    Send {
        peer: &'a Peer,
        message: &'a [u8],
    },
}

impl Op<'_> {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Write { .. } => "write",
            Self::Read { .. } => "read",
            Self::WritePages { .. } => "paged write",
            Self::ReadPages { .. } => "paged read",
            Self::WritePieces { .. } => "write",
            Self::ReadPieces { .. } => "read",
            Self::Scatter { .. } => "scatter",
            Self::Barrier { .. } => "barrier",
            Self::Send { .. } => "send",
        }
    }
}

/// How urgent a request is. Who shares a rail with more urgent work leaves room for it; nobody starves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for it: tokens, tails, control.
    Latency,
    #[default]
    Bulk,
    /// Whenever there is room: checkpoints, spilled pages.
    Background,
}

impl Priority {
    pub const ALL: [Self; 3] = [Self::Latency, Self::Bulk, Self::Background];
}
