//! The backlog of one peer: operations that wait for room, by priority.

use std::collections::VecDeque;

use super::{
    eligible_links::Deferral,
    ledger::Ledger,
    policy::admit::Window,
    policy::classes::ByClass,
    route::{ActiveLink, PeerState, Route},
    slices::{post_slices, BoundOp, PostOutcome},
    Group, PeerKey, Rails, TransferKey,
};
use crate::{api::Priority, time::Time};

/// A waiting operation.
pub(super) struct Waiting {
    pub key: TransferKey,
    pub op: BoundOp,
    /// When it became the first of its priority; `NEVER` until then.
    pub since: Time,
}

#[derive(Default)]
pub(super) struct Backlog {
    queues: [VecDeque<Waiting>; 3],
    /// Why the first operation waits, since its last attempt, if only one class waits.
    deferral: Option<(Priority, Deferral)>,
}

impl Backlog {
    pub fn is_empty(&self) -> bool {
        self.queues.iter().all(VecDeque::is_empty)
    }

    /// Whether an operation of this priority waits.
    pub fn waits(&self, priority: Priority) -> bool {
        !self.queues[priority as usize].is_empty()
    }

    pub fn len(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }

    /// Whether work of this priority must queue behind operations of its class or a more urgent
    /// one.
    #[inline]
    pub fn blocks(&self, priority: Priority) -> bool {
        self.queues[..=priority as usize].iter().any(|q| !q.is_empty())
    }

    pub fn push_back(&mut self, priority: Priority, waiting: Waiting) {
        if self.deferral.is_some_and(|(class, _)| class != priority) {
            self.deferral = None;
        }
        self.queues[priority as usize].push_back(waiting);
    }

    pub fn push_front(&mut self, priority: Priority, waiting: Waiting) {
        self.deferral = None;
        self.queues[priority as usize].push_front(waiting);
    }

    pub fn pop(&mut self, priority: Priority) -> Option<Waiting> {
        let first = self.queues[priority as usize].pop_front()?;
        self.deferral = None;
        Some(first)
    }

    /// Removes the operations of a transfer; returns their number.
    pub fn remove(&mut self, key: TransferKey) -> usize {
        let before = self.len();
        self.deferral = None;
        self.queues.iter_mut().for_each(|q| q.retain(|w| w.key != key));
        before - self.len()
    }

    /// Puts an operation back, and records why it waits.
    pub fn defer(&mut self, priority: Priority, waiting: Waiting, deferral: Deferral) {
        self.push_front(priority, waiting);
        let others = Priority::ALL.into_iter().any(|p| p != priority && self.waits(p));
        self.deferral = Some((priority, deferral)).filter(|_| deferral.bytes > 0 && !others);
    }

    /// Forgets why operations wait: more than the rails' windows has changed.
    pub fn try_again(&mut self) {
        self.deferral = None;
    }

    pub fn deferral(&self) -> Option<(Priority, Deferral)> {
        self.deferral
    }

    /// Removes all operations.
    pub fn take(&mut self) -> impl Iterator<Item = TransferKey> {
        std::mem::take(self).queues.into_iter().flatten().map(|w| w.key)
    }
}

impl Route {
    /// Bytes under way to the peer: the least on a rail that has room, then on all.
    pub(super) fn under_way_where_room(&self, ledger: &Ledger) -> (u64, u64) {
        let bytes = self.backlog.deferral().map_or(0, |(_, d)| d.bytes);
        let has_room = |link: &&ActiveLink| {
            let rail = ledger.rail_window(link.pair.rail, bytes);
            rail.under_way.total().saturating_add(bytes) <= rail.bytes
        };
        let least = self.active().iter().filter(has_room).map(|link| link.gauge.queued).min();
        (least.unwrap_or(u64::MAX), self.under_way.total())
    }

    /// Until when the backlog would find no room even if work completes; `None` if it may have
    /// room. Saves attempts when many peers wait for one rail.
    pub(super) fn deferred_until(&self, now: Time, ledger: &Ledger) -> Option<Time> {
        let (class, Deferral { bytes, until }) = self.backlog.deferral()?;
        let receiver = Window { bytes: self.credit, under_way: self.under_way };
        let full = |link: &ActiveLink| {
            let rail = ledger.rail_window(link.pair.rail, bytes);
            rail.under_way.of(class) > 0 && !rail.has_room(class, bytes)
        };
        let deferred = now < until
            && receiver.under_way.of(class) > 0
            && (!receiver.has_room(class, bytes) || self.active().iter().all(full));
        deferred.then_some(until)
    }
}

impl Group {
    /// The demand for a rail: bytes under way there, and one window for each class that waits.
    pub fn demand(&self, rail: usize) -> ByClass {
        let mut demand = self.ledger.under_way(rail);
        if self.backlogged > 0 {
            let here = |r: &Route| r.active().iter().any(|l| l.pair.rail == rail);
            let waits = |p| self.peers.iter().any(|(_, r)| r.backlog.waits(p) && here(r));
            for class in Priority::ALL.into_iter().filter(|p| waits(*p)) {
                *demand.of_mut(class) += self.policy.rail_window;
            }
        }
        demand
    }

    /// Removes the unposted operations of a failed transfer from all backlogs.
    pub(super) fn purge(&mut self, key: TransferKey) {
        for (_, route) in self.peers.iter_mut() {
            self.backlogged -= route.backlog.remove(key);
        }
        self.transfers[key.slot as usize].waiting = 0;
    }

    /// Posts as much of a peer's backlog as its links accept now.
    pub(super) fn drain_backlog(&mut self, now: Time, peer: PeerKey, rails: &mut Rails) -> bool {
        let mut moved = false;
        // A less urgent class may have room while a more urgent one waits.
        moved |= self.drain_queue(now, peer, (Priority::Latency, false), rails);
        for pressed in [true, false] {
            moved |= self.drain_queue(now, peer, (Priority::Bulk, pressed), rails);
            moved |= self.drain_queue(now, peer, (Priority::Background, pressed), rails);
        }
        moved
    }

    /// Posts operations of one priority; if `pressed`, only those about to miss their deadline.
    fn drain_queue(
        &mut self,
        now: Time,
        peer: PeerKey,
        (priority, pressed): (Priority, bool),
        rails: &mut Rails,
    ) -> bool {
        let mut moved = false;
        loop {
            let route = &mut self.peers[peer as usize];
            if route.state != PeerState::Up {
                return moved;
            }
            let Some(mut first) = route.backlog.pop(priority) else { return moved };
            let is_new = first.since == Time::NEVER;
            first.since = first.since.min(now);
            let (key, op) = (first.key, &mut first.op);
            let transfer = &mut self.transfers[key.slot as usize];
            if pressed && now < transfer.urgent_at(now, route) {
                route.backlog.push_front(priority, first);
                return moved;
            }
            let means = (rails as &mut Rails, &mut self.ledger);
            match post_slices((now, first.since), key, transfer, op, route, means) {
                PostOutcome::Part(deferral) => {
                    if is_new && deferral.bytes > 0 {
                        transfer.waits_for_room(route);
                    }
                    route.backlog.defer(priority, first, deferral);
                    self.move_at = self.move_at.min(deferral.until);
                    self.posted(now, peer, rails);
                    return moved;
                }
                PostOutcome::All => {}
                PostOutcome::Failed(rail, e) => self.fail(now, key, peer, (rails, rail, e)),
            }
            moved = true;
            self.posted(now, peer, rails);
            self.transfers[key.slot as usize].waiting -= 1;
            self.backlogged -= 1;
            self.settle(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Count, WorkRequest};

    const DEFERRAL: Deferral = Deferral { bytes: 1 << 20, until: Time::NEVER };

    fn waiting() -> Waiting {
        let count = WorkRequest::Count(Count { imm: 1, n: 1 });
        let key = TransferKey { slot: 0, serial: 0 };
        Waiting { key, op: BoundOp::new(0, count), since: Time(0) }
    }

    #[test]
    fn a_deferral_is_known_until_another_operation_may_move() {
        use Priority::{Background, Bulk};
        let deferred = || {
            let mut backlog = Backlog::default();
            backlog.defer(Bulk, waiting(), DEFERRAL);
            backlog.push_back(Bulk, waiting());
            assert!(backlog.pop(Background).is_none());
            assert!(backlog.deferral().is_some());
            backlog
        };
        let changes: [fn(&mut Backlog); 5] = [
            |b| b.push_back(Background, waiting()),
            |b| b.push_front(Bulk, waiting()),
            |b| _ = b.pop(Bulk),
            |b| _ = b.remove(waiting().key),
            Backlog::try_again,
        ];
        for change in changes {
            let mut backlog = deferred();
            change(&mut backlog);
            assert!(backlog.deferral().is_none());
        }
        let mut others = deferred();
        others.push_back(Background, waiting());
        let first = others.pop(Bulk).unwrap();
        others.defer(Bulk, first, DEFERRAL);
        assert!(others.deferral().is_none(), "the other class may have room");
        let first = deferred().pop(Bulk).unwrap();
        let mut unknown = Backlog::default();
        unknown.defer(Bulk, first, Deferral { bytes: 0, ..DEFERRAL });
        assert!(unknown.deferral().is_none(), "it wasn't the windows");
    }
}
