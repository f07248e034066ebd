//! Gets an engine polled when something outside of it has progressed: a helper thread, a disk.

use std::sync::{Arc, OnceLock};

type Call = Box<dyn Fn(WakeAction) + Send + Sync>;

/// The thread that polls the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WakeAction {
    /// Any other thread polls.
    WakeThread,
    /// The calling thread may poll itself: it holds no lock, and its next work can wait.
    PollHere,
}

/// Wakes one engine, once [`Waker::set`] has named it. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Waker(Arc<OnceLock<Call>>);

impl Waker {
    /// Sets the function that wakes the engine. Only the first call counts.
    pub fn set(&self, call: impl Fn(WakeAction) + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(call));
    }

    /// Makes another thread poll the engine.
    pub fn wake(&self) {
        self.request(WakeAction::WakeThread);
    }

    /// Polls the engine on this thread if possible, so that no other thread is woken.
    pub fn poll_here(&self) {
        self.request(WakeAction::PollHere);
    }

    fn request(&self, action: WakeAction) {
        if let Some(call) = self.0.get() {
            call(action);
        }
    }
}
