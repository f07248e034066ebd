//! One socket: its send queue, and its receive buffer.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::io::Errno;

use super::{
    frame::{Header, Kind, HEADER},
    page_cursor::{PageCursor, PageIndex},
    raw,
};
use crate::{
    domain::{Data, DomainError, Seq},
    time::Time,
};

/// Size of the receive buffer: small frames are received by the hundreds.
const RX: usize = 128 << 10;
/// Bytes beyond the current body that a bulk stream receives into its buffer while frames are
/// small. After a larger one it is the next header only: a body in the buffer is copied once more.
const BULK_READ_AHEAD: usize = 4096;
/// Bodies up to this size are copied behind their header; larger ones are sent from their memory.
const SMALL_BODY: u64 = 2048;
/// Bytes received per call.
const MAX_RECEIVE: u64 = 1 << 20;
/// Bytes sent per call. Larger calls delay the first bytes and acknowledgements, smaller ones cost
/// more than they carry. Over loopback this size was fastest by a sixth or more.
const MAX_SEND: u64 = 384 << 10;
/// Bytes of the last call for a write whose acknowledgement this side waits for: the receiver still
/// has to copy them when the call ends.
const LAST_SEND: u64 = 16 << 10;
const MAX_IOV: usize = 64;

/// Memory that replies to the peer may take before its further requests stay in the kernel, bytes.
/// Honest peers stay below it: see [`super::link::READ_WINDOW`].
pub(super) const MAX_REPLY_BYTES: u64 = 8 << 20;
/// Memory of a queue entry besides its bytes.
const QUEUE_OVERHEAD: u64 = 256;

/// Memory of a reply to a read until it is sent: small bodies are copied, page lists kept.
pub(super) fn reply_cost(bytes: u64, indices: u64) -> u64 {
    QUEUE_OVERHEAD + HEADER as u64 + bytes.min(SMALL_BODY) + 4 * indices
}

/// Memory that a whole read takes at the peer; the headers of its parts are neglected.
pub(super) fn read_cost(data: &Data) -> u64 {
    let indices = match &data.remote_seq {
        Seq::Strided { .. } => 0,
        Seq::Indexed { .. } => u64::from(data.pages),
    };
    reply_cost(data.bytes(), indices)
}

struct QueuedFrame {
    data: QueuedData,
    /// Memory that it takes on the peer's behalf.
    reply_bytes: u64,
}

/// An operation whose frame was queued.
struct UnackedOp {
    op: u64,
    /// Position of the frame's end among all bytes of the stream.
    end: u64,
}

enum QueuedData {
    Bytes { bytes: Vec<u8>, sent: usize },
    Pages(PageCursor),
}

/// Treatment of a frame's body.
pub(super) enum Body {
    IntoPages(PageCursor),
    Collect(Vec<u8>),
    /// Skip it; the operation was refused.
    Discard(u64),
}

enum Rx {
    Header,
    Indices(Header),
    Body(Header, Body),
}

/// Result of `step`.
pub(super) enum StreamStep {
    /// More bytes are needed.
    Starved,
    /// A header and its indices: call `start_connect` with the body's destination.
    Head(Header, PageIndex),
    /// A frame is complete.
    Tail(Header, Body),
}

pub(super) struct Stream {
    socket: OwnedFd,
    out: VecDeque<QueuedFrame>,
    /// Bytes in `out`.
    pub unsent: u64,
    /// Memory in `out` for the peer's requests; only the peer can free it.
    pub reply_bytes: u64,
    /// Whether reading is suspended because the peer leaves too many replies unread.
    throttled: bool,
    spare: Vec<u8>,
    /// Whether the socket took less than it was given; wait for room.
    pub blocked: bool,
    /// Bytes that the socket has taken.
    sent: u64,
    /// Operations whose frames were queued here and are not acknowledged, in order.
    unacked: VecDeque<UnackedOp>,
    /// Number of acknowledged operations.
    acked: u64,
    /// Number of the peer's frames executed, and the number last acknowledged.
    pub executed: u64,
    pub executed_acked: u64,
    rx: Box<[u8]>,
    pub is_bulk: bool,
    /// Whether the last frame had more bytes than a bulk stream reads ahead.
    was_large: bool,
    from: usize,
    to: usize,
    state: Rx,
    /// Whether frames arrived with the last handshake message: the kernel will not report them
    /// again.
    pub leftover: bool,
    /// Whether the last call received less than it had room for: the kernel has no more.
    pub drained: bool,
    /// Until then every poll tries the socket, because it received something.
    pub hot_until: Time,
}

impl Stream {
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            out: VecDeque::new(),
            unsent: 0,
            reply_bytes: 0,
            throttled: false,
            spare: Vec::new(),
            blocked: false,
            sent: 0,
            unacked: VecDeque::new(),
            acked: 0,
            executed: 0,
            executed_acked: 0,
            rx: vec![0; RX].into_boxed_slice(),
            is_bulk: false,
            was_large: false,
            from: 0,
            to: 0,
            state: Rx::Header,
            leftover: false,
            drained: false,
            hot_until: Time(0),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Queues raw bytes.
    pub fn queue_bytes(&mut self, bytes: &[u8]) {
        self.tail(bytes.len()).extend_from_slice(bytes);
    }

    /// The end of the queue, to which the caller appends `len` bytes.
    fn tail(&mut self, len: usize) -> &mut Vec<u8> {
        self.unsent += len as u64;
        let joins = matches!(self.out.back(), Some(QueuedFrame {
            data: QueuedData::Bytes { bytes, .. }, ..
        }) if bytes.len() + len <= RX);
        if !joins {
            let mut bytes = std::mem::take(&mut self.spare);
            bytes.clear();
            let data = QueuedData::Bytes { bytes, sent: 0 };
            self.out.push_back(QueuedFrame { data, reply_bytes: 0 });
        }
        match self.out.back_mut() {
            Some(QueuedFrame { data: QueuedData::Bytes { bytes, .. }, .. }) => bytes,
            _ => unreachable!("the last entry has bytes"),
        }
    }

    /// Queues a frame. The memory of its body stays unchanged until it is acknowledged.
    pub fn queue_frame(&mut self, header: &Header, indices: &[u32], body: Option<PageCursor>) {
        self.queue_bytes(&header.encode());
        if !indices.is_empty() {
            let bytes: Vec<u8> = indices.iter().flat_map(|i| i.to_le_bytes()).collect();
            self.queue_bytes(&bytes);
        }
        let Some(cursor) = body else { return };
        if cursor.left() > SMALL_BODY {
            self.unsent += cursor.left();
            self.out.push_back(QueuedFrame { data: QueuedData::Pages(cursor), reply_bytes: 0 });
            return;
        }
        raw::gather(&cursor, self.tail(cursor.left() as usize));
    }

    /// Marks the last queue entry as a reply that takes `memory` bytes.
    pub fn charge_reply(&mut self, memory: u64) {
        if let Some(last) = self.out.back_mut() {
            last.reply_bytes += memory;
            self.reply_bytes += memory;
        }
    }

    /// Whether reading from the peer is suspended, because its replies take too much memory.
    /// Resumes once half of the limit is free.
    pub fn update_throttle(&mut self) -> bool {
        self.throttled = self.exceeds_reply_limit();
        self.throttled
    }

    pub fn is_throttled(&self) -> bool {
        self.throttled
    }

    /// Whether [`Stream::update_throttle`] would be true now.
    pub fn exceeds_reply_limit(&self) -> bool {
        self.reply_bytes > if self.throttled { MAX_REPLY_BYTES / 2 } else { MAX_REPLY_BYTES }
    }

    /// Queues an acknowledgement of the peer's frames, if there is anything new.
    pub fn acknowledge(&mut self) {
        if self.executed != self.executed_acked {
            self.executed_acked = self.executed;
            let ack = Header { op: self.executed, ..Header::new(Kind::Ack) };
            self.queue_bytes(&ack.encode());
            self.charge_reply(HEADER as u64);
        }
    }

    /// Queues a frame that the peer acknowledges, in order.
    pub fn queue_op(&mut self, header: &Header, indices: &[u32], body: Option<PageCursor>) {
        self.queue_frame(header, indices, body);
        self.unacked.push_back(UnackedOp { op: header.op, end: self.sent + self.unsent });
    }

    /// The peer has executed `done` frames in total; appends their operations to `ops`.
    ///
    /// # Errors
    /// One of the frames was not sent in full: its memory is still to be read.
    pub fn acked(&mut self, done: u64, ops: &mut Vec<u64>) -> Result<(), DomainError> {
        let what = "an acknowledgement of a frame that was not sent";
        let unsent = || DomainError::Handshake(what.into());
        let most = self.unacked.len() as u64;
        let n = done.checked_sub(self.acked).filter(|n| *n <= most).ok_or_else(unsent)? as usize;
        if n > 0 && self.unacked[n - 1].end > self.sent {
            return Err(unsent());
        }
        self.acked = done;
        ops.extend(self.unacked.drain(..n).map(|u| u.op));
        Ok(())
    }

    /// Bytes and operations in the way of another frame: unsent ones first, then unacknowledged.
    pub fn backlog(&self) -> (u64, usize) {
        (self.unsent, self.unacked.len())
    }

    /// Whether the peer's writer waits for this stream's acknowledgement more than its next bytes.
    pub fn owes_bulk_ack(&self) -> bool {
        self.drained && self.is_bulk && self.executed != self.executed_acked
    }

    /// Whether all unacknowledged operations are still unsent.
    pub fn is_first_flight(&self) -> bool {
        self.unacked.front().is_none_or(|first| first.end > self.sent)
    }

    /// Sends as much as the kernel takes; true if it took anything.
    pub fn send(&mut self) -> Result<bool, DomainError> {
        let mut progressed = false;
        while !self.out.is_empty() {
            let most = match self.unsent.checked_sub(LAST_SEND) {
                Some(n) if (LAST_SEND..=MAX_SEND).contains(&n) && self.is_first_flight() => n,
                _ => MAX_SEND,
            };
            let mut iov = raw::IoVecs::new();
            for out in &self.out {
                if iov.len() >= MAX_IOV || iov.bytes() >= most {
                    break;
                }
                match &out.data {
                    QueuedData::Bytes { bytes, sent } => {
                        iov.push(bytes.as_ptr() as usize + sent, bytes.len() - sent);
                    }
                    QueuedData::Pages(cursor) => {
                        let (ranges, bytes) = (MAX_IOV - iov.len(), most - iov.bytes());
                        cursor.peek(ranges, bytes, |addr, n| iov.push(addr, n));
                    }
                }
            }
            match raw::send(self.socket.as_fd(), &iov) {
                Ok(n) => {
                    progressed = true;
                    self.on_sent(n as u64);
                    if (n as u64) < iov.bytes() {
                        self.blocked = true;
                        return Ok(true);
                    }
                }
                Err(Errno::AGAIN) => {
                    self.blocked = true;
                    return Ok(progressed);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(connection_error(e)),
            }
        }
        self.blocked = false;
        Ok(progressed)
    }

    fn on_sent(&mut self, mut n: u64) {
        self.unsent -= n;
        self.sent += n;
        while n > 0 {
            let Some(front) = self.out.front_mut() else { return };
            let done = match &mut front.data {
                QueuedData::Bytes { bytes, sent } => {
                    let k = n.min((bytes.len() - *sent) as u64);
                    *sent += k as usize;
                    n -= k;
                    *sent == bytes.len()
                }
                QueuedData::Pages(cursor) => {
                    let k = n.min(cursor.left());
                    cursor.advance(k);
                    n -= k;
                    cursor.is_done()
                }
            };
            if done {
                let Some(QueuedFrame { data, reply_bytes }) = self.out.pop_front() else { return };
                self.reply_bytes -= reply_bytes;
                if let QueuedData::Bytes { bytes, .. } = data {
                    self.spare = bytes;
                }
            }
        }
    }

    /// Whether queued data lies in this region.
    pub fn uses(&self, index: u32) -> bool {
        self.out.iter().any(|o| matches!(&o.data, QueuedData::Pages(w) if w.is_in(index)))
    }

    /// A region is deregistered: the rest of a body for it is skipped (MR-1).
    pub fn discard_region(&mut self, index: u32) {
        if let Rx::Body(_, body) = &mut self.state {
            let left = match body {
                Body::IntoPages(w) if w.is_in(index) => w.left(),
                _ => return,
            };
            *body = Body::Discard(left);
        }
    }

    /// Receives bytes: into the pages of a body if there is one, else into the buffer. `None` if
    /// there are none.
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
        if let Rx::Body(_, Body::IntoPages(cursor)) = &self.state {
            // The buffer is empty here; otherwise the body would have been filled from it.
            cursor.peek(MAX_IOV - 1, MAX_RECEIVE, |addr, n| iov.push(addr, n));
        }
        let direct = iov.bytes();
        let whole = matches!(&self.state, Rx::Body(_, Body::IntoPages(w)) if w.left() > direct);
        if !whole {
            let room = &mut self.rx[self.to..];
            let ahead = room.len().min(match &self.state {
                _ if !self.is_bulk => RX,
                Rx::Indices(header) => BULK_READ_AHEAD.max(header.indices as usize * 4),
                Rx::Header | Rx::Body(_, Body::IntoPages(_)) if self.was_large => HEADER,
                _ => BULK_READ_AHEAD,
            });
            iov.push(room.as_mut_ptr() as usize, ahead);
        }
        let n = match raw::receive(self.socket.as_fd(), &iov) {
            Ok(0) => {
                return Err(DomainError::LinkDown("the peer has closed the connection".into()))
            }
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(e) => return Err(connection_error(e)),
        };
        self.drained = (n as u64) < iov.bytes();
        let placed = direct.min(n as u64);
        if let Rx::Body(_, Body::IntoPages(cursor)) = &mut self.state {
            cursor.advance(placed);
        }
        self.to += n - placed as usize;
        Ok(Some(n))
    }

    /// Marks buffered bytes as frames, after a handshake or while the peer is throttled.
    pub fn mark_leftover(&mut self) {
        self.leftover = self.from < self.to;
    }

    /// The next length-prefixed handshake message; `None` if it is incomplete.
    pub fn handshake_message(&mut self, limit: usize) -> Result<Option<Vec<u8>>, DomainError> {
        let have = &self.rx[self.from..self.to];
        let Some(len) = have.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len > limit {
            return Err(DomainError::Handshake(format!(
                "a first message of {len} bytes, expected at most {limit}: not a fabric-ray peer"
            )));
        }
        let Some(message) = have.get(4..4 + len) else { return Ok(None) };
        let message = message.to_vec();
        self.from += 4 + len;
        Ok(Some(message))
    }

    /// Parses received bytes up to the next decision.
    pub fn next_step(&mut self) -> Result<StreamStep, DomainError> {
        match std::mem::replace(&mut self.state, Rx::Header) {
            Rx::Header => {
                let Some(b) = self.rx[self.from..self.to].first_chunk::<HEADER>() else {
                    return Ok(StreamStep::Starved);
                };
                let header = Header::decode(b)?;
                self.from += HEADER;
                self.was_large = header.body() > BULK_READ_AHEAD as u64;
                if header.indices > 0 {
                    self.state = Rx::Indices(header);
                    return self.next_step();
                }
                Ok(StreamStep::Head(header, PageIndex::Strided))
            }
            Rx::Indices(header) => {
                let need = header.indices as usize * 4;
                let Some(b) = self.rx[self.from..self.to].get(..need) else {
                    self.state = Rx::Indices(header);
                    return Ok(StreamStep::Starved);
                };
                let list = b.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]));
                let list = list.collect();
                self.from += need;
                Ok(StreamStep::Head(header, PageIndex::Listed(list)))
            }
            Rx::Body(header, mut body) => {
                let have = &self.rx[self.from..self.to];
                let (used, done) = match &mut body {
                    Body::IntoPages(cursor) => {
                        let n = raw::scatter(cursor, have);
                        cursor.advance(n as u64);
                        (n, cursor.is_done())
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
                    return Ok(StreamStep::Tail(header, body));
                }
                self.state = Rx::Body(header, body);
                Ok(StreamStep::Starved)
            }
        }
    }

    /// Sets the destination of the body of the frame that `step` returned.
    pub fn set_body(&mut self, header: Header, body: Body) {
        self.state = Rx::Body(header, body);
    }
}

fn connection_error(e: Errno) -> DomainError {
    DomainError::LinkDown(match e {
        Errno::CONNRESET | Errno::PIPE => "the connection was reset".into(),
        e => e.to_string(),
    })
}
