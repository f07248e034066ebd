//! The ring that carries small messages (SEND): variable length, one producer, one consumer, apart
//! from the ring of counts so that a message that waits for a receive buffer holds up no count.
//!
//! Layout: `head` and `tail` count bytes produced and consumed; a message is an 8-byte header
//! (length, status) and its bytes, rounded up to 8. The consumer writes the status before it gives
//! the place back, which is how a sender learns that a message was too long for the pool.

use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};

use super::raw::Map;

const HEADER: usize = 8;
const TAKEN: u32 = 1;
const TOO_LONG: u32 = 2;

/// Where the ring lies in its mapping.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Offsets of the three words, each on a line of its own, and of the bytes.
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

fn put(map: &Map, place: &Place, at: u64, bytes: &[u8]) {
    let at = at as usize % place.capacity;
    let first = bytes.len().min(place.capacity - at);
    map.write(place.bytes + at, &bytes[..first]);
    map.write(place.bytes, &bytes[first..]);
}

fn take(map: &Map, place: &Place, at: u64, out: &mut [u8]) {
    let at = at as usize % place.capacity;
    let first = out.len().min(place.capacity - at);
    map.read(place.bytes + at, &mut out[..first]);
    map.read(place.bytes, &mut out[first..]);
}

#[derive(Debug)]
pub(super) struct Sender {
    place: Place,
    head: u64,
    /// Where the oldest message that is not accounted for begins.
    settled: u64,
}

/// What became of the oldest outstanding message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Taken,
    TooLong,
}

impl Sender {
    pub fn new(place: Place) -> Self {
        Self { place, head: 0, settled: 0 }
    }

    /// False if there is no room: the consumer will ring when there is.
    pub fn push(&mut self, map: &Map, message: &[u8]) -> bool {
        let need = footprint(message.len());
        let full = |s: &Self| s.head + need - s.settled > s.place.capacity as u64;
        if full(self) {
            map.u32_at(self.place.waiting).store(1, SeqCst);
            return false;
        }
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&(message.len() as u32).to_le_bytes());
        put(map, &self.place, self.head, &header);
        put(map, &self.place, self.head + HEADER as u64, message);
        self.head += need;
        map.u64_at(self.place.head).store(self.head, Release);
        true
    }

    /// Asks to be woken when the consumer gives places back, then looks whether it has already.
    pub fn ask_and_look(&self, map: &Map, len: usize) -> bool {
        map.u32_at(self.place.waiting).store(1, SeqCst);
        self.would_settle(map, len)
    }

    fn would_settle(&self, map: &Map, len: usize) -> bool {
        map.u64_at(self.place.tail).load(SeqCst) >= self.settled + footprint(len)
    }

    /// Whether the consumer is done with the oldest message, of `len` bytes.
    pub fn settle(&mut self, map: &Map, len: usize) -> Option<Fate> {
        if !self.would_settle(map, len) {
            return None;
        }
        let mut status = [0; 4];
        take(map, &self.place, self.settled + 4, &mut status);
        self.settled += footprint(len);
        Some(match u32::from_le_bytes(status) {
            TOO_LONG => Fate::TooLong,
            _ => Fate::Taken,
        })
    }
}

#[derive(Debug)]
pub(super) struct Receiver {
    place: Place,
    tail: u64,
}

/// The ring's contents make no sense: the peer is not to be trusted further.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Corrupt;

impl Receiver {
    pub fn new(place: Place) -> Self {
        Self { place, tail: 0 }
    }

    /// The length of the next message, if one is there.
    pub fn peek(&self, map: &Map) -> Result<Option<usize>, Corrupt> {
        let available = map.u64_at(self.place.head).load(Acquire).wrapping_sub(self.tail);
        if available == 0 {
            return Ok(None);
        }
        let mut len = [0; 4];
        take(map, &self.place, self.tail, &mut len);
        let len = u32::from_le_bytes(len) as usize;
        let sane = available <= self.place.capacity as u64
            && len <= longest(self.place.capacity)
            && footprint(len) <= available;
        if sane {
            Ok(Some(len))
        } else {
            Err(Corrupt)
        }
    }

    /// Takes the message that `peek` has shown.
    pub fn pop(&mut self, map: &Map, len: usize) -> Box<[u8]> {
        let mut message = vec![0; len].into_boxed_slice();
        take(map, &self.place, self.tail + HEADER as u64, &mut message);
        self.give_back(map, len, TAKEN);
        message
    }

    /// Drops the message that `peek` has shown and lets its sender know.
    pub fn refuse(&mut self, map: &Map, len: usize) {
        self.give_back(map, len, TOO_LONG);
    }

    fn give_back(&mut self, map: &Map, len: usize, status: u32) {
        put(map, &self.place, self.tail + 4, &status.to_le_bytes());
        self.tail += footprint(len);
        map.u64_at(self.place.tail).store(self.tail, SeqCst);
    }

    /// Whether the sender wants to be woken now that places were given back.
    pub fn wakes_sender(&self, map: &Map) -> bool {
        map.u32_at(self.place.waiting).swap(0, SeqCst) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { head: 0, tail: 64, waiting: 128, bytes: 4096, capacity: 1024 };

    #[test]
    fn messages_of_all_lengths_wrap_and_arrive_whole() {
        let (map, _fd) = Map::create(8192).unwrap();
        let (mut tx, mut rx) = (Sender::new(PLACE), Receiver::new(PLACE));
        for i in 0..2000usize {
            let message: Vec<u8> = (0..i % 257).map(|b| (b + i) as u8).collect();
            assert!(tx.push(&map, &message));
            assert_eq!(tx.settle(&map, message.len()), None);
            assert_eq!(rx.peek(&map), Ok(Some(message.len())));
            if i % 5 == 0 {
                rx.refuse(&map, message.len());
                assert_eq!(tx.settle(&map, message.len()), Some(Fate::TooLong));
            } else {
                assert_eq!(*rx.pop(&map, message.len()), message[..]);
                assert_eq!(tx.settle(&map, message.len()), Some(Fate::Taken));
            }
            assert!(!rx.wakes_sender(&map), "nobody asked");
        }
        assert_eq!(rx.peek(&map), Ok(None));
    }

    #[test]
    fn a_full_ring_keeps_what_it_has() {
        let (map, _fd) = Map::create(8192).unwrap();
        let (mut tx, mut rx) = (Sender::new(PLACE), Receiver::new(PLACE));
        let mut n = 0;
        while tx.push(&map, &[n; 100]) {
            n += 1;
        }
        assert_eq!(n, 9);
        assert!(!tx.ask_and_look(&map, 100));
        for i in 0..n {
            assert_eq!(rx.peek(&map), Ok(Some(100)));
            assert_eq!(*rx.pop(&map, 100), [i; 100]);
            assert_eq!(rx.wakes_sender(&map), i == 0);
        }
    }

    #[test]
    fn a_hostile_head_or_length_is_noticed() {
        let (map, _fd) = Map::create(8192).unwrap();
        let rx = Receiver::new(PLACE);
        map.u64_at(PLACE.head).store(u64::MAX, SeqCst);
        assert_eq!(rx.peek(&map), Err(Corrupt));
        map.u64_at(PLACE.head).store(16, SeqCst);
        map.write(PLACE.bytes, &u32::MAX.to_le_bytes());
        assert_eq!(rx.peek(&map), Err(Corrupt));
    }
}
