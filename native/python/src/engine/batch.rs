use fabric_engine as fe;
use fe::{api::Imm, Local, Op, Remote, ScatterDst, SegmentPiece};
use pyo3::prelude::*;

use super::{
    checked_int,
    class_arg::ClassArg,
    counter::ImmArg,
    memory::{Pages, Region, RemoteRegion},
    peers::{Peer, PeerGroup},
    segment::{RemoteSegment, Segment},
};
use crate::errors::OrRaise;

/// An operation that owns what it names.
pub(crate) enum OwnedOp {
    Write {
        src: fe::Region,
        src_offset: u64,
        dst: fe::RemoteRegion,
        dst_offset: u64,
        len: u64,
        imm: Option<Imm>,
    },
    Read {
        src: fe::RemoteRegion,
        src_offset: u64,
        dst: fe::Region,
        dst_offset: u64,
        len: u64,
    },
    WritePages {
        page_len: u64,
        src: fe::Region,
        src_pages: fe::api::Pages,
        dst: fe::RemoteRegion,
        dst_pages: fe::api::Pages,
        imm: Option<Imm>,
    },
    ReadPages {
        page_len: u64,
        src: fe::RemoteRegion,
        src_pages: fe::api::Pages,
        dst: fe::Region,
        dst_pages: fe::api::Pages,
    },
    WritePieces {
        pieces: Vec<SegmentPiece>,
        imm: Option<Imm>,
    },
    ReadPieces {
        pieces: Vec<SegmentPiece>,
    },
    Scatter {
        group: Option<fe::PeerGroup>,
        src: fe::Region,
        parts: Vec<ScatterDst>,
        imm: Option<Imm>,
    },
    Barrier {
        group: fe::PeerGroup,
        imm: Imm,
    },
    Send {
        peer: fe::Peer,
        message: Vec<u8>,
    },
}

impl OwnedOp {
    /// The operation with another immediate, where it counts at all.
    pub fn op_counted(&self, py: Python<'_>, imm: Option<&ImmArg>) -> PyResult<Op<'_>> {
        let Some(arg) = imm else { return Ok(self.op()) };
        let mut op = self.op();
        match &mut op {
            Op::Write { dst, imm, .. } => *imm = Some(arg.for_peer(py, dst.region.peer())?),
            Op::WritePages { dst, imm, .. } => *imm = Some(arg.for_peer(py, dst.peer())?),
            Op::WritePieces { pieces, imm } => {
                if let Some(p) = pieces.first() {
                    *imm = Some(arg.for_peer(py, p.remote.peer())?);
                }
            }
            Op::Scatter { .. } | Op::Barrier { .. } => {
                let text = "a batch with scatters or barriers keeps its own immediates".into();
                return Err(crate::errors::raise(py, &fe::EngineError::Invalid(text)));
            }
            Op::Read { .. } | Op::ReadPages { .. } | Op::ReadPieces { .. } | Op::Send { .. } => {}
        }
        Ok(op)
    }

    pub fn op(&self) -> Op<'_> {
        match self {
            Self::Write { src, src_offset, dst, dst_offset, len, imm } => Op::Write {
                src: Local { region: src, offset: *src_offset },
                dst: Remote { region: dst, offset: *dst_offset },
                len: *len,
                imm: *imm,
            },
            Self::Read { src, src_offset, dst, dst_offset, len } => Op::Read {
                src: Remote { region: src, offset: *src_offset },
                dst: Local { region: dst, offset: *dst_offset },
                len: *len,
            },
            Self::WritePages { page_len, src, src_pages, dst, dst_pages, imm } => {
                Op::WritePages { page_len: *page_len, src, src_pages, dst, dst_pages, imm: *imm }
            }
            Self::ReadPages { page_len, src, src_pages, dst, dst_pages } => {
                Op::ReadPages { page_len: *page_len, src, src_pages, dst, dst_pages }
            }
            Self::WritePieces { pieces, imm } => Op::WritePieces { pieces, imm: *imm },
            Self::ReadPieces { pieces } => Op::ReadPieces { pieces },
            Self::Scatter { group, src, parts, imm } => {
                Op::Scatter { group: group.as_ref(), src, parts, imm: *imm }
            }
            Self::Barrier { group, imm } => Op::Barrier { group, imm: *imm },
            Self::Send { peer, message } => Op::Send { peer, message },
        }
    }

    /// The peer, if there is exactly one.
    pub fn peer(&self) -> Option<&fe::Peer> {
        match self {
            Self::Write { dst, .. } | Self::WritePages { dst, .. } => Some(dst.peer()),
            Self::Read { src, .. } | Self::ReadPages { src, .. } => Some(src.peer()),
            Self::WritePieces { pieces, .. } | Self::ReadPieces { pieces } => {
                pieces.first().map(|p| p.remote.peer())
            }
            Self::Send { peer, .. } => Some(peer),
            Self::Scatter { .. } | Self::Barrier { .. } => None,
        }
    }
}

fn imm_for(
    py: Python<'_>,
    imm: Option<&Bound<'_, PyAny>>,
    peer: &fe::Peer,
) -> PyResult<Option<Imm>> {
    imm.map(|i| ImmArg::extract(i)?.for_peer(py, peer)).transpose()
}

/// Bytes of a transfer without `nbytes`: the rest of both sides, which must have the same length.
pub fn length(
    py: Python<'_>,
    nbytes: Option<u64>,
    (src, src_offset): (u64, u64),
    (dst, dst_offset): (u64, u64),
) -> PyResult<u64> {
    if let Some(n) = nbytes {
        return Ok(n);
    }
    match (remaining_bytes("src", src, src_offset), remaining_bytes("dst", dst, dst_offset)) {
        (Ok(src), Ok(dst)) if src == dst => Ok(src),
        (Ok(src), Ok(dst)) => Err(fe::EngineError::Invalid(format!(
            "src has {src} bytes and dst has {dst}: name nbytes, or slice one of them"
        ))),
        (Err(e), _) | (_, Err(e)) => Err(e),
    }
    .or_raise(py)
}

/// Bytes that remain of `limit` after the first `offset`.
fn remaining_bytes(what: &str, limit: u64, offset: u64) -> Result<u64, fe::EngineError> {
    let outside = || fe::EngineError::OutOfBounds { what: what.to_owned(), offset, len: 0, limit };
    limit.checked_sub(offset).ok_or_else(outside)
}

/// The pieces from which requests are put together, shared by `Engine` and `Batch`.
pub mod build {
    use super::*;

    #[allow(clippy::too_many_arguments)] // keyword arguments of a Python method
    #[inline]
    pub fn write(
        py: Python<'_>,
        src: &Region,
        dst: &RemoteRegion,
        nbytes: Option<u64>,
        src_offset: u64,
        dst_offset: u64,
        imm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<(u64, Option<Imm>)> {
        let len = length(py, nbytes, (src.0.len(), src_offset), (dst.0.len(), dst_offset))?;
        Ok((len, imm_for(py, imm, dst.0.peer())?))
    }

    pub fn scatter(
        py: Python<'_>,
        src: &Region,
        parts: Vec<(ClassArg<'_, RemoteRegion>, u64, u64, u64)>,
        group: Option<&PeerGroup>,
        imm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<OwnedOp> {
        let parts: Vec<ScatterDst> = parts
            .into_iter()
            .map(|(dst, dst_offset, src_offset, len)| ScatterDst {
                len,
                src_offset,
                dst: dst.0.clone(),
                dst_offset,
            })
            .collect();
        let imm = imm.map(|imm| scattered(py, imm, &parts)).transpose()?.flatten();
        Ok(OwnedOp::Scatter { group: group.map(|g| g.0.clone()), src: src.0.clone(), parts, imm })
    }

    /// The immediate of all parts: a reference is good for the parts of its engine alone.
    fn scattered(
        py: Python<'_>,
        imm: &Bound<'_, PyAny>,
        parts: &[ScatterDst],
    ) -> PyResult<Option<Imm>> {
        let imm = ImmArg::extract(imm)?;
        let elsewhere = |owner| parts.iter().find(|p| p.dst.peer().id() != owner);
        if let ImmArg::Of(r) = &imm {
            if let Some(part) = elsewhere(r.owner) {
                let text = format!(
                    "the counter belongs to engine {}, but a part goes to {}: agree on a plain \
                     integer where several engines count",
                    r.owner,
                    part.dst.peer().address().label()
                );
                return Err(crate::errors::raise(py, &fe::EngineError::Invalid(text)));
            }
        }
        parts.first().map(|part| imm.for_peer(py, part.dst.peer())).transpose()
    }

    pub fn barrier(py: Python<'_>, group: &PeerGroup, imm: &Bound<'_, PyAny>) -> PyResult<OwnedOp> {
        let imm = match ImmArg::extract(imm)? {
            ImmArg::Plain(imm) => imm,
            ImmArg::Of(_) => {
                let text = "a barrier goes to several engines: agree on a plain integer".into();
                return Err(crate::errors::raise(py, &fe::EngineError::Invalid(text)));
            }
        };
        Ok(OwnedOp::Barrier { group: group.0.clone(), imm })
    }
}

/// A request of several operations, which may mix kinds and peers. Build it once, submit it as
/// often as needed: what can be prepared is prepared here.
#[pyclass(module = "fabric_ray._native")]
#[derive(Default)]
pub(crate) struct Batch {
    pub ops: Vec<OwnedOp>,
}

#[pymethods]
impl Batch {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (src, dst, nbytes=None, *, src_offset=0, dst_offset=0, imm=None))]
    fn write(
        &mut self,
        py: Python<'_>,
        src: ClassArg<'_, Region>,
        dst: ClassArg<'_, RemoteRegion>,
        #[pyo3(from_py_with = checked_int)] nbytes: Option<u64>,
        #[pyo3(from_py_with = checked_int)] src_offset: u64,
        #[pyo3(from_py_with = checked_int)] dst_offset: u64,
        imm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (len, imm) = build::write(py, &src, &dst, nbytes, src_offset, dst_offset, imm)?;
        let (src, dst) = (src.0.clone(), dst.0.clone());
        self.ops.push(OwnedOp::Write { src, src_offset, dst, dst_offset, len, imm });
        Ok(())
    }

    #[pyo3(signature = (src, dst, nbytes=None, *, src_offset=0, dst_offset=0))]
    fn read(
        &mut self,
        py: Python<'_>,
        src: ClassArg<'_, RemoteRegion>,
        dst: ClassArg<'_, Region>,
        #[pyo3(from_py_with = checked_int)] nbytes: Option<u64>,
        #[pyo3(from_py_with = checked_int)] src_offset: u64,
        #[pyo3(from_py_with = checked_int)] dst_offset: u64,
    ) -> PyResult<()> {
        let len = length(py, nbytes, (src.0.len(), src_offset), (dst.0.len(), dst_offset))?;
        let (src, dst) = (src.0.clone(), dst.0.clone());
        self.ops.push(OwnedOp::Read { src, src_offset, dst, dst_offset, len });
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (page_nbytes, src, src_pages, dst, dst_pages, *, imm=None))]
    fn write_pages(
        &mut self,
        py: Python<'_>,
        #[pyo3(from_py_with = checked_int)] page_nbytes: u64,
        src: ClassArg<'_, Region>,
        src_pages: ClassArg<'_, Pages>,
        dst: ClassArg<'_, RemoteRegion>,
        dst_pages: ClassArg<'_, Pages>,
        imm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.ops.push(OwnedOp::WritePages {
            page_len: page_nbytes,
            src: src.0.clone(),
            src_pages: src_pages.0.clone(),
            dst: dst.0.clone(),
            dst_pages: dst_pages.0.clone(),
            imm: imm_for(py, imm, dst.0.peer())?,
        });
        Ok(())
    }

    fn read_pages(
        &mut self,
        #[pyo3(from_py_with = checked_int)] page_nbytes: u64,
        src: ClassArg<'_, RemoteRegion>,
        src_pages: ClassArg<'_, Pages>,
        dst: ClassArg<'_, Region>,
        dst_pages: ClassArg<'_, Pages>,
    ) {
        self.ops.push(OwnedOp::ReadPages {
            page_len: page_nbytes,
            src: src.0.clone(),
            src_pages: src_pages.0.clone(),
            dst: dst.0.clone(),
            dst_pages: dst_pages.0.clone(),
        });
    }

    /// Adds a write from a range of a segment to a range of a peer's.
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (local, local_offset, remote, remote_offset, nbytes, *, imm=None))]
    fn write_segment(
        &mut self,
        py: Python<'_>,
        local: &Segment,
        #[pyo3(from_py_with = checked_int)] local_offset: u64,
        remote: &RemoteSegment,
        #[pyo3(from_py_with = checked_int)] remote_offset: u64,
        #[pyo3(from_py_with = checked_int)] nbytes: u64,
        imm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let pieces = local.0.pieces(local_offset, (&remote.0, remote_offset), nbytes);
        let imm = imm_for(py, imm, remote.0.peer())?;
        self.ops.push(OwnedOp::WritePieces { pieces: pieces.or_raise(py)?, imm });
        Ok(())
    }

    /// Adds a read of a range of a peer's segment into a range of one.
    fn read_segment(
        &mut self,
        py: Python<'_>,
        local: &Segment,
        #[pyo3(from_py_with = checked_int)] local_offset: u64,
        remote: &RemoteSegment,
        #[pyo3(from_py_with = checked_int)] remote_offset: u64,
        #[pyo3(from_py_with = checked_int)] nbytes: u64,
    ) -> PyResult<()> {
        let pieces = local.0.pieces(local_offset, (&remote.0, remote_offset), nbytes);
        self.ops.push(OwnedOp::ReadPieces { pieces: pieces.or_raise(py)? });
        Ok(())
    }

    #[pyo3(signature = (src, parts, *, group=None, imm=None))]
    fn scatter(
        &mut self,
        py: Python<'_>,
        src: ClassArg<'_, Region>,
        #[pyo3(from_py_with = checked_int)] parts: Vec<(ClassArg<'_, RemoteRegion>, u64, u64, u64)>,
        group: Option<&PeerGroup>,
        imm: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.ops.push(build::scatter(py, &src, parts, group, imm)?);
        Ok(())
    }

    fn barrier(
        &mut self,
        py: Python<'_>,
        group: &PeerGroup,
        imm: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.ops.push(build::barrier(py, group, imm)?);
        Ok(())
    }

    fn send(&mut self, peer: ClassArg<'_, Peer>, message: &[u8]) {
        self.ops.push(OwnedOp::Send { peer: peer.0.clone(), message: message.to_vec() });
    }

    fn __len__(&self) -> usize {
        self.ops.len()
    }

    fn __repr__(&self) -> String {
        format!("Batch({} operations)", self.ops.len())
    }
}
