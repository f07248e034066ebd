//! Requests of one small work request, which most software transports carry out within the post.

use super::{
    recorder::SMALL,
    route::{PeerKey, PeerState},
    transfer::{Transfer, TransferKey},
    Group, Rails, Submitted,
};
use crate::{
    api::{Priority, Span},
    domain::{Post, WorkRequest},
    time::Time,
};

/// Describes a request, as [`Group::open`] and [`Group::seal`] take it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestInfo {
    pub name: &'static str,
    pub span: Span,
    pub priority: Priority,
    pub timeout: std::time::Duration,
}

impl Group {
    /// Posts a request of one work request at once, if it is small and the peer has one link,
    /// with room, whose work the ledger does not keep. If the link carries it out within the call,
    /// the request needs no entry among the transfers, and `clock` is read only for requests that
    /// the recorder keeps. `None` if nothing happened: the caller opens the request.
    #[inline]
    pub fn post_alone(
        &mut self,
        (peer, wr): (PeerKey, &WorkRequest),
        info: RequestInfo,
        clock: impl Fn() -> Time,
        rails: &mut Rails,
    ) -> Option<Submitted> {
        let bytes = wr.bytes();
        let route = &mut self.peers[peer as usize];
        let link =
            route.direct.filter(|link| !link.keeps_work && bytes < SMALL && link.takes(wr))?;
        if route.state != PeerState::Up || route.backlog.blocks(info.priority) {
            return None;
        }
        let begun = self.recorder.samples(info.span).then(&clock);
        let serial = (self.recorder.opened + 1) as u32;
        let key = TransferKey { slot: self.transfers.vacant_key() as u32, serial };
        // A refusal has no effect, and is found again by the slower way, which reports it.
        let post = rails[link.rail].post_alone(link.id, Transfer::token(key, None), wr).ok()?;
        match (post, begun) {
            (Post::Full, _) => return None,
            (Post::Done, None) => {
                route.tally.posted(link.rail, info.priority, bytes, false);
                self.recorder.opened += 1;
                return Some(Submitted::Done(Ok(())));
            }
            (Post::Done, Some(_)) | (Post::Queued, _) => {}
        }
        route.tally.posted(link.rail, info.priority, bytes, false);
        let now = begun.unwrap_or_else(clock);
        let opened = self.open(now, (info.name, info.span), info.priority);
        debug_assert_eq!(opened, key);
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.peer = peer;
        self.recorder.part(&mut transfer.flight, peer, wr.count(), bytes);
        transfer.slice_posted((now, link.rail), (bytes, 0), None, post == Post::Queued);
        Some(self.seal((now, now), key, info.timeout))
    }
}
