//! Metrics and flight records of an engine.

use super::TransferEngine;
use crate::{
    flight::{Cursor, Metrics, Records},
    Result,
};

impl TransferEngine {
    /// All metrics since the engine was opened.
    ///
    /// # Errors
    /// [`EngineError::Forked`](crate::EngineError::Forked)
    pub fn metrics(&self) -> Result<Metrics> {
        self.shared.driver()?;
        let stats = self.shared.stats();
        let mut metrics = Metrics {
            counted: stats.counted,
            ghosts: stats.ghosts,
            regions: stats.regions,
            retiring: stats.retiring,
            expected: self.shared.counters.log.wait_times(),
            ..Metrics::default()
        };
        let core = self.shared.lock()?;
        core.group.metrics(&core.domains, &mut metrics);
        Ok(metrics)
    }

    /// Flight records since `since`, and pending requests. The engine's lock is held for some ten
    /// microseconds per hundred records: call this every second, not every millisecond.
    ///
    /// # Errors
    /// [`EngineError::Forked`](crate::EngineError::Forked)
    pub fn records(&self, since: Cursor) -> Result<Records> {
        self.shared.driver()?;
        let mut records = Records::default();
        self.shared.counters.log.read(since, &mut records);
        let core = self.shared.lock()?;
        core.group.records(since, &core.domains, &mut records);
        Ok(records)
    }
}
