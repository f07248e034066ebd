//! A link: the streams to one peer, and the operations under way on them.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    time::Duration,
};

use slab::Slab;

use super::page_cursor::PageCursor;
use crate::{
    domain::{
        CompletedNumbers, Count, DomainError, LinkId, LinkName, PeerIdentity, Receipt, Token,
    },
    time::Time,
};

/// Index of a stream's socket. A link's first stream carries small frames only, so that they never
/// queue behind bulk data.
pub(super) type StreamKey = usize;

/// Identifies the streams of one link before they are proven.
pub(super) type LinkNonce = [u8; 16];

/// Bits of an operation's number that are sent; the next bit marks reads and messages.
const NUMBER_BITS: u32 = 31;
const MASK: u64 = (1 << NUMBER_BITS) - 1;

/// Messages that one peer may have under way.
pub(super) const MESSAGE_WINDOW: usize = 32;
/// Operations that may be under way on a link; further ones wait in the group.
pub(super) const MAX_OPS: usize = 1 << 16;

/// Memory that a link's reads may take at the peer, bytes; further reads wait in the group. A peer
/// that keeps to it is never throttled, so two peers that read from each other always progress.
pub(super) const READ_WINDOW: u64 = super::stream::MAX_REPLY_BYTES / 2;

/// The kind of an operation without a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unnumbered {
    /// Its bytes land on this side.
    Read,
    /// It is never sent again.
    Message,
}

/// A local operation: done when all its parts are.
pub(super) struct Op {
    /// `None` for writes and counts, which have a number.
    kind: Option<Unnumbered>,
    /// The lower bits of its number, as sent: see [`Link::open`].
    serial: u32,
    number: u64,
    pub token: Token,
    pub parts: u16,
    pub error: Option<DomainError>,
}

/// A part of a local read, and the memory for its bytes.
pub(super) struct Fetch {
    pub op: u64,
    pub into: PageCursor,
    /// Memory that its reply takes at the peer.
    cost: u64,
    /// Whether its bytes are being received: it can be neither answered again nor refused.
    pub begun: bool,
}

/// A write of the peer that arrives in several parts.
pub(super) struct Incoming {
    pub left: u16,
    pub count: Option<Count>,
    pub refused: bool,
}

pub(super) struct Link {
    pub id: LinkId,
    pub nonce: LinkNonce,
    pub initiator: bool,
    /// One for each stream; `None` until it is proven.
    pub streams: Vec<Option<StreamKey>>,
    pub peer: Option<PeerIdentity>,
    /// The initiator's address of the peer to connect to.
    pub target: Option<crate::api::EngineAddress>,
    pub candidates: VecDeque<SocketAddr>,
    pub errors: Vec<String>,
    /// Whether a connection broke in the middle of a handshake.
    pub interrupted: bool,
    pub remote: String,
    ops: Slab<Op>,
    /// Numbered operations started: writes and counts. And unnumbered ones.
    begun: u64,
    reads: u32,
    pub fetches: HashMap<u64, Fetch>,
    next_fetch: u64,
    /// Memory that the replies to all of `fetches` take at the peer.
    read_bytes: u64,
    pub messages: usize,
    pub incoming: HashMap<u64, Incoming>,
    pub waiting_messages: VecDeque<(u64, Vec<u8>)>,
    /// Control messages of the peer that were not taken yet.
    pub control_messages: usize,
    /// When a message of the peer was last delivered.
    pub delivered_at: Time,
    pub received_at: Time,
    pub sent_at: Time,
    pub deadline: Time,
    next_bulk: usize,
    /// The peer's operations that this side has carried out.
    completed: CompletedNumbers,
}

impl Link {
    pub fn new(id: LinkId, nonce: LinkNonce, streams: usize, initiator: bool, now: Time) -> Self {
        Self {
            id,
            nonce,
            initiator,
            streams: vec![None; streams],
            peer: None,
            target: None,
            candidates: VecDeque::new(),
            errors: Vec::new(),
            interrupted: false,
            remote: String::new(),
            ops: Slab::new(),
            begun: 0,
            reads: 0,
            fetches: HashMap::new(),
            next_fetch: 1,
            read_bytes: 0,
            messages: 0,
            incoming: HashMap::new(),
            waiting_messages: VecDeque::new(),
            control_messages: 0,
            delivered_at: Time(0),
            received_at: now,
            sent_at: now,
            deadline: Time::NEVER,
            next_bulk: 0,
            completed: CompletedNumbers::default(),
        }
    }

    pub fn is_complete(&self) -> bool {
        self.streams.iter().all(Option::is_some)
    }

    pub fn is_full(&self) -> bool {
        self.ops.len() >= MAX_OPS
    }

    /// Opens an operation in `parts` parts. The peer's receipt refers to its number, whose lower
    /// bits are sent above the slot.
    pub fn open_op(&mut self, token: Token, parts: u16) -> u64 {
        self.begun += 1;
        let (number, serial) = (self.begun, (self.begun & MASK) as u32);
        let slot = self.ops.insert(Op { kind: None, serial, number, token, parts, error: None });
        u64::from(serial) << 32 | slot as u64
    }

    /// Opens an operation without a number, which receipts do not mention. With a number it would
    /// leave a gap in the receipt, beyond which all numbers are remembered one by one.
    pub fn open_unnumbered(&mut self, token: Token, kind: Unnumbered, parts: u16) -> u64 {
        self.reads = self.reads.wrapping_add(1);
        let serial = self.reads | 1 << NUMBER_BITS;
        let kind = Some(kind);
        let slot = self.ops.insert(Op { kind, serial, number: 0, token, parts, error: None });
        u64::from(serial) << 32 | slot as u64
    }

    /// This side has carried out an operation of the peer.
    pub fn on_op_executed(&mut self, op: u64, done: bool) {
        let number = self.completed.widen(op >> 32 & MASK, NUMBER_BITS);
        self.completed.record(number, done);
    }

    fn op(&mut self, number: u64) -> Option<&mut Op> {
        let op = self.ops.get_mut((number & 0xFFFF_FFFF) as usize)?;
        (op.serial == (number >> 32) as u32).then_some(op)
    }

    /// Records why an operation will fail once all its parts are done.
    pub fn refuse(&mut self, number: u64, error: DomainError) {
        if let Some(op) = self.op(number) {
            op.error.get_or_insert(error);
        }
    }

    /// One part is done; returns the result if it was the last.
    pub fn part_done(&mut self, number: u64) -> Option<(Token, Result<(), DomainError>)> {
        let op = self.op(number)?;
        op.parts -= 1;
        if op.parts > 0 {
            return None;
        }
        let op = self.ops.remove((number & 0xFFFF_FFFF) as usize);
        Some((op.token, op.error.map_or(Ok(()), Err)))
    }

    /// The peer reports the result of a message; returns its token.
    ///
    /// # Errors
    /// No such message is under way. Writes and reads end in other ways: until then their memory is
    /// in use.
    pub fn message_done(&mut self, number: u64) -> Result<Token, DomainError> {
        let known = self.op(number).is_some_and(|op| op.kind == Some(Unnumbered::Message));
        if !known {
            let what = "the result of a message that was not sent";
            return Err(DomainError::Handshake(what.into()));
        }
        self.messages -= 1;
        Ok(self.ops.remove((number & 0xFFFF_FFFF) as usize).token)
    }

    pub fn open_fetch(&mut self, op: u64, into: PageCursor, cost: u64) -> u64 {
        self.next_fetch += 1;
        self.read_bytes += cost;
        self.fetches.insert(self.next_fetch, Fetch { op, into, cost, begun: false });
        self.next_fetch
    }

    /// A part of a read is done.
    pub fn close_fetch(&mut self, fetch: u64) -> Option<Fetch> {
        let fetch = self.fetches.remove(&fetch)?;
        self.read_bytes -= fetch.cost;
        Some(fetch)
    }

    /// Whether a read whose replies take `cost` bytes at the peer may be sent now.
    pub fn can_read(&self, cost: u64) -> bool {
        self.read_bytes == 0 || self.read_bytes + cost <= READ_WINDOW
    }

    /// Removes everything under way, to be failed, with its number or 0.
    pub fn abandon(&mut self) -> Vec<(Token, u64)> {
        self.fetches.clear();
        self.read_bytes = 0;
        self.messages = 0;
        std::mem::take(&mut self.ops).into_iter().map(|(_, op)| (op.token, op.number)).collect()
    }

    /// The link's name at both ends.
    pub fn name(&self) -> LinkName {
        u64::from_le_bytes(std::array::from_fn(|i| self.nonce[i]))
    }

    /// Returns the receipt of the link. The socket's reader places bytes, so nothing lands after
    /// this.
    pub fn receipt(&mut self) -> Receipt {
        Receipt::Numbered(std::mem::take(&mut self.completed))
    }

    /// The stream for urgent frames.
    pub fn urgent_stream(&self) -> Option<StreamKey> {
        self.streams.first().copied().flatten()
    }

    /// The streams for bulk data, starting with another one each time.
    pub fn bulk_streams(&mut self) -> Vec<StreamKey> {
        let from = if self.streams.len() > 1 { 1 } else { 0 };
        let mut keys: Vec<StreamKey> = self.streams[from..].iter().copied().flatten().collect();
        self.next_bulk += 1;
        let n = keys.len().max(1);
        keys.rotate_left(self.next_bulk % n);
        keys
    }

    /// The next time for a heartbeat, or for the peer's timeout.
    pub fn next_timer(&self, peer_timeout: Duration) -> Time {
        if !self.is_complete() {
            return self.deadline;
        }
        self.sent_at.after(peer_timeout / 4).min(self.received_at.after(peer_timeout))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ic_3_messages_and_reads_leave_no_gaps_in_the_receipt() {
        let link = || Link::new(1, [0; 16], 2, true, Time(0));
        let (mut sender, mut receiver) = (link(), link());
        for _ in 0..1000 {
            let write = sender.open_op(Token::default(), 1);
            sender.open_unnumbered(Token::default(), Unnumbered::Read, 1);
            receiver.on_op_executed(write, true);
            sender.part_done(write);
        }
        let last = sender.open_op(Token::default(), 1);
        let numbers: Vec<u64> = sender.abandon().into_iter().map(|(_, n)| n).collect();
        assert_eq!(numbers.iter().filter(|n| **n != 0).collect::<Vec<_>>(), [&1001]);
        assert_eq!(numbers.len(), 1001);
        receiver.on_op_executed(last, false);
        let Receipt::Numbered(completed) = receiver.receipt() else {
            panic!("tcp reports which operations completed")
        };
        assert_eq!((completed.contains(1000), completed.contains(1001)), (Some(true), Some(false)));
        assert_eq!(completed.remembered(), 1, "one that was refused, and nothing else");
    }
}
