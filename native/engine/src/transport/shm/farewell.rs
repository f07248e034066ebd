//! How an engine that is closed leaves its peers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use smallvec::smallvec;

use super::{
    control::{Control, Frame},
    link::Link,
    ShmDomain,
};
use crate::{
    domain::{Aperture, DomainError},
    time::Time,
};

/// How long `close` waits for peers to let go of memory that isn't the engine's own.
const FAREWELL: Duration = Duration::from_secs(1);

/// Connections of engines that are closed to peers whose memory a device may store to yet, and where.
static STORED_TO: Mutex<Vec<(Control, Vec<Arc<Aperture>>)>> = Mutex::new(Vec::new());

/// Ends the connections over which nothing is stored any more; asked whenever a device has ended somewhere.
pub(super) fn end_what_is_over() {
    let over: Vec<_> = {
        let mut stored_to = STORED_TO.lock();
        let is_over = |apertures: &[Arc<Aperture>]| apertures.iter().all(|a| a.stays() == 0);
        stored_to.extract_if(.., |(_, apertures)| is_over(apertures)).collect()
    };
    for (mut control, _) in over {
        control.finish();
    }
}

impl ShmDomain {
    /// Tells all peers, and waits for those that could still write to memory that isn't ours.
    pub(super) fn say_goodbye(&mut self) {
        let mut out = Vec::new();
        for (_, link) in &mut self.links {
            let reason = "its engine was closed".to_owned();
            let _ = link.send(&Frame::Bye { reason: reason.clone() }, smallvec![]);
            link.closing.get_or_insert(DomainError::LinkDown(reason));
            link.imports.shut("this engine was closed");
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
                    // The peer waits for the end of the connection, which comes when the device has ended.
                    tracing::warn!(
                        "a device stores to a peer's memory yet; the peer keeps it until then"
                    );
                    let apertures = link.imports.entered().map(Arc::clone).collect();
                    STORED_TO.lock().push((link.control, apertures));
                }
            }
        }
        // It may have ended before it could be found there.
        end_what_is_over();
    }
}
