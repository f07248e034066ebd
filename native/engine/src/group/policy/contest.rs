//! The three choices side by side, on rails that exist only as numbers: a discrete-event run in
//! virtual time, with slicing, windows and estimates as the group has them.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use super::{
    admit::{admit, Ask, UnderWay, Verdict, Window},
    estimate::Estimate,
    score::{Choice, Load, RailView, Tier},
    size::slicing,
};
use crate::{api::Priority, time::Time};

const REQUEST: u64 = 4 << 20;
/// How long a run is; a rail that slows down does so in the middle.
const END: u64 = 60_000_000;
const MIDDLE: u64 = END / 2;
/// Completions are seen when the worker polls.
const POLL: u64 = 250;
const LATENCY: u64 = 4_000;
/// What may be under way on a rail, and what is hardly enough to keep it busy.
const WINDOW: u64 = 1 << 20;
const SHALLOW: u64 = 384 << 10;

/// A rail's true nature, which no choice sees.
#[derive(Clone, Copy)]
struct Wire {
    gbits: f64,
    gbits_from_the_middle: f64,
}

const fn wire(gbits: f64) -> Wire {
    Wire { gbits, gbits_from_the_middle: gbits }
}

impl Wire {
    fn bytes_per_ns(&self, at: u64) -> f64 {
        if at < MIDDLE {
            self.gbits / 8.0
        } else {
            self.gbits_from_the_middle / 8.0
        }
    }
}

struct Rail {
    wire: Wire,
    free_at: u64,
    queued: u64,
    estimate: Estimate,
}

struct Slice {
    request: usize,
    bytes: u64,
}

/// One of a slice's ends: when it is seen, a serial number, and what it was.
type Ending = Reverse<(u64, u64, usize, usize, u64, u64, u64)>;

struct Run {
    choice: Choice,
    rails: Vec<Rail>,
    backlog: VecDeque<Slice>,
    behind: u64,
    endings: BinaryHeap<Ending>,
    serial: u64,
    /// When each request began, and how many of its slices are left.
    requests: Vec<(u64, u64)>,
    /// Durations of the requests, for those begun before and after the middle.
    took: [Vec<u64>; 2],
    /// Bytes that arrived before and after the middle.
    carried: [u64; 2],
    jitter: fastrand::Rng,
    window: u64,
}

#[derive(Debug)]
struct Half {
    /// Of what the rails can carry.
    share: f64,
    p99: u64,
}

/// Keeps `outstanding` requests going until the end.
fn run(choice: Choice, wires: &[Wire], outstanding: usize, window: u64) -> [Half; 2] {
    let rail = |w: &Wire| Rail {
        wire: *w,
        free_at: 0,
        queued: 0,
        // Nobody was told that the rails differ.
        estimate: Estimate::new(50.0),
    };
    let mut run = Run {
        choice,
        rails: wires.iter().map(rail).collect(),
        backlog: VecDeque::new(),
        behind: 0,
        endings: BinaryHeap::new(),
        serial: 0,
        requests: Vec::new(),
        took: [Vec::new(), Vec::new()],
        carried: [0, 0],
        jitter: fastrand::Rng::with_seed(1),
        window,
    };
    (0..outstanding).for_each(|_| run.submit(0));
    run.post(0);
    while let Some(Reverse((now, ..))) = run.endings.peek().copied().filter(|e| e.0 .0 < END) {
        // All that one poll sees.
        while let Some(ending) = run.endings.peek().copied().filter(|e| e.0 .0 == now) {
            run.endings.pop();
            run.end(ending);
        }
        run.post(now);
    }
    [0, 1].map(|half| {
        let from = [0, MIDDLE][half];
        let most: f64 = wires.iter().map(|w| w.bytes_per_ns(from) * MIDDLE as f64).sum();
        let took = &mut run.took[half];
        took.sort_unstable();
        Half { share: run.carried[half] as f64 / most, p99: took[took.len() * 99 / 100] }
    })
}

impl Run {
    fn submit(&mut self, now: u64) {
        let slices = slicing(REQUEST, self.rails.len());
        let request = self.requests.len();
        self.requests.push((now, slices.count));
        for i in 0..slices.count {
            let range = slices.slice(i);
            self.backlog.push_back(Slice { request, bytes: range.end - range.start });
        }
        self.behind += REQUEST;
    }

    fn post(&mut self, now: u64) {
        while let Some(slice) = self.backlog.front() {
            let ask = Ask {
                class: Priority::Bulk,
                bytes: slice.bytes,
                since: Time(now),
                deadline: Time::NEVER,
                remaining: std::time::Duration::ZERO,
            };
            let open = Window { bytes: u64::MAX, under_way: UnderWay::default() };
            let views: Vec<_> = self
                .rails
                .iter()
                .map(|r| {
                    let under_way = UnderWay { bulk: r.queued, ..UnderWay::default() };
                    let window = Window { bytes: self.window, under_way };
                    RailView {
                        queued: r.queued,
                        speed: r.estimate.speed(Time(now), r.queued),
                        tier: Tier::Near,
                        excluded: false,
                        room: matches!(admit(Time(now), ask, window, open), Verdict::Post(_)),
                        paired: true,
                    }
                })
                .collect();
            let load = Load { length: slice.bytes, behind: self.behind - slice.bytes };
            let Some(picked) = self.choice.pick(&views, load) else { return };
            let Slice { request, bytes } = self.backlog.pop_front().unwrap();
            self.behind -= bytes;
            self.put(now, picked, request, bytes);
        }
    }

    fn put(&mut self, now: u64, picked: usize, request: usize, bytes: u64) {
        let rail = &mut self.rails[picked];
        let start = rail.free_at.max(now);
        // A slice takes up to a tenth more or less than its bytes.
        let factor = 0.9 + 0.2 * self.jitter.f64();
        rail.free_at = start + (bytes as f64 / rail.wire.bytes_per_ns(start) * factor) as u64;
        let seen = (rail.free_at + LATENCY).next_multiple_of(POLL);
        self.serial += 1;
        self.endings.push(Reverse((seen, self.serial, picked, request, bytes, now, rail.queued)));
        rail.queued += bytes;
    }

    fn end(&mut self, Reverse((now, _, rail, request, bytes, posted, queued)): Ending) {
        let rail = &mut self.rails[rail];
        rail.queued -= bytes;
        rail.estimate.completed(Time(now), Time(posted), bytes, queued);
        self.carried[usize::from(now >= MIDDLE)] += bytes;
        let (began, left) = &mut self.requests[request];
        *left -= 1;
        if *left == 0 {
            self.took[usize::from(*began >= MIDDLE)].push(now - *began);
            self.submit(now);
        }
    }
}

const EQUAL: [Wire; 4] = [wire(400.0), wire(400.0), wire(400.0), wire(400.0)];
/// One of them slows down to a tenth in mid-run.
const UNEQUAL: [Wire; 4] =
    [wire(400.0), Wire { gbits: 400.0, gbits_from_the_middle: 40.0 }, wire(400.0), wire(100.0)];

/// One that was slow is itself again from the middle on.
const RECOVERING: [Wire; 4] =
    [wire(400.0), Wire { gbits: 40.0, gbits_from_the_middle: 400.0 }, wire(400.0), wire(100.0)];

/// Two are so slow that a fast one with a full window would still be done sooner.
const TWO_SLOW: [Wire; 4] = [wire(400.0), wire(400.0), wire(50.0), wire(50.0)];

/// `run` for adaptive, round-robin and random.
fn all(wires: &[Wire], outstanding: usize, window: u64) -> [[Half; 2]; 3] {
    [Choice::adaptive(), Choice::round_robin(), Choice::random(1)]
        .map(|choice| run(choice, wires, outstanding, window))
}

#[test]
fn adaptive_uses_what_unequal_rails_can_carry() {
    let cases = [
        (2, WINDOW, UNEQUAL),
        (8, WINDOW, UNEQUAL),
        (8, WINDOW, RECOVERING),
        (8, SHALLOW, TWO_SLOW),
    ];
    for (outstanding, window, wires) in cases {
        let [adaptive, turns, random] = all(&wires, outstanding, window);
        for half in [0, 1] {
            let (a, t, r) = (&adaptive[half], &turns[half], &random[half]);
            let said = format!("{outstanding} at a time, half {half}: {a:?}, {t:?}, {r:?}");
            assert!(a.share >= 0.95, "{said}");
            assert!(a.p99 as f64 <= 0.6 * t.p99 as f64, "{said}");
            assert!(a.p99 as f64 <= 0.6 * r.p99 as f64, "{said}");
        }
    }
}

#[test]
fn adaptive_loses_nothing_where_rails_are_equal() {
    for outstanding in [1, 2, 8] {
        let [adaptive, turns, random] = all(&EQUAL, outstanding, WINDOW);
        for half in [0, 1] {
            let (a, t, r) = (&adaptive[half], &turns[half], &random[half]);
            let said = format!("{outstanding} at a time, half {half}: {a:?}, {t:?}, {r:?}");
            assert!(a.share >= 0.995 * t.share, "{said}");
            assert!(a.p99 as f64 <= 1.01 * t.p99 as f64, "{said}");
            assert!(a.share >= r.share && a.p99 <= r.p99, "{said}");
        }
    }
}
