//! The group layer: requests become slices on links, completions become results.
//!
//! A state machine without threads, clocks or sockets: time comes in as a value, work goes out
//! through the [`Domain`] seam, results through [`Sink`]. The same code runs under a worker thread
//! and inside the simulator.

mod route;
mod slices;
mod transfer;

use std::collections::{BTreeSet, HashMap};

use slab::Slab;

use crate::{
    api::{EngineAddress, EngineId},
    domain::{Completion, Count, Domain, DomainError, LinkId, Token, WorkRequest},
    engine::HandleRef,
    time::Time,
    EngineError,
};

pub(crate) use route::PeerKey;
pub use route::Verdict;
use route::{Route, State};
pub(crate) use slices::BoundOp;
use slices::{post_slices, Posted};
use transfer::Transfer;
pub(crate) use transfer::TransferKey;

/// The domains of a group, in order of preference.
pub(crate) type Rails = [Box<dyn Domain>];

/// Where the group's events go.
pub(crate) trait Sink {
    fn counted(&self, count: Count);
    fn message(&self, from: EngineId, message: Box<[u8]>);
    fn finished(&self, handle: HandleRef, result: Result<(), EngineError>);
    fn peer_lost(&self, peer: EngineId, error: &EngineError);
    fn region_quiet(&self, rail: usize, index: u32);
    /// Memory that a finished transfer no longer needs; not to be dropped under the group's lock.
    fn release(&self, keep: Vec<crate::engine::Region>);
}

/// What became of a request when `seal` was called.
pub(crate) enum Submitted {
    Done(Result<(), EngineError>),
    Pending(TransferKey),
}

#[derive(Default)]
pub(crate) struct Group {
    peers: Slab<Route>,
    by_id: HashMap<EngineId, PeerKey>,
    links: HashMap<(usize, LinkId), PeerKey>,
    transfers: Slab<Transfer>,
    serial: u32,
    deadlines: BTreeSet<(Time, TransferKey)>,
    /// Routes whose backlog may be able to move.
    backlogged: usize,
}

impl Group {
    /// The peer with this address; made known if it wasn't.
    pub fn peer(&mut self, address: &EngineAddress) -> PeerKey {
        if let Some(key) = self.by_id.get(&address.id) {
            return *key;
        }
        let key = self.peers.insert(Route::new(address.clone())) as PeerKey;
        self.by_id.insert(address.id, key);
        key
    }

    /// Begins a request; `push` its operations, then `seal` it.
    pub fn open(&mut self, name: &'static str) -> TransferKey {
        self.serial = self.serial.wrapping_add(1);
        let serial = self.serial;
        let slot = self.transfers.insert(Transfer::new(name, serial)) as u32;
        TransferKey { slot, serial }
    }

    /// Posts as much of an operation as its link takes now; the rest waits its turn.
    pub fn push(
        &mut self,
        now: Time,
        key: TransferKey,
        mut op: BoundOp,
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        let peer = op.peer;
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.peer = peer;
        let route = &mut self.peers[peer as usize];
        if route.state == State::Up && route.backlog.is_empty() {
            let (rail, link) = route.link();
            match post_slices(key, transfer, &mut op, &mut *rails[rail], link) {
                Posted::All => return,
                Posted::Failed(e) => {
                    transfer.fail(route.blame(rails[rail].kind(), transfer.name, e));
                    return;
                }
                Posted::Part => {}
            }
        }
        transfer.waiting += 1;
        route.backlog.push_back((key, op));
        self.backlogged += 1;
        if matches!(route.state, State::Idle | State::Lost) {
            self.connect(now, peer, rails, sink);
        }
    }

    /// Ends the request's description. `deadline` counts only if it is still going on.
    pub fn seal(&mut self, now: Time, key: TransferKey, timeout: std::time::Duration) -> Submitted {
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.sealed = true;
        if transfer.is_over() {
            let transfer = self.transfers.remove(key.slot as usize);
            return Submitted::Done(transfer.error.map_or(Ok(()), Err));
        }
        transfer.deadline = now.after(timeout);
        transfer.timeout = timeout;
        if transfer.deadline != Time::NEVER {
            self.deadlines.insert((transfer.deadline, key));
        }
        Submitted::Pending(key)
    }

    /// Whom to tell when a pending request is over, and what must stay alive until then.
    pub fn attach(
        &mut self,
        key: TransferKey,
        handle: HandleRef,
        keep: Vec<crate::engine::Region>,
    ) {
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.handle = Some(handle);
        transfer.keep = keep;
    }

    /// Makes sure that a peer is watched: connected, or found lost.
    pub fn watch(
        &mut self,
        now: Time,
        peer: PeerKey,
        rails: &mut Rails,
        sink: &dyn Sink,
    ) -> Result<(), EngineError> {
        let route = &mut self.peers[peer as usize];
        match route.state {
            State::Up | State::Connecting => Ok(()),
            State::Idle => {
                self.connect(now, peer, rails, sink);
                Ok(())
            }
            State::Lost => {
                // A lost peer may be back on the same life (a broken cable): look again.
                self.connect(now, peer, rails, sink);
                let route = &self.peers[peer as usize];
                match (&route.state, &route.lost) {
                    (State::Lost, Some(e)) => Err(e.clone()),
                    _ => Ok(()),
                }
            }
        }
    }

    pub fn on_completion(
        &mut self,
        now: Time,
        rail: usize,
        completion: Completion,
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        match completion {
            Completion::Count(count) => sink.counted(count),
            Completion::Done { link, token, result } => {
                let peer = self.links.get(&(rail, link)).copied();
                self.on_done(now, (rail, peer), token, result, rails, sink);
            }
            Completion::Message { link, message } => {
                if let Some(peer) = self.links.get(&(rail, link)) {
                    sink.message(self.peers[*peer as usize].address.id, message);
                }
            }
            Completion::LinkUp { link, peer, note } => {
                let key = self.peer(&peer.address);
                self.links.insert((rail, link), key);
                let route = &mut self.peers[key as usize];
                route.up(rail, link, note);
                self.drain_backlog(key, rails, sink);
            }
            Completion::LinkDown { link, cause } => {
                self.on_link_down(now, rail, link, cause, rails, sink)
            }
            Completion::RegionQuiet { index } => sink.region_quiet(rail, index),
        }
    }

    /// Moves backlogs on and lets deadlines strike. Call after polling.
    pub fn progress(&mut self, now: Time, rails: &mut Rails, sink: &dyn Sink) -> bool {
        let mut moved = false;
        if self.backlogged > 0 {
            for key in 0..self.peers.capacity() {
                let Some(route) = self.peers.get(key) else { continue };
                if route.state == State::Up && !route.backlog.is_empty() {
                    moved |= self.drain_backlog(key as PeerKey, rails, sink);
                }
            }
        }
        while let Some((_, key)) = self.deadlines.first().copied().filter(|(t, _)| *t <= now) {
            moved = true;
            self.expire(key, sink);
        }
        moved
    }

    pub fn next_deadline(&self) -> Time {
        self.deadlines.first().map_or(Time::NEVER, |(t, _)| *t)
    }

    /// Fails whatever is left, once and for all.
    pub fn close(&mut self, sink: &dyn Sink) {
        for (_, route) in &mut self.peers {
            route.backlog.clear();
            route.state = State::Lost;
        }
        self.backlogged = 0;
        self.deadlines.clear();
        for mut transfer in std::mem::take(&mut self.transfers) {
            transfer.1.fail(EngineError::Closed);
            transfer.1.deliver(sink);
        }
        self.links.clear();
    }

    pub fn explain(&self, peer: PeerKey, rails: &Rails) -> (Option<String>, Vec<Verdict>) {
        self.peers[peer as usize].explain(rails)
    }

    pub fn kind(&self, peer: PeerKey, rails: &Rails) -> Option<crate::api::TransportKind> {
        let route = self.peers.get(peer as usize)?;
        (route.state == State::Up).then(|| rails[route.link().0].kind())
    }

    fn on_done(
        &mut self,
        now: Time,
        (rail, peer): (usize, Option<PeerKey>),
        token: Token,
        result: Result<(), DomainError>,
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        let key = TransferKey { slot: token.slot, serial: token.serial };
        let transfer = self.transfers.get_mut(key.slot as usize);
        let Some(transfer) = transfer.filter(|t| t.serial == key.serial) else { return };
        transfer.outstanding -= 1;
        if let Err(e) = result {
            let route = &self.peers[peer.unwrap_or(transfer.peer) as usize];
            transfer.fail(route.blame(rails[rail].kind(), transfer.name, e));
        }
        if let Some((peer, count)) = transfer.confirmed(token.part) {
            let op = BoundOp::new(peer, WorkRequest::Count(count));
            self.push(now, key, op, rails, sink);
        }
        self.settle(key, sink);
    }

    /// Delivers a transfer's result if it has one, and forgets it when nothing of it is left.
    fn settle(&mut self, key: TransferKey, sink: &dyn Sink) {
        let transfer = &mut self.transfers[key.slot as usize];
        if transfer.error.is_some() && transfer.waiting > 0 {
            self.purge(key);
        }
        let transfer = &mut self.transfers[key.slot as usize];
        if transfer.sealed && transfer.is_over() {
            self.deadlines.remove(&(transfer.deadline, key));
            let mut transfer = self.transfers.remove(key.slot as usize);
            transfer.deliver(sink);
        }
    }

    /// Takes what a failed transfer has not posted yet out of the backlogs.
    fn purge(&mut self, key: TransferKey) {
        for (_, route) in &mut self.peers {
            let before = route.backlog.len();
            route.backlog.retain(|(k, _)| *k != key);
            self.backlogged -= before - route.backlog.len();
        }
        self.transfers[key.slot as usize].waiting = 0;
    }

    fn expire(&mut self, key: TransferKey, sink: &dyn Sink) {
        let Some(transfer) = self.transfers.get_mut(key.slot as usize) else { return };
        self.deadlines.remove(&(transfer.deadline, key));
        let route = &self.peers[transfer.peer as usize];
        let error = EngineError::Timeout {
            op: transfer.name,
            peer: route.address.label(),
            missing: 0,
            after: transfer.timeout,
            quiesced: transfer.outstanding == 0,
        };
        transfer.fail(error);
        // Both sides have their result by the deadline (IC-4); what is on its way keeps its memory
        // until its link lets go of it (MR-1).
        transfer.tell(sink);
        self.settle(key, sink);
    }

    fn drain_backlog(&mut self, peer: PeerKey, rails: &mut Rails, sink: &dyn Sink) -> bool {
        let mut moved = false;
        loop {
            let route = &mut self.peers[peer as usize];
            if route.state != State::Up {
                return moved;
            }
            let Some((key, mut op)) = route.backlog.pop_front() else { return moved };
            let (rail, link) = route.link();
            let transfer = &mut self.transfers[key.slot as usize];
            match post_slices(key, transfer, &mut op, &mut *rails[rail], link) {
                Posted::Part => {
                    route.backlog.push_front((key, op));
                    return moved;
                }
                Posted::All => {}
                Posted::Failed(e) => {
                    let error = route.blame(rails[rail].kind(), transfer.name, e);
                    transfer.fail(error);
                }
            }
            moved = true;
            transfer.waiting -= 1;
            self.backlogged -= 1;
            self.settle(key, sink);
        }
    }

    /// Tries the next transport that may reach a peer; none left means that it is lost.
    fn connect(&mut self, now: Time, peer: PeerKey, rails: &mut Rails, sink: &dyn Sink) {
        let route = &mut self.peers[peer as usize];
        if route.state != State::Connecting {
            route.begin(rails);
        }
        while let Some(rail) = route.untried.pop_front() {
            match rails[rail].connect(now, &route.address) {
                Ok(link) => {
                    route.trying = Some((rail, link));
                    return;
                }
                Err(e) => route.failed(rails[rail].kind(), e),
            }
        }
        let error = route.unreachable();
        self.lose(peer, error, sink);
    }

    fn on_link_down(
        &mut self,
        now: Time,
        rail: usize,
        link: LinkId,
        cause: DomainError,
        rails: &mut Rails,
        sink: &dyn Sink,
    ) {
        if let Some(peer) = self.links.remove(&(rail, link)) {
            let route = &mut self.peers[peer as usize];
            if route.down(rail, link) {
                let error =
                    EngineError::lost(route.address.label(), rails[rail].kind(), cause.to_string());
                self.lose(peer, error, sink);
            }
            return;
        }
        let trying = self.peers.iter().find(|(_, r)| r.trying == Some((rail, link)));
        if let Some((peer, _)) = trying {
            let route = &mut self.peers[peer];
            route.trying = None;
            route.failed(rails[rail].kind(), cause);
            if route.state == State::Connecting {
                self.connect(now, peer as PeerKey, rails, sink);
            }
        }
    }

    fn lose(&mut self, peer: PeerKey, error: EngineError, sink: &dyn Sink) {
        let route = &mut self.peers[peer as usize];
        route.state = State::Lost;
        route.lost = Some(error.clone());
        let id = route.address.id;
        let backlog = std::mem::take(&mut route.backlog);
        self.backlogged -= backlog.len();
        let mut keys: Vec<_> = backlog.into_iter().map(|(key, _)| key).collect();
        for key in &keys {
            let transfer = &mut self.transfers[key.slot as usize];
            transfer.waiting -= 1;
            transfer.fail(error.clone());
        }
        keys.dedup();
        for key in keys {
            if self.transfers.get(key.slot as usize).is_some_and(|t| t.serial == key.serial) {
                self.settle(key, sink);
            }
        }
        sink.peer_lost(id, &error);
    }
}
