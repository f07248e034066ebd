use std::time::Duration;

use smallvec::SmallVec;

use super::{
    policy::admit::urgent_at,
    recorder::FlightState,
    route::Route,
    slices::{BoundOp, Joint},
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
    /// Tells two users of one slot apart: a late completion of the first must not hit the second.
    pub serial: u32,
}

/// A count that waits until all slices of its write are acknowledged (design §4, *confirm*).
#[derive(Debug)]
pub(super) struct Confirm {
    peer: PeerKey,
    count: Option<Count>,
    /// The rail that the write is pinned to, and its count with it.
    pin: Option<u8>,
    /// Slices posted and not acknowledged.
    left: u32,
    /// Operations of which some slices are not posted yet.
    open: u32,
    tries: u8,
}

/// A request under way.
pub(super) struct Transfer {
    pub name: &'static str,
    pub serial: u32,
    pub priority: Priority,
    /// The peer of its latest operation; who is named when the request as a whole fails.
    pub peer: PeerKey,
    /// Work requests posted and not completed.
    pub outstanding: u32,
    /// Operations in some backlog.
    pub waiting: u32,
    /// Bytes that are not posted yet.
    pub unposted: u64,
    pub sealed: bool,
    pub error: Option<EngineError>,
    /// A rail to this peer failed it. Whether the rail was lost or the peer is not known until then.
    pub undecided: Option<(PeerKey, Time)>,
    pub completion: Option<CompletionHandle>,
    /// Its result was told, maybe before everything of it was over.
    told: bool,
    /// A link that carried some of it was lost, and its other end hasn't said that it is down.
    pub unproven: bool,
    pub deadline: Time,
    pub timeout: Duration,
    confirms: SmallVec<[Confirm; 1]>,
    /// The latest of them that several operations share.
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
            told: false,
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

    /// Those that it may still refer to.
    pub fn peers(&self) -> impl Iterator<Item = PeerKey> + '_ {
        let undecided = self.undecided.map(|(peer, _)| peer);
        let confirming = self.confirms.iter().map(|c| c.peer);
        confirming.chain(undecided).chain([self.peer])
    }

    /// From when on it may miss its deadline.
    pub fn urgent_at(&self, now: Time, route: &Route) -> Time {
        match self.deadline {
            Time::NEVER => Time::NEVER,
            deadline => urgent_at(deadline, route.expects(now, self.unposted)),
        }
    }

    /// One of its operations found no room in a window.
    pub fn waits_for_room(&mut self, route: &mut Route) {
        self.flight.waits += 1;
        route.tally.waited(self.priority);
    }

    /// Ends it before everything of it is over, for its waiter. The last word: what failed before
    /// doesn't say that other parts are still under way (MR-1).
    pub fn end_early(&mut self, error: EngineError) {
        self.undecided = None;
        match self.outstanding {
            0 => self.fail(error),
            _ => self.error = Some(error),
        }
        self.tell();
    }

    /// The first error stands.
    pub fn fail(&mut self, error: EngineError) {
        self.error.get_or_insert(error);
    }

    /// The rail that failed it was the first sign of the peer's end.
    pub fn peer_was_lost(&mut self, peer: PeerKey, error: &EngineError) -> bool {
        let hit = self.undecided.is_some_and(|(p, _)| p == peer);
        if hit {
            self.undecided = None;
            self.error = Some(error.clone());
        }
        hit
    }

    /// Opens the count of a write that is cut; one operation is to post its slices.
    pub fn open_confirm(
        &mut self,
        peer: PeerKey,
        (pin, tries): (Option<u8>, u8),
        count: Option<Count>,
    ) -> u32 {
        self.confirms.push(Confirm { peer, count, pin, left: 0, open: 1, tries });
        self.confirms.len() as u32 - 1
    }

    /// The count that an operation shares with others, opened by the first of them.
    pub fn join(&mut self, peer: PeerKey, pin: Option<u8>, joint: Joint) -> u32 {
        if joint.first {
            let confirm = self.open_confirm(peer, (pin, 0), Some(joint.count));
            self.confirms[confirm as usize].open = joint.of;
            self.joint = confirm;
        }
        self.joint
    }

    /// A slice was lost, and is posted again by an operation of its own.
    pub fn reopen(&mut self, confirm: u32) {
        let c = &mut self.confirms[confirm as usize];
        c.left -= 1;
        c.open += 1;
        // Its rail was lost.
        c.pin = None;
    }

    pub fn slice_posted(&mut self, confirm: Option<u32>, pending: bool) {
        if !pending {
            return;
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

    /// A slice is acknowledged; returns the count that may be sent now, if any: with the last slice and not
    /// before (IC-2), also when slices were lost meanwhile (IC-4).
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

    /// What the completion of a slice brings that no ledger knows.
    pub fn token(key: TransferKey, confirm: Option<u32>) -> Token {
        Token { slot: key.slot, serial: key.serial, part: confirm.map_or(0, |c| c + 1) }
    }

    pub fn of_token(token: Token) -> (TransferKey, Option<u32>) {
        (TransferKey { slot: token.slot, serial: token.serial }, token.part.checked_sub(1))
    }

    /// Gives the result to the waiter, once.
    pub fn tell(&mut self) {
        if let Some((completion, at)) = self.completion.as_ref().filter(|_| !self.told) {
            completion.resolve(*at, self.error.clone().map_or(Ok(()), Err));
            self.told = true;
        }
    }

    /// All of it is over.
    pub fn deliver(&mut self) {
        let Some((completion, at)) = &self.completion else { return };
        let result = (!self.told).then(|| self.error.clone().map_or(Ok(()), Err));
        self.told = true;
        completion.release(*at, !self.unproven, result);
    }
}
