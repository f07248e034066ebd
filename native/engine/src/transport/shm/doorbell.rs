//! The doorbell that wakes an engine: a word in shared memory says whether the engine sleeps, and
//! an eventfd wakes it. Ringing an awake engine costs one load.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{eventfd, EventfdFlags};

use super::raw::Map;
use crate::{
    domain::DomainError,
    sync::atomic::{fence, AtomicU32, Ordering::SeqCst},
};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

/// Peers ring from now on. The caller must look for work once more afterwards.
#[inline]
fn arm(word: &AtomicU32) {
    word.store(ASLEEP, SeqCst);
    fence(SeqCst);
}

/// Whether the sleeping engine must be woken; true for only one of several callers. The work must
/// be stored before the call, and ordered before later loads.
#[inline]
fn must_ring(word: &AtomicU32) -> bool {
    word.load(SeqCst) == ASLEEP && word.swap(AWAKE, SeqCst) == ASLEEP
}

/// The doorbell of this engine.
#[derive(Debug)]
pub(super) struct Doorbell {
    word: Map,
    pub memory: OwnedFd,
    pub event: OwnedFd,
}

impl Doorbell {
    pub fn new() -> Result<Self, DomainError> {
        let (word, memory) = Map::create(rustix::param::page_size())?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(DomainError::io("eventfd"))?;
        Ok(Self { word, memory, event })
    }

    /// Peers ring from now on. The caller must look for work once more afterwards.
    pub fn arm(&self) {
        arm(self.word.shared_word(0));
    }

    pub fn disarm(&self) {
        self.word.shared_word(0).store(AWAKE, SeqCst);
    }

    /// Whether a peer rang since the engine fell asleep.
    #[cfg(test)]
    pub fn was_rung(&self) -> bool {
        self.word.shared_word(0).load(SeqCst) == AWAKE
    }

    /// Clears the event that ended a sleep.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
    }
}

/// The doorbell of a peer.
#[derive(Debug)]
pub(super) struct PeerDoorbell {
    word: Map,
    event: OwnedFd,
}

impl PeerDoorbell {
    pub fn import(memory: OwnedFd, event: OwnedFd) -> Result<Self, DomainError> {
        let word = Map::import(memory.as_fd(), rustix::param::page_size())?;
        // A full counter must not block this thread.
        let flags = rustix::fs::fcntl_getfl(&event).map_err(DomainError::io("fcntl"))?;
        rustix::fs::fcntl_setfl(&event, flags | rustix::fs::OFlags::NONBLOCK)
            .map_err(DomainError::io("fcntl"))?;
        Ok(Self { word, event })
    }

    /// Wakes the peer if it sleeps. The work must be stored before the call.
    #[inline]
    pub fn ring(&self) {
        fence(SeqCst);
        self.ring_for_counts();
    }

    /// As [`PeerDoorbell::ring`], for counts: [`Producer::push`](super::ring::Producer::push) has
    /// ordered them before later loads.
    #[inline]
    pub fn ring_for_counts(&self) {
        if must_ring(self.word.shared_word(0)) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{
        sync::{atomic::AtomicU32, Arc},
        thread,
    };

    use super::{super::ring, *};
    use crate::domain::Count;

    #[test]
    fn no_engine_sleeps_while_a_record_waits() {
        loom::model(|| {
            let shared = Arc::new((ring::memory(2), AtomicU32::new(AWAKE)));
            let peer_link = Arc::clone(&shared);
            let writer = thread::spawn(move || {
                let ((slots, tail), word) = &*peer_link;
                let mut p = ring::Producer::new();
                assert!(p.has_room(slots, tail));
                p.push(slots, Count { imm: 1, n: 1 });
                must_ring(word)
            });
            let ((slots, _), word) = &*shared;
            let mut c = ring::Consumer::new();
            arm(word);
            let saw = c.pop(slots).is_some();
            let rung = writer.join().unwrap();
            assert!(saw || rung, "a record waits and the doorbell was not rung");
        });
    }
}
