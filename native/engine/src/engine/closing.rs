//! The end of an engine: drained, then closed.

use std::sync::{atomic::Ordering::SeqCst, Arc};

use super::{callbacks, handle, Handle, TransferEngine};
use crate::{EngineError, Result};

impl TransferEngine {
    /// Refuses requests and expectations from now on, with [`EngineError::Draining`]. The handle is
    /// done when everything that was submitted here has ended, by its deadline at the latest. Peers
    /// can still write until the engine is closed, which is the next step.
    pub fn drain(&self) -> Result<Handle> {
        self.shared.check_open()?;
        let pending = handle::HandleState::new(&self.shared);
        let theirs = Arc::clone(&pending);
        self.shared.draining.store(true, SeqCst);
        self.shared.post(Box::new(move |core, shared| {
            if core.closed {
                return theirs.complete(Err(EngineError::Closed));
            }
            core.drains.push(theirs);
            core.end_drains(shared);
        }));
        Ok(Handle::pending("drain", pending))
    }

    /// Closes the engine. It may be called more than once and from any thread, but not under a lock
    /// that callbacks need. A call beside another one returns when that has closed the engine; a
    /// callback's returns at once. In a forked child it does nothing: the resources are the parent's.
    pub fn close(&self) {
        if self.shared.driver().is_err() {
            return;
        }
        let (closed, wake) = &self.closed;
        if !self.shared.close() {
            // A callback may run on a thread that the other call joins.
            let mut closed = closed.lock();
            while !*closed && !callbacks::in_callback() {
                wake.wait(&mut closed);
            }
            return;
        }
        if let Some(worker) = self.worker.lock().take() {
            worker.stop(&self.shared);
        }
        self.shared.callbacks.close();
        *closed.lock() = true;
        wake.notify_all();
    }
}

impl Drop for TransferEngine {
    fn drop(&mut self) {
        self.close();
    }
}
