use std::time::Duration;

use smallvec::SmallVec;

use super::{
    policy::admit::urgent_at,
    recorder::FlightState,
    route::Route,
    slices::{BoundOp, SharedCount},
    CompletionHandle, PeerKey,
};
use crate::{
    api::Priority,
    domain::{Count, Token, WorkRequest},
    time::Time,
    EngineError,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TransferKey {
    pub slot: u32,
    /// Distinguishes successive users of a slot, so that a late completion never hits a later one.
    pub serial: u32,
}

/// A count that waits until all slices of its write are acknowledged (design section 4, *confirm*).
#[derive(Debug)]
pub(super) struct DeferredCount {
    peer: PeerKey,
    count: Option<Count>,
    /// The rail to which the write and its count are pinned.
    pin: Option<u8>,
    /// Slices posted and not acknowledged.
    left: u32,
    /// Operations with unposted slices.
    open: u32,
    tries: u8,
}

/// A request under way.
pub(super) struct Transfer {
    pub name: &'static str,
    pub serial: u32,
    pub priority: Priority,
    /// The peer of the latest operation, which errors of the whole request name.
    pub peer: PeerKey,
    /// Work requests posted and not completed.
    pub outstanding: u32,
    /// Operations in some backlog.
    pub waiting: u32,
    /// Unposted bytes.
    pub unposted: u64,
    pub sealed: bool,
    pub error: Option<EngineError>,
    /// The peer whose rail failed the transfer, and when the rail counts as lost alone.
    pub undecided: Option<(PeerKey, Time)>,
    pub completion: Option<CompletionHandle>,
    /// The result was reported, perhaps before all work was over.
    reported: bool,
    /// A link that carried a part was lost, and its other end has not reported that it is down.
    pub unproven: bool,
    pub deadline: Time,
    pub timeout: Duration,
    confirms: SmallVec<[DeferredCount; 1]>,
    /// Index of the latest confirm that several operations share.
    joint: u32,
    pub flight: FlightState,
}

impl Transfer {
    pub fn new(name: &'static str, serial: u32, priority: Priority, flight: FlightState) -> Self {
        Self {
            name,
            serial,
            priority,
            peer: 0,
            outstanding: 0,
            waiting: 0,
            unposted: 0,
            sealed: false,
            error: None,
            undecided: None,
            completion: None,
            reported: false,
            unproven: false,
            deadline: Time::NEVER,
            timeout: Duration::MAX,
            confirms: SmallVec::new(),
            joint: 0,
            flight,
        }
    }

    pub fn is_over(&self) -> bool {
        let confirming = || self.confirms.iter().any(|c| c.count.is_some());
        let result_known = match &self.error {
            Some(_) => self.undecided.is_none(),
            None => !confirming(),
        };
        self.outstanding == 0 && self.waiting == 0 && result_known
    }

    /// The peers to which it may still refer.
    pub fn peers(&self) -> impl Iterator<Item = PeerKey> + '_ {
        let undecided = self.undecided.map(|(peer, _)| peer);
        let confirming = self.confirms.iter().map(|c| c.peer);
        confirming.chain(undecided).chain([self.peer])
    }

    /// When it must be posted to meet its deadline.
    pub fn urgent_at(&self, now: Time, route: &Route) -> Time {
        match self.deadline {
            Time::NEVER => Time::NEVER,
            deadline => urgent_at(deadline, route.expects(now, self.unposted)),
        }
    }

    /// Records that an operation found no room in a window.
    pub fn waits_for_room(&mut self, route: &mut Route) {
        self.flight.waits += 1;
        route.tally.waited(self.priority);
    }

    /// Reports the result before all work is over. It replaces an earlier error, which does not say
    /// that work is still under way (MR-1).
    pub fn end_early(&mut self, error: EngineError) {
        self.undecided = None;
        match self.outstanding {
            0 => self.fail(error),
            _ => self.error = Some(error),
        }
        self.report();
    }

    /// Sets the error, unless there is one.
    pub fn fail(&mut self, error: EngineError) {
        self.error.get_or_insert(error);
    }

    /// Replaces the error of a lost rail by that of its lost peer; true if it had one.
    pub fn peer_was_lost(&mut self, peer: PeerKey, error: &EngineError) -> bool {
        let hit = self.undecided.is_some_and(|(p, _)| p == peer);
        if hit {
            self.undecided = None;
            self.error = Some(error.clone());
        }
        hit
    }

    /// Opens the confirm of a cut write, whose slices one operation posts.
    pub fn open_confirm(
        &mut self,
        peer: PeerKey,
        (pin, tries): (Option<u8>, u8),
        count: Option<Count>,
    ) -> u32 {
        self.confirms.push(DeferredCount { peer, count, pin, left: 0, open: 1, tries });
        self.confirms.len() as u32 - 1
    }

    /// The confirm that an operation shares with others; the first operation opens it.
    pub fn join(&mut self, peer: PeerKey, pin: Option<u8>, joint: SharedCount) -> u32 {
        if joint.first {
            let confirm = self.open_confirm(peer, (pin, 0), Some(joint.count));
            self.confirms[confirm as usize].open = joint.of;
            self.joint = confirm;
        }
        self.joint
    }

    /// A slice was lost; an operation of its own posts it again.
    pub fn reopen(&mut self, confirm: u32) {
        let c = &mut self.confirms[confirm as usize];
        c.left -= 1;
        c.open += 1;
        // The pinned rail was lost.
        c.pin = None;
    }

    /// A link has accepted a slice. `pending`: it is not done yet.
    #[inline]
    pub fn slice_posted(
        &mut self,
        (now, rail): (Time, usize),
        (bytes, tries): (u64, u8),
        confirm: Option<u32>,
        pending: bool,
    ) {
        self.flight.posted(now, rail, tries > 0);
        self.unposted = self.unposted.saturating_sub(bytes);
        if !pending {
            return self.flight.acknowledged(now);
        }
        self.outstanding += 1;
        if let Some(c) = confirm {
            self.confirms[c as usize].left += 1;
        }
    }

    /// All slices of an operation are posted; returns the count if nothing is outstanding.
    pub fn all_posted(&mut self, confirm: u32) -> Option<Count> {
        let c = &mut self.confirms[confirm as usize];
        c.open -= 1;
        if c.left == 0 && c.open == 0 {
            return c.count.take();
        }
        None
    }

    /// A slice is acknowledged. Returns the count with the last slice, not before (IC-2), also if
    /// slices were lost meanwhile (IC-4).
    pub fn confirmed(&mut self, confirm: u32) -> Option<BoundOp> {
        let c = &mut self.confirms[confirm as usize];
        c.left -= 1;
        if c.left > 0 || c.open > 0 || self.error.is_some() {
            return None;
        }
        let (peer, pin, tries) = (c.peer, c.pin, c.tries);
        let op =
            |count| BoundOp::new(peer, WorkRequest::Count(count)).pinned(pin).tried(tries).ahead();
        c.count.take().map(op)
    }

    /// The token of a slice that the ledger does not keep.
    pub fn token(key: TransferKey, confirm: Option<u32>) -> Token {
        Token { slot: key.slot, serial: key.serial, part: confirm.map_or(0, |c| c + 1) }
    }

    pub fn of_token(token: Token) -> (TransferKey, Option<u32>) {
        (TransferKey { slot: token.slot, serial: token.serial }, token.part.checked_sub(1))
    }

    /// Reports the result to the waiter, once.
    pub fn report(&mut self) {
        if let Some((completion, at)) = self.completion.as_ref().filter(|_| !self.reported) {
            completion.resolve(*at, self.error.clone().map_or(Ok(()), Err));
            self.reported = true;
        }
    }

    /// Reports that all work is over, once.
    pub fn deliver(&mut self) {
        let Some((completion, at)) = self.completion.take() else { return };
        let result = (!self.reported).then(|| self.error.clone().map_or(Ok(()), Err));
        self.reported = true;
        completion.release(at, !self.unproven, result);
        completion.recycle();
    }
}
