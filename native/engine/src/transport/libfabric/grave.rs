//! Endpoints that are done with, and the memory that they had in their hands.
//!
//! The shm provider keeps an endpoint's queues in memory that its peers in the same process use
//! directly and without asking: where such an endpoint is closed while a peer still believes in it,
//! the peer's next call crashes the process. So it is laid aside, unpolled, until every peer must
//! have noticed. Nothing can land in memory through it: its registrations are over, and only its own
//! thread moved bytes.

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

static GRAVES: Mutex<Vec<Buried>> = Mutex::new(Vec::new());

/// Closes an endpoint, now or when it is safe, and frees its memory after that.
pub(super) fn bury(nic: Nic, mut slots: [Slots; 3]) {
    slots.iter_mut().for_each(Slots::unregister);
    let mut graves = GRAVES.lock();
    graves.retain(|b| b.since.elapsed() < REST);
    if nic.shares_queues() {
        return graves.push(Buried { since: Instant::now(), _nic: nic, _slots: slots });
    }
    drop(nic);
    drop(slots);
}
