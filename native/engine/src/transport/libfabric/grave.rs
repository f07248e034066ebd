//! Endpoints that are done with, and the memory that they had in their hands.
//!
//! The shm provider keeps an endpoint's queues in memory that its peers in the same process use
//! directly and without asking: where such an endpoint is closed while a peer still believes in it,
//! the peer's next call crashes the process. So it is laid aside, unpolled, until every peer must
//! have noticed, or no endpoint is left here that could be such a peer. Nothing can land in memory
//! through it: its registrations are over, and only its own thread moved bytes. The memory's name is
//! gone at once: a process that ends before then leaves nothing behind.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{raw::Nic, slots::Slots};

/// Longer than any peer takes to miss an engine by default.
const REST: Duration = Duration::from_secs(10);

struct Buried {
    since: Instant,
    // Closed first.
    _nic: Nic,
    _slots: [Slots; 3],
}

struct Yard {
    /// Endpoints with shared queues that are in use.
    live: usize,
    graves: Vec<Buried>,
}

static YARD: Mutex<Yard> = Mutex::new(Yard { live: 0, graves: Vec::new() });

/// An endpoint is in use from now on, until it is buried.
pub(super) fn born(nic: &Nic) {
    if nic.shares_queues() {
        YARD.lock().live += 1;
    }
}

/// Closes an endpoint, now or when it is safe, and frees its memory after that.
pub(super) fn bury(nic: Nic, mut slots: [Slots; 3]) {
    slots.iter_mut().for_each(Slots::unregister);
    let mut yard = YARD.lock();
    if nic.shares_queues() {
        nic.unlink();
        yard.live -= 1;
        yard.graves.push(Buried { since: Instant::now(), _nic: nic, _slots: slots });
    } else {
        drop(nic);
        drop(slots);
    }
    match yard.live {
        0 => yard.graves.clear(),
        _ => yard.graves.retain(|b| b.since.elapsed() < REST),
    }
}
