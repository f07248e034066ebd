//! Records the group's transfers and the times of their stages. It is as deterministic as the
//! group: its time is the latest that the group was given.

use std::collections::HashSet;

use crate::{
    api::{Priority, Span},
    domain::Count,
    flight::{
        Arrival, Cursor, EventKind, Part, PathEvent, Records, Ring, StageTimes, TransferRecord,
        TransferTimes,
    },
    time::Time,
};

use super::{ledger::Slice, transfer::Transfer, PeerKey};

/// Events of links and peers that are kept; they are rare.
const EVENTS: usize = 256;
/// Parts of a transfer that are kept in place; a scatter has one for each peer.
const PARTS: usize = 4;
/// One in this many small transfers that end within their call is kept, because keeping one takes
/// longer than the transfer.
const SAMPLE: u64 = 16;
/// Small transfers are shorter, bytes.
pub(super) const SMALL: u64 = 4 << 10;
/// Bits of a set of rails.
const MAX_RAILS: usize = u32::BITS as usize;

/// The record of a transfer under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlightState {
    pub id: u64,
    pub span: Span,
    pub times: TransferTimes,
    /// Number of parts. `first` is the first one, and the ring of the recorder holds the others.
    parts: u32,
    first: Part,
    others: u64,
    pub slices: u32,
    pub again: u32,
    pub waits: u32,
    pub rails: u32,
    /// The latest rail.
    rail: u8,
    /// The times of its work requests were recorded.
    pub timed: bool,
}

impl FlightState {
    pub fn new(id: u64, now: Time, span: Span) -> Self {
        Self {
            id,
            span,
            times: TransferTimes::queued(now),
            parts: 0,
            first: Part::default(),
            others: 0,
            slices: 0,
            again: 0,
            waits: 0,
            rails: 0,
            rail: 0,
            timed: false,
        }
    }

    #[inline]
    pub fn posted(&mut self, now: Time, rail: usize, again: bool) {
        self.times.posted = self.times.posted.min(now);
        self.times.all_posted = now;
        self.slices += 1;
        self.again += u32::from(again);
        self.rails |= 1 << rail.min(MAX_RAILS - 1);
        self.rail = rail as u8;
    }

    #[inline]
    pub fn acknowledged(&mut self, now: Time) {
        self.times.wire = now;
    }

    pub fn notified(&mut self, now: Time) {
        self.times.notified = self.times.notified.min(now);
    }
}

/// An ended transfer, and the number of transfers that it represents. A plain value without
/// `Drop`, so that overwriting one in the ring costs nothing.
#[derive(Clone, Copy, Debug)]
struct EndedTransfer {
    flight: FlightState,
    op: &'static str,
    priority: Priority,
    weight: u32,
    /// Number of the failure's text.
    failure: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Recorder {
    on: bool,
    /// The latest time given to [`Self::set_now`].
    pub now: Time,
    /// Number of requests that have begun: the number of the latest.
    pub opened: u64,
    ended: Ring<EndedTransfer>,
    failures: Ring<Box<str>>,
    parts: Ring<Part>,
    arrivals: Ring<Arrival>,
    events: Ring<PathEvent>,
    /// By rail and class.
    pub stages: Vec<[StageTimes; 3]>,
}

impl Recorder {
    /// Keeps so many transfers, and as many arrivals; nothing for 0.
    pub fn new(records: usize) -> Self {
        let events = if records > 0 { EVENTS } else { 0 };
        Self {
            on: records > 0,
            ended: Ring::new(records),
            failures: Ring::new(records),
            parts: Ring::new(records.saturating_mul(PARTS)),
            arrivals: Ring::new(records),
            events: Ring::new(events),
            ..Self::default()
        }
    }

    /// Sets the time. A caller may pass an earlier time than the last one, which has no effect.
    #[inline]
    pub fn set_now(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    /// A request begins.
    #[inline]
    pub fn open(&mut self, now: Time, span: Span) -> FlightState {
        self.opened += 1;
        FlightState::new(self.opened, now, span)
    }

    /// Whether the next request is kept if it is small and over when its call returns.
    #[inline]
    pub fn samples(&self, span: Span) -> bool {
        self.on && (!span.is_none() || (self.opened + 1).is_multiple_of(SAMPLE))
    }

    /// Something of the request goes to a peer: what goes to the counter of the one before adds up.
    #[inline]
    pub fn part(
        &mut self,
        flight: &mut FlightState,
        peer: PeerKey,
        count: Option<Count>,
        bytes: u64,
    ) {
        if !self.on {
            return;
        }
        let (imm, counts) = count.map_or((0, 0), |c| (c.imm, c.n));
        // While a request is described no other thread adds parts.
        let last = match flight.parts {
            0 => None,
            1 => Some(&mut flight.first),
            _ => self.parts.last_mut(),
        };
        if let Some(last) = last.filter(|l| l.peer == peer && l.imm == imm) {
            if let Some(sum) = last.counts.checked_add(counts) {
                last.counts = sum;
                last.bytes += bytes;
                return;
            }
        }
        let part = Part { peer, imm, counts, bytes };
        match flight.parts {
            0 => flight.first = part,
            1 => {
                flight.others = self.parts.written();
                self.parts.push(part);
            }
            _ => self.parts.push(part),
        }
        flight.parts += 1;
    }

    /// A work request that was kept is acknowledged.
    #[inline]
    pub fn slice_done(&mut self, now: Time, slice: &Slice) {
        if self.on {
            let wire = &mut self.stages(slice.link.0, slice.priority).wire;
            wire.add(now.nanos_since(slice.posted), 1);
        }
    }

    #[inline]
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// A transfer of which nothing is left. `at_once`: it was over when its call returned.
    #[inline]
    pub fn ended(&mut self, transfer: &mut Transfer, at_once: bool) {
        if !self.on {
            return;
        }
        let flight = &mut transfer.flight;
        flight.notified(self.now);
        let small = flight.parts == 1 && flight.first.bytes < SMALL;
        // What is done for a request that a caller may ask about is kept.
        let sampled = at_once && small && flight.span.is_none() && transfer.error.is_none();
        match sampled {
            true if !flight.id.is_multiple_of(SAMPLE) => {}
            true => self.keep(transfer, SAMPLE as u32),
            false => self.keep(transfer, 1),
        }
    }

    fn keep(&mut self, transfer: &Transfer, weight: u32) {
        let flight = transfer.flight;
        let TransferTimes { queued, posted, all_posted, wire, notified } = flight.times;
        if wire != Time::NEVER && posted != Time::NEVER {
            let stages = self.stages(usize::from(flight.rail), transfer.priority);
            stages.queue.add(posted.nanos_since(queued), weight);
            stages.post.add(all_posted.nanos_since(posted), weight);
            if !flight.timed {
                stages.wire.add(wire.nanos_since(all_posted), weight);
            }
            stages.deliver.add(notified.nanos_since(wire), weight);
        }
        let failure = transfer.error.as_ref().map(|e| {
            self.failures.push(e.to_string().into_boxed_str());
            self.failures.written() - 1
        });
        let (op, priority) = (transfer.name, transfer.priority);
        self.ended.push(EndedTransfer { flight, op, priority, weight, failure });
    }

    #[inline]
    fn stages(&mut self, rail: usize, class: Priority) -> &mut StageTimes {
        if self.stages.len() <= rail {
            self.stages.resize(rail + 1, Default::default());
        }
        &mut self.stages[rail][class as usize]
    }

    /// Writes were counted here; those of one counter that are seen together are one record.
    #[inline]
    pub fn arrived(&mut self, now: Time, rail: usize, count: Count) {
        let rail = rail as u8;
        let Count { imm, n } = count;
        let last = self.arrivals.last_mut();
        if let Some(last) = last.filter(|l| (l.at, l.rail, l.imm) == (now, rail, imm)) {
            // Peers say how many: any sum of theirs may come.
            if let Some(sum) = last.counts.checked_add(n) {
                last.counts = sum;
                return;
            }
        }
        self.arrivals.push(Arrival { at: now, rail, imm, counts: n });
    }

    pub fn event(
        &mut self,
        kind: EventKind,
        peer: PeerKey,
        rail: Option<usize>,
        cause: impl FnOnce() -> String,
    ) {
        if self.on {
            let (at, rail) = (self.now, rail.map(|r| r as u8));
            self.events.push(PathEvent { at, kind, peer, rail, cause: cause().into_boxed_str() });
        }
    }

    /// The peers that records name.
    pub fn peers<'a>(&self, going_on: impl Iterator<Item = &'a Transfer>) -> HashSet<PeerKey> {
        let flights = self.ended.since(0).map(|e| &e.flight).chain(going_on.map(|t| &t.flight));
        let first = flights.filter(|f| f.parts > 0).map(|f| f.first.peer);
        let others = self.parts.since(0).map(|p| p.peer);
        first.chain(others).chain(self.events.since(0).map(|e| e.peer)).collect()
    }

    /// The records since a cursor, and the operations in flight.
    pub fn read<'a>(
        &self,
        since: Cursor,
        going_on: impl Iterator<Item = &'a Transfer>,
        out: &mut Records,
    ) {
        let over = self.ended.since(since.transfers).map(|e| {
            // There is room for as many as for transfers: it hasn't been written over before its
            // own.
            let failure = e.failure.and_then(|n| self.failures.since(n).next().cloned());
            self.record((e.op, e.priority), &e.flight, (true, e.weight), failure)
        });
        out.transfers.extend(over);
        out.transfers.extend(going_on.map(|t| {
            let failure = t.error.as_ref().map(|e| e.to_string().into_boxed_str());
            self.record((t.name, t.priority), &t.flight, (false, 1), failure)
        }));
        out.arrivals.extend(self.arrivals.since(since.arrivals));
        out.events.extend(self.events.since(since.events).cloned());
        out.missed += self.ended.oldest().saturating_sub(since.transfers)
            + self.arrivals.oldest().saturating_sub(since.arrivals)
            + self.events.oldest().saturating_sub(since.events);
        out.cursor.transfers = self.ended.written();
        out.cursor.arrivals = self.arrivals.written();
        out.cursor.events = self.events.written();
    }

    fn record(
        &self,
        (op, priority): (&'static str, Priority),
        flight: &FlightState,
        (over, weight): (bool, u32),
        failure: Option<Box<str>>,
    ) -> TransferRecord {
        let others = u64::from(flight.parts.saturating_sub(1));
        let known = flight.others.max(self.parts.oldest())..flight.others + others;
        let first = (flight.parts > 0).then_some(flight.first);
        let rest = self.parts.since(known.start).take(known.clone().count());
        let parts: Vec<Part> = first.into_iter().chain(rest.copied()).collect();
        TransferRecord {
            id: flight.id,
            op,
            priority,
            span: flight.span,
            times: flight.times,
            parts_lost: flight.parts - parts.len() as u32,
            parts,
            slices: flight.slices,
            again: flight.again,
            waits: flight.waits,
            rails: flight.rails,
            over,
            weight,
            failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineError;

    fn transfer(recorder: &mut Recorder, at: u64) -> Transfer {
        let flight = recorder.open(Time(at), Span(9));
        Transfer::new("write", flight.id as u32, Priority::Bulk, flight)
    }

    fn read(recorder: &Recorder, since: Cursor) -> Records {
        let mut out = Records::default();
        recorder.read(since, std::iter::empty(), &mut out);
        out
    }

    #[test]
    fn a_transfer_is_kept_with_all_its_moments() {
        let mut r = Recorder::new(4);
        let mut t = transfer(&mut r, 10);
        r.part(&mut t.flight, 1, Some(Count { imm: 7, n: 2 }), 100);
        r.part(&mut t.flight, 1, Some(Count { imm: 7, n: 1 }), 50);
        r.part(&mut t.flight, 2, None, 8);
        t.flight.posted(Time(20), 0, false);
        t.flight.posted(Time(30), 3, true);
        t.flight.acknowledged(Time(40));
        r.now = Time(50);
        r.ended(&mut t, false);
        let out = read(&r, Cursor::default());
        let [record] = &out.transfers[..] else { panic!("one transfer") };
        let times = [20, 30, 40, 50].map(Time);
        let m = record.times;
        assert_eq!(([m.posted, m.all_posted, m.wire, m.notified], m.queued), (times, Time(10)));
        let part = |peer, imm, counts, bytes| Part { peer, imm, counts, bytes };
        assert_eq!(record.parts, [part(1, 7, 3, 150), part(2, 0, 0, 8)]);
        assert_eq!((record.slices, record.again, record.rails), (2, 1, 0b1001));
        assert_eq!((record.span, record.over, record.parts_lost), (Span(9), true, 0));
        // The last rail's, by class.
        let stages = r.stages[3][Priority::Bulk as usize];
        assert_eq!(
            [stages.queue, stages.post, stages.wire, stages.deliver].map(|h| h.total),
            [10; 4]
        );
    }

    #[test]
    fn what_was_written_over_is_missed_and_not_made_up() {
        let mut r = Recorder::new(2);
        for at in 0..5 {
            let mut t = transfer(&mut r, at);
            (0..5).for_each(|peer| r.part(&mut t.flight, peer, None, 1 << 20));
            r.ended(&mut t, false);
        }
        let out = read(&r, Cursor { transfers: 1, ..Cursor::default() });
        assert_eq!((out.transfers.len(), out.missed, out.cursor.transfers), (2, 2, 5));
        assert_eq!(out.transfers[0].parts.len() + out.transfers[0].parts_lost as usize, 5);
        let all: Vec<u32> = out.transfers[1].parts.iter().map(|p| p.peer).collect();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        assert_eq!(read(&r, out.cursor).transfers.len(), 0);
    }

    #[test]
    fn what_failed_says_why_for_as_long_as_it_is_kept() {
        let mut r = Recorder::new(4);
        for at in 0..11 {
            let mut t = transfer(&mut r, at);
            // All of the last four but one.
            if at != 8 {
                t.fail(EngineError::Invalid(at.to_string()));
            }
            r.ended(&mut t, false);
        }
        let failures = read(&r, Cursor::default()).transfers.into_iter().map(|t| t.failure);
        let said: Vec<_> = failures.map(|f| f.map(String::from)).collect();
        let why = |at: u64| Some(EngineError::Invalid(at.to_string()).to_string());
        assert_eq!(said, [why(7), None, why(9), why(10)]);
        let mut t = transfer(&mut r, 11);
        t.fail(EngineError::Invalid("11".into()));
        r.ended(&mut t, false);
        assert_eq!(read(&r, Cursor::default()).transfers[0].failure, None);
    }

    #[test]
    fn of_small_transfers_that_are_over_at_once_one_stands_for_many() {
        let mut r = Recorder::new(64);
        for at in 0..32 {
            let mut t = transfer(&mut r, at);
            t.flight.span = Span::NONE;
            r.part(&mut t.flight, 0, None, 8);
            t.flight.posted(Time(at), 0, false);
            t.flight.acknowledged(Time(at));
            r.now = Time(at);
            r.ended(&mut t, true);
        }
        let out = read(&r, Cursor::default());
        assert_eq!(out.transfers.iter().map(|t| t.weight).collect::<Vec<_>>(), [16, 16]);
        assert_eq!(r.stages[0][Priority::Bulk as usize].queue.count(), 32);
        let mut named = transfer(&mut r, 33);
        r.part(&mut named.flight, 0, None, 8);
        r.ended(&mut named, true);
        let latest = read(&r, out.cursor).transfers;
        assert_eq!(latest.iter().map(|t| t.weight).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn arrivals_seen_together_are_one() {
        let mut r = Recorder::new(8);
        let count = |imm, n| Count { imm, n };
        r.arrived(Time(1), 0, count(5, 1));
        r.arrived(Time(1), 0, count(5, 2));
        r.arrived(Time(1), 1, count(5, 1));
        r.arrived(Time(2), 1, count(5, 1));
        let counts: Vec<u32> =
            read(&r, Cursor::default()).arrivals.iter().map(|a| a.counts).collect();
        assert_eq!(counts, [3, 1, 1]);
    }

    #[test]
    fn counts_whose_sum_does_not_fit_are_kept_apart() {
        let mut r = Recorder::new(8);
        let most = Count { imm: 5, n: u32::MAX };
        for n in [1, u32::MAX, 1] {
            r.arrived(Time(1), 0, Count { n, ..most });
        }
        let counts: Vec<u32> =
            read(&r, Cursor::default()).arrivals.iter().map(|a| a.counts).collect();
        assert_eq!(counts, [1, u32::MAX, 1]);
        let mut t = transfer(&mut r, 1);
        (0..2).for_each(|_| r.part(&mut t.flight, 1, Some(most), 8));
        r.ended(&mut t, false);
        let counts: Vec<u32> =
            read(&r, Cursor::default()).transfers[0].parts.iter().map(|p| p.counts).collect();
        assert_eq!(counts, [u32::MAX; 2]);
    }

    #[test]
    fn time_does_not_run_backwards() {
        let mut r = Recorder::new(8);
        let mut t = transfer(&mut r, 5);
        r.set_now(Time(7));
        r.set_now(Time(3));
        r.ended(&mut t, false);
        assert_eq!(read(&r, Cursor::default()).transfers[0].times.notified, Time(7));
    }

    #[test]
    fn without_records_nothing_is_kept() {
        let mut r = Recorder::new(0);
        let mut t = transfer(&mut r, 1);
        r.part(&mut t.flight, 0, None, 8);
        r.arrived(Time(1), 0, Count { imm: 1, n: 1 });
        r.event(EventKind::LinkUp, 0, None, || unreachable!("no reader asks for it"));
        r.ended(&mut t, false);
        assert_eq!(read(&r, Cursor::default()).cursor, Cursor::default());
    }
}
