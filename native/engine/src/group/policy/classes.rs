//! Bytes of each priority class: under way, wanted or allowed.

use crate::api::Priority;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByClass {
    pub latency: u64,
    pub bulk: u64,
    pub background: u64,
}

impl ByClass {
    /// The same for each.
    pub fn all(bytes: u64) -> Self {
        Self { latency: bytes, bulk: bytes, background: bytes }
    }

    pub fn of(&self, class: Priority) -> u64 {
        match class {
            Priority::Latency => self.latency,
            Priority::Bulk => self.bulk,
            Priority::Background => self.background,
        }
    }

    pub fn of_mut(&mut self, class: Priority) -> &mut u64 {
        match class {
            Priority::Latency => &mut self.latency,
            Priority::Bulk => &mut self.bulk,
            Priority::Background => &mut self.background,
        }
    }

    /// Of a class and those above it.
    pub fn up_to(&self, class: Priority) -> u64 {
        let those = Priority::ALL.iter().filter(|c| **c <= class);
        those.fold(0, |n, c| n.saturating_add(self.of(*c)))
    }

    pub fn total(&self) -> u64 {
        self.up_to(Priority::Background)
    }

    /// The larger one of each class.
    pub fn max(self, other: Self) -> Self {
        Self {
            latency: self.latency.max(other.latency),
            bulk: self.bulk.max(other.bulk),
            background: self.background.max(other.background),
        }
    }
}
