//! ImmCounter: the receiver's count of logical writes, and the expectations on it.
//!
//! A counter only grows. An expectation of `n` claims the next `n` arrivals that no earlier
//! expectation has claimed. Early arrivals are thus kept (IC-5), and rounds don't mix.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::{Arc, OnceLock},
};

use smallvec::SmallVec;

use super::{
    expectation_log::ExpectationLog,
    slot_order::{SlotOrder, ALLOCATED},
    HandleRef, Peer,
};
use crate::{
    api::{EngineId, Imm, Span, FIRST_ALLOCATED_SLOT},
    domain::Count,
    group::CompletionHandle,
    sync::{
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{Acquire, Relaxed, SeqCst},
        },
        total_order, Mutex,
    },
    time::Time,
    EngineError,
};

const PAGE: usize = if cfg!(loom) { 2 } else { 256 };
const PAGES: usize = crate::api::SLOTS as usize / PAGE;

pub(super) struct Expectation {
    pub n: u64,
    threshold: u64,
    /// `None` keeps it out of the flight records.
    pub span: Option<Span>,
    pub begun: Time,
    deadline: Time,
    completion: CompletionHandle,
    writers: Writers,
    timeout: std::time::Duration,
}

/// The peers that will write; usually one.
pub(crate) type Writers = SmallVec<[Peer; 1]>;

#[derive(Default)]
struct Expectations {
    list: VecDeque<Expectation>,
    claimed: u64,
}

struct CounterSlot {
    /// Immediates of another generation are ghosts (IC-6).
    generation: AtomicU32,
    arrived: AtomicU64,
    /// When the latest write arrived, if expectations are recorded. The thread that resolves an
    /// expectation may have read the clock before that.
    arrived_at: AtomicU64,
    /// The lowest pending threshold: arrivals below it take no lock.
    threshold: AtomicU64,
    pending: Mutex<Expectations>,
}

impl CounterSlot {
    fn new(generation: u8) -> Self {
        Self {
            generation: AtomicU32::new(generation.into()),
            arrived: AtomicU64::new(0),
            arrived_at: AtomicU64::new(0),
            threshold: AtomicU64::new(u64::MAX),
            pending: Mutex::default(),
        }
    }

    fn publish_threshold(&self, p: &Expectations) {
        let lowest = p.list.front().map_or(u64::MAX, |e| e.threshold);
        self.threshold.store(lowest, SeqCst);
        total_order();
    }

    /// Resolves every expectation whose threshold is reached.
    fn fire(&self, now: Time, log: &ExpectationLog, imm: Imm) {
        let mut done = Vec::new();
        {
            let mut p = self.pending.lock();
            loop {
                while p.list.front().is_some_and(|e| e.threshold <= self.arrived.load(SeqCst)) {
                    done.extend(p.list.pop_front());
                }
                self.publish_threshold(&p);
                // An arrival between the test and the publication has seen the old threshold.
                if p.list.front().is_none_or(|e| e.threshold > self.arrived.load(SeqCst)) {
                    break;
                }
            }
        }
        let notified = now.max(Time(self.arrived_at.load(Relaxed)));
        for e in done {
            log.record(imm, &e, notified, None);
            e.completion.0.resolve(e.completion.1, Ok(()));
        }
    }

    /// Fails the expectations that `doomed` selects. Their claims pass to later expectations: a
    /// failed wait consumes no arrivals (IC-5).
    fn fail(
        &self,
        (now, log, imm): (Time, &ExpectationLog, Imm),
        mut doomed: impl FnMut(&Expectation) -> Option<EngineError>,
    ) {
        let mut failed = Vec::new();
        {
            let mut p = self.pending.lock();
            let mut given_back = 0;
            p.list.retain_mut(|e| match doomed(e) {
                None => {
                    e.threshold -= given_back;
                    true
                }
                Some(error) => {
                    given_back += e.n;
                    log.record(imm, e, now, Some(&error));
                    failed.push((e.completion.clone(), error));
                    false
                }
            });
            p.claimed -= given_back;
            self.publish_threshold(&p);
        }
        if self.arrived.load(SeqCst) >= self.threshold.load(SeqCst) {
            self.fire(now, log, imm);
        }
        for ((completion, at), error) in failed {
            completion.resolve(at, Err(error));
        }
    }
}

type Page = [CounterSlot; PAGE];

/// Receives the value of a tagged immediate and the number of writes that carried it.
pub(crate) type TakeTag = Box<dyn Fn(u32, u32) + Send + Sync>;

/// All counters of an engine.
pub(crate) struct Counters {
    pages: Box<[OnceLock<Box<Page>>]>,
    free: Mutex<FreeSlots>,
    /// Slots that may hold expectations with a deadline or with writers. Ordered, so that every run
    /// of a simulation ends them in the same order.
    watched: Mutex<BTreeSet<u32>>,
    /// A lower bound of all deadlines, so that a check costs one load. Every expectation has a
    /// deadline (IC-4).
    next_expiry: AtomicU64,
    ghosts: AtomicU64,
    tags: OnceLock<TakeTag>,
    pub(super) slot_order: Option<SlotOrder>,
    pub log: ExpectationLog,
}

struct FreeSlots {
    /// Slots that were allocated at least once.
    begun: u32,
    /// Released slots, oldest first, so that a slot is reused as late as possible.
    returned: VecDeque<u32>,
}

/// Released slots that must be queued before the oldest is reused.
const MIN_REUSE_QUEUE: usize = 4096;

impl Default for Counters {
    fn default() -> Self {
        Self {
            pages: (0..PAGES).map(|_| OnceLock::new()).collect(),
            free: Mutex::new(FreeSlots { begun: 0, returned: VecDeque::new() }),
            watched: Mutex::default(),
            next_expiry: AtomicU64::new(u64::MAX),
            ghosts: AtomicU64::new(0),
            tags: OnceLock::new(),
            slot_order: None,
            log: ExpectationLog::default(),
        }
    }
}

impl Counters {
    /// Records the latest `records` expectations. Allocates counters in a fixed order, for
    /// simulations.
    pub fn recording(records: usize) -> Self {
        Self { log: ExpectationLog::new(records), ..Self::default() }
    }

    /// Allocates counters that peers can't guess (IC-2).
    ///
    /// # Errors
    /// [`EngineError::Resource`] if the system has no random numbers.
    pub fn with_random_slots(records: usize) -> Result<Self, EngineError> {
        let slot_order = Some(SlotOrder::random()?);
        Ok(Self { slot_order, ..Self::recording(records) })
    }

    /// Passes tagged immediates to `take` from now on; false if a receiver is set already.
    pub fn take_tags(&self, take: TakeTag) -> bool {
        self.tags.set(take).is_ok()
    }

    fn cell(&self, slot: u32) -> &CounterSlot {
        let page = slot as usize / PAGE;
        let page = self.pages[page].get_or_init(|| {
            let generation =
                |i| self.slot_order.as_ref().map_or(0, |d| d.generation(page * PAGE + i));
            let cells: Box<[CounterSlot]> =
                (0..PAGE).map(|i| CounterSlot::new(generation(i))).collect();
            cells.try_into().unwrap_or_else(|_| unreachable!("PAGE cells make a page"))
        });
        &page[slot as usize % PAGE]
    }

    /// Allocates a counter whose current generation is unused.
    pub fn allocate(&self) -> Result<Imm, EngineError> {
        let mut free = self.free.lock();
        let slot = if free.returned.len() > MIN_REUSE_QUEUE || free.begun == ALLOCATED {
            free.returned.pop_front()
        } else {
            free.begun += 1;
            let start = self.slot_order.as_ref().map_or(0, |d| d.start);
            Some(FIRST_ALLOCATED_SLOT + (start + free.begun - 1) % ALLOCATED)
        };
        let slot = slot.ok_or_else(|| EngineError::Resource {
            call: "counter",
            cause: "all counters are in use".into(),
            hint: "drop counters that are no longer needed".into(),
        })?;
        let cell = self.cell(slot);
        Ok(Imm::allocated(slot, cell.generation.load(Acquire) as u8))
    }

    /// Releases a counter: later immediates of its generation are ghosts.
    pub fn release(&self, now: Time, imm: Imm) {
        let cell = self.cell(imm.slot());
        cell.generation.store(u32::from(imm.generation().wrapping_add(1)), SeqCst);
        cell.fail((now, &self.log, imm), |_| {
            Some(EngineError::Cancelled {
                what: "expectation",
                cause: "its counter was released".into(),
            })
        });
        cell.pending.lock().claimed = 0;
        cell.arrived.store(0, SeqCst);
        self.free.lock().returned.push_back(imm.slot());
    }

    /// Counts arrivals, and resolves expectations that they complete. Called with the group's lock
    /// held.
    #[inline]
    pub fn arrive(&self, now: Time, count: Count) {
        let imm = Imm::from_wire(count.imm);
        if let (Some(take), Some(tag)) = (self.tags.get(), imm.tag()) {
            return take(tag, count.n);
        }
        let cell = self.cell(imm.slot());
        if cell.generation.load(Acquire) as u8 != imm.generation() {
            self.ghosts.fetch_add(u64::from(count.n), Relaxed);
            return;
        }
        if self.log.is_on() {
            cell.arrived_at.store(now.0, Relaxed);
        }
        let n = cell.arrived.fetch_add(u64::from(count.n), SeqCst) + u64::from(count.n);
        total_order();
        if n >= cell.threshold.load(SeqCst) {
            cell.fire(now, &self.log, imm);
        }
    }

    /// Number of writes counted so far.
    #[inline]
    pub fn arrived(&self, imm: Imm) -> u64 {
        self.cell(imm.slot()).arrived.load(Acquire)
    }

    /// Counted writes that no expectation has claimed.
    pub fn unclaimed(&self, imm: Imm) -> u64 {
        let cell = self.cell(imm.slot());
        let claimed = cell.pending.lock().claimed;
        self.arrived(imm).saturating_sub(claimed)
    }

    pub fn ghosts(&self) -> u64 {
        self.ghosts.load(Relaxed)
    }

    /// Queues an expectation of `n` further writes, which resolves `completion`. The caller must
    /// call [`Counters::look`] next.
    pub fn expect(
        &self,
        (imm, n, span): (Imm, u32, Option<Span>),
        (now, timeout): (Time, std::time::Duration),
        writers: Writers,
        completion: CompletionHandle,
    ) {
        let cell = self.cell(imm.slot());
        let deadline = now.after(timeout);
        let mut p = cell.pending.lock();
        p.claimed += u64::from(n);
        let threshold = p.claimed;
        let (n, begun) = (u64::from(n), now);
        let expectation =
            Expectation { n, threshold, span, begun, deadline, completion, writers, timeout };
        p.list.push_back(expectation);
        cell.publish_threshold(&p);
    }

    /// Resolves expectations of these counters whose writes have arrived. With a `deadline`,
    /// deadlines and lost peers end the others from now on.
    pub fn look(
        &self,
        (now, deadline): (Time, Option<Time>),
        counters: impl Iterator<Item = Imm> + Clone,
    ) {
        if let Some(deadline) = deadline {
            self.watched.lock().extend(counters.clone().map(Imm::slot));
            self.next_expiry.fetch_min(deadline.0, SeqCst);
        }
        for imm in counters {
            let cell = self.cell(imm.slot());
            if cell.arrived.load(SeqCst) >= cell.threshold.load(SeqCst) {
                cell.fire(now, &self.log, imm);
            }
        }
    }

    /// Fails the expectations whose deadline had passed by `began`, before the last poll; true if
    /// there were any. `now` is the time of their end.
    pub fn expire(&self, (began, now): (Time, Time)) -> bool {
        if began < self.next_deadline() {
            return false;
        }
        self.next_expiry.store(u64::MAX, SeqCst);
        let mut next = Time::NEVER;
        let mut failed = false;
        self.each_watched(|imm, cell| {
            cell.fail((now, &self.log, imm), |e| {
                if e.deadline > began {
                    next = next.min(e.deadline);
                    return None;
                }
                failed = true;
                let missing = e.threshold.saturating_sub(cell.arrived.load(SeqCst));
                let writers: Vec<_> = e.writers.iter().map(|w| w.address.label()).collect();
                let (op, peer, after) = ("expectation", writers.join(", "), e.timeout);
                let hint = "; they may still arrive, so keep the memory that they go to";
                Some(EngineError::Timeout { op, peer, missing, after, quiesced: false, hint })
            })
        });
        self.next_expiry.fetch_min(next.0, SeqCst);
        failed
    }

    pub fn next_deadline(&self) -> Time {
        Time(self.next_expiry.load(SeqCst))
    }

    /// Fails expectations whose writers include a lost peer (RS-4).
    pub fn peer_lost(&self, now: Time, peer: EngineId, error: &EngineError) {
        self.each_watched(|imm, cell| {
            cell.fail((now, &self.log, imm), |e| {
                e.writers.iter().any(|w| w.id() == peer).then(|| error.clone())
            });
        });
    }

    /// Cancels one expectation; later ones can claim its arrivals.
    pub fn cancel(&self, now: Time, imm: Imm, handle: &HandleRef) {
        self.cell(imm.slot()).fail((now, &self.log, imm), |e| {
            std::ptr::addr_eq(Arc::as_ptr(&e.completion.0), Arc::as_ptr(handle)).then(|| {
                EngineError::Cancelled { what: "expectation", cause: "as was asked".into() }
            })
        });
    }

    /// Whether an expectation is pending.
    pub fn is_expecting(&self) -> bool {
        let mut cells = self.pages.iter().filter_map(OnceLock::get).flat_map(|page| page.iter());
        cells.any(|cell| cell.threshold.load(SeqCst) != u64::MAX)
    }

    pub fn close(&self, now: Time) {
        for (number, page) in self.pages.iter().enumerate() {
            for (i, cell) in page.get().into_iter().flat_map(|page| page.iter()).enumerate() {
                let imm = self.imm((number * PAGE + i) as u32);
                cell.fail((now, &self.log, imm), |_| Some(EngineError::Closed));
            }
        }
    }

    /// The immediate of a slot's current generation.
    fn imm(&self, slot: u32) -> Imm {
        Imm::of_slot(slot, self.cell(slot).generation.load(Acquire) as u8)
    }

    fn each_watched(&self, mut f: impl FnMut(Imm, &CounterSlot)) {
        let slots: Vec<u32> = self.watched.lock().iter().copied().collect();
        for slot in slots {
            f(self.imm(slot), self.cell(slot));
        }
        self.watched.lock().retain(|s| !self.cell(*s).pending.lock().list.is_empty());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{
        engine::handle::HandleState,
        flight::{Cursor, Records},
    };

    /// The recorded begin and end of an expectation that began at `begun` and whose write arrived
    /// at `came`.
    fn wait_times(
        begun: u64,
        came: u64,
        first: impl Fn(&mut dyn FnMut(), &mut dyn FnMut()),
    ) -> [u64; 2] {
        let counters = Counters::recording(4);
        let imm = Imm::plain(0).unwrap();
        let mut expect = || {
            let handle = Arc::new(HandleState::default());
            let (now, forever) = (Time(begun), std::time::Duration::MAX);
            let no_writers = Writers::new();
            counters.expect((imm, 1, Some(Span::NONE)), (now, forever), no_writers, (handle, 0));
            counters.look((now, None), std::iter::once(imm));
        };
        let mut arrive = || counters.arrive(Time(came), Count { imm: imm.to_wire(), n: 1 });
        first(&mut expect, &mut arrive);
        let mut records = Records::default();
        counters.log.read(Cursor::default(), &mut records);
        let met = &records.expectations[0];
        [met.begun.0, met.notified.0]
    }

    #[test]
    fn a_record_ends_after_its_begin_and_its_last_arrival_in_any_order_of_clock_reads() {
        let expected_first = |expect: &mut dyn FnMut(), arrive: &mut dyn FnMut()| {
            expect();
            arrive();
        };
        let came_first = |expect: &mut dyn FnMut(), arrive: &mut dyn FnMut()| {
            arrive();
            expect();
        };
        assert_eq!(
            wait_times(1, 5, came_first),
            [1, 5],
            "expected by a clock read before the count"
        );
        assert_eq!(wait_times(5, 1, expected_first), [5, 5], "counted by a clock read before");
        assert_eq!(wait_times(1, 5, expected_first), [1, 5]);
        assert_eq!(wait_times(5, 1, came_first), [5, 5]);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::thread;

    use super::*;
    use crate::{engine::handle::HandleState, group::OperationCompletion};

    #[test]
    fn ic_4_an_expectation_and_its_arrival_never_miss_each_other() {
        loom::model(|| {
            let counters = loom::sync::Arc::new(Counters::default());
            let imm = Imm::plain(0).unwrap();
            // Allocates the page first: loom doesn't model std's OnceLock.
            counters.arrived(imm);
            let theirs = loom::sync::Arc::clone(&counters);
            let arrival =
                thread::spawn(move || theirs.arrive(Time(0), Count { imm: imm.to_wire(), n: 1 }));
            let handle = Arc::new(HandleState::default());
            let never = (Time(0), std::time::Duration::MAX);
            let completion = (Arc::clone(&handle) as Arc<dyn OperationCompletion>, 0);
            counters.expect((imm, 1, Some(Span::NONE)), never, Writers::new(), completion);
            counters.look((Time(0), None), std::iter::once(imm));
            arrival.join().unwrap();
            assert!(handle.is_done());
        });
    }
}
