//! Turns work requests into chunks: one write or read for each page, each with its own immediate.

use smallvec::SmallVec;

use super::{
    link::Link,
    ops::{ContextUse, InFlight, Op, NO_REGION},
    raw::Span,
    read_buffers::ReadBuffer,
    shuffle::PostOrder,
    LibfabricDomain,
};
use crate::{
    api::{Imm, RegionKey},
    domain::{Count, Data, DomainError, LinkId, Post, Token, WorkRequest},
    transport::nic::files::refuse_files,
};

/// Bytes under way on one link; heartbeats may have to wait behind them. The limit is smaller for
/// NICs, whose progress is not visible.
const WINDOW: u64 = 64 << 20;
const NIC_WINDOW: u64 = 8 << 20;
/// Counted writes under way on one link, if each takes a receive slot of the peer.
const IMM_WINDOW: u32 = 16;

/// The kind and data of an operation's chunks.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Write {
        data: Data,
        imm: Option<u32>,
    },
    Read {
        data: Data,
    },
    /// Writes without bytes that only count.
    Imms {
        raw: u32,
        n: u32,
    },
}

impl Work {
    /// Bytes of one chunk.
    fn chunk_bytes(&self) -> u64 {
        match self {
            Work::Write { data, .. } | Work::Read { data } => data.page_len,
            Work::Imms { .. } => 0,
        }
    }
}

/// An operation with chunks that are not posted yet.
pub(super) struct PartialPost {
    op: u32,
    link: LinkId,
    work: Work,
    order: PostOrder,
    next: u32,
    n: u32,
}

impl LibfabricDomain {
    #[inline]
    pub(super) fn post_request(
        &mut self,
        id: LinkId,
        token: Token,
        wr: &WorkRequest,
    ) -> Result<Post, DomainError> {
        let down = || DomainError::LinkDown("the link is down".into());
        let (work, then) = match wr {
            WorkRequest::Prepare { .. } => return Ok(Post::Done),
            WorkRequest::Send(message) => {
                let link = self.link(id).ok_or_else(down)?;
                if !link.channel.submit(token, message) {
                    return Ok(Post::Full);
                }
                self.send_frames(id);
                return Ok(Post::Queued);
            }
            WorkRequest::Write { data, count: None } => {
                (Work::Write { data: data.clone(), imm: None }, None)
            }
            WorkRequest::Write { data, count: Some(c) } if c.n == data.pages => {
                (Work::Write { data: data.clone(), imm: Some(c.imm) }, None)
            }
            WorkRequest::Write { data, count } => {
                (Work::Write { data: data.clone(), imm: None }, *count)
            }
            WorkRequest::Read { data } => (Work::Read { data: data.clone() }, None),
            WorkRequest::Count(c) => (Work::Imms { raw: c.imm, n: c.n }, None),
        };
        let (n, bytes, imms) = size(&work);
        let (takes_slots, share) = (self.imms_take_slots(), self.table.share());
        let window = self.window();
        let link = self.link(id).ok_or_else(down)?;
        let full = (link.bytes > 0 && link.bytes + bytes > window)
            || (takes_slots && link.imms > 0 && link.imms + imms > IMM_WINDOW)
            || link.chunks + n as usize > share
            || link.queries.ops.len() >= share;
        let behind = self.partial_posts.iter().any(|s| s.link == id);
        if full || behind || (n as usize) > self.table.room() {
            return Ok(Post::Full);
        }
        self.check(id, &work)?;
        let access = access(&work);
        let op = Op { link: id, token, left: n, imms, error: None, then, access, fenced: false };
        let op = self.table.ops.insert(op) as u32;
        let Some(link) = self.link(id) else { return Err(down()) };
        link.imms += imms;
        let order = self.shuffle.as_mut().map_or(PostOrder::sequential(n), |s| s.order(n));
        let work = PartialPost { op, link: id, work, order, next: 0, n };
        match self.must_query(id, access) {
            true => self.query_first(id, work),
            false => self.launch(work),
        }
        Ok(Post::Queued)
    }

    /// Checks that keys for all bytes exist (MR-2), before anything is posted.
    fn check(&mut self, id: LinkId, work: &Work) -> Result<(), DomainError> {
        let (Work::Write { data, .. } | Work::Read { data }) = work else { return Ok(()) };
        self.check_local(data)?;
        let Some(link) = self.link(id) else { return Ok(()) };
        for i in 0..data.pages {
            let offset = data.remote_seq.nth(i);
            match data.remote_keys.find(link.endpoint as u8, offset) {
                Some((_, end)) if offset.saturating_add(data.page_len) <= end => {}
                Some(_) => {
                    let why = "a page crosses two registrations of the peer's NIC";
                    return Err(DomainError::Refused(why.into()));
                }
                None => {
                    refuse_files(data)?;
                    let nic = link.remote.label();
                    return Err(DomainError::Stale(format!(
                        "the region's descriptor has no key for {nic}: the region lies on a GPU, or was \
                        registered before that NIC was opened or on another engine"
                    )));
                }
            }
        }
        Ok(())
    }

    fn check_local(&mut self, data: &Data) -> Result<(), DomainError> {
        if self.regions.desc(data.local_region).is_some() {
            return Ok(());
        }
        Err(DomainError::Stale(format!(
            "local region {} is not registered with this NIC, or lies in a file or on a GPU, which \
            {} doesn't support",
            data.local_region, self.offer.provider
        )))
    }

    /// Whether the peer must be queried before an access.
    #[inline]
    fn must_query(&mut self, id: LinkId, access: Option<(RegionKey, u64, u64)>) -> bool {
        let (true, Some((key, offset, len))) = (self.queries_first, access) else { return false };
        let end = offset.saturating_add(len);
        let known = self.link(id).and_then(|l| l.queries.allowed_up_to.get(&key).copied());
        known.is_none_or(|limit| end > limit)
    }

    fn query_first(&mut self, id: LinkId, work: PartialPost) {
        let op = work.op;
        self.parked.insert(op, work);
        if let Some(link) = self.link(id) {
            link.queries.ops.push_back(op);
        }
        self.send_next_query(id);
    }

    /// Posts an operation after the peer has allowed its access.
    pub(super) fn launch_parked(&mut self, op: u32) -> bool {
        let Some(work) = self.parked.remove(&op) else { return false };
        self.launch(work);
        true
    }

    /// Posts as many chunks as possible; later polls post the rest.
    fn launch(&mut self, mut work: PartialPost) {
        if !self.post_chunks(&mut work) {
            self.partial_posts.push_back(work);
        }
    }

    /// Posts chunks until all are posted or there is no room; true if all are.
    fn post_chunks(&mut self, s: &mut PartialPost) -> bool {
        while s.next < s.n {
            if !self.has_chunk_share(s) {
                return false;
            }
            let Some(context) = self.table.take_chunk() else { return false };
            match self.post_chunk(s, context) {
                Ok(true) => s.next += 1,
                Ok(false) => {
                    self.table.give_back(context);
                    return false;
                }
                Err(e) => {
                    self.table.give_back(context);
                    // Chunks posted before complete by themselves.
                    self.chunks_done(s.op, s.n - s.next, Some(e));
                    return true;
                }
            }
        }
        true
    }

    /// Whether the link may have one more chunk under way.
    fn has_chunk_share(&mut self, s: &PartialPost) -> bool {
        let (share, window, len) = (self.table.share(), self.window(), s.work.chunk_bytes());
        let Some(link) = self.link(s.link) else { return true };
        link.chunks < share && (link.bytes == 0 || link.bytes + len <= window)
    }

    fn window(&self) -> u64 {
        match self.offer.is_rdma() {
            true => NIC_WINDOW,
            false => WINDOW,
        }
    }

    fn post_chunk(&mut self, s: &PartialPost, context: u32) -> Result<bool, DomainError> {
        if self.table.ops.get(s.op as usize).is_none() {
            self.table.give_back(context);
            return Ok(true);
        }
        let id = s.link;
        let gone = || DomainError::LinkDown("the link is down".into());
        let i = s.order.nth(s.next);
        if let Work::Write { data, .. } | Work::Read { data } = &s.work {
            self.check_local(data)?;
        }
        let (span, imm, region) = match &s.work {
            Work::Write { data, imm } => (self.span(id, data, i), *imm, data.local_region),
            Work::Read { data } => (self.span(id, data, i), None, data.local_region),
            Work::Imms { raw, n } => {
                (self.empty_span(id), Imm::weighted(*raw, *n).nth(i as usize), NO_REGION)
            }
        };
        let mut span = span.ok_or_else(gone)?;
        let Some(link) = self.link(id) else { return Err(gone()) };
        let (addr, address) = (link.addr, link.address);
        let nic = self.nic.as_ref().ok_or_else(super::closed)?;
        let scratch_of = self.table.contexts.at(context);
        let is_read = matches!(s.work, Work::Read { .. });
        let mut buffer = None;
        if is_read && !self.regions.by_nic && !nic.cuts_off() {
            let buffer = buffer.insert(ReadBuffer::new(span.local, span.len));
            span.local = buffer.addr();
        }
        // SAFETY: the local region, or the scratch slot, stays registered and allocated while
        // `uses` counts this chunk, and the buffer until it lands; the context belongs to this
        // chunk until then.
        let posted = unsafe {
            match s.work {
                Work::Read { .. } => nic.read(addr, &span, scratch_of),
                _ => nic.write(addr, &span, imm, scratch_of),
            }
        }?;
        if posted {
            let len = s.work.chunk_bytes();
            let (used_for, bytes) = (ContextUse::Op(s.op), len as u32);
            let flight = InFlight { used_for, region, address, len: bytes, is_read };
            self.table.launch(context, flight);
            self.table.buffers.extend(buffer.map(|b| (context, b)));
            self.regions.add_use(region);
            if let Some(link) = self.link(id) {
                link.chunks += 1;
                link.bytes += len;
            }
        }
        Ok(posted)
    }

    /// The span of a write that only counts. EFA needs a valid descriptor and key even then. The
    /// shm provider never completes a write without bytes, so it writes one byte.
    fn empty_span(&mut self, id: LinkId) -> Option<Span> {
        let (local, desc) = (self.scratch.addr(0), self.scratch.desc());
        let len = u64::from(self.queries_first);
        let terms = &self.link(id)?.terms;
        Some(Span { local, desc, len, remote: terms.scratch, key: terms.scratch_key })
    }

    /// The local and remote position of page `i`.
    #[inline]
    fn span(&mut self, id: LinkId, data: &Data, i: u32) -> Option<Span> {
        if data.page_len == 0 {
            return self.empty_span(id);
        }
        let desc = self.regions.desc(data.local_region)?;
        let offset = data.remote_seq.nth(i);
        let link: &Link = self.link(id)?;
        let (key, _) = data.remote_keys.find(link.endpoint as u8, offset)?;
        Some(Span {
            local: data.local.0 + data.local_seq.nth(i) as usize,
            desc,
            len: data.page_len,
            remote: key.base.wrapping_add(offset - key.offset),
            key: key.key ^ data.remote.rkey,
        })
    }

    /// Posts chunks that the provider had no room for.
    pub(super) fn post_partials(&mut self) -> bool {
        let mut progressed = false;
        // Links that can't proceed; their chunks keep their order while other links proceed.
        let mut blocked: SmallVec<[LinkId; 8]> = SmallVec::new();
        for _ in 0..self.partial_posts.len() {
            let Some(mut s) = self.partial_posts.pop_front() else { break };
            if blocked.contains(&s.link) {
                self.partial_posts.push_back(s);
                continue;
            }
            let next = s.next;
            let all = self.post_chunks(&mut s);
            progressed |= all || s.next > next;
            if !all {
                blocked.push(s.link);
                self.partial_posts.push_back(s);
            }
        }
        progressed
    }

    /// `n` chunks of an operation are complete or failed.
    pub(super) fn chunks_done(&mut self, op: u32, n: u32, error: Option<DomainError>) {
        let Some(o) = self.table.ops.get_mut(op as usize) else { return };
        o.left -= n;
        if o.error.is_none() {
            o.error = error;
        }
        if o.left > 0 {
            return;
        }
        let link = o.link;
        match (&o.error, o.then.take()) {
            (None, Some(Count { imm, n })) => {
                // All bytes are readable: now the write may count (IC-2).
                let work = Work::Imms { raw: imm, n };
                let (n, _, _) = size(&work);
                o.left = n;
                self.launch(PartialPost {
                    op,
                    link,
                    work,
                    order: PostOrder::sequential(n),
                    next: 0,
                    n,
                });
            }
            (None, None) => self.finish_op(op, Ok(())),
            // A local error: there is nothing to ask the peer.
            (Some(stale @ DomainError::Stale(_)), _) => {
                let stale = stale.clone();
                self.finish_op(op, Err(stale));
            }
            (Some(_), _) => self.query_failure(op),
        }
    }

    /// Drops the chunks of a closed link that are not posted.
    pub(super) fn drop_partials(&mut self, id: LinkId) {
        self.partial_posts.retain(|s| s.link != id);
        self.parked.retain(|_, s| s.link != id);
    }
}

/// Chunks, bytes, and immediates of an operation.
fn size(work: &Work) -> (u32, u64, u32) {
    match work {
        Work::Write { data, imm } => {
            let imms = if imm.is_some() { data.pages } else { 0 };
            (data.pages, data.bytes(), imms)
        }
        Work::Read { data } => (data.pages, data.bytes(), 0),
        Work::Imms { raw, n } => {
            let imms = Imm::weighted(*raw, *n).count() as u32;
            (imms, 0, imms)
        }
    }
}

/// The range that an operation touches at the peer: region, offset, length.
fn access(work: &Work) -> Option<(RegionKey, u64, u64)> {
    let (Work::Write { data, .. } | Work::Read { data }) = work else { return None };
    let (mut from, mut to) = (u64::MAX, 0u64);
    for i in 0..data.pages {
        let at = data.remote_seq.nth(i);
        (from, to) = (from.min(at), to.max(at.saturating_add(data.page_len)));
    }
    Some((data.remote, from, to.saturating_sub(from)))
}
