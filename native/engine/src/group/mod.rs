//! The group layer: requests become slices on links, completions become results.
//!
//! The group is a state machine without threads, clocks or sockets. Time comes in as a value, work
//! goes out through [`Domain`], results through [`GroupEvents`]. The same code runs under a worker
//! thread and in the simulator.

mod alone;
mod attempts;
mod backlog;
mod cancel;
mod credit;
mod delivered;
mod eligible_links;
mod heal;
mod ledger;
mod links;
mod messages;
mod peers;
pub mod policy;
mod rail_probes;
mod recorder;
mod route;
mod slices;
mod spray;
mod timers;
mod transfer;
mod view;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use slab::Slab;
use smallvec::SmallVec;

use crate::{
    api::{EngineId, Priority, Span, Spray},
    domain::{Completion, Count, Domain, DomainError, LinkId, Receipts, Token},
    flight::EventKind,
    time::Time,
    EngineError,
};

pub(crate) use alone::{RequestInfo, SmallRequest, SmallWrites};
use attempts::RailPair;
use backlog::{Backlog, Waiting};
use credit::Credits;
use ledger::Ledger;
#[cfg(any(test, fuzzing))]
pub(crate) use messages::fuzz_group_message;
#[cfg(test)]
pub(crate) use messages::sample_group_message;
use peers::Peers;
use recorder::Recorder;
use route::PeerState;
pub use route::TransportVerdict;
pub(crate) use route::{PeerHold, PeerKey};
use slices::{post_slices, PostOutcome};
pub(crate) use slices::{BoundOp, SharedCount};
use timers::{Timer, Timers};
use transfer::Transfer;
pub(crate) use transfer::TransferKey;

/// The domains of a group, in order of preference.
pub(crate) type Rails = [Box<dyn Domain>];

/// Receives the group's events.
pub(crate) trait GroupEvents {
    fn counted(&self, now: Time, count: Count);
    fn message(&self, from: EngineId, message: Box<[u8]>);
    fn peer_lost(&self, now: Time, peer: EngineId, error: &EngineError);
    fn region_released(&self, rail: usize, index: u32);
}

/// The waiter for a transfer and the owner of its memory, in the layer above.
pub(crate) trait OperationCompletion: Send + Sync {
    /// Reports the result, once. `at` is the index of the request within its batch.
    fn resolve(&self, at: u32, result: Result<(), EngineError>);
    /// Reports that nothing of a transfer is under way any more. `proven`: no byte of it can still
    /// land (MR-1). `result` is set unless `resolve` has reported it.
    fn release(&self, at: u32, proven: bool, result: Option<Result<(), EngineError>>);
    /// Takes the group's reference after `release`.
    fn recycle(self: Arc<Self>) {}
}

/// The waiter, and the index of the request within its batch.
pub(crate) type CompletionHandle = (Arc<dyn OperationCompletion>, u32);

/// Limits from the configuration, apart from the list of rails.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Policy {
    /// The configuration names a fallback transport (RS-2).
    pub names_fallback: bool,
    /// Longest time after the first lost rail during which a dead peer may look alive on other
    /// rails.
    pub peer_timeout: std::time::Duration,
    pub spray: Spray,
    /// Whether lost work is sent again and lost links are replaced.
    pub heal: bool,
    /// Bytes that may be under way on one rail.
    pub rail_window: u64,
    /// Bytes that all peers together may have under way to this engine.
    pub receive_window: u64,
    /// Transfers that the flight recorder keeps; 0 turns it off.
    pub records: usize,
}

impl Policy {
    /// The receipts of a rail's links; none if healing is off.
    #[inline]
    pub fn receipts(self, rail: &dyn Domain) -> Receipts {
        match self.heal {
            true => rail.receipts(),
            false => Receipts::None,
        }
    }
}

/// The state of a request after `seal`.
pub(crate) enum Submitted {
    Done(Result<(), EngineError>),
    Pending(TransferKey),
}

#[derive(Default)]
pub(crate) struct Group {
    peers: Peers,
    links: HashMap<(usize, LinkId), PeerKey>,
    transfers: Slab<Transfer>,
    timers: Timers,
    ledger: Ledger,
    credits: Credits,
    /// Whether [`Timer::Stalls`] is set.
    checks_stalls: bool,
    policy: Policy,
    /// Operations in backlogs.
    backlogged: usize,
    /// Peers with a backlog; some may have become empty.
    waiters: BTreeSet<PeerKey>,
    /// When a backlog may move although nothing completes; found anew by each `progress`.
    move_at: Time,
    /// The peer whose backlog moves first.
    first: usize,
    recorder: Recorder,
}

/// A peer whose backlog may move: bytes under way to it, and its place in turn.
type Turn = ((u64, u64), usize, PeerKey);

impl Group {
    pub fn new(policy: Policy) -> Self {
        let ledger = Ledger::new(policy.rail_window);
        let recorder = Recorder::new(policy.records);
        Self { policy, ledger, move_at: Time::NEVER, recorder, ..Self::default() }
    }

    /// Begins a request. The caller then `push`es its operations and `seal`s it.
    pub fn open(
        &mut self,
        queued: Time,
        (name, span): (&'static str, Span),
        priority: Priority,
    ) -> TransferKey {
        let flight = self.recorder.open(queued, span);
        let serial = flight.id as u32;
        let slot = self.transfers.insert(Transfer::new(name, serial, priority, flight)) as u32;
        TransferKey { slot, serial }
    }

    /// Posts as much of an operation as its links accept now, and queues the rest.
    pub fn push(
        &mut self,
        now: Time,
        key: TransferKey,
        mut op: BoundOp,
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        let peer = op.peer;
        self.recorder.set_now(now);
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.peer = peer;
        if !transfer.sealed {
            let (count, bytes) = op.load();
            self.recorder.part(&mut transfer.flight, peer, count, bytes);
        }
        op.join(transfer);
        let route = &mut self.peers[peer as usize];
        transfer.unposted += op.bytes();
        let priority = transfer.priority;
        let mut since = Time::NEVER;
        let ahead = op.ahead;
        if route.state == PeerState::Up && (ahead || !route.backlog.blocks(priority)) {
            let means = (rails as &mut Rails, &mut self.ledger);
            match post_slices((now, now), key, transfer, &mut op, route, means) {
                PostOutcome::All => return self.posted(now, peer, rails),
                PostOutcome::Failed(rail, e) => return self.fail(now, key, peer, (rails, rail, e)),
                PostOutcome::Part(deferral) => {
                    since = now;
                    self.move_at = self.move_at.min(deferral.until);
                    if deferral.bytes > 0 {
                        transfer.waits_for_room(route);
                    }
                }
            }
        }
        transfer.waiting += 1;
        let waiting = Waiting { key, op, since };
        match ahead {
            true => route.backlog.push_front(priority, waiting),
            false => route.backlog.push_back(priority, waiting),
        }
        self.backlogged += 1;
        self.waiters.insert(peer);
        match route.state {
            PeerState::Up => self.posted(now, peer, rails),
            PeerState::Idle | PeerState::Lost => self.connect(now, peer, rails, events),
            PeerState::Connecting => {}
        }
    }

    /// Ends the description of a request that `began` then. The deadline is set only if the request
    /// is still under way.
    pub fn seal(
        &mut self,
        (began, now): (Time, Time),
        key: TransferKey,
        timeout: std::time::Duration,
    ) -> Submitted {
        self.recorder.set_now(now);
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.sealed = true;
        if transfer.error.is_some() && transfer.waiting > 0 {
            self.purge(key);
        }
        let transfer = &mut self.transfers[key.slot as usize];
        if transfer.is_over() {
            // Recorded in place: memory that was just stored to is slow to move.
            if self.recorder.is_on() {
                if transfer.error.is_none() {
                    transfer.flight.acknowledged(now);
                }
                self.recorder.ended(transfer, true);
            }
            let transfer = self.transfers.remove(key.slot as usize);
            return Submitted::Done(transfer.error.map_or(Ok(()), Err));
        }
        transfer.deadline = began.after(timeout);
        transfer.timeout = timeout;
        if transfer.deadline != Time::NEVER {
            // The request has a result by then (IC-4).
            self.timers.set(transfer.deadline, Timer::Deadline(key));
        }
        Submitted::Pending(key)
    }

    /// Sets the waiter of a pending request.
    pub fn attach(&mut self, key: TransferKey, completion: CompletionHandle) {
        self.transfers[key.slot as usize].completion = Some(completion);
    }

    /// Watches a peer: connects to it, or reports its loss.
    pub fn watch(
        &mut self,
        now: Time,
        peer: PeerKey,
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) -> Result<(), EngineError> {
        self.recorder.set_now(now);
        let route = &mut self.peers[peer as usize];
        match route.state {
            PeerState::Up | PeerState::Connecting => Ok(()),
            PeerState::Idle => {
                self.connect(now, peer, rails, events);
                Ok(())
            }
            PeerState::Lost => {
                // A lost peer may be back in the same incarnation (a broken cable): connect again.
                self.connect(now, peer, rails, events);
                let route = &self.peers[peer as usize];
                match (&route.state, &route.lost) {
                    (PeerState::Lost, Some(e)) => Err(e.clone()),
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
        events: &dyn GroupEvents,
    ) {
        self.recorder.set_now(now);
        match completion {
            Completion::Count(count) => {
                self.recorder.arrived(now, rail, count);
                events.counted(now, count);
            }
            Completion::Done { link, token, result } => {
                self.on_done(now, (rail, link), token, result, rails, events);
            }
            Completion::Message { link, message } => match self.links.get(&(rail, link)) {
                Some(peer) => events.message(self.peers[*peer as usize].address.id, message),
                None => tracing::error!(rail, link, "a message came by a link that is not up"),
            },
            Completion::LinkUp { link, peer, endpoint, name, description } => {
                let key = self.peer(&peer.address);
                self.links.insert((rail, link), key);
                self.recorder.event(EventKind::LinkUp, key, Some(rail), || description.clone());
                let route = &mut self.peers[key as usize];
                // The caller's address may have been wrong; this one is authentic.
                route.address = peer.address;
                let peer_info = (description, peer.version);
                route.up(now, RailPair { rail, endpoint }, (link, name), peer_info, rails);
                for pair in route.take_failed(rails) {
                    self.timers.set(route.rail_probes.on_lost(now, pair), Timer::Probe(key));
                }
                self.query_lost_links(now, key, rails);
                self.drain_backlog(now, key, rails);
            }
            Completion::LinkDown { link, cause, receipt, unfinished } => {
                self.on_link_down(now, (rail, link), (cause, receipt, unfinished), rails, events)
            }
            Completion::Unused { peer, name, receipt } => {
                self.on_unused(now, &peer.address, (name, receipt), rails);
            }
            Completion::GroupFrame { link, frame } => {
                self.on_group_frame(now, (rail, link), &frame, rails, events);
            }
            Completion::RegionReleased { index } => events.region_released(rail, index),
        }
    }

    /// Whether `progress` has to post, or a timer was due at `began`.
    pub fn is_due(&self, began: Time) -> bool {
        self.backlogged > 0 || self.timers.next() <= began
    }

    /// Posts backlogs, and handles the timers that were due at `began`, before the last poll.
    pub fn progress(
        &mut self,
        (began, now): (Time, Time),
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) -> bool {
        let mut moved = false;
        self.recorder.set_now(now);
        self.move_at = Time::NEVER;
        if self.backlogged > 0 {
            // Peers share rails, so they take turns to be first.
            let n = self.peers.ends_at();
            self.first = (self.first + 1) % n.max(1);
            let mut ready: SmallVec<[Turn; 16]> = SmallVec::new();
            let peers = &self.peers;
            let waits =
                |key: &PeerKey| peers.get(*key as usize).is_some_and(|r| !r.backlog.is_empty());
            self.waiters.retain(waits);
            for key in &self.waiters {
                let route = &peers[*key as usize];
                if route.state != PeerState::Up {
                    continue;
                }
                let turn = (*key as usize + n - self.first) % n;
                match route.deferred_until(now, &self.ledger) {
                    Some(until) => self.move_at = self.move_at.min(until),
                    None => ready.push((route.under_way_where_room(&self.ledger), turn, *key)),
                }
            }
            // A slow receiver, to which others send as well, must not fill a rail's window. Nor must
            // two receivers each keep a rail: a rail of theirs that others fill would slow them down,
            // and the other would be idle.
            ready.sort_unstable();
            for (_, _, key) in ready {
                moved |= self.drain_backlog(now, key, rails);
            }
        }
        moved | self.handle_timers((began, now), rails, events)
    }

    /// Fails all transfers and forgets all links.
    pub fn close(&mut self, now: Time) {
        self.recorder.set_now(now);
        for (_, route) in self.peers.iter_mut() {
            route.backlog = Backlog::default();
            route.state = PeerState::Lost;
        }
        self.backlogged = 0;
        self.timers.clear();
        self.checks_stalls = false;
        self.ledger.clear();
        self.credits = Credits::default();
        self.move_at = Time::NEVER;
        for mut transfer in std::mem::take(&mut self.transfers) {
            // What is under way may still land at its peer.
            transfer.1.unproven |= transfer.1.outstanding > 0;
            transfer.1.fail(EngineError::Closed);
            self.recorder.ended(&mut transfer.1, false);
            transfer.1.deliver();
        }
        self.links.clear();
    }

    fn on_done(
        &mut self,
        now: Time,
        (rail, link): (usize, LinkId),
        token: Token,
        result: Result<(), DomainError>,
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        let (key, confirm) = match Ledger::is_slice(token) {
            false => Transfer::of_token(token),
            true => {
                let Some(slice) = self.ledger.take(token) else { return };
                let heals = self.policy.receipts(&*rails[rail]) != Receipts::None;
                let route = &mut self.peers[slice.peer as usize];
                route.ended(now, &slice, result.is_ok());
                if result.is_ok() {
                    self.recorder.slice_done(now, &slice);
                }
                if result.as_ref().is_err_and(DomainError::is_loss) && heals && slice.may_return() {
                    // The link goes down next.
                    return route.healing.add_failed(token, slice);
                }
                (slice.owner, slice.confirm)
            }
        };
        let transfer = self.transfers.get_mut(key.slot as usize);
        let Some(transfer) = transfer.filter(|t| t.serial == key.serial) else { return };
        transfer.flight.acknowledged(now);
        transfer.flight.timed |= Ledger::is_slice(token);
        if let Err(e) = result {
            transfer.unproven |= e.is_loss();
            let peer = self.links.get(&(rail, link)).copied().unwrap_or(transfer.peer);
            self.peers[peer as usize].tally.failed(rail, transfer.priority);
            self.fail(now, key, peer, (rails, rail, e));
        }
        self.part_over(now, key, confirm, rails, events);
    }

    /// Handles the end of a work request, whatever its result.
    fn part_over(
        &mut self,
        now: Time,
        key: TransferKey,
        confirm: Option<u32>,
        rails: &mut Rails,
        events: &dyn GroupEvents,
    ) {
        let transfer = &mut self.transfers[key.slot as usize];
        transfer.outstanding -= 1;
        if let Some(op) = confirm.and_then(|c| transfer.confirmed(c)) {
            self.push(now, key, op, rails, events);
        }
        self.settle(key);
    }

    /// Fails a transfer. If one of several rails was lost, the peer may be lost as well without the
    /// other rails having noticed (RS-4): the verdict waits for `peer_timeout`.
    fn fail(
        &mut self,
        now: Time,
        key: TransferKey,
        peer: PeerKey,
        (rails, rail, e): (&Rails, usize, DomainError),
    ) {
        let transfer = &mut self.transfers[key.slot as usize];
        let error = self.peers[peer as usize].blame(rails, rail, transfer.name, e);
        if matches!(error, EngineError::RailLost { .. }) && transfer.error.is_none() {
            let at = now.after(self.policy.peer_timeout);
            transfer.undecided = Some((peer, at));
            self.timers.set(at, Timer::Verdict(key));
        }
        transfer.fail(error);
    }

    /// Delivers the result of a transfer and forgets it, if nothing of it is left.
    fn settle(&mut self, key: TransferKey) {
        let transfer = &mut self.transfers[key.slot as usize];
        if transfer.error.is_some() && transfer.waiting > 0 {
            self.purge(key);
        }
        let transfer = &mut self.transfers[key.slot as usize];
        if transfer.sealed && transfer.is_over() {
            self.timers.stop(transfer.deadline, Timer::Deadline(key));
            self.recorder.ended(transfer, false);
            // In place: a transfer is large to move.
            transfer.deliver();
            self.transfers.remove(key.slot as usize);
        }
    }
}
