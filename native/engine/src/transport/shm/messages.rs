//! The ring of small messages (SEND): variable length, one producer, one consumer. It is separate
//! from the ring of counts, so that a message that waits for a receive buffer delays no count.
//!
//! Layout: `head` and `tail` count bytes produced and consumed. A message is an 8-byte header
//! (length, status) and its bytes, rounded up to 8. The consumer writes the status before it
//! releases the space, so the sender learns whether the message was too long for the pool.

use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};

use super::raw::Map;

const HEADER: usize = 8;
const DELIVERED: u32 = 1;
const TOO_LONG: u32 = 2;

/// Position of the ring in its mapping.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingLayout {
    /// Offsets of the three words, each on its own cache line, and of the bytes.
    pub head: usize,
    pub tail: usize,
    pub waiting: usize,
    pub bytes: usize,
    /// A power of two.
    pub capacity: usize,
}

fn footprint(len: usize) -> u64 {
    (HEADER + len).next_multiple_of(8) as u64
}

/// The longest message that fits however the ring is filled.
pub(super) const fn longest(capacity: usize) -> usize {
    capacity / 4
}

fn put(map: &Map, layout: &RingLayout, at: u64, bytes: &[u8]) {
    let at = at as usize % layout.capacity;
    let first = bytes.len().min(layout.capacity - at);
    map.write(layout.bytes + at, &bytes[..first]);
    map.write(layout.bytes, &bytes[first..]);
}

fn take(map: &Map, layout: &RingLayout, at: u64, out: &mut [u8]) {
    let at = at as usize % layout.capacity;
    let first = out.len().min(layout.capacity - at);
    map.read(layout.bytes + at, &mut out[..first]);
    map.read(layout.bytes, &mut out[first..]);
}

#[derive(Debug)]
pub(super) struct Sender {
    layout: RingLayout,
    head: u64,
    /// Start of the oldest message without a result.
    settled: u64,
}

/// Result of a sent message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendResult {
    Delivered,
    TooLong,
}

impl Sender {
    pub fn new(layout: RingLayout) -> Self {
        Self { layout, head: 0, settled: 0 }
    }

    /// Writes a message; false if there is no room. The consumer rings when there is.
    pub fn push(&mut self, map: &Map, message: &[u8]) -> bool {
        let need = footprint(message.len());
        let full = |s: &Self| s.head + need - s.settled > s.layout.capacity as u64;
        if full(self) {
            map.u32_at(self.layout.waiting).store(1, SeqCst);
            return false;
        }
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&(message.len() as u32).to_le_bytes());
        put(map, &self.layout, self.head, &header);
        put(map, &self.layout, self.head + HEADER as u64, message);
        self.head += need;
        // The engine may sleep already, and asks for the result only before it falls asleep.
        map.u32_at(self.layout.waiting).store(1, Release);
        map.u64_at(self.layout.head).store(self.head, Release);
        true
    }

    /// Asks to be woken when the consumer releases space; true if it has already.
    pub fn request_wake(&self, map: &Map, len: usize) -> bool {
        map.u32_at(self.layout.waiting).store(1, SeqCst);
        self.is_consumed(map, len)
    }

    fn is_consumed(&self, map: &Map, len: usize) -> bool {
        map.u64_at(self.layout.tail).load(SeqCst) >= self.settled + footprint(len)
    }

    /// The result of the oldest message, of `len` bytes, if the consumer is done with it.
    pub fn take_result(&mut self, map: &Map, len: usize) -> Option<SendResult> {
        if !self.is_consumed(map, len) {
            return None;
        }
        let mut status = [0; 4];
        take(map, &self.layout, self.settled + 4, &mut status);
        self.settled += footprint(len);
        Some(match u32::from_le_bytes(status) {
            TOO_LONG => SendResult::TooLong,
            _ => SendResult::Delivered,
        })
    }
}

#[derive(Debug)]
pub(super) struct Receiver {
    layout: RingLayout,
    tail: u64,
}

/// The ring's contents are invalid; the peer can't be trusted.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Corrupt;

impl Receiver {
    pub fn new(layout: RingLayout) -> Self {
        Self { layout, tail: 0 }
    }

    /// The length of the next message, if there is one.
    pub fn peek(&self, map: &Map) -> Result<Option<usize>, Corrupt> {
        let available = map.u64_at(self.layout.head).load(Acquire).wrapping_sub(self.tail);
        if available == 0 {
            return Ok(None);
        }
        let mut len = [0; 4];
        take(map, &self.layout, self.tail, &mut len);
        let len = u32::from_le_bytes(len) as usize;
        let sane = available <= self.layout.capacity as u64
            && len <= longest(self.layout.capacity)
            && footprint(len) <= available;
        if sane {
            Ok(Some(len))
        } else {
            Err(Corrupt)
        }
    }

    /// Takes the message that `peek` returned.
    pub fn pop(&mut self, map: &Map, len: usize) -> Box<[u8]> {
        let mut message = vec![0; len].into_boxed_slice();
        take(map, &self.layout, self.tail + HEADER as u64, &mut message);
        self.release(map, len, DELIVERED);
        message
    }

    /// Drops the message that `peek` returned, and reports it as too long.
    pub fn refuse(&mut self, map: &Map, len: usize) {
        self.release(map, len, TOO_LONG);
    }

    fn release(&mut self, map: &Map, len: usize, status: u32) {
        put(map, &self.layout, self.tail + 4, &status.to_le_bytes());
        self.tail += footprint(len);
        map.u64_at(self.layout.tail).store(self.tail, SeqCst);
    }

    /// Whether the sender asked to be woken.
    pub fn wakes_sender(&self, map: &Map) -> bool {
        map.u32_at(self.layout.waiting).swap(0, SeqCst) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: RingLayout =
        RingLayout { head: 0, tail: 64, waiting: 128, bytes: 4096, capacity: 1024 };

    #[test]
    fn messages_of_all_lengths_wrap_and_arrive_whole() {
        let (map, _fd) = Map::create(8192).unwrap();
        let (mut tx, mut rx) = (Sender::new(LAYOUT), Receiver::new(LAYOUT));
        for i in 0..2000usize {
            let message: Vec<u8> = (0..i % 257).map(|b| (b + i) as u8).collect();
            assert!(tx.push(&map, &message));
            assert_eq!(tx.take_result(&map, message.len()), None);
            assert_eq!(rx.peek(&map), Ok(Some(message.len())));
            if i % 5 == 0 {
                rx.refuse(&map, message.len());
                assert_eq!(tx.take_result(&map, message.len()), Some(SendResult::TooLong));
            } else {
                assert_eq!(*rx.pop(&map, message.len()), message[..]);
                assert_eq!(tx.take_result(&map, message.len()), Some(SendResult::Delivered));
            }
            assert!(rx.wakes_sender(&map), "each message asks for its result");
            assert!(!rx.wakes_sender(&map), "the sender asks once");
        }
        assert_eq!(rx.peek(&map), Ok(None));
    }

    #[test]
    fn a_full_ring_keeps_its_messages() {
        let (map, _fd) = Map::create(8192).unwrap();
        let (mut tx, mut rx) = (Sender::new(LAYOUT), Receiver::new(LAYOUT));
        let mut n = 0;
        while tx.push(&map, &[n; 100]) {
            n += 1;
        }
        assert_eq!(n, 9);
        assert!(!tx.request_wake(&map, 100));
        for i in 0..n {
            assert_eq!(rx.peek(&map), Ok(Some(100)));
            assert_eq!(*rx.pop(&map, 100), [i; 100]);
            assert_eq!(rx.wakes_sender(&map), i == 0);
        }
    }

    #[test]
    fn a_hostile_head_or_length_is_noticed() {
        let (map, _fd) = Map::create(8192).unwrap();
        let rx = Receiver::new(LAYOUT);
        map.u64_at(LAYOUT.head).store(u64::MAX, SeqCst);
        assert_eq!(rx.peek(&map), Err(Corrupt));
        map.u64_at(LAYOUT.head).store(16, SeqCst);
        map.write(LAYOUT.bytes, &u32::MAX.to_le_bytes());
        assert_eq!(rx.peek(&map), Err(Corrupt));
    }
}
