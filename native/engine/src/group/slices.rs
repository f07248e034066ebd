//! Cuts operations into work requests, and posts them on links.

use super::{
    eligible_links::{Deferral, EligibleLinks},
    ledger::{Ledger, Slice},
    policy::{admit::Window, size::slice_size},
    route::{DirectLink, Route},
    transfer::{Transfer, TransferKey},
    PeerKey, Rails,
};
use crate::{
    domain::{Caps, Count, Data, DomainError, Post, WorkRequest},
    time::Time,
};

/// Shortest contiguous write that is spread over several rails, bytes. Below, the second work
/// request and the confirming one cost more than the second rail saves.
const MIN_SPRAY_BYTES: u64 = 256 << 10;

/// An operation to one peer, and how much of it is posted.
#[derive(Debug)]
pub(crate) struct BoundOp {
    pub peer: PeerKey,
    /// The only rail that may carry it: its index among those of the transport in use.
    pub(super) pin: Option<u8>,
    pub(super) wr: WorkRequest,
    page: u32,
    /// Posted bytes of page `page`; above 0 only if single pages are cut.
    byte: u64,
    cut: Option<SliceLimits>,
    confirm: Option<u32>,
    joint: Option<SharedCount>,
    /// Number of earlier attempts for these bytes.
    pub(super) tries: u8,
    /// Whether it completes posted work and is posted before queued bytes.
    pub(super) ahead: bool,
}

/// One count for several successive operations of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedCount {
    pub count: Count,
    /// Number of operations.
    pub of: u32,
    pub first: bool,
}

/// Limits of one slice: bytes of a page, and pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SliceLimits {
    bytes: u64,
    pages: u32,
}

impl BoundOp {
    pub fn new(peer: PeerKey, wr: WorkRequest) -> Self {
        let (pin, cut, confirm, joint) = (None, None, None, None);
        Self { peer, pin, wr, page: 0, byte: 0, cut, confirm, joint, tries: 0, ahead: false }
    }

    /// The missing part of a lost slice, of which `there` counts and their bytes have arrived.
    /// Bytes go without a count, and no count is sent twice (IC-3). Any rail may carry it.
    pub(super) fn missing_part(slice: Slice, there: u32, transfer: &mut Transfer) -> Self {
        let Slice { peer, wr, confirm, tries, .. } = slice;
        let tries = tries.saturating_add(1);
        let (wr, confirm) = match wr {
            WorkRequest::Write { data, count: Some(c) } => {
                let count = Count { imm: c.imm, n: c.n - there };
                let confirm = transfer.open_confirm(peer, (None, tries), Some(count));
                // Counts of pages arrive in order; a single page counts as a whole.
                let skip = if c.n == data.pages { there } else { 0 };
                let data = Data {
                    local_seq: data.local_seq.advanced(skip, 0),
                    remote_seq: data.remote_seq.advanced(skip, 0),
                    pages: data.pages - skip,
                    ..data
                };
                (WorkRequest::Write { data, count: None }, Some(confirm))
            }
            WorkRequest::Count(c) => {
                (WorkRequest::Count(Count { imm: c.imm, n: c.n - there }), confirm)
            }
            wr => {
                confirm.into_iter().for_each(|c| transfer.reopen(c));
                (wr, confirm)
            }
        };
        Self { confirm, ..Self::new(peer, wr).tried(tries) }
    }

    #[inline]
    pub fn bytes(&self) -> u64 {
        self.wr.bytes()
    }

    /// Whether nothing of it is posted, and any link may carry it.
    #[inline]
    fn is_whole(&self) -> bool {
        self.pin.is_none() && self.cut.is_none() && self.confirm.is_none()
    }

    /// The count at the peer, and the bytes. If several operations share a count, the first has it.
    #[inline]
    pub fn load(&self) -> (Option<Count>, u64) {
        let shared = self.joint.filter(|j| j.first).map(|j| j.count);
        match &self.wr {
            WorkRequest::Send(message) => (None, message.len() as u64),
            wr => (wr.count().or(shared), wr.bytes()),
        }
    }

    /// Takes the work request of an operation that is posted whole and not used again.
    fn take_request(&mut self) -> WorkRequest {
        std::mem::replace(&mut self.wr, WorkRequest::Count(Count { imm: 0, n: 0 }))
    }

    pub fn ahead(self) -> Self {
        Self { ahead: true, ..self }
    }

    /// Makes it one of several operations with one count.
    pub fn joined(self, joint: SharedCount) -> Self {
        Self { joint: Some(joint), ..self }
    }

    /// Joins the confirm that it shares.
    pub(super) fn join(&mut self, transfer: &mut Transfer) {
        if let Some(joint) = self.joint.take() {
            self.confirm = Some(transfer.join(self.peer, self.pin, joint));
        }
    }

    pub fn tried(self, tries: u8) -> Self {
        Self { tries, ..self }
    }

    pub fn pinned(self, pin: Option<u8>) -> Self {
        Self { pin, ..self }
    }

    /// The operation that prepares this one; `None` if it moves no bytes.
    pub fn prepare(self) -> Option<Self> {
        match self.wr {
            WorkRequest::Write { data, .. } => {
                Some(Self::new(self.peer, WorkRequest::Prepare { data }).pinned(self.pin))
            }
            _ => None,
        }
    }
}

pub(super) enum PostOutcome {
    All,
    /// The links are full, and the rest waits.
    Part(Deferral),
    /// Posting failed on this rail.
    Failed(usize, DomainError),
}

/// Posts slices of `op` until it is all posted or the links are full.
#[inline]
pub(super) fn post_slices(
    (now, since): (Time, Time),
    key: TransferKey,
    transfer: &mut Transfer,
    op: &mut BoundOp,
    route: &mut Route,
    (rails, ledger): (&mut Rails, &mut Ledger),
) -> PostOutcome {
    if let Some(link) = route.direct.filter(|link| op.is_whole() && link.takes(&op.wr)) {
        if let Some(posted) = post_direct(now, key, transfer, op, route, (rails, ledger), link) {
            return posted;
        }
    }
    let mut eligible_links =
        match EligibleLinks::new((now, since), route, (rails, ledger), op, transfer) {
            Ok(eligible_links) => eligible_links,
            Err((rail, e)) => return PostOutcome::Failed(rail, e),
        };
    let (data, count) = match &op.wr {
        WorkRequest::Write { data, count } => (data, *count),
        WorkRequest::Read { data } | WorkRequest::Prepare { data } => (data, None),
        WorkRequest::Count(_) | WorkRequest::Send(_) => {
            let posted = eligible_links.post(key, transfer, (&op.wr, 0), op.confirm);
            return whole(posted, eligible_links.deferral);
        }
    };
    let cut = match op.cut {
        Some(cut) => {
            // The links may have changed since the cut.
            let caps = eligible_links.caps();
            if data.page_len > caps.max_bytes && data.page_len <= cut.bytes {
                let rail = eligible_links.route.active()[0].pair.rail;
                let why = "its transport changed for one that takes less at a time";
                return PostOutcome::Failed(rail, DomainError::LinkDown(why.into()));
            }
            let (bytes, pages) = (cut.bytes.min(caps.max_bytes), cut.pages.min(caps.max_pages));
            *op.cut.insert(SliceLimits { bytes, pages })
        }
        None => {
            let cut = choose_cut(
                data,
                &eligible_links.caps(),
                eligible_links.len(),
                eligible_links.max_slice(),
            );
            if data.page_len <= cut.bytes && data.pages <= cut.pages {
                let posted = eligible_links.post(key, transfer, (&op.wr, 0), op.confirm);
                let posted = whole(posted, eligible_links.deferral);
                return match (posted, op.confirm) {
                    (PostOutcome::All, Some(confirm)) => {
                        all_posted(confirm, now, key, transfer, op, route, (rails, ledger))
                    }
                    (posted, _) => posted,
                };
            }
            *op.cut.insert(cut)
        }
    };
    let cut_pages = data.page_len > cut.bytes;
    if cut_pages && op.confirm.is_none() {
        op.confirm = Some(transfer.open_confirm(op.peer, (op.pin, op.tries), count));
    }
    while op.page < data.pages {
        let slice = next_slice(data, op.page, op.byte, cut);
        let (pages, bytes, slice_bytes) = (slice.pages, slice.page_len, slice.bytes());
        // A page that is cut carries no immediate: the confirming write counts it (IC-1, IC-2).
        let count = count.filter(|_| !cut_pages).map(|c| Count { imm: c.imm, n: pages });
        let wr = match &op.wr {
            WorkRequest::Read { .. } => WorkRequest::Read { data: slice },
            WorkRequest::Prepare { .. } => WorkRequest::Prepare { data: slice },
            _ => WorkRequest::Write { data: slice, count },
        };
        let behind = data.bytes() - u64::from(op.page) * data.page_len - op.byte;
        let behind = behind.saturating_sub(slice_bytes);
        match eligible_links.post(key, transfer, (&wr, behind), op.confirm) {
            Ok(Post::Full) => return PostOutcome::Part(eligible_links.deferral),
            Ok(_) => {}
            Err((rail, e)) => return PostOutcome::Failed(rail, e),
        }
        op.byte += bytes;
        if op.byte == data.page_len || !cut_pages {
            op.byte = 0;
            op.page += pages;
        }
    }
    match op.confirm {
        Some(confirm) => all_posted(confirm, now, key, transfer, op, route, (rails, ledger)),
        None => PostOutcome::All,
    }
}

/// Posts an operation whole on the only link to its peer; `None` if a window has no room. The
/// ledger takes the work request of one that is posted.
#[inline]
fn post_direct(
    now: Time,
    key: TransferKey,
    transfer: &mut Transfer,
    op: &mut BoundOp,
    route: &mut Route,
    (rails, ledger): (&mut Rails, &mut Ledger),
    link: DirectLink,
) -> Option<PostOutcome> {
    let (bytes, priority) = (op.bytes(), transfer.priority);
    let token = match link.keeps_work {
        false => Transfer::token(key, None),
        true => {
            let receiver = Window { bytes: route.credit, under_way: route.under_way };
            let mut windows = [ledger.rail_window(link.rail, bytes), receiver].into_iter();
            if bytes > 0 && !windows.all(|window| window.has_room(priority, bytes)) {
                return None;
            }
            ledger.next_token()
        }
    };
    let posted = rails[link.rail].post(link.id, token, &op.wr);
    let pending = posted == Ok(Post::Queued);
    if link.keeps_work && pending {
        let entered = ledger.enter(Slice {
            owner: key,
            peer: op.peer,
            link: (link.rail, link.id),
            wr: op.take_request(),
            confirm: None,
            tries: op.tries,
            posted: now,
            priority,
            bytes,
            queued: route.active()[0].gauge.queued,
            number: None,
            order: 0,
        });
        debug_assert_eq!(entered, token);
    }
    let waits = || PostOutcome::Part(Deferral { bytes: 0, until: Time::NEVER });
    Some(match posted {
        Ok(Post::Full) => waits(),
        Ok(_) => {
            if link.keeps_work && pending {
                route.links_and_selector().0[0].gauge.posted(now, bytes);
                *route.under_way.of_mut(priority) += bytes;
            }
            route.tally.posted(link.rail, priority, (1, bytes), op.tries > 0);
            transfer.slice_posted((now, link.rail), (bytes, op.tries), None, pending);
            PostOutcome::All
        }
        // Nothing was posted: the link that replaces this one carries it.
        Err(e) if e.is_loss() && link.heals => waits(),
        Err(e) => PostOutcome::Failed(link.rail, e),
    })
}

/// Handles that the last slice of an operation is posted. If all slices were carried out at once,
/// only the count is left to post.
fn all_posted(
    confirm: u32,
    now: Time,
    key: TransferKey,
    transfer: &mut Transfer,
    op: &mut BoundOp,
    route: &mut Route,
    (rails, ledger): (&mut Rails, &mut Ledger),
) -> PostOutcome {
    match transfer.all_posted(confirm) {
        Some(count) => {
            op.wr = WorkRequest::Count(count);
            op.confirm = None;
            post_slices((now, now), key, transfer, op, route, (rails, ledger))
        }
        None => PostOutcome::All,
    }
}

#[inline]
fn whole(posted: Result<Post, (usize, DomainError)>, deferral: Deferral) -> PostOutcome {
    match posted {
        Ok(Post::Full) => PostOutcome::Part(deferral),
        Ok(_) => PostOutcome::All,
        Err((rail, e)) => PostOutcome::Failed(rail, e),
    }
}

/// Chooses the cut of an operation. `most` bounds a slice, so that it occupies neither a rail nor a
/// receiver for long. A slightly larger operation is not cut: its confirming count would cost more.
fn choose_cut(data: &Data, caps: &Caps, links: usize, most: Option<u64>) -> SliceLimits {
    let mut cut = SliceLimits { bytes: caps.max_bytes, pages: caps.max_pages };
    if let Some(most) = most.filter(|most| data.bytes() > 2 * most) {
        let pages = u32::try_from(most / data.page_len.max(1)).unwrap_or(u32::MAX);
        cut = SliceLimits { bytes: cut.bytes.min(most), pages: cut.pages.min(pages).max(1) };
    }
    if links > 1 {
        let slice = slice_size(data.bytes(), links).min(most.unwrap_or(u64::MAX));
        let chunk = u32::try_from(slice / data.page_len.max(1)).unwrap_or(u32::MAX);
        cut.pages = cut.pages.min(data.pages.div_ceil(links as u32)).min(chunk).max(1);
        if (data.pages as usize) < links && data.page_len >= MIN_SPRAY_BYTES {
            cut.bytes = cut.bytes.min(slice);
        }
    }
    cut
}

fn next_slice(data: &Data, page: u32, byte: u64, cut: SliceLimits) -> Data {
    let (pages, page_len) = match data.page_len > cut.bytes {
        true => (1, (data.page_len - byte).min(cut.bytes)),
        false => ((data.pages - page).min(cut.pages), data.page_len),
    };
    Data {
        local: data.local,
        local_region: data.local_region,
        local_seq: data.local_seq.advanced(page, byte),
        remote: data.remote,
        remote_keys: data.remote_keys.clone(),
        remote_seq: data.remote_seq.advanced(page, byte),
        page_len,
        pages,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::RegionKey, domain::LocalAddr, domain::Seq};

    fn data(page_len: u64, pages: u32) -> Data {
        Data {
            local: LocalAddr(0),
            local_region: 0,
            local_seq: Seq::Strided { offset: 0, stride: 1 << 30 },
            remote: RegionKey { index: 0, rkey: 0 },
            remote_keys: Default::default(),
            remote_seq: Seq::Strided { offset: 7, stride: 1 << 30 },
            page_len,
            pages,
        }
    }

    #[test]
    fn slices_cover_every_byte_once() {
        for (page_len, pages, bytes, chunk) in
            [(10, 1, 4, 9), (4, 7, 4, 3), (9, 3, 4, 100), (8, 2, 8, 1)]
        {
            let cut = SliceLimits { bytes, pages: chunk };
            let whole = data(page_len, pages);
            let (mut page, mut byte) = (0, 0);
            let mut seen = Vec::new();
            while page < pages {
                let s = next_slice(&whole, page, byte, cut);
                assert!(s.page_len <= bytes && s.pages <= chunk && s.bytes() > 0);
                for i in 0..s.pages {
                    assert_eq!(s.remote_seq.nth(i), s.local_seq.nth(i) + 7);
                    seen.extend(s.local_seq.nth(i)..s.local_seq.nth(i) + s.page_len);
                }
                byte += s.page_len;
                if byte == page_len || page_len <= bytes {
                    byte = 0;
                    page += s.pages;
                }
            }
            let all: Vec<u64> =
                (0..u64::from(pages)).flat_map(|p| (p << 30)..(p << 30) + page_len).collect();
            assert_eq!(seen, all);
        }
    }

    #[test]
    fn writes_spread_over_all_rails_and_small_ones_stay_whole() {
        let caps = Caps { max_bytes: 1 << 30, max_pages: 32, max_message: 0 };
        let cut = |page_len, pages, links| choose_cut(&data(page_len, pages), &caps, links, None);
        assert_eq!(cut(MIN_SPRAY_BYTES - 1, 1, 4).bytes, 1 << 30);
        assert_eq!(cut(1 << 20, 1, 4).bytes, 64 << 10);
        assert_eq!(cut(1 << 30, 1, 4).bytes, 8 << 20);
        assert_eq!(cut(1 << 20, 4, 4), SliceLimits { bytes: 1 << 30, pages: 1 });
        // Pages are never cut for this, and go in chunks of a slice at least.
        assert_eq!(cut(1024, 100, 4).pages, 25);
        assert_eq!(cut(1024, 1000, 4).pages, 32);
        assert_eq!(cut(16 << 10, 1000, 4).pages, 8);
        assert_eq!(cut(1024, 1000, 1), SliceLimits { bytes: 1 << 30, pages: 32 });
    }
}
