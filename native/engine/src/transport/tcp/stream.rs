//! One socket: what waits to be sent, what has been received and not yet understood.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::io::Errno;

use super::{
    frame::{Header, Kind, HEADER},
    place::{Index, Walk},
    raw,
};
use crate::{
    domain::{Data, DomainError, Seq},
    time::Time,
};

/// Received bytes are taken from the kernel in steps of at most this many, small frames by the
/// hundreds.
const RX: usize = 128 << 10;
/// On a stream for bulk, only as many beyond what has a place already: a body that is taken along
/// with its header has to be copied once more.
pub(super) const AHEAD: usize = 4096;
/// Bodies up to this size are copied behind their header rather than sent from where they lie.
const SMALL_BODY: u64 = 2048;
/// Bytes taken from the kernel in one call.
const GULP: u64 = 1 << 20;
/// Bytes given to it in one call. The more they are the later the first of them leave, and the later acknowledgements
/// are heard; with fewer, calls cost more than they carry. Over loopback this much was the fastest by a sixth or more.
const GIVEN: u64 = 384 << 10;
const MAX_IOV: usize = 64;

/// Memory that replies to the peer may take before its further requests stay in the kernel, bytes. Honest peers
/// don't come near it: see [`super::link::READ_WINDOW`].
pub(super) const MOST_OWED: u64 = 8 << 20;
/// What a queued piece takes besides its bytes.
const PIECE: u64 = 256;

/// Memory that the reply to a read takes until the peer has taken it: small bodies are copied, lists of pages kept.
pub(super) fn reply_cost(bytes: u64, indices: u64) -> u64 {
    PIECE + HEADER as u64 + bytes.min(SMALL_BODY) + 4 * indices
}

/// Memory that a read takes at the peer, whole: one that is cut up takes no more but for headers.
pub(super) fn read_cost(data: &Data) -> u64 {
    let indices = match &data.remote_seq {
        Seq::Strided { .. } => 0,
        Seq::Indexed { .. } => u64::from(data.pages),
    };
    reply_cost(data.bytes(), indices)
}

struct Out {
    piece: Piece,
    /// Memory that it takes on the peer's behalf.
    owed: u64,
}

enum Piece {
    Bytes { bytes: Vec<u8>, sent: usize },
    Pages(Walk),
}

/// What to do with the bytes of a frame's body.
pub(super) enum Body {
    Place(Walk),
    Collect(Vec<u8>),
    /// Read and forget; the operation was refused.
    Discard(u64),
}

enum Rx {
    Header,
    Indices(Header),
    Body(Header, Body),
}

/// What `step` has come to.
pub(super) enum Step {
    /// More bytes are needed.
    Starved,
    /// A header and its indices: call `begin` with what is to become of its body.
    Head(Header, Index),
    /// A frame is complete.
    Tail(Header, Body),
}

pub(super) struct Stream {
    socket: OwnedFd,
    out: VecDeque<Out>,
    /// Bytes in `out`.
    pub unsent: u64,
    /// Memory in `out` that the peer's own requests take: it alone can make room.
    pub owed: u64,
    /// The peer leaves so much untaken that it isn't listened to.
    stalled: bool,
    spare: Vec<u8>,
    /// The socket took less than it was given; wait for room.
    pub blocked: bool,
    /// Operations whose frames went out here and are not acknowledged, in order.
    unacked: VecDeque<u64>,
    /// How many of them, at most, still wait to be sent.
    aboard: usize,
    /// How many of them have been acknowledged since the beginning.
    acked: u64,
    /// How many frames of the peer's have been carried out, and how many of those it knows of.
    pub done: u64,
    pub done_told: u64,
    rx: Box<[u8]>,
    /// At most so many bytes are taken that have no place yet.
    pub ahead: usize,
    from: usize,
    to: usize,
    state: Rx,
    /// Frames came along with the handshake's last message: the kernel will not tell of them again.
    pub leftover: bool,
    /// Try it at every poll until then: something came lately.
    pub hot_until: Time,
}

impl Stream {
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            out: VecDeque::new(),
            unsent: 0,
            owed: 0,
            stalled: false,
            spare: Vec::new(),
            blocked: false,
            unacked: VecDeque::new(),
            aboard: 0,
            acked: 0,
            done: 0,
            done_told: 0,
            rx: vec![0; RX].into_boxed_slice(),
            ahead: RX,
            from: 0,
            to: 0,
            state: Rx::Header,
            leftover: false,
            hot_until: Time(0),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Queues raw bytes.
    pub fn say(&mut self, bytes: &[u8]) {
        self.unsent += bytes.len() as u64;
        if let Some(Out { piece: Piece::Bytes { bytes: b, .. }, .. }) = self.out.back_mut() {
            if b.len() + bytes.len() <= RX {
                return b.extend_from_slice(bytes);
            }
        }
        let mut fresh = std::mem::take(&mut self.spare);
        fresh.clear();
        fresh.extend_from_slice(bytes);
        self.out.push_back(Out { piece: Piece::Bytes { bytes: fresh, sent: 0 }, owed: 0 });
    }

    /// Queues a frame whose body lies in memory that stays as it is until it is acknowledged.
    pub fn frame(&mut self, header: &Header, indices: &[u32], body: Option<Walk>) {
        self.say(&header.encode());
        if !indices.is_empty() {
            let bytes: Vec<u8> = indices.iter().flat_map(|i| i.to_le_bytes()).collect();
            self.say(&bytes);
        }
        let Some(walk) = body else { return };
        if walk.left() > SMALL_BODY {
            self.unsent += walk.left();
            self.out.push_back(Out { piece: Piece::Pages(walk), owed: 0 });
            return;
        }
        let mut small = [0u8; SMALL_BODY as usize];
        let n = raw::gather(&walk, &mut small);
        self.say(&small[..n]);
    }

    /// What was queued last, of so many bytes of memory, answers the peer.
    pub fn owe(&mut self, memory: u64) {
        if let Some(last) = self.out.back_mut() {
            last.owed += memory;
            self.owed += memory;
        }
    }

    /// Whether the peer takes its replies so slowly that nothing more is read from it: it would have this process keep
    /// ever more of them. Ends when half of them are taken.
    pub fn stalls(&mut self) -> bool {
        self.stalled = self.owes_too_much();
        self.stalled
    }

    pub fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// As [`Stream::stalls`], of now.
    pub fn owes_too_much(&self) -> bool {
        self.owed > if self.stalled { MOST_OWED / 2 } else { MOST_OWED }
    }

    /// Tells how far the peer's frames have been carried out, if it doesn't know.
    pub fn acknowledge(&mut self) {
        if self.done != self.done_told {
            self.done_told = self.done;
            let ack = Header { op: self.done, ..Header::new(Kind::Ack) };
            self.say(&ack.encode());
            self.owe(HEADER as u64);
        }
    }

    /// Expects an acknowledgement for the next frame, in its turn.
    pub fn await_ack(&mut self, op: u64) {
        self.unacked.push_back(op);
        self.aboard += 1;
    }

    /// The peer has carried out `done` frames, all told: whose they were.
    pub fn acked(&mut self, done: u64) -> Result<Vec<u64>, DomainError> {
        let most = self.unacked.len() as u64;
        let n = done.checked_sub(self.acked).filter(|n| *n <= most).ok_or_else(|| {
            DomainError::Handshake("an acknowledgement of what was never sent".into())
        })?;
        self.acked = done;
        self.aboard = self.aboard.min((most - n) as usize);
        Ok(self.unacked.drain(..n as usize).collect())
    }

    /// Whether nothing but what waits to be sent is on its way.
    pub fn is_first_flight(&self) -> bool {
        self.unacked.len() == self.aboard
    }

    /// Gives the kernel what it takes; true if it took anything.
    pub fn send(&mut self) -> Result<bool, DomainError> {
        let mut moved = false;
        while !self.out.is_empty() {
            let mut iov = raw::IoVecs::new();
            let mut offered = 0;
            for out in &self.out {
                if iov.len() >= MAX_IOV || offered >= GIVEN {
                    break;
                }
                match &out.piece {
                    Piece::Bytes { bytes, sent } => {
                        iov.push(bytes.as_ptr() as usize + sent, bytes.len() - sent);
                        offered += (bytes.len() - sent) as u64;
                    }
                    Piece::Pages(walk) => {
                        walk.peek(MAX_IOV - iov.len(), GIVEN - offered, |a, n| {
                            iov.push(a, n);
                            offered += n as u64;
                        })
                    }
                }
            }
            match raw::send(self.socket.as_fd(), &iov) {
                Ok(n) => {
                    moved = true;
                    self.sent(n as u64);
                    if (n as u64) < offered {
                        self.blocked = true;
                        return Ok(true);
                    }
                }
                Err(Errno::AGAIN) => {
                    self.blocked = true;
                    return Ok(moved);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(lost(e)),
            }
        }
        self.blocked = false;
        self.aboard = 0;
        Ok(moved)
    }

    fn sent(&mut self, mut n: u64) {
        self.unsent -= n;
        while n > 0 {
            let Some(front) = self.out.front_mut() else { return };
            let done = match &mut front.piece {
                Piece::Bytes { bytes, sent } => {
                    let k = n.min((bytes.len() - *sent) as u64);
                    *sent += k as usize;
                    n -= k;
                    *sent == bytes.len()
                }
                Piece::Pages(walk) => {
                    let k = n.min(walk.left());
                    walk.advance(k);
                    n -= k;
                    walk.is_done()
                }
            };
            if done {
                let Some(Out { piece, owed }) = self.out.pop_front() else { return };
                self.owed -= owed;
                if let Piece::Bytes { bytes, .. } = piece {
                    self.spare = bytes;
                }
            }
        }
    }

    /// Whether bytes of this region still wait to be sent, or are being received.
    pub fn uses(&self, index: u32) -> bool {
        let is = |w: &Walk| w.region.as_ref().is_some_and(|r| r.key.index == index);
        self.out.iter().any(|o| matches!(&o.piece, Piece::Pages(w) if is(w)))
    }

    /// A region goes away: what was on its way into it is read and forgotten (MR-1).
    pub fn forget(&mut self, index: u32) {
        if let Rx::Body(_, body) = &mut self.state {
            let left = match body {
                Body::Place(w) if w.region.as_ref().is_some_and(|r| r.key.index == index) => {
                    w.left()
                }
                _ => return,
            };
            *body = Body::Discard(left);
        }
    }

    /// Takes bytes from the kernel: into their place if they are a body's, else into the buffer.
    /// `None` if there are none now.
    pub fn fill(&mut self) -> Result<Option<usize>, DomainError> {
        if self.from == self.to {
            self.from = 0;
            self.to = 0;
        } else if self.to == self.rx.len() {
            self.rx.copy_within(self.from..self.to, 0);
            self.to -= self.from;
            self.from = 0;
        }
        let mut iov = raw::IoVecs::new();
        let mut direct = 0;
        if let Rx::Body(_, Body::Place(walk)) = &self.state {
            // The buffer is empty here, or the body would have been served from it.
            walk.peek(MAX_IOV - 1, GULP, |a, n| {
                iov.push(a, n);
                direct += n as u64;
            });
        }
        let whole = matches!(&self.state, Rx::Body(_, Body::Place(w)) if w.left() > direct);
        if !whole {
            let need = match &self.state {
                Rx::Indices(header) => header.indices as usize * 4,
                _ => 0,
            };
            let room = &mut self.rx[self.to..];
            let n = room.len().min(self.ahead.max(need));
            iov.push(room.as_mut_ptr() as usize, n);
        }
        let n = match raw::receive(self.socket.as_fd(), &iov) {
            Ok(0) => return Err(DomainError::LinkDown("its connection has ended".into())),
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(e) => return Err(lost(e)),
        };
        let placed = direct.min(n as u64);
        if let Rx::Body(_, Body::Place(walk)) = &mut self.state {
            walk.advance(placed);
        }
        self.to += n - placed as usize;
        Ok(Some(n))
    }

    /// What has been taken and not understood is frames: beyond the handshake, or while the peer stalls.
    pub fn shaken(&mut self) {
        self.leftover = self.from < self.to;
    }

    /// Bytes of the handshake: the next message, length first; `None` if it isn't complete.
    pub fn handshake_message(&mut self, limit: usize) -> Result<Option<Vec<u8>>, DomainError> {
        let have = &self.rx[self.from..self.to];
        let Some(len) = have.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > limit {
            return Err(DomainError::Handshake(format!(
                "a first message of {len} bytes: this is not a fabric-ray peer"
            )));
        }
        let Some(message) = have.get(4..4 + len) else { return Ok(None) };
        let message = message.to_vec();
        self.from += 4 + len;
        Ok(Some(message))
    }

    /// Understands what has been received, up to the next decision.
    pub fn step(&mut self) -> Result<Step, DomainError> {
        match std::mem::replace(&mut self.state, Rx::Header) {
            Rx::Header => {
                let Some(b) = self.rx[self.from..self.to].first_chunk::<HEADER>() else {
                    return Ok(Step::Starved);
                };
                let header = Header::decode(b)?;
                self.from += HEADER;
                if header.indices > 0 {
                    self.state = Rx::Indices(header);
                    return self.step();
                }
                Ok(Step::Head(header, Index::Strided))
            }
            Rx::Indices(header) => {
                let need = header.indices as usize * 4;
                let Some(b) = self.rx[self.from..self.to].get(..need) else {
                    self.state = Rx::Indices(header);
                    return Ok(Step::Starved);
                };
                let list = b.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]));
                let list = list.collect();
                self.from += need;
                Ok(Step::Head(header, Index::Listed(list)))
            }
            Rx::Body(header, mut body) => {
                let have = &self.rx[self.from..self.to];
                let (used, done) = match &mut body {
                    Body::Place(walk) => {
                        let n = raw::scatter(walk, have);
                        walk.advance(n as u64);
                        (n, walk.is_done())
                    }
                    Body::Collect(bytes) => {
                        let n = (header.body() as usize - bytes.len()).min(have.len());
                        bytes.extend_from_slice(&have[..n]);
                        (n, bytes.len() as u64 == header.body())
                    }
                    Body::Discard(left) => {
                        let n = (*left).min(have.len() as u64);
                        *left -= n;
                        (n as usize, *left == 0)
                    }
                };
                self.from += used;
                if done {
                    return Ok(Step::Tail(header, body));
                }
                self.state = Rx::Body(header, body);
                Ok(Step::Starved)
            }
        }
    }

    /// Says what is to become of the body of the frame that `step` has shown.
    pub fn begin(&mut self, header: Header, body: Body) {
        self.state = Rx::Body(header, body);
    }
}

fn lost(e: Errno) -> DomainError {
    DomainError::LinkDown(match e {
        Errno::CONNRESET | Errno::PIPE => "its connection was reset".into(),
        e => e.to_string(),
    })
}
