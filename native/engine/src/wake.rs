//! How whatever has news of its own (a helper thread, a disk) gets an engine polled.

use std::sync::{Arc, OnceLock};

type Call = Box<dyn Fn() + Send + Sync>;

/// Wakes the engine that it is given to, once there is one. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Waker(Arc<OnceLock<Call>>);

impl Waker {
    /// What waking means; only the first call counts.
    pub fn set(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(call));
    }

    pub fn wake(&self) {
        if let Some(call) = self.0.get() {
            call();
        }
    }
}
