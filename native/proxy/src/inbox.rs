//! What an executor is told by other threads.

use std::sync::{
    atomic::{
        AtomicBool,
        Ordering::{Acquire, Release},
    },
    Arc,
};

use fabric_engine::{EngineError, Notify};
use parking_lot::Mutex;

use crate::{descriptor::ThreadDescriptor, Bed};

/// What isn't a tag.
#[derive(Debug)]
pub(crate) enum News {
    /// The engine has lost a rank.
    Lost {
        rank: usize,
        incarnation: u32,
        error: EngineError,
    },
    Join {
        rank: usize,
        incarnation: u32,
        descriptor: Box<ThreadDescriptor>,
    },
    Mask {
        rank: usize,
    },
}

#[derive(Debug)]
pub(crate) struct Inbox {
    any: AtomicBool,
    /// Some of it is no tag.
    any_news: AtomicBool,
    /// Values of tagged immediates, and how many writes carried each.
    tags: Mutex<Vec<(u32, u32)>>,
    news: Mutex<Vec<News>>,
    bed: Arc<Bed>,
}

impl Inbox {
    pub fn new(bed: Arc<Bed>) -> Self {
        Self {
            any: AtomicBool::new(false),
            any_news: AtomicBool::new(false),
            tags: Mutex::default(),
            news: Mutex::default(),
            bed,
        }
    }

    /// Called under the engine's lock.
    pub fn tag(&self, value: u32, n: u32) {
        self.tags.lock().push((value, n));
        self.tell();
    }

    pub fn news(&self, news: News) {
        let mut all = self.news.lock();
        all.push(news);
        // Under the lock, as it is cleared: it says what the list holds.
        self.any_news.store(true, Release);
        drop(all);
        self.tell();
    }

    fn tell(&self) {
        self.any.store(true, Release);
        self.bed.wake();
    }

    /// Nobody takes anything any more, here or from the FIFOs.
    pub fn close(&self) {
        self.bed.close();
    }

    pub fn is_empty(&self) -> bool {
        !self.any.load(Acquire)
    }

    /// Whether ranks have come or gone since the last [`Inbox::take`].
    #[inline]
    pub fn has_news(&self) -> bool {
        self.any_news.load(Acquire)
    }

    /// What has come since the last time; `tags` must be empty.
    #[inline]
    pub fn take(&self, tags: &mut Vec<(u32, u32)>) -> Vec<News> {
        if self.is_empty() {
            return Vec::new();
        }
        // Before the look, so that what comes after it is announced anew.
        self.any.store(false, std::sync::atomic::Ordering::SeqCst);
        std::mem::swap(tags, &mut self.tags.lock());
        let mut news = self.news.lock();
        self.any_news.store(false, Release);
        std::mem::take(&mut news)
    }
}

/// A transfer that somebody waits for is over.
impl Notify for Inbox {
    fn notify(&self, _key: u64) {
        self.tell();
    }
}
