//! Requests of small writes to one counter of one peer, which a transport that copies by itself
//! carries out within the post.

use smallvec::SmallVec;

use super::{
    recorder::SMALL,
    route::{PeerKey, PeerState},
    transfer::{Transfer, TransferKey},
    Group, Rails, Submitted,
};
use crate::{
    api::{Priority, Span},
    domain::{Count, Post, SmallWrite},
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

/// Writes of a small request that move bytes; usually one.
pub(crate) type SmallWrites = SmallVec<[SmallWrite; 1]>;

/// A request of small writes to one peer, all with the same immediate or without.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SmallRequest {
    peer: PeerKey,
    imm: Option<u32>,
    operations: u32,
    pub bytes: u64,
}

impl SmallRequest {
    pub fn new(peer: PeerKey, imm: Option<u32>) -> Self {
        Self { peer, imm, operations: 0, bytes: 0 }
    }

    /// Adds a write; false if it does not belong to the request.
    #[inline]
    pub fn add(&mut self, peer: PeerKey, imm: Option<u32>, len: u64) -> bool {
        self.operations += 1;
        let belongs = peer == self.peer && imm == self.imm && len < SMALL - self.bytes;
        self.bytes += if belongs { len } else { 0 };
        belongs
    }
}

impl Group {
    /// Posts a small request at once, if the peer has one link, with room, whose work the ledger
    /// does not keep. If the link carries it out within the call, the request needs no entry among
    /// the transfers, one record counts all its writes, and `clock` is read only for requests that
    /// the recorder keeps. `None` if nothing was counted: the caller opens the request.
    #[inline]
    pub fn post_small(
        &mut self,
        (request, writes): (SmallRequest, &[SmallWrite]),
        info: RequestInfo,
        clock: impl Fn() -> Time,
        rails: &mut Rails,
    ) -> Option<Submitted> {
        let SmallRequest { peer, imm, operations, bytes } = request;
        let route = &mut self.peers[peer as usize];
        let link = route.direct.filter(|link| !link.keeps_work)?;
        if route.state != PeerState::Up || route.backlog.blocks(info.priority) {
            return None;
        }
        let begun = self.recorder.samples(info.span).then(&clock);
        let serial = (self.recorder.opened + 1) as u32;
        let key = TransferKey { slot: self.transfers.vacant_key() as u32, serial };
        let count = imm.map(|imm| Count { imm, n: operations });
        let token = Transfer::token(key, None);
        let post = rails[link.rail].write_small(link.id, token, writes, count)?;
        route.tally.posted(link.rail, info.priority, (operations, bytes), false);
        if (post, begun) == (Post::Done, None) {
            self.recorder.opened += 1;
            return Some(Submitted::Done(Ok(())));
        }
        let now = begun.unwrap_or_else(clock);
        let opened = self.open(now, (info.name, info.span), info.priority);
        debug_assert_eq!(opened, key);
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.peer = peer;
        self.recorder.part(&mut transfer.flight, peer, count, bytes);
        transfer.slice_posted((now, link.rail), (bytes, 0), None, post == Post::Queued);
        transfer.flight.slices = operations;
        Some(self.seal((now, now), key, info.timeout))
    }
}
