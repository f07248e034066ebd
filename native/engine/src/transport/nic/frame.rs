//! Small frames that travel by SEND into a receive slot of the peer.
//!
//! ```text
//! mark u16, version u8, kind u8, link u32, frame_credits u32, imm_credits u32, body
//! ```
//! All numbers little-endian. Peers are untrusted: decoding borrows, never allocates, never panics.

use crate::{
    api::{EngineId, RegionKey},
    domain::{DomainError, LinkName},
};

/// Bytes before the body of every frame.
pub(crate) const HEADER: usize = 16;
/// Bytes of a fragment's frame before its payload.
pub(crate) const FRAGMENT_HEADER: usize = HEADER + 12;
/// Bytes of a handshake fragment's frame before its payload.
pub(crate) const HANDSHAKE_FRAGMENT_HEADER: usize = HEADER + 16 + 1 + 8 + 1;

const MARK: [u8; 2] = *b"FN";
const VERSION: u8 = 1;

/// Names one attempt to connect. The initiator draws it at random.
pub(crate) type Exchange = [u8; 16];

/// Fields of every frame before its body. The counts only grow, and wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// The receiver's number of the link, on wires that do not identify it.
    pub link: u32,
    /// Frames of the receiver whose slots are free again.
    pub frame_credits: u32,
    /// Immediates of the receiver whose receive requests are free again.
    pub imm_credits: u32,
}

/// A part of a handshake message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HandshakeFragment<'a> {
    pub exchange: Exchange,
    /// Direction of the message. Number of the message within the handshake.
    pub to_initiator: bool,
    pub step: u8,
    pub total: u32,
    pub offset: u32,
    pub bytes: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body<'a> {
    /// Only the header: a heartbeat, or credits.
    Heartbeat,
    Fragment {
        message: u32,
        total: u32,
        offset: u32,
        bytes: &'a [u8],
    },
    /// Results of messages: see [`results`].
    Results(&'a [u8]),
    /// Asks why the NIC refused an access.
    AccessQuery {
        key: RegionKey,
        offset: u64,
        len: u64,
    },
    AccessAnswer {
        stale: bool,
        reason: &'a [u8],
    },
    Close {
        /// Whether the whole engine has closed, rather than this link alone.
        gone: bool,
        reason: &'a [u8],
    },
    /// A frame between groups.
    GroupFrame(&'a [u8]),
    HandshakeFragment(HandshakeFragment<'a>),
    /// Requests [`Self::Fenced`] once no operation that the receiver began before is under way.
    Fence(u32),
    /// Answers [`Self::Fence`] with its number.
    Fenced(u32),
}

impl Body<'_> {
    fn kind(&self) -> u8 {
        match self {
            Self::Heartbeat => 1,
            Self::Fragment { .. } => 2,
            Self::Results(_) => 3,
            Self::AccessQuery { .. } => 4,
            Self::AccessAnswer { .. } => 5,
            Self::Close { .. } => 6,
            Self::HandshakeFragment(_) => 7,
            Self::Fence(_) => 8,
            Self::Fenced(_) => 9,
            Self::GroupFrame(_) => 10,
        }
    }
}

/// Writes a frame to the beginning of `out` and returns its length. The caller chooses a payload
/// that fits; a longer one is cut.
pub(crate) fn encode(header: &Header, body: &Body<'_>, out: &mut [u8]) -> usize {
    let mut w = Writer { out, at: 0 };
    w.put(&MARK);
    w.put(&[VERSION, body.kind()]);
    [header.link, header.frame_credits, header.imm_credits]
        .iter()
        .for_each(|n| w.put(&n.to_le_bytes()));
    match body {
        Body::Heartbeat => {}
        Body::Fragment { message, total, offset, bytes } => {
            [message, total, offset].iter().for_each(|n| w.put(&n.to_le_bytes()));
            w.put(bytes);
        }
        Body::Results(list) => w.put(list),
        Body::AccessQuery { key, offset, len } => {
            w.put(&key.index.to_le_bytes());
            [&key.rkey, offset, len].iter().for_each(|n| w.put(&n.to_le_bytes()));
        }
        Body::AccessAnswer { stale, reason } => {
            w.put(&[u8::from(*stale)]);
            w.put(reason);
        }
        Body::Close { gone, reason } => {
            w.put(&[u8::from(*gone)]);
            w.put(reason);
        }
        Body::GroupFrame(bytes) => w.put(bytes),
        Body::Fence(n) | Body::Fenced(n) => w.put(&n.to_le_bytes()),
        Body::HandshakeFragment(p) => {
            w.put(&p.exchange);
            w.put(&[u8::from(p.to_initiator), p.step]);
            [p.total, p.offset].iter().for_each(|n| w.put(&n.to_le_bytes()));
            w.put(p.bytes);
        }
    }
    w.at
}

pub(crate) fn decode(bytes: &[u8]) -> Result<(Header, Body<'_>), DomainError> {
    let mut r = Reader(bytes);
    if r.take(2)? != MARK {
        return Err(broken("it does not begin with the frame mark"));
    }
    let [version, kind] = r.array()?;
    if version != VERSION {
        return Err(DomainError::Handshake(format!(
            "frames of version {version} from the peer, this build reads {VERSION}; upgrade the \
             older side"
        )));
    }
    let header = Header { link: r.u32()?, frame_credits: r.u32()?, imm_credits: r.u32()? };
    let body = match kind {
        1 => Body::Heartbeat,
        2 => {
            Body::Fragment { message: r.u32()?, total: r.u32()?, offset: r.u32()?, bytes: r.rest() }
        }
        3 => Body::Results(r.rest()),
        4 => {
            let key = RegionKey { index: r.u32()?, rkey: r.u64()? };
            Body::AccessQuery { key, offset: r.u64()?, len: r.u64()? }
        }
        5 => Body::AccessAnswer { stale: r.array::<1>()? != [0], reason: r.rest() },
        6 => Body::Close { gone: r.array::<1>()? != [0], reason: r.rest() },
        7 => {
            let exchange = r.array()?;
            let [to_initiator, step] = r.array()?;
            Body::HandshakeFragment(HandshakeFragment {
                exchange,
                to_initiator: to_initiator != 0,
                step,
                total: r.u32()?,
                offset: r.u32()?,
                bytes: r.rest(),
            })
        }
        8 => Body::Fence(r.u32()?),
        9 => Body::Fenced(r.u32()?),
        10 => Body::GroupFrame(r.rest()),
        kind => return Err(broken(&format!("unknown kind {kind}"))),
    };
    if !r.0.is_empty() {
        return Err(broken("it has trailing bytes"));
    }
    Ok((header, body))
}

/// One entry of [`Body::Results`]: a message, and the limit that it exceeds if it was refused.
pub(crate) fn result_entry(message: u32, limit: Option<u32>) -> [u8; 8] {
    let mut entry = [0; 8];
    entry[..4].copy_from_slice(&message.to_le_bytes());
    entry[4..].copy_from_slice(&limit.map_or(0, |l| l.saturating_add(1)).to_le_bytes());
    entry
}

/// The entries of [`Body::Results`].
pub(crate) fn results(list: &[u8]) -> impl Iterator<Item = (u32, Option<u32>)> + '_ {
    list.chunks_exact(8).map(|e| {
        let word = |i: usize| u32::from_le_bytes([e[i], e[i + 1], e[i + 2], e[i + 3]]);
        (word(0), word(4).checked_sub(1))
    })
}

/// A peer's reason, shortened and printable.
pub(crate) fn printable(reason: &[u8]) -> String {
    String::from_utf8_lossy(reason).chars().filter(|c| !c.is_control()).take(300).collect()
}

/// The link's name on both sides, from the exchange that created it.
pub(crate) fn link_name(exchange: &Exchange) -> LinkName {
    LinkName::from_le_bytes(std::array::from_fn(|i| exchange[i]))
}

/// A random exchange number.
pub(crate) fn new_exchange() -> Result<Exchange, DomainError> {
    EngineId::random().map(|id| id.0).map_err(|e| DomainError::Unavailable(e.to_string()))
}

pub(super) fn broken(why: &str) -> DomainError {
    DomainError::LinkDown(format!("the peer sent a malformed frame: {why}"))
}

struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let room = self.out.len() - self.at;
        debug_assert!(bytes.len() <= room, "a frame outgrew its slot");
        let n = bytes.len().min(room);
        self.out[self.at..self.at + n].copy_from_slice(&bytes[..n]);
        self.at += n;
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], DomainError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or_else(|| broken("it is cut off"))?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DomainError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, DomainError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, DomainError> {
        self.array().map(u64::from_le_bytes)
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bodies(bytes: &[u8]) -> [Body<'_>; 10] {
        let key = RegionKey { index: 7, rkey: u64::MAX };
        let fragment = HandshakeFragment {
            exchange: [9; 16],
            to_initiator: true,
            step: 3,
            total: 100,
            offset: 50,
            bytes,
        };
        [
            Body::Heartbeat,
            Body::Fragment { message: 1, total: 200, offset: 100, bytes },
            Body::Results(bytes),
            Body::AccessQuery { key, offset: 1 << 40, len: 3 },
            Body::AccessAnswer { stale: true, reason: bytes },
            Body::Close { gone: true, reason: bytes },
            Body::HandshakeFragment(fragment),
            Body::Fence(u32::MAX),
            Body::Fenced(6),
            Body::GroupFrame(bytes),
        ]
    }

    #[test]
    fn encoded_frames_decode_to_the_same() {
        let header = Header { link: 5, frame_credits: u32::MAX, imm_credits: 1 };
        let mut out = [0; 256];
        for body in bodies(b"0123456789") {
            let n = encode(&header, &body, &mut out);
            assert_eq!(decode(&out[..n]), Ok((header, body)));
        }
        for body in [Body::Heartbeat, bodies(b"x")[3]] {
            let n = encode(&header, &body, &mut out);
            assert!(decode(&out[..n - 1]).is_err() && decode(&out[..=n]).is_err());
        }
        let around = |i: usize| encode(&header, &bodies(b"")[i], &mut [0; 64]);
        assert_eq!(
            (around(0), around(1), around(6)),
            (HEADER, FRAGMENT_HEADER, HANDSHAKE_FRAGMENT_HEADER)
        );
    }

    #[test]
    fn message_results_survive_encoding() {
        let list = [(1, None), (2, Some(0)), (u32::MAX, Some(99))];
        let bytes: Vec<u8> = list.iter().flat_map(|(m, l)| result_entry(*m, *l)).collect();
        assert_eq!(results(&bytes).collect::<Vec<_>>(), list);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(kind in 0u8..12, body in proptest::collection::vec(any::<u8>(), 0..64)) {
            let bytes = [&MARK[..], &[VERSION, kind], &body].concat();
            if let Ok((header, read)) = decode(&bytes) {
                let mut out = [0; 128];
                let n = encode(&header, &read, &mut out);
                prop_assert_eq!(decode(&out[..n]), Ok((header, read)));
            }
        }
    }
}
