//! How an engine that is closed leaves its peers.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::smallvec;

use super::{
    control::{Control, Frame},
    link::Link,
    ShmDomain,
};
use crate::{domain::DomainError, time::Time};

/// How long `close` waits for peers to let go of memory that isn't the engine's own.
const FAREWELL: Duration = Duration::from_secs(1);

/// Connections to peers whose memory a device may store to for ever.
static STORED_TO: Mutex<Vec<Control>> = Mutex::new(Vec::new());

impl ShmDomain {
    /// Tells all peers, and waits for those that could still write to memory that isn't ours.
    pub(super) fn say_goodbye(&mut self) {
        let mut out = Vec::new();
        for (_, link) in &mut self.links {
            let reason = "its engine was closed".to_owned();
            let _ = link.send(&Frame::Bye { reason: reason.clone() }, smallvec![]);
            link.closing.get_or_insert(DomainError::LinkDown(reason));
            link.imports.shut();
        }
        let start = Instant::now();
        let exported = |l: &Link| !l.exported.is_empty();
        while self.links.iter().any(|(_, l)| exported(l) || l.imports.is_entered()) {
            if start.elapsed() > FAREWELL {
                break;
            }
            while let Some(job) = self.pool.done.pop() {
                self.finish_job(&job, &mut out);
            }
            self.look_for(Time::now(), Duration::from_millis(20), &mut out);
        }
        if self.links.iter().any(|(_, l)| exported(l)) {
            // MR-1: it can't be shown that they have let go, so the memory is never given back.
            tracing::warn!("a peer did not let go of this engine's memory in time; it is kept");
            std::mem::take(&mut self.book).keep_for_good();
        }
        for mut link in self.links.drain() {
            match link.imports.is_entered() {
                // No copy is under way any more. A child of this process may hold the sockets open: say it.
                false => link.control.finish(),
                true => {
                    // The peer waits for its end, which comes with that of this process, and of its kernels.
                    tracing::warn!(
                        "a device stores to a peer's memory yet; the peer keeps it while this process lives"
                    );
                    STORED_TO.lock().push(link.control);
                }
            }
        }
    }
}
