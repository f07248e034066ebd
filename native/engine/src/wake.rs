//! How whatever has news of its own (a helper thread, a disk) gets an engine polled.

use std::sync::{Arc, OnceLock};

type Call = Box<dyn Fn(News) + Send + Sync>;

/// What is to be done about news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Some thread is to look.
    Wake,
    /// The thread that has them may look itself: it holds no lock, and its next work can wait.
    Act,
}

/// Wakes the engine that it is given to, once there is one. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Waker(Arc<OnceLock<Call>>);

impl Waker {
    /// What waking means; only the first call counts.
    pub fn set(&self, call: impl Fn(News) + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(call));
    }

    pub fn wake(&self) {
        self.tell(News::Wake);
    }

    /// As `wake`, where this thread may do what is to be done: no other is woken for it.
    pub fn act(&self) {
        self.tell(News::Act);
    }

    fn tell(&self, news: News) {
        if let Some(call) = self.0.get() {
            call(news);
        }
    }
}
