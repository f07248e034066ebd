//! The operations of an engine.

use super::{Peer, PeerGroup, Region, RemoteRegion};
use crate::api::{Imm, Pages};
#[cfg(doc)]
use crate::EngineError;

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

/// A piece of a request on segments: bytes between a local region and a peer's.
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
/// There is no order among operations, not even of one request, nor among the bytes of one. Bytes
/// that an operation reads must not be bytes that it writes: [`EngineError::Invalid`] for the
/// engine's own memory, undefined for memory that two engines share. Counts (IC-1): a write counts
/// 1, a paged write 1 for each page, a write in pieces 1, a scatter 1 at each destination, a barrier
/// 1 at each peer.
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
    /// Calls `name` with each peer of the operation.
    pub(crate) fn each_peer(&self, mut name: impl FnMut(&Peer)) {
        match self {
            Self::Write { dst: Remote { region, .. }, .. }
            | Self::Read { src: Remote { region, .. }, .. }
            | Self::WritePages { dst: region, .. }
            | Self::ReadPages { src: region, .. } => name(&region.peer),
            Self::WritePieces { pieces, .. } | Self::ReadPieces { pieces } => {
                pieces.iter().for_each(|p| name(&p.remote.peer));
            }
            Self::Scatter { parts, .. } => parts.iter().for_each(|p| name(&p.dst.peer)),
            Self::Barrier { group, .. } => group.peers.iter().for_each(name),
            Self::Send { peer, .. } => name(peer),
        }
    }

    /// Calls `name` with each local region of the operation.
    pub(crate) fn each_local(&self, mut name: impl FnMut(&Region)) {
        match self {
            Self::Write { src: Local { region, .. }, .. }
            | Self::Read { dst: Local { region, .. }, .. }
            | Self::WritePages { src: region, .. }
            | Self::ReadPages { dst: region, .. }
            | Self::Scatter { src: region, .. } => name(region),
            Self::WritePieces { pieces, .. } | Self::ReadPieces { pieces } => {
                pieces.iter().for_each(|p| name(&p.local));
            }
            Self::Barrier { .. } | Self::Send { .. } => {}
        }
    }

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
