//! The other engines at the NIC: the table's records, without dead, hung or departed engines.

use std::time::Duration;

use super::record::{Record, SlotContent, SLOTS};
use crate::{group::policy::divide::NicSharer, time::Time};

/// Silence after which the lock of an engine with demand is checked: the kernel knows whether it is
/// held. It is checked again after as long.
pub(super) const LOCK_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Silence after which an engine with a held lock counts as stopped or hung, or its lock as
/// inherited. Its demand is ignored until it writes again.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
struct SeenRecord {
    record: Record,
    /// When the record last changed.
    moved: Time,
    /// When its lock is checked next.
    ask: Time,
    dead: bool,
}

#[derive(Debug)]
pub(super) struct OtherProcesses {
    seen: Box<[Option<SeenRecord>]>,
    sharers: Vec<NicSharer>,
}

impl OtherProcesses {
    pub fn new() -> Self {
        Self { seen: vec![None; SLOTS].into(), sharers: Vec::with_capacity(SLOTS) }
    }

    pub fn sharers(&self) -> &[NicSharer] {
        &self.sharers
    }

    /// Updates from the slots of all others. `holds` tells whether a slot's lock is held.
    pub fn update(
        &mut self,
        now: Time,
        found: impl Iterator<Item = (usize, SlotContent)>,
        mut holds: impl FnMut(usize) -> bool,
    ) {
        self.sharers.clear();
        for (slot, found) in found {
            let seen = &mut self.seen[slot];
            match found {
                SlotContent::Empty => *seen = None,
                // The earlier record counts until it is too old.
                SlotContent::Torn => {}
                SlotContent::Record(record) => match seen {
                    Some(seen) if seen.record == record => {}
                    Some(seen) if seen.record.id == record.id => {
                        *seen = SeenRecord {
                            record,
                            moved: now,
                            ask: now.after(LOCK_CHECK_INTERVAL),
                            dead: false,
                        };
                    }
                    // A new engine, or the record of an engine that died long ago.
                    _ => *seen = Some(SeenRecord { record, moved: now, ask: now, dead: false }),
                },
            }
            let Some(seen) = seen else { continue };
            let wants = seen.record.sharer.demand.total() > 0;
            if wants && !seen.dead && now >= seen.ask {
                seen.dead = !holds(slot);
                seen.ask = now.after(LOCK_CHECK_INTERVAL);
            }
            if wants && !seen.dead && now.since(seen.moved) < SILENCE_LIMIT {
                self.sharers.push(seen.record.sharer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::group::policy::classes::ByClass;

    fn record(id: u64, beat: u64, bulk: u64) -> SlotContent {
        let sharer = NicSharer { weight: 1, demand: ByClass { bulk, ..ByClass::default() } };
        SlotContent::Record(Record { id, beat, sharer })
    }

    fn ms(n: u64) -> Time {
        Time(n * 1_000_000)
    }

    #[test]
    fn dead_or_silent_engines_have_no_share_until_they_write() {
        let mut others = OtherProcesses::new();
        let (asked, alive) = (Cell::new(0), Cell::new(true));
        let mut at = |now, found| {
            asked.set(0);
            others.update(ms(now), std::iter::once((5, found)), |slot| {
                assert_eq!(slot, 5);
                asked.set(asked.get() + 1);
                alive.get()
            });
            (others.sharers().len(), asked.get())
        };
        assert_eq!(at(0, SlotContent::Empty), (0, 0));
        assert_eq!(at(10, record(1, 1, 9)), (1, 1), "the lock of a new engine is checked");
        assert_eq!(at(20, record(1, 2, 9)), (1, 0));
        assert_eq!(at(30, record(1, 3, 0)), (0, 0), "no demand, no share");
        assert_eq!(at(40, record(1, 4, 9)), (1, 0));
        assert_eq!(at(80, SlotContent::Torn), (1, 0));
        assert_eq!(at(100, record(1, 4, 9)), (1, 1), "the lock of a silent engine is checked");
        assert_eq!(at(110, record(1, 4, 9)), (1, 0), "and not again at once");
        assert_eq!(at(1039, record(1, 4, 9)), (1, 1));
        assert_eq!(at(1040, record(1, 4, 9)).0, 0, "held but silent");
        assert_eq!(at(2000, record(1, 5, 9)), (1, 0), "it writes again");

        alive.set(false);
        assert_eq!(at(2049, record(1, 5, 9)), (1, 0));
        assert_eq!(at(2050, record(1, 5, 9)), (0, 1), "dead");
        assert_eq!(at(2500, record(1, 5, 9)), (0, 0), "and stays dead");
        assert_eq!(at(2510, record(2, 1, 9)), (0, 1), "the record of a dead engine");
        alive.set(true);
        assert_eq!(at(2520, record(3, 1, 9)), (1, 1), "a new engine in the slot");
        assert_eq!(at(2530, SlotContent::Empty), (0, 0));
    }
}
