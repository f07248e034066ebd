//! Cutting operations into work requests, and handing them to the links in turn.

use smallvec::SmallVec;

use super::{
    ledger::{Ledger, Slice},
    policy::{
        score::Load,
        size::{slicing, SMALLEST},
    },
    route::Route,
    spray,
    transfer::{Transfer, TransferKey},
    PeerKey, Rails,
};
use crate::{
    domain::{Caps, Count, Data, DomainError, Post, Receipts, WorkRequest},
    time::Time,
};

/// A contiguous write is spread over several rails only from here on: below, a second work request
/// and the confirming one cost more than the second wire brings.
const SPREAD: u64 = 256 << 10;

/// An operation bound to one peer, with how far it has been posted.
#[derive(Debug)]
pub(crate) struct BoundOp {
    pub peer: PeerKey,
    /// The one rail that may carry it, counted among those of the transport in use.
    pin: Option<u8>,
    wr: WorkRequest,
    page: u32,
    /// Bytes of page `page` that are posted; not 0 only where a single page must be cut.
    byte: u64,
    cut: Option<Cut>,
    confirm: Option<u32>,
    joint: Option<Joint>,
    /// How often its bytes have been sent before.
    tries: u8,
}

/// One count for several operations of a transfer, which follow each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Joint {
    pub count: Count,
    /// How many operations.
    pub of: u32,
    pub first: bool,
}

/// How an operation is cut: pieces of at most so many bytes, work requests of so many pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    bytes: u64,
    pages: u32,
}

impl BoundOp {
    pub fn new(peer: PeerKey, wr: WorkRequest) -> Self {
        let (pin, cut, confirm, joint) = (None, None, None, None);
        Self { peer, pin, wr, page: 0, byte: 0, cut, confirm, joint, tries: 0 }
    }

    /// What is missing of a lost slice of which `there` counts have come with their bytes; over any rail, for
    /// its own is the one that was lost.
    pub(super) fn again(slice: Slice, there: u32, transfer: &mut Transfer) -> Self {
        let Slice { peer, wr, confirm, tries, .. } = slice;
        let tries = tries.saturating_add(1);
        let (wr, confirm) = match wr {
            WorkRequest::Write { data, count: Some(c) } => {
                let count = Count { imm: c.imm, n: c.n - there };
                let confirm = transfer.open_confirm(peer, (None, tries), Some(count));
                // Counts of pages come in their order; a single page counts as a whole.
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

    /// One of several whose count follows the last of them.
    pub fn joined(self, joint: Joint) -> Self {
        Self { joint: Some(joint), ..self }
    }

    /// Takes its place among those that share a count.
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

    /// The same, up to where bytes would move; nothing for what moves none.
    pub fn prepare(self) -> Option<Self> {
        match self.wr {
            WorkRequest::Write { data, .. } => {
                Some(Self::new(self.peer, WorkRequest::Prepare { data }).pinned(self.pin))
            }
            _ => None,
        }
    }
}

pub(super) enum Posted {
    All,
    /// The links are full; the rest waits.
    Part,
    /// On this rail.
    Failed(usize, DomainError),
}

/// Posts slices of `op` until it is all posted or the links are full.
#[inline]
pub(super) fn post_slices(
    now: Time,
    key: TransferKey,
    transfer: &mut Transfer,
    op: &mut BoundOp,
    route: &mut Route,
    (rails, ledger): (&mut Rails, &mut Ledger),
) -> Posted {
    let mut lanes = match Lanes::new(now, route, rails, ledger, op) {
        Ok(lanes) => lanes,
        Err((rail, e)) => return Posted::Failed(rail, e),
    };
    let (data, count) = match &op.wr {
        WorkRequest::Write { data, count } => (data, *count),
        WorkRequest::Read { data } | WorkRequest::Prepare { data } => (data, None),
        WorkRequest::Count(_) | WorkRequest::Send(_) => {
            return whole(lanes.post(key, transfer, (&op.wr, 0), op.confirm));
        }
    };
    let cut = match op.cut {
        Some(cut) => {
            // The links may be others by now.
            let caps = lanes.caps();
            if data.page_len > caps.max_bytes && data.page_len <= cut.bytes {
                let rail = lanes.route.active()[0].pair.rail;
                let why = "its transport changed for one that takes less at a time";
                return Posted::Failed(rail, DomainError::LinkDown(why.into()));
            }
            let (bytes, pages) = (cut.bytes.min(caps.max_bytes), cut.pages.min(caps.max_pages));
            *op.cut.insert(Cut { bytes, pages })
        }
        None => {
            let cut = choose_cut(data, &lanes.caps(), lanes.len());
            if data.page_len <= cut.bytes && data.pages <= cut.pages {
                let posted = whole(lanes.post(key, transfer, (&op.wr, 0), op.confirm));
                return match (posted, op.confirm) {
                    (Posted::All, Some(confirm)) => {
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
        match lanes.post(key, transfer, (&wr, behind), op.confirm) {
            Ok(Post::Full) => return Posted::Part,
            Ok(_) => {}
            Err((rail, e)) => return Posted::Failed(rail, e),
        }
        op.byte += bytes;
        if op.byte == data.page_len || !cut_pages {
            op.byte = 0;
            op.page += pages;
        }
    }
    match op.confirm {
        Some(confirm) => all_posted(confirm, now, key, transfer, op, route, (rails, ledger)),
        None => Posted::All,
    }
}

/// The last slice of an operation is posted. If every slice was carried out at once, what is left of
/// it is its count.
fn all_posted(
    confirm: u32,
    now: Time,
    key: TransferKey,
    transfer: &mut Transfer,
    op: &mut BoundOp,
    route: &mut Route,
    (rails, ledger): (&mut Rails, &mut Ledger),
) -> Posted {
    match transfer.all_posted(confirm) {
        Some(count) => {
            op.wr = WorkRequest::Count(count);
            op.confirm = None;
            post_slices(now, key, transfer, op, route, (rails, ledger))
        }
        None => Posted::All,
    }
}

#[inline]
fn whole(posted: Result<Post, (usize, DomainError)>) -> Posted {
    match posted {
        Ok(Post::Full) => Posted::Part,
        Ok(_) => Posted::All,
        Err((rail, e)) => Posted::Failed(rail, e),
    }
}

/// The links of a peer that an operation may use.
struct Lanes<'a> {
    now: Time,
    route: &'a mut Route,
    rails: &'a mut Rails,
    ledger: &'a mut Ledger,
    peer: PeerKey,
    tries: u8,
    /// The only one, as a place among the active links.
    only: Option<usize>,
}

impl<'a> Lanes<'a> {
    #[inline]
    fn new(
        now: Time,
        route: &'a mut Route,
        rails: &'a mut Rails,
        ledger: &'a mut Ledger,
        op: &BoundOp,
    ) -> Result<Self, (usize, DomainError)> {
        let only = match (op.pin, &op.wr) {
            (Some(pin), _) => Some(pinned(route, rails, pin)?),
            // Messages keep to one link, so that most arrive in the order in which they were sent.
            (None, WorkRequest::Send(_)) => Some(0),
            (None, _) if route.active().len() == 1 => Some(0),
            (None, _) => None,
        };
        let (peer, tries) = (op.peer, op.tries);
        Ok(Self { now, route, rails, ledger, peer, tries, only })
    }

    #[inline]
    fn len(&self) -> usize {
        self.only.map_or(self.route.active().len(), |_| 1)
    }

    /// What every link takes.
    #[inline]
    fn caps(&self) -> Caps {
        let links = self.route.active();
        if let Some(only) = self.only {
            return self.rails[links[only].pair.rail].caps();
        }
        let all = links.iter().map(|l| self.rails[l.pair.rail].caps());
        all.reduce(|a, b| Caps {
            max_bytes: a.max_bytes.min(b.max_bytes),
            max_pages: a.max_pages.min(b.max_pages),
            max_message: a.max_message.min(b.max_message),
        })
        .unwrap_or(Caps { max_bytes: 0, max_pages: 0, max_message: 0 })
    }

    /// Posts on one of the links: small work on the one whose turn it is, or on the next one that has
    /// room; large work where the policy says. `behind`: bytes of the same operation after these.
    #[inline]
    fn post(
        &mut self,
        key: TransferKey,
        transfer: &mut Transfer,
        (wr, behind): (&WorkRequest, u64),
        confirm: Option<u32>,
    ) -> Result<Post, (usize, DomainError)> {
        let bytes = match wr {
            WorkRequest::Write { data, .. } | WorkRequest::Read { data } => data.bytes(),
            _ => 0,
        };
        let n = self.route.active().len();
        let mut tried = Tried { full: SmallVec::from_elem(false, n), waits: false, failed: None };
        if let Some(only) = self.only {
            if let Some(post) =
                self.post_on(only, key, transfer, (wr, bytes), confirm, &mut tried)?
            {
                return Ok(post);
            }
            return tried.end();
        }
        if bytes < SMALLEST {
            let first = self.route.turn();
            for i in 0..n {
                let at = (first + i) % n;
                if let Some(post) =
                    self.post_on(at, key, transfer, (wr, bytes), confirm, &mut tried)?
                {
                    return Ok(post);
                }
            }
            return tried.end();
        }
        loop {
            let (links, choice) = self.route.links_and_choice();
            let views = spray::views(self.now, links, &tried.full, bytes);
            let Some(at) = choice.pick(&views, Load { length: bytes, behind }) else {
                return tried.end();
            };
            if let Some(post) = self.post_on(at, key, transfer, (wr, bytes), confirm, &mut tried)? {
                return Ok(post);
            }
        }
    }

    /// Posts on one link, if it has room and isn't failing.
    #[inline]
    fn post_on(
        &mut self,
        at: usize,
        key: TransferKey,
        transfer: &mut Transfer,
        (wr, bytes): (&WorkRequest, u64),
        confirm: Option<u32>,
        tried: &mut Tried,
    ) -> Result<Option<Post>, (usize, DomainError)> {
        let (links, _) = self.route.links_and_choice();
        let several = links.len() > 1;
        let link = &mut links[at];
        let rail = link.pair.rail;
        let domain = &mut self.rails[rail];
        let heals = domain.receipts() != Receipts::None;
        let known = heals || several;
        let token = match known {
            false => Transfer::token(key, confirm),
            true => self.ledger.enter(Slice {
                owner: key,
                peer: self.peer,
                link: (rail, link.id),
                wr: wr.clone(),
                confirm,
                tries: self.tries,
                posted: self.now,
                bytes,
                queued: link.gauge.queued,
                number: None,
                order: 0,
            }),
        };
        let posted = domain.post(link.id, token, wr);
        if known && posted != Ok(Post::Queued) {
            self.ledger.take(token);
        }
        match posted {
            Ok(Post::Full) => (tried.full[at], tried.waits) = (true, true),
            Ok(post) => {
                if known && post == Post::Queued {
                    link.gauge.posted(self.now, bytes);
                }
                transfer.slice_posted(confirm, post == Post::Queued);
                return Ok(Some(post));
            }
            // Nothing was posted: another may carry it, or the link that replaces this one.
            Err(e) if e.is_loss() => {
                tried.full[at] = true;
                match heals {
                    true => tried.waits = true,
                    false => tried.failed = Some((rail, e)),
                }
            }
            Err(e) => return Err((rail, e)),
        }
        Ok(None)
    }
}

/// Links that didn't take a work request.
struct Tried {
    full: SmallVec<[bool; spray::MOST_LINKS]>,
    /// One of them may take it later.
    waits: bool,
    failed: Option<(usize, DomainError)>,
}

impl Tried {
    /// None took it: it waits, unless none ever will.
    fn end(self) -> Result<Post, (usize, DomainError)> {
        match self.failed.filter(|_| !self.waits) {
            Some(failed) => Err(failed),
            None => Ok(Post::Full),
        }
    }
}

/// The active link over the pinned rail.
fn pinned(route: &Route, rails: &Rails, pin: u8) -> Result<usize, (usize, DomainError)> {
    let links = route.active();
    let kind = rails[links[0].pair.rail].kind();
    let rail = (0..rails.len()).filter(|r| rails[*r].kind() == kind).nth(pin.into());
    let at = rail.and_then(|rail| links.iter().position(|l| l.pair.rail == rail));
    at.ok_or_else(|| match rail {
        // The others may not know yet that the peer is gone.
        Some(rail) => {
            let why = format!("rail {pin}, to which it is pinned, does not reach this peer now");
            (rail, DomainError::LinkDown(why))
        }
        None => {
            let n = rails.iter().filter(|r| r.kind() == kind).count();
            let why = format!("it is pinned to rail {pin}, but {kind} has {n} here");
            (links[0].pair.rail, DomainError::Unavailable(why))
        }
    })
}

fn choose_cut(data: &Data, caps: &Caps, links: usize) -> Cut {
    let mut cut = Cut { bytes: caps.max_bytes, pages: caps.max_pages };
    if links > 1 {
        let slice = slicing(data.bytes(), links).size;
        let chunk = u32::try_from(slice / data.page_len.max(1)).unwrap_or(u32::MAX);
        cut.pages = cut.pages.min(data.pages.div_ceil(links as u32)).min(chunk).max(1);
        if (data.pages as usize) < links && data.page_len >= SPREAD {
            cut.bytes = cut.bytes.min(slice);
        }
    }
    cut
}

fn next_slice(data: &Data, page: u32, byte: u64, cut: Cut) -> Data {
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
            let cut = Cut { bytes, pages: chunk };
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
        let cut = |page_len, pages, links| choose_cut(&data(page_len, pages), &caps, links);
        assert_eq!(cut(SPREAD - 1, 1, 4).bytes, 1 << 30);
        assert_eq!(cut(1 << 20, 1, 4).bytes, 64 << 10);
        assert_eq!(cut(1 << 30, 1, 4).bytes, 8 << 20);
        assert_eq!(cut(1 << 20, 4, 4), Cut { bytes: 1 << 30, pages: 1 });
        // Pages are never cut for this, and go in chunks of a slice at least.
        assert_eq!(cut(1024, 100, 4).pages, 25);
        assert_eq!(cut(1024, 1000, 4).pages, 32);
        assert_eq!(cut(16 << 10, 1000, 4).pages, 8);
        assert_eq!(cut(1024, 1000, 1), Cut { bytes: 1 << 30, pages: 32 });
    }
}
