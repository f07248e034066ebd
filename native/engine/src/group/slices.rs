//! Cutting operations into work requests that a domain can take.

use super::{
    transfer::{Transfer, TransferKey},
    PeerKey,
};
use crate::domain::{Caps, Count, Data, Domain, DomainError, LinkId, Post, WorkRequest};

/// An operation bound to one peer, with how far it has been posted.
#[derive(Debug)]
pub(crate) struct BoundOp {
    pub peer: PeerKey,
    wr: WorkRequest,
    page: u32,
    /// Bytes of page `page` that are posted; not 0 only where a single page must be cut.
    byte: u64,
    confirm: Option<u32>,
}

impl BoundOp {
    pub fn new(peer: PeerKey, wr: WorkRequest) -> Self {
        Self { peer, wr, page: 0, byte: 0, confirm: None }
    }

    /// The same, up to where bytes would move; nothing for what moves none.
    pub fn prepare(self) -> Option<Self> {
        match self.wr {
            WorkRequest::Write { data, .. } => {
                Some(Self::new(self.peer, WorkRequest::Prepare { data }))
            }
            _ => None,
        }
    }
}

pub(super) enum Posted {
    All,
    /// The link is full; the rest waits.
    Part,
    Failed(DomainError),
}

/// Posts slices of `op` until it is all posted or the link is full.
pub(super) fn post_slices(
    key: TransferKey,
    transfer: &mut Transfer,
    op: &mut BoundOp,
    domain: &mut dyn Domain,
    link: LinkId,
) -> Posted {
    let caps = domain.caps();
    let (data, count) = match &op.wr {
        WorkRequest::Write { data, count } => (data, *count),
        WorkRequest::Read { data } | WorkRequest::Prepare { data } => (data, None),
        WorkRequest::Count(_) | WorkRequest::Send(_) => {
            return match post(key, transfer, &op.wr, None, domain, link) {
                Ok(Post::Full) => Posted::Part,
                Ok(_) => Posted::All,
                Err(e) => Posted::Failed(e),
            };
        }
    };
    if fits(data, &caps) {
        return match post(key, transfer, &op.wr, None, domain, link) {
            Ok(Post::Full) => Posted::Part,
            Ok(_) => Posted::All,
            Err(e) => Posted::Failed(e),
        };
    }
    let cut_pages = data.page_len > caps.max_bytes;
    if cut_pages && op.confirm.is_none() {
        op.confirm = Some(transfer.open_confirm(op.peer, count));
    }
    while op.page < data.pages {
        let slice = next_slice(data, op.page, op.byte, &caps);
        let (pages, bytes) = (slice.pages, slice.page_len);
        // A page that is cut carries no immediate: the confirming write counts it (IC-1, IC-2).
        let count = count.filter(|_| !cut_pages).map(|c| Count { imm: c.imm, n: pages });
        let wr = match &op.wr {
            WorkRequest::Read { .. } => WorkRequest::Read { data: slice },
            WorkRequest::Prepare { .. } => WorkRequest::Prepare { data: slice },
            _ => WorkRequest::Write { data: slice, count },
        };
        match post(key, transfer, &wr, op.confirm, domain, link) {
            Ok(Post::Full) => return Posted::Part,
            Ok(_) => {}
            Err(e) => return Posted::Failed(e),
        }
        op.byte += bytes;
        if op.byte == data.page_len || !cut_pages {
            op.byte = 0;
            op.page += pages;
        }
    }
    if let Some(count) = op.confirm.and_then(|c| transfer.all_posted(c)) {
        // Every slice was carried out at once: what is left of this operation is its count.
        op.wr = WorkRequest::Count(count);
        return post_slices(key, transfer, op, domain, link);
    }
    Posted::All
}

fn fits(data: &Data, caps: &Caps) -> bool {
    data.page_len <= caps.max_bytes && data.pages <= caps.max_pages
}

fn next_slice(data: &Data, page: u32, byte: u64, caps: &Caps) -> Data {
    let (pages, page_len) = match data.page_len > caps.max_bytes {
        true => (1, (data.page_len - byte).min(caps.max_bytes)),
        false => ((data.pages - page).min(caps.max_pages), data.page_len),
    };
    Data {
        local: data.local,
        local_seq: data.local_seq.advanced(page, byte),
        remote: data.remote,
        remote_seq: data.remote_seq.advanced(page, byte),
        page_len,
        pages,
    }
}

fn post(
    key: TransferKey,
    transfer: &mut Transfer,
    wr: &WorkRequest,
    confirm: Option<u32>,
    domain: &mut dyn Domain,
    link: LinkId,
) -> Result<Post, DomainError> {
    let post = domain.post(link, Transfer::token(key, confirm), wr)?;
    transfer.slice_posted(confirm, post == Post::Queued);
    Ok(post)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::RegionKey, domain::LocalAddr, domain::Seq};

    fn data(page_len: u64, pages: u32) -> Data {
        Data {
            local: LocalAddr(0),
            local_seq: Seq::Strided { offset: 0, stride: 1 << 30 },
            remote: RegionKey { index: 0, rkey: 0 },
            remote_seq: Seq::Strided { offset: 7, stride: 1 << 30 },
            page_len,
            pages,
        }
    }

    #[test]
    fn slices_cover_every_byte_once() {
        for (page_len, pages, max_bytes, max_pages) in
            [(10, 1, 4, 9), (4, 7, 4, 3), (9, 3, 4, 100), (8, 2, 8, 1)]
        {
            let caps = Caps { max_bytes, max_pages, max_message: 0 };
            let whole = data(page_len, pages);
            let (mut page, mut byte) = (0, 0);
            let mut seen = Vec::new();
            while page < pages {
                let s = next_slice(&whole, page, byte, &caps);
                assert!(s.page_len <= max_bytes && s.pages <= max_pages && s.bytes() > 0);
                for i in 0..s.pages {
                    assert_eq!(s.remote_seq.nth(i), s.local_seq.nth(i) + 7);
                    seen.extend(s.local_seq.nth(i)..s.local_seq.nth(i) + s.page_len);
                }
                byte += s.page_len;
                if byte == page_len || page_len <= max_bytes {
                    byte = 0;
                    page += s.pages;
                }
            }
            let all: Vec<u64> =
                (0..u64::from(pages)).flat_map(|p| (p << 30)..(p << 30) + page_len).collect();
            assert_eq!(seen, all);
        }
    }
}
