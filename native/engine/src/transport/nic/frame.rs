//! Small frames that travel by SEND into a receive slot of the peer's.
//!
//! ```text
//! mark u16, version u8, kind u8, link u32, heard u32, counted u32, body
//! ```
//! All numbers little-endian. Peers are untrusted: decoding borrows, never allocates, never panics.

use crate::{
    api::{EngineId, RegionKey},
    domain::{DomainError, LinkName},
};

/// Bytes before the body of every frame.
pub(crate) const HEADER: usize = 16;
/// Bytes around the payload of a fragment.
pub(crate) const FRAGMENT: usize = HEADER + 12;
/// Bytes around the payload of a handshake's piece.
pub(crate) const PIECE: usize = HEADER + 16 + 1 + 8 + 1;

const MARK: [u8; 2] = *b"FN";
const VERSION: u8 = 1;

/// Names one attempt to connect: drawn at random by the side that begins.
pub(crate) type Exchange = [u8; 16];

/// What every frame tells besides its body. The numbers only grow, and wrap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    /// What the receiver calls the link, where the wire doesn't say it already.
    pub link: u32,
    /// Frames of the receiver's whose slots are free again.
    pub heard: u32,
    /// Immediates of the receiver's whose places are free again.
    pub counted: u32,
}

/// A part of a handshake's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece<'a> {
    pub exchange: Exchange,
    /// From whom to whom the message goes, and which one it is.
    pub to_initiator: bool,
    pub step: u8,
    pub total: u32,
    pub offset: u32,
    pub bytes: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body<'a> {
    /// Nothing but the header: a sign of life, or credits.
    Alive,
    Fragment {
        message: u32,
        total: u32,
        offset: u32,
        bytes: &'a [u8],
    },
    /// What became of messages: see [`taken`].
    Taken(&'a [u8]),
    /// The NIC refused an access: why?
    Ask {
        key: RegionKey,
        offset: u64,
        len: u64,
    },
    Verdict {
        stale: bool,
        reason: &'a [u8],
    },
    Bye {
        /// The whole engine has closed, not this link alone.
        gone: bool,
        reason: &'a [u8],
    },
    /// From group to group.
    Note(&'a [u8]),
    Piece(Piece<'a>),
    /// Tell when nothing that you began before this is under way any more.
    Fence(u32),
    /// The answer: nothing is, since that fence.
    Fenced(u32),
}

impl Body<'_> {
    fn kind(&self) -> u8 {
        match self {
            Self::Alive => 1,
            Self::Fragment { .. } => 2,
            Self::Taken(_) => 3,
            Self::Ask { .. } => 4,
            Self::Verdict { .. } => 5,
            Self::Bye { .. } => 6,
            Self::Piece(_) => 7,
            Self::Fence(_) => 8,
            Self::Fenced(_) => 9,
            Self::Note(_) => 10,
        }
    }
}

/// Writes a frame to the beginning of `out` and returns its length. Whoever calls has chosen a
/// payload that fits; one that doesn't is cut.
pub(crate) fn encode(header: &Header, body: &Body<'_>, out: &mut [u8]) -> usize {
    let mut w = Writer { out, at: 0 };
    w.put(&MARK);
    w.put(&[VERSION, body.kind()]);
    [header.link, header.heard, header.counted].iter().for_each(|n| w.put(&n.to_le_bytes()));
    match body {
        Body::Alive => {}
        Body::Fragment { message, total, offset, bytes } => {
            [message, total, offset].iter().for_each(|n| w.put(&n.to_le_bytes()));
            w.put(bytes);
        }
        Body::Taken(list) => w.put(list),
        Body::Ask { key, offset, len } => {
            w.put(&key.index.to_le_bytes());
            [&key.rkey, offset, len].iter().for_each(|n| w.put(&n.to_le_bytes()));
        }
        Body::Verdict { stale, reason } => {
            w.put(&[u8::from(*stale)]);
            w.put(reason);
        }
        Body::Bye { gone, reason } => {
            w.put(&[u8::from(*gone)]);
            w.put(reason);
        }
        Body::Note(note) => w.put(note),
        Body::Fence(n) | Body::Fenced(n) => w.put(&n.to_le_bytes()),
        Body::Piece(p) => {
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
        return Err(broken("it does not begin with the mark of one"));
    }
    let [version, kind] = r.array()?;
    if version != VERSION {
        return Err(DomainError::Handshake(format!(
            "frames of version {version} from the peer, this build reads {VERSION}; upgrade the \
             older side"
        )));
    }
    let header = Header { link: r.u32()?, heard: r.u32()?, counted: r.u32()? };
    let body = match kind {
        1 => Body::Alive,
        2 => {
            Body::Fragment { message: r.u32()?, total: r.u32()?, offset: r.u32()?, bytes: r.rest() }
        }
        3 => Body::Taken(r.rest()),
        4 => {
            let key = RegionKey { index: r.u32()?, rkey: r.u64()? };
            Body::Ask { key, offset: r.u64()?, len: r.u64()? }
        }
        5 => Body::Verdict { stale: r.array::<1>()? != [0], reason: r.rest() },
        6 => Body::Bye { gone: r.array::<1>()? != [0], reason: r.rest() },
        7 => {
            let exchange = r.array()?;
            let [to_initiator, step] = r.array()?;
            Body::Piece(Piece {
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
        10 => Body::Note(r.rest()),
        kind => return Err(broken(&format!("kind {kind} is not known"))),
    };
    if !r.0.is_empty() {
        return Err(broken("there are bytes left over"));
    }
    Ok((header, body))
}

/// One entry of [`Body::Taken`]: a message, and the limit that it exceeds if it was refused.
pub(crate) fn taken_entry(message: u32, limit: Option<u32>) -> [u8; 8] {
    let mut entry = [0; 8];
    entry[..4].copy_from_slice(&message.to_le_bytes());
    entry[4..].copy_from_slice(&limit.map_or(0, |l| l.saturating_add(1)).to_le_bytes());
    entry
}

/// The entries of [`Body::Taken`].
pub(crate) fn taken(list: &[u8]) -> impl Iterator<Item = (u32, Option<u32>)> + '_ {
    list.chunks_exact(8).map(|e| {
        let word = |i: usize| u32::from_le_bytes([e[i], e[i + 1], e[i + 2], e[i + 3]]);
        (word(0), word(4).checked_sub(1))
    })
}

/// A reason from a peer, short and printable.
pub(crate) fn words(reason: &[u8]) -> String {
    String::from_utf8_lossy(reason).chars().filter(|c| !c.is_control()).take(300).collect()
}

/// What both ends call the link that an exchange led to.
pub(crate) fn link_name(exchange: &Exchange) -> LinkName {
    LinkName::from_le_bytes(std::array::from_fn(|i| exchange[i]))
}

/// An exchange that nobody else has.
pub(crate) fn new_exchange() -> Result<Exchange, DomainError> {
    EngineId::random().map(|id| id.0).map_err(|e| DomainError::Unavailable(e.to_string()))
}

pub(super) fn broken(why: &str) -> DomainError {
    DomainError::LinkDown(format!("the peer sent a frame that can't be read: {why}"))
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
        let piece =
            Piece { exchange: [9; 16], to_initiator: true, step: 3, total: 100, offset: 50, bytes };
        [
            Body::Alive,
            Body::Fragment { message: 1, total: 200, offset: 100, bytes },
            Body::Taken(bytes),
            Body::Ask { key, offset: 1 << 40, len: 3 },
            Body::Verdict { stale: true, reason: bytes },
            Body::Bye { gone: true, reason: bytes },
            Body::Piece(piece),
            Body::Fence(u32::MAX),
            Body::Fenced(6),
            Body::Note(bytes),
        ]
    }

    #[test]
    fn what_is_written_is_read() {
        let header = Header { link: 5, heard: u32::MAX, counted: 1 };
        let mut out = [0; 256];
        for body in bodies(b"0123456789") {
            let n = encode(&header, &body, &mut out);
            assert_eq!(decode(&out[..n]), Ok((header, body)));
        }
        for body in [Body::Alive, bodies(b"x")[3]] {
            let n = encode(&header, &body, &mut out);
            assert!(decode(&out[..n - 1]).is_err() && decode(&out[..=n]).is_err());
        }
        let around = |i: usize| encode(&header, &bodies(b"")[i], &mut [0; 64]);
        assert_eq!((around(0), around(1), around(6)), (HEADER, FRAGMENT, PIECE));
    }

    #[test]
    fn what_became_of_messages_survives() {
        let list = [(1, None), (2, Some(0)), (u32::MAX, Some(99))];
        let bytes: Vec<u8> = list.iter().flat_map(|(m, l)| taken_entry(*m, *l)).collect();
        assert_eq!(taken(&bytes).collect::<Vec<_>>(), list);
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
