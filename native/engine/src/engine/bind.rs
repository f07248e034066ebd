//! Checks a user's operations, and binds them to work requests of the group.

use std::sync::{atomic::Ordering::SeqCst, Arc};

use super::{
    handle::KeptRegions, overlap, peers::Peer, Local, Region, Remote, RemoteRegion, Shared,
};
use crate::{
    api::{check_range, Imm, PageIndices, Pages},
    domain::{Count, Data, LocalAddr, Seq, SmallWrite, WorkRequest},
    engine::Op,
    group::{BoundOp, SharedCount, SmallRequest, SmallWrites},
    EngineError, Result,
};

/// Most operations of a [`SmallRequest`].
const MAX_SMALL_WRITES: usize = 4096;

#[cold]
fn other_engine(peer: &Peer) -> EngineError {
    EngineError::Invalid(format!(
        "peer {} was made by another engine; make it with this engine's peer() or import it here",
        peer.address.label()
    ))
}

#[cold]
fn other_region() -> EngineError {
    EngineError::Invalid(
        "the local region belongs to another engine; register it with this one".into(),
    )
}

#[cold]
fn no_effect() -> EngineError {
    EngineError::Invalid("a write of zero bytes without an immediate does nothing".into())
}

impl Shared {
    #[inline]
    pub(super) fn check_peer(&self, peer: &Peer) -> Result<()> {
        match peer.known_to == self.address.id {
            true => Ok(()),
            false => Err(other_engine(peer)),
        }
    }

    #[inline]
    pub(super) fn check_own(&self, region: &Region) -> Result<()> {
        match std::ptr::eq(Arc::as_ptr(&region.inner.shared), self) {
            true => region.check_open(),
            false => Err(other_region()),
        }
    }

    #[inline]
    fn check_local(&self, region: &Region, offset: u64, len: u64) -> Result<()> {
        self.check_own(region)?;
        check_range("local region", offset, len, region.len())
    }

    #[inline]
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
    #[inline]
    pub(super) fn check(&self, op: &Op<'_>) -> Result<()> {
        match op {
            // The bytes of another engine overlap none of this one's.
            Op::Write { src, dst, len, imm } if dst.region.own.is_none() => {
                self.check_write((src, dst), *len, *imm)
            }
            op => self.check_ranges(op).and_then(|()| overlap::check(op)),
        }
    }

    /// Checks that the local regions of checked operations are still registered, if a region was
    /// revoked since `revocations` was read. The caller has the lock, or has called
    /// [`keep`](Self::keep): revocations from now on end after the operations (MR-1).
    #[inline]
    pub(super) fn check_again(&self, ops: &[Op<'_>], revocations: u64) -> Result<()> {
        match self.revocations.load(SeqCst) == revocations {
            true => Ok(()),
            false => ops.iter().try_for_each(Self::check_registered),
        }
    }

    #[cold]
    fn check_registered(op: &Op<'_>) -> Result<()> {
        let mut registered = Ok(());
        op.each_local(|region| {
            if registered.is_ok() {
                registered = region.check_open();
            }
        });
        registered
    }

    #[inline]
    fn check_write(
        &self,
        (src, dst): (&Local<'_>, &Remote<'_>),
        len: u64,
        imm: Option<Imm>,
    ) -> Result<()> {
        if len == 0 && imm.is_none() {
            return Err(no_effect());
        }
        self.check_local(src.region, src.offset, len)?;
        self.check_remote(dst.region, dst.offset, len)
    }

    fn check_ranges(&self, op: &Op<'_>) -> Result<()> {
        match op {
            Op::Write { src, dst, len, imm } => self.check_write((src, dst), *len, *imm),
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
    pub(super) fn keep<'a>(&self, ops: impl IntoIterator<Item = &'a Op<'a>>) -> KeptRegions {
        // Only the latest few are compared. A region that is kept twice is released twice.
        const COMPARED_REGIONS: usize = 4;
        let mut keep = KeptRegions::new();
        let mut add = |region: &Region| {
            if !keep
                .iter()
                .rev()
                .take(COMPARED_REGIONS)
                .any(|k| Arc::ptr_eq(&k.inner, &region.inner))
            {
                region.inner.memory.users.fetch_add(1, SeqCst);
                keep.push(region.clone());
            }
        };
        ops.into_iter().for_each(|op| op.each_local(&mut add));
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

/// The request of these operations, if all are small writes to one peer, with the same immediate or
/// none. `writes` takes those that move bytes.
#[inline]
pub(super) fn small_request(ops: &[Op<'_>], writes: &mut SmallWrites) -> Option<SmallRequest> {
    let [Op::Write { dst, imm, .. }, ..] = ops else { return None };
    if ops.len() > 1 {
        if ops.len() > MAX_SMALL_WRITES {
            return None;
        }
        writes.reserve(ops.len());
    }
    let wire = |imm: &Option<Imm>| imm.map(Imm::to_wire);
    let mut request = SmallRequest::new(dst.region.peer.key, wire(imm));
    for op in ops {
        let Op::Write { src, dst, len, imm } = op else { return None };
        if !request.add(dst.region.peer.key, wire(imm), *len) {
            return None;
        }
        if *len > 0 {
            writes.push(SmallWrite {
                local: LocalAddr(src.region.addr() + src.offset as usize),
                local_region: src.region.inner.memory.key.index,
                remote: dst.region.key,
                remote_offset: dst.region.offset + dst.offset,
                len: *len,
            });
        }
    }
    Some(request)
}

/// The work request of a checked write.
#[inline]
fn write_request(
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
