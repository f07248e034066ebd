//! Frames between two staging ends, sent over the control channel.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{SLOTS, SLOT_BYTES};
use crate::{
    api::{Envelope, RegionKey},
    domain::{Count, Data, DomainError, Seq},
    memory::{device::CopyRange, RegionMemory},
};

/// Fits into a control message of every transport.
const ENVELOPE: Envelope = Envelope::new(*b"FRst", "a staging frame", 3584);
/// Page indices take up to 5 bytes each.
pub(super) const MAX_INDICES: u32 = 512;
const MAX_REASON: usize = 1600;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// Requests a window.
    OpenWindow,
    /// The window: a region through which the sender's other regions are accessed.
    Window { key: RegionKey },
    /// Requests a copy between a slot of the window and pages of a region.
    CopyRequest { slot: u8, chunk: u64, pages: Pages, inward: bool, count: Option<(u32, u32)> },
    /// The result of a copy.
    CopyDone { chunk: u64, result: Result<(), Refusal> },
    /// A frame between groups.
    Group(Vec<u8>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refusal {
    Stale(String),
    Refused(String),
    Storage(String),
}

/// Pages of a region, as a peer names them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pages {
    pub key: RegionKey,
    pub offset: u64,
    pub stride: u64,
    pub page_len: u64,
    pub n: u32,
    /// Empty for `0, 1, ...`
    pub indices: Vec<u32>,
}

/// A copy that can't start is refused, unless a file is the cause.
pub(super) fn copy_error(e: DomainError) -> DomainError {
    match e {
        DomainError::Storage(_) => e,
        e => DomainError::Refused(e.to_string()),
    }
}

impl Frame {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        ENVELOPE.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))
    }
}

impl Refusal {
    pub fn of(e: &DomainError) -> Self {
        let text: String = e.to_string().chars().take(MAX_REASON / 4).collect();
        match e {
            DomainError::Stale(_) => Self::Stale(text),
            DomainError::Storage(_) => Self::Storage(text),
            _ => Self::Refused(text),
        }
    }

    pub fn into_error(self) -> DomainError {
        let shown = |text: String| text.chars().filter(|c| !c.is_control()).collect::<String>();
        match self {
            Self::Stale(text) => DomainError::Stale(shown(text)),
            Self::Refused(text) => DomainError::Refused(shown(text)),
            Self::Storage(text) => DomainError::Storage(format!("the peer's {}", shown(text))),
        }
    }
}

impl Pages {
    /// The remote pages of a request.
    pub fn remote(data: &Data) -> Self {
        let (offset, stride, indices) = match &data.remote_seq {
            Seq::Strided { offset, stride } => (*offset, *stride, Vec::new()),
            Seq::Indexed { list, from, offset, stride } => {
                let from = *from as usize;
                (*offset, *stride, list.indices[from..from + data.pages as usize].to_vec())
            }
        };
        let (key, page_len, n) = (data.remote, data.page_len, data.pages);
        Self { key, offset, stride, page_len, n, indices }
    }

    fn index(&self, i: u32) -> u64 {
        match self.indices.get(i as usize) {
            Some(index) => u64::from(*index),
            None => u64::from(i),
        }
    }

    /// The copies between `slot` and these pages, if both are in bounds (MR-3).
    pub fn pieces(
        &self,
        region: &RegionMemory,
        slot: usize,
        inward: bool,
    ) -> Result<SmallVec<[CopyRange; 4]>, DomainError> {
        let listed = self.indices.len();
        if self.n > MAX_INDICES || (self.n > 0 && self.page_len == 0) {
            return Err(DomainError::Refused("an impossible number of pages".into()));
        }
        if listed > MAX_INDICES as usize || (listed != 0 && listed != self.n as usize) {
            return Err(DomainError::Refused(
                "the number of page indices differs from the number of pages".into(),
            ));
        }
        let total = u64::from(self.n).checked_mul(self.page_len);
        if total.is_none_or(|total| total > SLOT_BYTES) {
            return Err(DomainError::Refused("more bytes than a slot holds".into()));
        }
        let last = match self.indices.iter().max() {
            Some(last) => u64::from(*last),
            None => u64::from(self.n.saturating_sub(1)),
        };
        let end = last
            .checked_mul(self.stride)
            .and_then(|n| n.checked_add(self.offset))
            .and_then(|n| n.checked_add(self.page_len));
        if end.is_none_or(|end| end > region.len) {
            return Err(DomainError::Refused(format!(
                "bytes outside region {} of {} bytes",
                region.key.index, region.len
            )));
        }
        let ranges = (0..self.n).map(|i| {
            let at = region.base + (self.offset + self.index(i) * self.stride) as usize;
            (at, slot + i as usize * self.page_len as usize)
        });
        Ok(merge(ranges, self.page_len as usize, inward))
    }
}

/// The copies between a slot, where pages are adjacent, and the local pages of a request.
pub(super) fn local_pieces(data: &Data, slot: usize, inward: bool) -> SmallVec<[CopyRange; 4]> {
    let page = data.page_len as usize;
    let ranges = (0..data.pages).map(|i| {
        let at = data.local.0 + data.local_seq.nth(i) as usize;
        (at, slot + i as usize * page)
    });
    merge(ranges, page, inward)
}

/// Merges adjacent ranges into one copy: each costs the driver some microseconds.
fn merge(
    ranges: impl Iterator<Item = (usize, usize)>,
    page: usize,
    inward: bool,
) -> SmallVec<[CopyRange; 4]> {
    let mut pieces: SmallVec<[CopyRange; 4]> = SmallVec::new();
    for (at, slot) in ranges.filter(|_| page > 0) {
        let (to, from) = if inward { (at, slot) } else { (slot, at) };
        match pieces.last_mut() {
            Some(p) if p.to + p.len == to && p.from + p.len == from => p.len += page,
            _ => pieces.push(CopyRange { to, from, len: page }),
        }
    }
    pieces
}

/// Division of a request into chunks that fit a slot each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunking {
    /// Chunks per page, if a page is longer than a slot.
    per_page: u64,
    /// Pages per chunk otherwise.
    per_chunk: u32,
    pub chunks: u64,
}

impl Chunking {
    pub fn of(data: &Data) -> Self {
        if data.page_len > SLOT_BYTES {
            let per_page = data.page_len.div_ceil(SLOT_BYTES);
            return Self { per_page, per_chunk: 1, chunks: per_page * u64::from(data.pages) };
        }
        let fit = (SLOT_BYTES / data.page_len.max(1)).min(u64::from(MAX_INDICES)) as u32;
        Self { per_page: 1, per_chunk: fit, chunks: u64::from(data.pages.div_ceil(fit)) }
    }

    /// Chunk `i` of the request.
    pub fn nth(&self, data: &Data, i: u64) -> Data {
        let (page, part) = ((i / self.per_page) as u32, i % self.per_page);
        let first = page * self.per_chunk;
        let from = part * SLOT_BYTES;
        let whole = self.per_page == 1;
        Data {
            local_seq: data.local_seq.advanced(first, from),
            remote_seq: data.remote_seq.advanced(first, from),
            page_len: if whole { data.page_len } else { SLOT_BYTES.min(data.page_len - from) },
            pages: self.per_chunk.min(data.pages - first),
            ..data.clone()
        }
    }
}

/// Offset of a slot in its window.
pub(super) fn slot_offset(slot: u8) -> u64 {
    u64::from(slot) * SLOT_BYTES
}

pub(super) const WINDOW_BYTES: u64 = SLOT_BYTES * SLOTS as u64;

/// A count from its encoding.
pub(super) fn to_count((imm, n): (u32, u32)) -> Count {
    Count { imm, n }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        api::{PageIndices, RailKeys},
        domain::LocalAddr,
        memory::Backing,
    };

    fn seq(indices: Option<Vec<u32>>, offset: u64, stride: u64) -> Seq {
        match indices.map(PageIndices::list) {
            Some(Ok(PageIndices::List(list))) => Seq::Indexed { list, from: 0, offset, stride },
            _ => Seq::Strided { offset, stride },
        }
    }

    fn work() -> impl Strategy<Value = Data> {
        let lengths = prop_oneof![1u64..5000, SLOT_BYTES - 2..SLOT_BYTES * 3 + 2];
        (lengths, 1u32..1500, any::<bool>(), any::<u64>()).prop_map(
            |(page_len, pages, listed, x)| {
                let pages = if page_len > 5000 { pages % 4 + 1 } else { pages };
                let list = listed.then(|| (0..pages).rev().collect());
                Data {
                    local: LocalAddr(1 << 40),
                    local_region: 0,
                    local_seq: seq(None, x % 77, page_len + x % 3),
                    remote: RegionKey::default(),
                    remote_keys: RailKeys::default(),
                    remote_seq: seq(list, x % 99, page_len + x % 5),
                    page_len,
                    pages,
                }
            },
        )
    }

    /// Every page of the request: local offset, remote offset, length.
    fn spans(data: &Data) -> Vec<(u64, u64, u64)> {
        let page = |i| (data.local_seq.nth(i), data.remote_seq.nth(i), data.page_len);
        (0..data.pages).map(page).collect()
    }

    proptest! {
        #[test]
        fn chunks_fit_a_slot_and_cover_the_work_once(data in work()) {
            let chunking = Chunking::of(&data);
            let mut parts = Vec::new();
            for i in 0..chunking.chunks {
                let chunk = chunking.nth(&data, i);
                prop_assert!(chunk.bytes() <= SLOT_BYTES && chunk.bytes() > 0);
                prop_assert!(chunk.pages <= MAX_INDICES);
                parts.extend(spans(&chunk));
            }
            // Parts of one page, joined again, are the pages.
            let mut whole: Vec<(u64, u64, u64)> = Vec::new();
            for (l, r, n) in parts {
                match whole.last_mut() {
                    Some(w) if w.2 < data.page_len && w.0 + w.2 == l && w.1 + w.2 == r => w.2 += n,
                    _ => whole.push((l, r, n)),
                }
            }
            prop_assert_eq!(whole, spans(&data));
        }

        #[test]
        fn mr_3_copies_stay_inside_region_and_slot(
            pages in (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>(),
                      proptest::collection::vec(any::<u32>(), 0..4)),
            small in any::<bool>(),
        ) {
            let (offset, stride, page_len, n, indices) = pages;
            let fit = |v: u64, most: u64| if small { v % most } else { v };
            let pages = Pages {
                key: RegionKey::default(),
                offset: fit(offset, 500),
                stride: fit(stride, 300),
                page_len: fit(page_len, 200),
                n: if small && !indices.is_empty() { indices.len() as u32 } else { n % 600 },
                indices: indices.iter().map(|i| if small { i % 3 } else { *i }).collect(),
            };
            let region =
                RegionMemory::new(RegionKey::default(), 1 << 30, 700, Backing::Foreign, None);
            let slot = 1usize << 40;
            if let Ok(pieces) = pages.pieces(&region, slot, true) {
                for p in pieces {
                    prop_assert!(p.to >= 1 << 30 && p.to + p.len <= (1 << 30) + 700);
                    prop_assert!(p.from >= slot && p.from + p.len <= slot + SLOT_BYTES as usize);
                }
            }
        }

        #[test]
        fn merging_ranges_changes_no_byte(
            at in proptest::collection::vec(0usize..12, 1..12), page in 1usize..9,
        ) {
            let ranges: Vec<_> = at.iter().enumerate().map(|(i, a)| (a * page, i * page)).collect();
            let bytes = |pieces: &[CopyRange]| -> HashSet<(usize, usize)> {
                pieces.iter().flat_map(|p| (0..p.len).map(|b| (p.to + b, p.from + b))).collect()
            };
            for inward in [true, false] {
                let plain = ranges.iter().map(|(at, slot)| match inward {
                    true => CopyRange { to: *at, from: *slot, len: page },
                    false => CopyRange { to: *slot, from: *at, len: page },
                });
                let plain: Vec<_> = plain.collect();
                let joined = merge(ranges.iter().copied(), page, inward);
                prop_assert_eq!(bytes(&joined), bytes(&plain));
            }
        }

        #[test]
        fn decoded_frames_encode_to_the_same(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(frame) = Frame::decode(&ENVELOPE.seal(&bytes)) {
                let again = Frame::decode(&frame.encode()).unwrap();
                prop_assert_eq!(again, frame);
            }
        }
    }

    #[test]
    fn the_longest_frame_fits() {
        let indices = vec![u32::MAX; MAX_INDICES as usize];
        let pages = Pages {
            key: RegionKey { index: u32::MAX, rkey: u64::MAX },
            offset: u64::MAX,
            stride: u64::MAX,
            page_len: u64::MAX,
            n: MAX_INDICES,
            indices,
        };
        let count = Some((u32::MAX, u32::MAX));
        let frame = Frame::CopyRequest { slot: 255, chunk: u64::MAX, pages, inward: true, count };
        assert!(frame.encode().len() <= ENVELOPE.limit);
        let refusal = Refusal::of(&DomainError::Stale("\u{1F980}".repeat(1000)));
        let frame = Frame::CopyDone { chunk: u64::MAX, result: Err(refusal) };
        assert!(frame.encode().len() <= ENVELOPE.limit);
    }
}
