//! Whether a slice may be posted now: windows per class on a rail and towards a receiver.
//!
//! A window limits the bytes under way. A rail has one, so that urgent work never finds a long
//! queue in the NIC, where nothing can overtake. A receiver has one for each of its senders, its
//! *credit*, so that many senders together don't overrun it (incast). TENT §3.3.2 has quotas
//! between processes, but neither classes nor credits.
//!
//! 1. A class is held only by its own bytes and those of the classes above it.
//!    *Latency*: its own bytes stay within the window. *Bulk*: latency and bulk within 7/8 of it.
//!    *Background*: all three within 1/4 of it.
//! 2. A class above background with nothing under way, on the rail or to the receiver, may post one slice,
//!    however small the window and however much others have under way.
//! 3. Background doesn't starve: a slice that has waited for [`MAX_BACKGROUND_WAIT`] with none of its class under
//!    way may be posted.
//! 4. A slice that would miss its deadline at twice the expected pace is judged by the rules of the
//!    class above: background as bulk, bulk with the whole window, though still behind latency. It is posted
//!    before work that isn't urgent.
//! 5. A slice whose deadline is past isn't posted.

use std::time::Duration;

use super::classes::ByClass;
use crate::{api::Priority, time::Time};

/// Maximum wait of a background slice with none of its class under way on the rail.
pub const MAX_BACKGROUND_WAIT: Duration = Duration::from_millis(10);
/// Least credit of a sender, bytes: one smallest slice.
pub const LEAST_CREDIT: u64 = super::size::SMALLEST;

/// A limit of bytes under way, and the bytes under way.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub bytes: u64,
    pub under_way: ByClass,
}

/// The slice that would be posted.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest {
    pub class: Priority,
    pub bytes: u64,
    /// Since when it is the next of its class to be posted.
    pub since: Time,
    pub deadline: Time,
    /// Expected time for the rest of the request.
    pub remaining: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Post it; it counts in the window of this class.
    Post(Priority),
    /// Ask again after a completion, and at this time at the latest.
    Wait(Time),
    /// The deadline is past.
    Expired,
}

/// When the remaining work would miss its deadline at twice the expected time (rule 4).
pub fn urgent_at(deadline: Time, remaining: Duration) -> Time {
    let twice = u64::try_from(remaining.as_nanos()).unwrap_or(u64::MAX).saturating_mul(2);
    match deadline {
        Time::NEVER => Time::NEVER,
        deadline => Time(deadline.0.saturating_sub(twice)),
    }
}

/// Whether a slice may be posted: whether the rail's window and the receiver's credit have room.
pub fn admit(now: Time, ask: AdmissionRequest, rail: Window, receiver: Window) -> Admission {
    if now >= ask.deadline {
        return Admission::Expired;
    }
    let urgent_at = urgent_at(ask.deadline, ask.remaining);
    let urgent = now >= urgent_at;
    for pressed in [urgent, false] {
        let class = ask.judged(pressed);
        // Others may fill the rail for as long as they like: a class with nothing under way has its
        // turn (rule 2).
        let idle = class != Priority::Background && receiver.under_way.of(class) == 0;
        if (idle || rail.admits(now, ask, pressed)) && receiver.admits(now, ask, pressed) {
            return Admission::Post(class);
        }
    }
    let mut again = ask.deadline;
    if !urgent {
        again = again.min(urgent_at);
    }
    let turn = ask.since.after(MAX_BACKGROUND_WAIT);
    if ask.class == Priority::Background && now < turn {
        again = again.min(turn);
    }
    Admission::Wait(again)
}

impl AdmissionRequest {
    fn judged(&self, urgent: bool) -> Priority {
        match (self.class, urgent) {
            (Priority::Background, true) => Priority::Bulk,
            (class, _) => class,
        }
    }
}

impl Window {
    /// Whether there is room now. If so, `admit` posts at any time and deadline.
    #[inline]
    pub fn has_room(&self, class: Priority, bytes: u64) -> bool {
        let limit = match class {
            Priority::Latency => self.bytes,
            Priority::Bulk => self.most_bulk(),
            Priority::Background => self.bytes / 4,
        };
        self.under_way.up_to(class).saturating_add(bytes) <= limit
    }

    fn admits(&self, now: Time, ask: AdmissionRequest, urgent: bool) -> bool {
        let class = ask.judged(urgent);
        let limit = match (ask.class, urgent) {
            (Priority::Latency, _) | (Priority::Bulk, true) => self.bytes,
            (Priority::Bulk, false) | (Priority::Background, true) => self.most_bulk(),
            (Priority::Background, false) => self.bytes / 4,
        };
        if self.under_way.up_to(class).saturating_add(ask.bytes) <= limit {
            return true;
        }
        let none = self.under_way.of(class) == 0;
        none && (class != Priority::Background || now.since(ask.since) >= MAX_BACKGROUND_WAIT)
    }

    fn most_bulk(&self) -> u64 {
        self.bytes - self.bytes / 8
    }
}

/// The credit of each of `senders` senders, of the `bytes` that a receiver permits to be under way.
///
/// The credits add up to at most `bytes`, unless so many senders have the least credit. A sender
/// with nothing of a class under way may exceed its credit by one slice (rule 2).
pub fn credit(bytes: u64, senders: usize) -> u64 {
    (bytes / senders.max(1) as u64).max(LEAST_CREDIT)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const M: u64 = 1 << 20;
    const K64: u64 = 64 << 10;
    const LATE: Time = Time(1_000_000_000);

    fn ask(class: Priority) -> AdmissionRequest {
        let remaining = Duration::from_millis(1);
        AdmissionRequest { class, bytes: K64, since: Time(0), deadline: LATE, remaining }
    }

    fn window(latency: u64, bulk: u64, background: u64) -> Window {
        Window { bytes: M, under_way: ByClass { latency, bulk, background } }
    }

    /// No limit, and something of every class under way.
    const OPEN: Window =
        Window { bytes: u64::MAX, under_way: ByClass { latency: 1, bulk: 1, background: 1 } };

    #[test]
    fn each_class_has_its_window() {
        use Priority::{Background, Bulk, Latency};
        let now = Time(1);
        #[rustfmt::skip]
        let table = [
            (Latency,    window(0, 0, 0),                  true,  "idle"),
            (Latency,    window(K64, 99 * M, 99 * M),      true,  "never held behind bulk"),
            (Latency,    window(M - K64, 0, 0),            true,  "up to the window"),
            (Latency,    window(M - K64 + 1, 0, 0),        false, "held by its own"),
            (Bulk,       window(0, 0, 0),                  true,  "idle"),
            (Bulk,       window(0, 7 * M / 8 - K64, 0),    true,  "up to 7/8"),
            (Bulk,       window(0, 7 * M / 8 - K64 + 1, 0), false, "1/8 is left to latency"),
            (Bulk,       window(M, K64, 0),                false, "behind latency"),
            (Bulk,       window(M, 0, 0),                  true,  "one slice always"),
            (Bulk,       window(0, K64, 99 * M),           true,  "never behind background"),
            (Background, window(0, 0, 0),                  true,  "idle"),
            (Background, window(0, 0, M / 4 - K64),        true,  "up to 1/4"),
            (Background, window(0, 0, M / 4 - K64 + 1),    false, "no more"),
            (Background, window(0, M / 4, 0),              false, "behind bulk"),
            (Background, window(M / 4, 0, 0),              false, "behind latency"),
        ];
        for (class, w, expected, name) in table {
            for (rail, receiver) in [(w, OPEN), (OPEN, w)] {
                let verdict = admit(now, ask(class), rail, receiver);
                assert_eq!(
                    matches!(verdict, Admission::Post(_)),
                    expected,
                    "{class:?} {name}: {verdict:?}"
                );
            }
        }
    }

    #[test]
    fn a_class_with_nothing_under_way_to_a_receiver_has_its_turn() {
        let (full, idle) = (window(M, M, M), window(0, 0, 0));
        for (class, expected) in
            [(Priority::Latency, true), (Priority::Bulk, true), (Priority::Background, false)]
        {
            let verdict = admit(Time(1), ask(class), full, idle);
            assert_eq!(matches!(verdict, Admission::Post(_)), expected, "{class:?}");
            assert!(matches!(admit(Time(1), ask(class), full, OPEN), Admission::Wait(_)));
        }
    }

    /// A promoted slice counts in the window of the class it was promoted to.
    #[test]
    fn urgent_background_keeps_to_the_window() {
        let near = Time(LATE.0 - 2_000_000);
        let mut rail = window(0, 0, 0);
        while let Admission::Post(class) = admit(near, ask(Priority::Background), rail, OPEN) {
            *rail.under_way.of_mut(class) += K64;
            assert!(rail.under_way.total() <= M, "{:?}", rail.under_way);
        }
    }

    #[test]
    fn background_gets_its_turn_after_a_while() {
        let busy = window(M, M, 0);
        let turn = Time(0).after(MAX_BACKGROUND_WAIT);
        let a = ask(Priority::Background);
        assert_eq!(admit(Time(1), a, busy, OPEN), Admission::Wait(turn));
        assert_eq!(admit(Time(turn.0 - 1), a, busy, busy), Admission::Wait(turn));
        assert_eq!(admit(turn, a, busy, busy), Admission::Post(Priority::Background));
        // One slice at a time.
        assert!(matches!(admit(turn, a, window(M, M, 1), OPEN), Admission::Wait(_)));
    }

    #[test]
    fn a_near_deadline_moves_a_slice_up_but_not_past_latency() {
        let near = Time(LATE.0 - 2_000_000);
        let bulk = window(0, M - K64, 0);
        assert_eq!(admit(Time(1), ask(Priority::Bulk), bulk, OPEN), Admission::Wait(near));
        assert_eq!(admit(near, ask(Priority::Bulk), bulk, OPEN), Admission::Post(Priority::Bulk));
        let behind = window(M, K64, 0);
        assert_eq!(admit(near, ask(Priority::Bulk), behind, OPEN), Admission::Wait(LATE));
        let half = window(0, M / 2, K64);
        assert_eq!(
            admit(near, ask(Priority::Background), half, OPEN),
            Admission::Post(Priority::Bulk)
        );
        let more = window(0, 7 * M / 8, K64);
        assert_eq!(admit(near, ask(Priority::Background), more, OPEN), Admission::Wait(LATE));
        assert_eq!(admit(LATE, ask(Priority::Latency), OPEN, OPEN), Admission::Expired);

        let timeless = AdmissionRequest {
            deadline: Time::NEVER,
            remaining: Duration::MAX,
            ..ask(Priority::Bulk)
        };
        assert_eq!(admit(near, timeless, bulk, OPEN), Admission::Wait(Time::NEVER));
    }

    #[test]
    fn credits_add_up_to_what_the_receiver_takes() {
        for (bytes, senders, expected) in [
            (16 * M, 0, 16 * M),
            (16 * M, 1, 16 * M),
            (16 * M, 16, M),
            (16 * M, 1000, K64),
            (0, 3, K64),
        ] {
            assert_eq!(credit(bytes, senders), expected, "{bytes} {senders}");
        }
    }

    fn any_class() -> impl Strategy<Value = Priority> {
        prop_oneof![Just(Priority::Latency), Just(Priority::Bulk), Just(Priority::Background)]
    }

    prop_compose! {
        fn any_window()(
            bytes in 0u64..1 << 22, latency in 0u64..1 << 21, bulk in 0u64..1 << 22,
            background in 0u64..1 << 21, empty in 0u8..8,
        ) -> Window {
            let keep = |n: u64, bit: u8| if empty & bit == 0 { n } else { 0 };
            let under_way = ByClass {
                latency: keep(latency, 1), bulk: keep(bulk, 2), background: keep(background, 4),
            };
            Window { bytes, under_way }
        }
    }

    proptest! {
        #[test]
        fn what_a_lower_class_has_under_way_never_matters(
            class in any_class(), rail in any_window(), receiver in any_window(),
            now in 0u64..2_000_000_000, bytes in 1u64..1 << 22,
        ) {
            let ask = AdmissionRequest { bytes, ..ask(class) };
            let without = |mut w: Window| {
                if class < Priority::Bulk { w.under_way.bulk = 0 }
                if class < Priority::Background { w.under_way.background = 0 }
                w
            };
            prop_assert_eq!(
                admit(Time(now), ask, rail, receiver),
                admit(Time(now), ask, without(rail), without(receiver))
            );
        }

        #[test]
        fn room_at_once_is_room(
            class in any_class(), rail in any_window(), receiver in any_window(),
            now in 0u64..LATE.0, bytes in 1u64..1 << 22,
        ) {
            let ask = AdmissionRequest { bytes, ..ask(class) };
            if rail.has_room(class, bytes) && receiver.has_room(class, bytes) {
                let posted = matches!(admit(Time(now), ask, rail, receiver), Admission::Post(_));
                prop_assert!(posted);
            }
        }

        /// A class with nothing under way goes within its turn, whatever the others do.
        #[test]
        fn no_class_starves(class in any_class(), rail in any_window(), receiver in any_window()) {
            let mut windows = [rail, receiver];
            for w in &mut windows {
                match class {
                    Priority::Latency => w.under_way.latency = 0,
                    Priority::Bulk => w.under_way.bulk = 0,
                    Priority::Background => w.under_way.background = 0,
                }
            }
            let then = Time(0).after(MAX_BACKGROUND_WAIT);
            let posted = admit(then, ask(class), windows[0], windows[1]);
            prop_assert!(matches!(posted, Admission::Post(_)));
        }

        /// No waiter is asked again later than the answer could change by itself.
        #[test]
        fn a_wait_ends_no_later_than_the_answer_changes(
            class in any_class(), rail in any_window(), receiver in any_window(),
            now in 0u64..1_000_000_000, later in 0u64..1_000_000_000,
        ) {
            if let Admission::Wait(until) = admit(Time(now), ask(class), rail, receiver) {
                prop_assert!(until > Time(now) && until <= LATE);
                let then = Time(now + later);
                if then < until {
                    prop_assert_eq!(admit(then, ask(class), rail, receiver), Admission::Wait(until));
                }
            }
        }

        /// One class alone never has more under way than its window, but for one slice.
        #[test]
        fn windows_hold(
            class in any_class(), bytes in 0u64..M,
            slices in prop::collection::vec(1u64..1 << 19, 1..60),
        ) {
            let mut w = Window { bytes, under_way: ByClass::default() };
            let mut first = 0;
            for bytes in slices {
                let verdict = admit(Time(0), AdmissionRequest { bytes, ..ask(class) }, w, OPEN);
                if matches!(verdict, Admission::Post(_)) {
                    if first == 0 { first = bytes }
                    match class {
                        Priority::Latency => w.under_way.latency += bytes,
                        Priority::Bulk => w.under_way.bulk += bytes,
                        Priority::Background => w.under_way.background += bytes,
                    }
                }
            }
            let limit = match class {
                Priority::Latency => w.bytes,
                Priority::Bulk => w.bytes - w.bytes / 8,
                Priority::Background => w.bytes / 4,
            };
            prop_assert!(w.under_way.of(class) <= limit.max(first));
        }
    }
}
