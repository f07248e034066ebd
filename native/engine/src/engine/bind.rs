//! Checks a user's operations, and binds them to work requests of the group.

use std::sync::{atomic::Ordering::Relaxed, Arc};

use super::{overlap, peers::Peer, Region, RemoteRegion, Shared};
use crate::{
    api::{check_range, Imm, PageIndices, Pages},
    domain::{Count, Data, LocalAddr, Seq, WorkRequest},
    engine::Op,
    group::{BoundOp, SharedCount},
    EngineError, Result,
};

impl Shared {
    pub(super) fn check_peer(&self, peer: &Peer) -> Result<()> {
        if peer.known_to == self.address.id {
            return Ok(());
        }
        Err(EngineError::Invalid(format!(
            "peer {} was made by another engine; make it with this engine's peer() or import it here",
            peer.address.label()
        )))
    }

    pub(super) fn check_own(&self, region: &Region) -> Result<()> {
        if !std::ptr::eq(Arc::as_ptr(&region.inner.shared), self) {
            return Err(EngineError::Invalid(
                "the local region belongs to another engine; register it with this one".into(),
            ));
        }
        region.check_open()
    }

    fn check_local(&self, region: &Region, offset: u64, len: u64) -> Result<()> {
        self.check_own(region)?;
        check_range("local region", offset, len, region.len())
    }

    fn check_remote(&self, region: &RemoteRegion, offset: u64, len: u64) -> Result<()> {
        self.check_peer(&region.peer)?;
        check_range("remote region", offset, len, region.len())
    }

    fn check_pages(what: &str, pages: &Pages, page_len: u64, limit: u64) -> Result<()> {
        match pages.end(page_len) {
            Some(end) => check_range(what, 0, end, limit),
            None => Err(EngineError::Invalid(format!("{what}: page offsets pass 2^64"))),
        }
    }

    fn check_paged(
        &self,
        page_len: u64,
        (local, local_pages): (&Region, &Pages),
        (remote, remote_pages): (&RemoteRegion, &Pages),
    ) -> Result<()> {
        if page_len == 0 {
            return Err(EngineError::Invalid("pages of zero bytes move nothing".into()));
        }
        let (n, m) = (local_pages.indices.len(), remote_pages.indices.len());
        if n != m {
            return Err(EngineError::Invalid(format!(
                "{n} local pages but {m} remote ones; give as many indices on both sides"
            )));
        }
        if n == 0 {
            return Err(EngineError::Invalid("a paged request needs at least one page".into()));
        }
        self.check_local(local, 0, 0)?;
        self.check_remote(remote, 0, 0)?;
        Self::check_pages("local pages", local_pages, page_len, local.len())?;
        Self::check_pages("remote pages", remote_pages, page_len, remote.len())?;
        (u64::from(n))
            .checked_mul(page_len)
            .map(drop)
            .ok_or_else(|| EngineError::Invalid(format!("{n} pages of {page_len} bytes pass 2^64")))
    }

    /// Checks everything that can be checked without the peer.
    pub(super) fn check(&self, op: &Op<'_>) -> Result<()> {
        self.check_ranges(op)?;
        overlap::check(op)
    }

    fn check_ranges(&self, op: &Op<'_>) -> Result<()> {
        match op {
            Op::Write { src, dst, len, imm } => {
                if *len == 0 && imm.is_none() {
                    return Err(EngineError::Invalid(
                        "a write of zero bytes without an immediate does nothing".into(),
                    ));
                }
                self.check_local(src.region, src.offset, *len)?;
                self.check_remote(dst.region, dst.offset, *len)
            }
            Op::Read { src, dst, len } => {
                if *len == 0 {
                    return Err(EngineError::Invalid("a read of zero bytes does nothing".into()));
                }
                self.check_local(dst.region, dst.offset, *len)?;
                self.check_remote(src.region, src.offset, *len)
            }
            Op::WritePages { page_len, src, src_pages, dst, dst_pages, .. } => {
                self.check_paged(*page_len, (src, src_pages), (dst, dst_pages))
            }
            Op::ReadPages { page_len, src, src_pages, dst, dst_pages } => {
                self.check_paged(*page_len, (dst, dst_pages), (src, src_pages))
            }
            Op::WritePieces { pieces, .. } | Op::ReadPieces { pieces } => {
                let Some(first) = pieces.first() else {
                    return Err(EngineError::Invalid("a request needs at least one piece".into()));
                };
                for p in *pieces {
                    if p.len == 0 {
                        return Err(EngineError::Invalid("a piece of zero bytes".into()));
                    }
                    self.check_local(&p.local, p.local_offset, p.len)?;
                    self.check_remote(&p.remote, p.remote_offset, p.len)?;
                    if p.remote.peer.key != first.remote.peer.key {
                        return Err(EngineError::Invalid(
                            "the pieces of one write or read are of one peer; make it several"
                                .into(),
                        ));
                    }
                }
                Ok(())
            }
            Op::Scatter { group, src, parts, imm } => {
                if parts.is_empty() {
                    return Err(EngineError::Invalid("a scatter needs at least one part".into()));
                }
                if let Some(group) = group.filter(|g| g.peers.len() != parts.len()) {
                    return Err(EngineError::Invalid(format!(
                        "{} parts for a group of {} peers; give one part for each",
                        parts.len(),
                        group.peers.len()
                    )));
                }
                for (i, part) in parts.iter().enumerate() {
                    if part.len == 0 && imm.is_none() {
                        return Err(EngineError::Invalid(format!(
                            "part {i} of the scatter moves nothing and counts nothing"
                        )));
                    }
                    self.check_local(src, part.src_offset, part.len)?;
                    self.check_remote(&part.dst, part.dst_offset, part.len)?;
                    let member = group.map(|g| &g.peers[i]);
                    if let Some(member) = member.filter(|m| m.key != part.dst.peer.key) {
                        return Err(EngineError::Invalid(format!(
                            "part {i} of the scatter goes to {}, the group has {} there; give both \
                             in one order",
                            part.dst.peer.address.label(),
                            member.address.label()
                        )));
                    }
                }
                Ok(())
            }
            Op::Barrier { group, .. } if group.peers.is_empty() => {
                Err(EngineError::Invalid("a barrier needs at least one peer".into()))
            }
            Op::Barrier { group, .. } => group.peers.iter().try_for_each(|p| self.check_peer(p)),
            Op::Send { peer, message } => {
                self.check_peer(peer)?;
                if message.len() > self.max_message {
                    return Err(EngineError::Invalid(format!(
                        "a message of {} bytes is over the limit of {}; write to a region instead",
                        message.len(),
                        self.max_message
                    )));
                }
                Ok(())
            }
        }
    }

    /// Passes each peer's part of a checked operation to `push`, or only what prepares it.
    #[inline]
    pub(super) fn bind(
        &self,
        op: &Op<'_>,
        (rail, only_prepare): (Option<u8>, bool),
        push: &mut dyn FnMut(BoundOp),
    ) {
        match (rail, only_prepare) {
            (None, false) => self.bind_all(op, push),
            (rail, false) => self.bind_all(op, &mut |bound| push(bound.pinned(rail))),
            (rail, true) => self.bind_all(op, &mut |bound| {
                if let Some(bound) = bound.pinned(rail).prepare() {
                    push(bound);
                }
            }),
        }
    }

    #[inline]
    fn bind_all(&self, op: &Op<'_>, push: &mut dyn FnMut(BoundOp)) {
        match op {
            Op::Write { src, dst, len, imm } => {
                push(write(src.region, src.offset, dst.region, dst.offset, *len, *imm));
            }
            Op::Read { src, dst, len } => {
                let data = single(dst.region, dst.offset, src.region, src.offset, *len);
                push(BoundOp::new(src.region.peer.key, WorkRequest::Read { data }));
            }
            Op::WritePages { page_len, src, src_pages, dst, dst_pages, imm } => {
                let data = paged(*page_len, (src, src_pages), (dst, dst_pages));
                // IC-1: one for each page.
                let count = imm.map(|i| Count { imm: i.to_wire(), n: data.pages });
                push(BoundOp::new(dst.peer.key, WorkRequest::Write { data, count }));
            }
            Op::ReadPages { page_len, src, src_pages, dst, dst_pages } => {
                let data = paged(*page_len, (dst, dst_pages), (src, src_pages));
                push(BoundOp::new(src.peer.key, WorkRequest::Read { data }));
            }
            Op::WritePieces { pieces, imm } => {
                let of = pieces.len() as u32;
                for (i, p) in pieces.iter().enumerate() {
                    let (local, remote) =
                        ((&p.local, p.local_offset), (&p.remote, p.remote_offset));
                    let one = |imm| write(local.0, local.1, remote.0, remote.1, p.len, imm);
                    push(match imm {
                        Some(imm) if of > 1 => {
                            let count = Count { imm: imm.to_wire(), n: 1 };
                            one(None).joined(SharedCount { count, of, first: i == 0 })
                        }
                        imm => one(*imm),
                    });
                }
            }
            Op::ReadPieces { pieces } => {
                for p in *pieces {
                    let data = single(&p.local, p.local_offset, &p.remote, p.remote_offset, p.len);
                    push(BoundOp::new(p.remote.peer.key, WorkRequest::Read { data }));
                }
            }
            Op::Scatter { src, parts, imm, .. } => {
                for p in *parts {
                    push(write(src, p.src_offset, &p.dst, p.dst_offset, p.len, *imm));
                }
            }
            Op::Barrier { group, imm } => {
                for p in group.peers.iter() {
                    let count = Count { imm: imm.to_wire(), n: 1 };
                    push(BoundOp::new(p.key, WorkRequest::Count(count)));
                }
            }
            Op::Send { peer, message } => {
                push(BoundOp::new(peer.key, WorkRequest::Send((*message).into())));
            }
        }
    }

    /// The local regions that pending requests use (MR-1: no reuse before they end).
    pub(super) fn keep<'a>(&self, ops: impl IntoIterator<Item = &'a Op<'a>>) -> Vec<Region> {
        // Only the latest few are compared. A region that is kept twice is released twice.
        const COMPARED_REGIONS: usize = 4;
        let mut keep: Vec<Region> = Vec::new();
        let mut add = |region: &Region| {
            if !keep
                .iter()
                .rev()
                .take(COMPARED_REGIONS)
                .any(|k| Arc::ptr_eq(&k.inner, &region.inner))
            {
                region.inner.memory.users.fetch_add(1, Relaxed);
                keep.push(region.clone());
            }
        };
        for op in ops {
            let region = match op {
                Op::Write { src, .. } => src.region,
                Op::Read { dst, .. } => dst.region,
                Op::WritePages { src, .. } | Op::Scatter { src, .. } => src,
                Op::ReadPages { dst, .. } => dst,
                Op::WritePieces { pieces, .. } | Op::ReadPieces { pieces } => {
                    pieces.iter().for_each(|p| add(&p.local));
                    continue;
                }
                Op::Barrier { .. } | Op::Send { .. } => continue,
            };
            add(region);
        }
        keep
    }
}

fn single(l: &Region, l_off: u64, r: &RemoteRegion, r_off: u64, len: u64) -> Data {
    Data {
        local: LocalAddr(l.addr()),
        local_region: l.inner.memory.key.index,
        local_seq: Seq::at(l_off),
        remote: r.key,
        remote_keys: r.rail_keys.clone(),
        remote_seq: Seq::at(r.offset + r_off),
        page_len: len,
        pages: 1,
    }
}

fn write(
    src: &Region,
    src_offset: u64,
    dst: &RemoteRegion,
    dst_offset: u64,
    len: u64,
    imm: Option<Imm>,
) -> BoundOp {
    BoundOp::new(dst.peer.key, write_request((src, src_offset), (dst, dst_offset), len, imm))
}

/// The work request of a checked write.
#[inline]
pub(super) fn write_request(
    (src, src_offset): (&Region, u64),
    (dst, dst_offset): (&RemoteRegion, u64),
    len: u64,
    imm: Option<Imm>,
) -> WorkRequest {
    let count = imm.map(|i| Count { imm: i.to_wire(), n: 1 });
    match count {
        Some(count) if len == 0 => WorkRequest::Count(count),
        count => WorkRequest::Write { data: single(src, src_offset, dst, dst_offset, len), count },
    }
}

fn paged(
    page_len: u64,
    (l, l_pages): (&Region, &Pages),
    (r, r_pages): (&RemoteRegion, &Pages),
) -> Data {
    Data {
        local: LocalAddr(l.addr()),
        local_region: l.inner.memory.key.index,
        local_seq: seq(l_pages, 0),
        remote: r.key,
        remote_keys: r.rail_keys.clone(),
        remote_seq: seq(r_pages, r.offset),
        page_len,
        pages: l_pages.indices.len(),
    }
}

pub(super) fn seq(pages: &Pages, base: u64) -> Seq {
    let (offset, stride) = (base + pages.offset, pages.stride);
    match &pages.indices {
        PageIndices::Range { first, .. } => {
            Seq::Strided { offset: offset + u64::from(*first) * stride, stride }
        }
        PageIndices::List(list) => Seq::Indexed { list: Arc::clone(list), from: 0, offset, stride },
    }
}
