//! Times at which the layers of a request were computed, posted and delivered: one store per layer,
//! for any reader.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fabric_engine::Time;

/// The times of one request's layers, in the order in which they are computed.
#[derive(Debug)]
pub struct Timeline {
    layers: Box<[AtomicTimes]>,
}

/// The times of one layer, nanoseconds; 0 if not yet.
#[derive(Debug)]
struct AtomicTimes {
    number: u32,
    computed: AtomicU64,
    posted: AtomicU64,
    delivered: AtomicU64,
}

/// One layer's times, by the clock of the first rank's engine; `None` if it has not come so far, or
/// no page of the layer had to be sent. For a prompt in chunks, the times of the last chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerTimes {
    /// The layer's number in the model.
    pub layer: u32,
    /// When it was reported to be in the cache, or seen to be if a kernel counts.
    pub computed: Option<Time>,
    /// When its last page was given to the engines.
    pub posted: Option<Time>,
    /// When its last page was known to be in the decoder's memory.
    pub delivered: Option<Time>,
}

/// Times of the latest layer counts; the counting thread records them, unless a kernel counts.
pub(super) struct CountTimes {
    marks: Box<[AtomicU64]>,
}

impl Default for CountTimes {
    fn default() -> Self {
        Self { marks: (0..1024).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl CountTimes {
    fn mark(&self, count: u64) -> &AtomicU64 {
        &self.marks[count as usize % self.marks.len()]
    }

    pub fn made(&self, count: u64, now: Time) {
        self.mark(count).store(now.0, Relaxed);
    }

    /// When a count was made that is seen now, and follows one that was made at `last`.
    pub fn take(&self, count: u64, last: Time, now: Time) -> Time {
        let at = Time(self.mark(count).swap(0, Relaxed));
        if (last.0.max(1)..=now.0).contains(&at.0) {
            at
        } else {
            now
        }
    }
}

impl Timeline {
    pub(super) fn new(numbers: impl Iterator<Item = u32>) -> Self {
        let zero = || AtomicU64::new(0);
        let marks =
            |number| AtomicTimes { number, computed: zero(), posted: zero(), delivered: zero() };
        Self { layers: numbers.map(marks).collect() }
    }

    pub(super) fn computed(&self, step: usize, now: Time) {
        self.layers[step].computed.store(now.0.max(1), Relaxed);
    }

    /// The word for the time at which the pages of a layer were given to the engines.
    pub(super) fn posted(&self, step: usize) -> &AtomicU64 {
        &self.layers[step].posted
    }

    pub(super) fn delivered(&self, step: usize, now: Time) {
        self.layers[step].delivered.store(now.0.max(1), Relaxed);
    }

    pub fn layers(&self) -> Vec<LayerTimes> {
        self.layers.iter().map(AtomicTimes::times).collect()
    }
}

impl AtomicTimes {
    fn times(&self) -> LayerTimes {
        let some = |mark: &AtomicU64| Some(Time(mark.load(Relaxed))).filter(|time| time.0 > 0);
        let computed = some(&self.computed);
        // What is earlier than what it follows is of the chunk before.
        let posted = some(&self.posted).filter(|posted| Some(*posted) >= computed);
        let delivered =
            some(&self.delivered).filter(|done| posted.is_some_and(|posted| *done >= posted));
        LayerTimes { layer: self.number, computed, posted, delivered }
    }
}

impl PartialEq for Timeline {
    fn eq(&self, other: &Self) -> bool {
        self.layers() == other.layers()
    }
}

impl Eq for Timeline {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_is_seen_late_was_made_when_it_was_made() {
        let counts = CountTimes::default();
        counts.made(1, Time(10));
        counts.made(2, Time(20));
        assert_eq!(counts.take(1, Time(0), Time(50)), Time(10));
        assert_eq!(counts.take(2, Time(10), Time(50)), Time(20));
        // These counts have no recorded time; one has the mark of a skipped count.
        assert_eq!(counts.take(3, Time(20), Time(50)), Time(50));
        counts.made(4, Time(30));
        assert_eq!(counts.take(4 + 1024, Time(40), Time(60)), Time(60));
    }

    #[test]
    fn times_of_the_chunk_before_are_not_those_of_the_next() {
        let timeline = Timeline::new([7].into_iter());
        let times = |timeline: &Timeline| {
            let at = timeline.layers()[0];
            [at.computed, at.posted, at.delivered].map(|time| time.map(|t| t.0))
        };
        assert_eq!(times(&timeline), [None, None, None]);
        timeline.computed(0, Time(1));
        timeline.posted(0).store(2, Relaxed);
        timeline.delivered(0, Time(3));
        assert_eq!(times(&timeline), [Some(1), Some(2), Some(3)]);
        timeline.computed(0, Time(4));
        assert_eq!(times(&timeline), [Some(4), None, None]);
        timeline.posted(0).store(5, Relaxed);
        assert_eq!(times(&timeline), [Some(4), Some(5), None]);
    }
}
