//! When the layers of a request were computed, posted and delivered: one store for each, read by whoever wants to.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fabric_engine::Time;

/// The times of one request's layers, in the order in which they are computed.
#[derive(Debug)]
pub struct Timeline {
    layers: Box<[Marks]>,
}

/// Nanoseconds; 0 is not yet.
#[derive(Debug)]
struct Marks {
    number: u32,
    computed: AtomicU64,
    posted: AtomicU64,
    delivered: AtomicU64,
}

/// One layer's times, by the clock of the first rank's engine; `None` where it hasn't come so far, or nothing of the layer had
/// to be sent. Of a prompt that is computed in chunks they are those of the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerTimes {
    /// The layer's number in the model.
    pub layer: u32,
    /// It was said to be in the cache.
    pub computed: Option<Time>,
    /// The last of its pages was given to the engines.
    pub posted: Option<Time>,
    /// The last of its pages is known to be in the decoder's memory.
    pub delivered: Option<Time>,
}

impl Timeline {
    pub(super) fn new(numbers: impl Iterator<Item = u32>) -> Self {
        let zero = || AtomicU64::new(0);
        let marks = |number| Marks { number, computed: zero(), posted: zero(), delivered: zero() };
        Self { layers: numbers.map(marks).collect() }
    }

    pub(super) fn computed(&self, step: usize, now: Time) {
        self.layers[step].computed.store(now.0.max(1), Relaxed);
    }

    pub(super) fn posted(&self, step: usize, now: Time) {
        self.layers[step].posted.store(now.0.max(1), Relaxed);
    }

    pub(super) fn delivered(&self, step: usize, now: Time) {
        self.layers[step].delivered.store(now.0.max(1), Relaxed);
    }

    pub fn layers(&self) -> Vec<LayerTimes> {
        self.layers.iter().map(Marks::times).collect()
    }
}

impl Marks {
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
