//! Fuzz target of a proven peer that requests copies between its window and any region.

use super::{
    frames::{slot_offset, Frame},
    SLOTS, SLOT_BYTES,
};
use crate::{
    fuzzing::sealed,
    memory::{Backing, RegionMemory},
};

const BASE: usize = 1 << 40;
const LEN: u64 = 3 << 20;
const WINDOW: usize = 1 << 30;

/// Checks that requested copies lie in the region and in their slot, or are refused (MR-3).
pub fn peer_requests(bytes: &[u8]) {
    let Ok(frame) = Frame::decode(&sealed(b"FRst", bytes)) else { return };
    assert_eq!(Frame::decode(&frame.encode()).as_ref(), Ok(&frame));
    match frame {
        Frame::CopyDone { result: Err(why), .. } => {
            assert!(!why.into_error().to_string().chars().any(char::is_control));
        }
        Frame::CopyRequest { slot, pages, inward, .. } if slot < SLOTS => {
            let region = RegionMemory::new(pages.key, BASE, LEN, Backing::Foreign, None);
            let at = WINDOW + slot_offset(slot) as usize;
            let Ok(pieces) = pages.pieces(&region, at, inward) else { return };
            let mut copied = 0;
            for p in pieces {
                let (there, here) = if inward { (p.to, p.from) } else { (p.from, p.to) };
                assert!(there >= BASE && there + p.len <= BASE + LEN as usize);
                assert!(here >= at && here + p.len <= at + SLOT_BYTES as usize);
                copied += p.len as u64;
            }
            assert_eq!(copied, u64::from(pages.n) * pages.page_len);
        }
        _ => {}
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use super::frames::{Pages, Refusal};
    use crate::api::RegionKey;
    let key = RegionKey { index: 3, rkey: 1 << 60 };
    let strided = Pages { key, offset: 4096, stride: 8192, page_len: 1024, n: 4, indices: vec![] };
    let listed = Pages { indices: vec![9, 0, 300], n: 3, ..strided.clone() };
    let asks = |pages, inward| Frame::CopyRequest {
        slot: 7,
        chunk: 5,
        pages,
        inward,
        count: Some((1, 2)),
    };
    let body = |f: Frame| f.encode()[10..].to_vec();
    vec![
        ("open", body(Frame::OpenWindow)),
        ("window", body(Frame::Window { key })),
        ("strided", body(asks(strided, true))),
        ("listed", body(asks(listed, false))),
        ("moved", body(Frame::CopyDone { chunk: 5, result: Ok(()) })),
        (
            "refused",
            body(Frame::CopyDone { chunk: 5, result: Err(Refusal::Stale("it is gone".into())) }),
        ),
        ("group-frame", body(Frame::Group(vec![1, 2, 3]))),
    ]
}
