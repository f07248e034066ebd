//! Closing the engine's links.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use smallvec::smallvec;

use super::{
    control_socket::{ControlSocket, Frame},
    link::Link,
    ShmDomain,
};
use crate::{
    domain::{DomainError, PeerMapping},
    locks::Mutex,
    process::PerProcess,
    time::Time,
};

/// Time that `close` waits for peers to release exported memory.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

type ClosedLink = (ControlSocket, Vec<Arc<PeerMapping>>);

/// Connections of closed engines to peers whose memory a device may still store to.
static CLOSED_WITH_STORES: PerProcess<Mutex<Vec<ClosedLink>>> = PerProcess::empty();

/// Closes the connections over which nothing is stored any more. Called whenever a device has
/// finished.
pub(super) fn finish_closed_links() {
    let over: Vec<_> = {
        let mut closed = CLOSED_WITH_STORES.get_or_default().lock();
        let is_over = |peer_mappings: &[Arc<PeerMapping>]| {
            peer_mappings.iter().all(|a| a.active_stores() == 0)
        };
        closed.extract_if(.., |(_, peer_mappings)| is_over(peer_mappings)).collect()
    };
    for (mut control, _) in over {
        control.finish();
    }
}

impl ShmDomain {
    /// Tells all peers, and waits for those that can still write to exported memory.
    pub(super) fn close_links(&mut self) {
        let mut out = Vec::new();
        for (_, link) in &mut self.links {
            let reason = "its engine was closed".to_owned();
            let _ = link.send(&Frame::Close { reason: reason.clone() }, smallvec![]);
            link.closing.get_or_insert(DomainError::LinkDown(reason));
            link.imports.close_peer_mappings("this engine was closed");
        }
        let start = Instant::now();
        let exported = |l: &Link| !l.exported.is_empty();
        while !self.retiring.is_empty()
            || self.links.iter().any(|(_, l)| exported(l) || l.imports.has_stores())
        {
            if start.elapsed() > RELEASE_TIMEOUT {
                break;
            }
            while let Some(job) = self.pool.done.pop() {
                self.finish_job(&job, &mut out);
            }
            self.poll_sockets_for(Time::now(), Duration::from_millis(20), &mut out);
        }
        let unreleased = self.links.iter().flat_map(|(_, l)| &l.exported).copied();
        self.kept = unreleased.chain(self.retiring.keys().copied()).collect();
        if !self.kept.is_empty() {
            // MR-1: it is unknown whether the peers have let go, so the memory is never freed.
            tracing::warn!("a peer did not release this engine's memory in time; leaking it");
            let mut book = std::mem::take(&mut self.book);
            self.retiring.drain().for_each(|(_, region)| book.insert(&region.memory));
            book.keep_for_good();
        }
        for mut link in self.links.drain() {
            match link.imports.has_stores() {
                // No copy is under way. A child process may hold the socket open, so shut it down.
                false => link.control.finish(),
                true => {
                    // The peer waits for the end of the connection, which follows when the device
                    // has finished.
                    tracing::warn!(
                        "a device still stores to a peer's memory; the peer keeps it until then"
                    );
                    let peer_mappings =
                        link.imports.peer_mappings_in_use().map(Arc::clone).collect();
                    let closed = CLOSED_WITH_STORES.get_or_default();
                    closed.lock().push((link.control, peer_mappings));
                }
            }
        }
        // The device may have finished before its connection was in the list.
        finish_closed_links();
    }
}
