//! Frames of a stream after the handshake: a fixed little-endian header and, for some kinds, an
//! index list and bytes. Nothing is trusted: every length is checked before use.

use crate::{
    api::RegionKey,
    domain::{Count, Data, DomainError, Seq},
};

pub(super) const HEADER: usize = 64;

/// Pages of one frame; larger requests use several frames.
pub(super) const MAX_PAGES: u32 = 16 << 10;
pub(super) const MAX_MESSAGE: usize = 64 << 10;
const MAX_REASON: usize = 512;
pub(super) const MAX_CONTROL_MESSAGE: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Pages for a region, followed by their bytes. A single write is one page.
    Write = 1,
    /// Requests pages of a region.
    Read = 2,
    /// The bytes of a read.
    ReadData = 3,
    /// A count without bytes.
    Count = 4,
    /// A message, followed by its bytes.
    Message = 5,
    /// The total of this stream's writes and counts that were carried out.
    Ack = 6,
    /// Refuses an operation; the reason follows.
    Nak = 7,
    /// The result of a message.
    MessageResult = 8,
    /// A heartbeat.
    Ping = 9,
    /// Closes the link; the reason follows.
    Close = 10,
    /// A message of the layer above this transport, followed by its bytes.
    ControlMessage = 11,
}

impl Kind {
    /// By their numbers, from 1.
    const ALL: [Self; 11] = [
        Self::Write,
        Self::Read,
        Self::ReadData,
        Self::Count,
        Self::Message,
        Self::Ack,
        Self::Nak,
        Self::MessageResult,
        Self::Ping,
        Self::Close,
        Self::ControlMessage,
    ];

    #[inline]
    fn from_byte(b: u8) -> Option<Self> {
        Self::ALL.get(usize::from(b).checked_sub(1)?).copied()
    }
}

/// Kind of a refusal, as sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Refusal {
    Stale = 1,
    Refused = 2,
}

/// The fields of a header; unused ones are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    /// Write: a count is due when the last part has arrived. Nak: kind of refusal.
    pub code: u8,
    /// Write: number of parts of the operation, over all streams.
    pub parts: u16,
    /// The operation's number on its link; for `Ack`, the number carried out on this stream.
    pub op: u64,
    pub key: RegionKey,
    /// Offset of index 0 in the region.
    pub offset: u64,
    pub stride: u64,
    /// Bytes per page, or bytes of the body.
    pub len: u64,
    pub pages: u32,
    /// Index entries after the header: 0 (pages are `0, 1, ...`) or `pages`.
    pub indices: u32,
    pub count: Count,
}

impl Header {
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            code: 0,
            parts: 0,
            op: 0,
            key: RegionKey::default(),
            offset: 0,
            stride: 0,
            len: 0,
            pages: 0,
            indices: 0,
            count: Count { imm: 0, n: 0 },
        }
    }

    pub fn encode(&self) -> [u8; HEADER] {
        let mut b = [0; HEADER];
        b[0] = self.kind as u8;
        b[1] = self.code;
        b[2..4].copy_from_slice(&self.parts.to_le_bytes());
        b[4..8].copy_from_slice(&self.key.index.to_le_bytes());
        b[8..16].copy_from_slice(&self.op.to_le_bytes());
        b[16..24].copy_from_slice(&self.key.rkey.to_le_bytes());
        b[24..32].copy_from_slice(&self.offset.to_le_bytes());
        b[32..40].copy_from_slice(&self.stride.to_le_bytes());
        b[40..48].copy_from_slice(&self.len.to_le_bytes());
        b[48..52].copy_from_slice(&self.pages.to_le_bytes());
        b[52..56].copy_from_slice(&self.indices.to_le_bytes());
        b[56..60].copy_from_slice(&self.count.imm.to_le_bytes());
        b[60..64].copy_from_slice(&self.count.n.to_le_bytes());
        b
    }

    pub fn decode(b: &[u8; HEADER]) -> Result<Self, DomainError> {
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        let kind = Kind::from_byte(b[0])
            .ok_or_else(|| DomainError::Handshake(format!("a frame of unknown kind {}", b[0])))?;
        let header = Self {
            kind,
            code: b[1],
            parts: u16::from_le_bytes([b[2], b[3]]),
            key: RegionKey { index: u32_at(4), rkey: u64_at(16) },
            op: u64_at(8),
            offset: u64_at(24),
            stride: u64_at(32),
            len: u64_at(40),
            pages: u32_at(48),
            indices: u32_at(52),
            count: Count { imm: u32_at(56), n: u32_at(60) },
        };
        header.check()?;
        Ok(header)
    }

    /// Checks limits that every honest peer keeps.
    fn check(&self) -> Result<(), DomainError> {
        let bad = |what: &str| Err(DomainError::Handshake(format!("a frame with {what}")));
        let paged = matches!(self.kind, Kind::Write | Kind::Read);
        if paged && (self.pages == 0 || self.pages > MAX_PAGES) {
            return bad("an impossible number of pages");
        }
        if self.indices != 0 && (!paged || self.indices != self.pages) {
            return bad("a wrong number of indices");
        }
        if paged && u64::from(self.pages).checked_mul(self.len).is_none() {
            return bad("an impossible length");
        }
        match self.kind {
            Kind::Message if self.len > MAX_MESSAGE as u64 => bad("too long a message"),
            Kind::Nak | Kind::Close if self.len > MAX_REASON as u64 => bad("too long a reason"),
            Kind::ControlMessage if self.len > MAX_CONTROL_MESSAGE as u64 => {
                bad("too long a control message")
            }
            Kind::Write if self.parts == 0 => bad("no parts"),
            _ => Ok(()),
        }
    }

    /// Bytes after the header and the indices.
    pub fn body(&self) -> u64 {
        match self.kind {
            Kind::Write => u64::from(self.pages) * self.len,
            Kind::ReadData | Kind::Message | Kind::Nak | Kind::Close | Kind::ControlMessage => {
                self.len
            }
            Kind::Read | Kind::Count | Kind::Ack | Kind::MessageResult | Kind::Ping => 0,
        }
    }
}

/// The remote side of a request as a header and an index list.
pub(super) fn describe(kind: Kind, data: &Data) -> (Header, Vec<u32>) {
    let (offset, stride, indices) = match &data.remote_seq {
        Seq::Strided { offset, stride } => (*offset, *stride, Vec::new()),
        Seq::Indexed { list, from, offset, stride } => {
            let from = *from as usize;
            (*offset, *stride, list.indices[from..from + data.pages as usize].to_vec())
        }
    };
    let header = Header {
        key: data.remote,
        offset,
        stride,
        len: data.page_len,
        pages: data.pages,
        indices: indices.len() as u32,
        ..Header::new(kind)
    };
    (header, indices)
}

/// A reason, cut to the length that a frame may carry.
pub(super) fn reason(text: &str) -> Vec<u8> {
    let mut end = text.len().min(MAX_REASON);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.as_bytes()[..end].to_vec()
}

/// A peer's reason, made printable.
pub(super) fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn decoding_never_panics_and_reencodes_to_the_same(b in any::<[u8; HEADER]>(), kind in 0u8..13) {
            let mut b = b;
            b[0] = kind;
            if let Ok(h) = Header::decode(&b) {
                prop_assert_eq!(h.encode(), b);
                prop_assert!(h.pages <= MAX_PAGES || !matches!(h.kind, Kind::Write | Kind::Read));
                let _ = h.body();
            }
        }
    }

    #[test]
    fn reasons_are_cut_at_characters() {
        let long = "ü".repeat(400);
        assert_eq!(shown(&reason(&long)), "ü".repeat(256));
    }
}
