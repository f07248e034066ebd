//! Doing something later, by the engine's clock: the same in real time and in the simulator.

use std::{sync::Arc, time::Duration};

use fabric_engine::{Result, TransferEngine};

/// Runs `f` on the engine's callback thread after `delay`, or as soon as the engine is closed: the
/// end (MR-1) does not depend on another event.
///
/// The timer is an expectation that never completes: its deadline is the time.
pub(crate) fn after(
    engine: &Arc<TransferEngine>,
    delay: Duration,
    f: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let handle = engine.counter()?.expect(1, &[], delay)?;
    // The expectation ends with its handle.
    let keep = handle.clone();
    handle.on_done(move |end| {
        drop(keep);
        if end.is_err() {
            f();
        }
    });
    Ok(())
}
