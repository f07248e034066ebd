//! Deferred close of endpoints and of the memory they use.
//!
//! The shm provider keeps an endpoint's queues in memory that peers of the same process access
//! directly. If such an endpoint is closed while a peer still uses its address, the peer's next
//! call crashes the process. It therefore stays open, unpolled, until every peer has noticed the
//! loss, or until no endpoint of this process is left. Nothing can land through it: its
//! registrations have ended, and only its own thread moved bytes. Its name is unlinked at once, so
//! a process that ends earlier leaves nothing behind.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use super::{raw::Nic, read_buffers::ReadBuffer, slots::Slots};
use crate::{locks::Mutex, process::PerProcess};

/// Time until a closed endpoint is freed: longer than the default peer timeout.
const CLOSE_AFTER: Duration = Duration::from_secs(10);

struct ClosedEndpoint {
    since: Instant,
    // Dropped before the slots.
    _nic: Nic,
    _slots: [Slots; 3],
}

#[derive(Default)]
struct DeferredClose {
    /// Open endpoints with shared queues.
    open: usize,
    closed: Vec<ClosedEndpoint>,
}

static DEFERRED: PerProcess<Mutex<DeferredClose>> = PerProcess::empty();

/// Counts an endpoint as open, until [`close`].
pub(super) fn opened(nic: &Nic) {
    if nic.shares_queues() {
        DEFERRED.get_or_default().lock().open += 1;
    }
}

/// Keeps an endpoint that can't be closed safely, and its memory, until the process ends. Only its
/// own thread moved bytes, so nothing lands through it any more.
pub(super) fn never_close(nic: Nic, mut slots: [Slots; 3], buffers: HashMap<u32, ReadBuffer>) {
    slots.iter_mut().for_each(Slots::unregister);
    tracing::warn!("a read is under way, so an endpoint of libfabric's tcp provider stays open");
    std::mem::forget((nic, slots, buffers));
}

/// Closes an endpoint now or when it is safe, and frees its memory after that.
pub(super) fn close(nic: Nic, mut slots: [Slots; 3]) {
    slots.iter_mut().for_each(Slots::unregister);
    let mut deferred = DEFERRED.get_or_default().lock();
    if nic.shares_queues() {
        nic.unlink();
        deferred.open -= 1;
        deferred.closed.push(ClosedEndpoint { since: Instant::now(), _nic: nic, _slots: slots });
    } else {
        drop(nic);
        drop(slots);
    }
    match deferred.open {
        0 => deferred.closed.clear(),
        _ => deferred.closed.retain(|b| b.since.elapsed() < CLOSE_AFTER),
    }
}
