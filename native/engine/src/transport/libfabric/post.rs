//! Work requests become pieces: one write or read for each page, each with its own immediate.

use smallvec::SmallVec;

use super::{
    link::Link,
    ops::{InFlight, Op, Use, NO_REGION},
    raw::Span,
    shuffle::Order,
    LibfabricDomain,
};
use crate::{
    api::{Imm, RegionKey},
    domain::{Count, Data, DomainError, LinkId, Post, Token, WorkRequest},
    transport::nic::files::refuse_files,
};

/// Bytes under way on one link: what signs of life may have to wait behind. Those that a NIC moves by
/// itself can't be shown to be on their way.
const WINDOW: u64 = 64 << 20;
const NIC_WINDOW: u64 = 8 << 20;
/// Counted writes under way on one link where each takes a receive slot of the peer's.
const IMM_WINDOW: u32 = 16;

/// What the pieces of an operation are.
#[derive(Clone, Debug)]
pub(super) enum Work {
    Write {
        data: Data,
        imm: Option<u32>,
    },
    Read {
        data: Data,
    },
    /// Writes of no bytes that only count.
    Imms {
        raw: u32,
        n: u32,
    },
}

impl Work {
    /// Bytes of one piece.
    fn piece(&self) -> u64 {
        match self {
            Work::Write { data, .. } | Work::Read { data } => data.page_len,
            Work::Imms { .. } => 0,
        }
    }
}

/// An operation of which some pieces are not posted yet.
pub(super) struct Stalled {
    op: u32,
    link: LinkId,
    work: Work,
    order: Order,
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
                self.pump(id);
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
            || link.pieces + n as usize > share
            || link.asking.ops.len() >= share;
        let behind = self.stalled.iter().any(|s| s.link == id);
        if full || behind || (n as usize) > self.table.room() {
            return Ok(Post::Full);
        }
        self.check(id, &work)?;
        let access = access(&work);
        let op = Op { link: id, token, left: n, imms, error: None, then, access, fenced: false };
        let op = self.table.ops.insert(op) as u32;
        let Some(link) = self.link(id) else { return Err(down()) };
        link.imms += imms;
        let order = self.shuffle.as_mut().map_or(Order::straight(n), |s| s.order(n));
        let work = Stalled { op, link: id, work, order, next: 0, n };
        match self.must_ask(id, access) {
            true => self.ask_first(id, work),
            false => self.launch(work),
        }
        Ok(Post::Queued)
    }

    /// Whether keys for all of it are at hand (MR-2): found out before anything is sent.
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
                    let nic = link.place.label();
                    return Err(DomainError::Stale(format!(
                        "its descriptor has no key for {nic}: it lies on a GPU, was registered \
                         before that NIC was there, or on another engine"
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
            "local region {} is not registered here any more, or lies in a file or on a GPU, which {} \
             doesn't reach",
            data.local_region, self.offer.provider
        )))
    }

    /// Whether the peer has to be asked before an access.
    #[inline]
    fn must_ask(&mut self, id: LinkId, access: Option<(RegionKey, u64, u64)>) -> bool {
        let (true, Some((key, offset, len))) = (self.asks_first, access) else { return false };
        let end = offset.saturating_add(len);
        let known = self.link(id).and_then(|l| l.asking.vouched.get(&key).copied());
        known.is_none_or(|limit| end > limit)
    }

    fn ask_first(&mut self, id: LinkId, work: Stalled) {
        let op = work.op;
        self.parked.insert(op, work);
        if let Some(link) = self.link(id) {
            link.asking.ops.push_back(op);
        }
        self.ask_next(id);
    }

    /// The peer has no objection to an access that it was asked about first.
    pub(super) fn launch_parked(&mut self, op: u32) -> bool {
        let Some(work) = self.parked.remove(&op) else { return false };
        self.launch(work);
        true
    }

    /// Posts what can be posted; the rest goes on with later polls.
    fn launch(&mut self, mut work: Stalled) {
        if !self.post_pieces(&mut work) {
            self.stalled.push_back(work);
        }
    }

    /// Posts pieces until all are or the provider has no room; true if all are.
    fn post_pieces(&mut self, s: &mut Stalled) -> bool {
        while s.next < s.n {
            if !self.has_share(s) {
                return false;
            }
            let Some(context) = self.table.take_piece() else { return false };
            match self.post_piece(s, context) {
                Ok(true) => s.next += 1,
                Ok(false) => {
                    self.table.give_back(context);
                    return false;
                }
                Err(e) => {
                    self.table.give_back(context);
                    // What was posted before comes back by itself.
                    self.pieces_over(s.op, s.n - s.next, Some(e));
                    return true;
                }
            }
        }
        true
    }

    /// Whether its link may have one more piece under way.
    fn has_share(&mut self, s: &Stalled) -> bool {
        let (share, window, len) = (self.table.share(), self.window(), s.work.piece());
        let Some(link) = self.link(s.link) else { return true };
        link.pieces < share && (link.bytes == 0 || link.bytes + len <= window)
    }

    fn window(&self) -> u64 {
        match self.offer.is_rdma() {
            true => NIC_WINDOW,
            false => WINDOW,
        }
    }

    fn post_piece(&mut self, s: &Stalled, context: u32) -> Result<bool, DomainError> {
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
        let span = span.ok_or_else(gone)?;
        let Some(link) = self.link(id) else { return Err(gone()) };
        let (addr, address) = (link.addr, link.address);
        let nic = self.nic.as_ref().ok_or_else(super::closed)?;
        let scratch_of = self.table.contexts.at(context);
        // SAFETY: the local region, or the scratch slot, stays registered and its memory kept while
        // `uses` counts this piece; the context is this piece's until it lands.
        let posted = unsafe {
            match s.work {
                Work::Read { .. } => nic.read(addr, &span, scratch_of),
                _ => nic.write(addr, &span, imm, scratch_of),
            }
        }?;
        if posted {
            let len = s.work.piece();
            let flight = InFlight { what: Use::Op(s.op), region, address, len: len as u32 };
            self.table.launch(context, flight);
            self.regions.used(region);
            if let Some(link) = self.link(id) {
                link.pieces += 1;
                link.bytes += len;
            }
        }
        Ok(posted)
    }

    /// What is written where nothing but the immediate matters. EFA wants a descriptor and a key that
    /// are valid even then; the shm provider never ends a write of no bytes, and gets one.
    fn empty_span(&mut self, id: LinkId) -> Option<Span> {
        let (local, desc) = (self.scratch.addr(0), self.scratch.desc());
        let len = u64::from(self.asks_first);
        let terms = &self.link(id)?.terms;
        Some(Span { local, desc, len, remote: terms.scratch, key: terms.scratch_key })
    }

    /// Where page `i` lies here and at the peer.
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

    /// Goes on with what the provider had no room for.
    pub(super) fn push_stalled(&mut self) -> bool {
        let mut moved = false;
        // Links that can't go on: theirs wait in their order, while others go on.
        let mut stuck: SmallVec<[LinkId; 8]> = SmallVec::new();
        for _ in 0..self.stalled.len() {
            let Some(mut s) = self.stalled.pop_front() else { break };
            if stuck.contains(&s.link) {
                self.stalled.push_back(s);
                continue;
            }
            let next = s.next;
            let all = self.post_pieces(&mut s);
            moved |= all || s.next > next;
            if !all {
                stuck.push(s.link);
                self.stalled.push_back(s);
            }
        }
        moved
    }

    /// Pieces of an operation are over, well or not.
    pub(super) fn pieces_over(&mut self, op: u32, n: u32, error: Option<DomainError>) {
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
                // Every byte is there: now it may count (IC-2).
                let work = Work::Imms { raw: imm, n };
                let (n, _, _) = size(&work);
                o.left = n;
                self.launch(Stalled { op, link, work, order: Order::straight(n), next: 0, n });
            }
            (None, None) => self.op_over(op, Ok(())),
            // Our own side's doing: nothing to ask the peer about.
            (Some(stale @ DomainError::Stale(_)), _) => {
                let stale = stale.clone();
                self.op_over(op, Err(stale));
            }
            (Some(_), _) => self.explain_failure(op),
        }
    }

    /// Forgets what is not posted of a link that is gone.
    pub(super) fn drop_stalled(&mut self, id: LinkId) {
        self.stalled.retain(|s| s.link != id);
        self.parked.retain(|_, s| s.link != id);
    }
}

/// Pieces, bytes, and immediates.
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

/// What is touched at the peer, from the first byte to the last.
fn access(work: &Work) -> Option<(RegionKey, u64, u64)> {
    let (Work::Write { data, .. } | Work::Read { data }) = work else { return None };
    let (mut from, mut to) = (u64::MAX, 0u64);
    for i in 0..data.pages {
        let at = data.remote_seq.nth(i);
        (from, to) = (from.min(at), to.max(at.saturating_add(data.page_len)));
    }
    Some((data.remote, from, to.saturating_sub(from)))
}
