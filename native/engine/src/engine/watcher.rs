//! Watched words in memory: a GPU kernel, or a plain store on the host, signals the engine (UVM
//! watcher, fabric-lib §3.3).

use std::{
    sync::{
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Release, SeqCst},
        },
        Arc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::callbacks::run_callback;
use crate::{
    locks::{Condvar, Mutex},
    memory::device::DeviceWord,
    process::ProcessLocal,
    EngineError, Result,
};

type OnChange = Box<dyn Fn(u64, u64) + Send + Sync>;

/// Polls in a row before the thread yields its core; the writer may need it.
const POLLS_BEFORE_YIELD: u32 = 32;
/// Time that the thread spins after a change.
const SPIN: Duration = Duration::from_micros(200);
/// Longest sleep between polls.
const LONGEST_NAP: Duration = Duration::from_millis(2);

/// On its own cache line, so that the writer's stores cause no false sharing.
#[repr(align(64))]
struct HostWord(AtomicU64);

/// The watched word.
enum WatchedWord {
    Host(HostWord),
    Device(DeviceWord),
}

impl WatchedWord {
    fn load(&self) -> u64 {
        match self {
            Self::Host(word) => word.0.load(Acquire),
            Self::Device(word) => word.load(),
        }
    }

    fn addr(&self) -> usize {
        match self {
            Self::Host(word) => word.0.as_ptr() as usize,
            Self::Device(word) => word.host_addr(),
        }
    }

    fn store(&self, value: u64) {
        match self {
            Self::Host(word) => word.0.store(value, Release),
            Self::Device(word) => word.store(value),
        }
    }

    fn add(&self, n: u64) {
        match self {
            Self::Host(word) => {
                word.0.fetch_add(n, SeqCst);
            }
            // CPUs have no atomic addition across the bus.
            Self::Device(word) => word.store(word.load().wrapping_add(n)),
        }
    }
}

struct Watch {
    word: WatchedWord,
    on_change: OnChange,
    /// The last value seen; only the watching thread changes it.
    seen: AtomicU64,
    /// When it was seen, in nanoseconds since `begun`.
    seen_at: AtomicU64,
    begun: Instant,
    dropped: AtomicBool,
    /// Whether others may store to the word without a call, so that only polling finds it.
    polled: AtomicBool,
}

#[derive(Default)]
struct WatcherState {
    watches: Vec<Arc<Watch>>,
    thread: Option<JoinHandle<()>>,
    closed: bool,
    /// Set by calls that end the thread's sleep.
    poked: bool,
}

/// A transfer stores its key when it ends; kernels wait on the word.
impl super::Notify for DeviceWord {
    fn notify(&self, key: u64) {
        self.store(key);
    }
}

/// The watchers of one engine and their thread, which starts with the first watcher.
#[derive(Clone)]
pub(crate) struct Watchers {
    inner: Arc<ProcessLocal<(Mutex<WatcherState>, Condvar)>>,
}

/// A watched 64-bit word. The engine calls back with the old and the new value after a change. It
/// may miss values in between, but never the latest. Dropping the watcher ends the watch.
///
/// The callback runs on the watching thread, so that it can post without a thread switch. It must
/// not block.
pub struct Watcher {
    watch: Arc<Watch>,
    watchers: Watchers,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Watcher({} at {:#x})", self.load(), self.watch.word.addr())
    }
}

impl Watcher {
    /// The address of the word, for direct stores: 8 bytes, aligned. From the first call on the
    /// watching thread polls the word; before it sleeps until [`store`] or [`add`].
    ///
    /// [`store`]: Self::store
    /// [`add`]: Self::add
    pub fn addr(&self) -> usize {
        if !self.watch.polled.swap(true, SeqCst) {
            // In a forked child no thread watches.
            if let Ok(inner) = self.watchers.inner.get() {
                wake_thread(inner);
            }
        }
        self.watch.word.addr()
    }

    /// The word as kernels see it, if kernels may use it.
    pub fn device_word(&self) -> Option<&DeviceWord> {
        match &self.watch.word {
            WatchedWord::Host(_) => None,
            WatchedWord::Device(word) => Some(word),
        }
    }

    pub fn load(&self) -> u64 {
        self.watch.word.load()
    }

    /// The value that the watching thread saw last, and how long ago its callback began.
    pub fn seen(&self) -> (u64, Duration) {
        let value = self.watch.seen.load(Acquire);
        let at = Duration::from_nanos(self.watch.seen_at.load(Acquire));
        (value, self.watch.begun.elapsed().saturating_sub(at))
    }

    /// Stores to the word and wakes the watching thread. A direct store to [`addr`] is seen too,
    /// after at most 2 ms.
    ///
    /// [`addr`]: Self::addr
    ///
    /// # Errors
    /// [`EngineError::Forked`]: the watching thread is the parent's.
    pub fn store(&self, value: u64) -> Result<()> {
        let inner = self.watchers.inner.get()?;
        self.watch.word.store(value);
        wake_thread(inner);
        Ok(())
    }

    /// Adds to the word; see [`Self::store`]. A device word must have one writer at a time.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub fn add(&self, n: u64) -> Result<()> {
        let inner = self.watchers.inner.get()?;
        self.watch.word.add(n);
        wake_thread(inner);
        Ok(())
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.watch.dropped.store(true, SeqCst);
        if let Ok(inner) = self.watchers.inner.get() {
            inner.0.lock().watches.retain(|w| !Arc::ptr_eq(w, &self.watch));
            // The watching thread lets go of the callback.
            wake_thread(inner);
        }
    }
}

impl Default for Watchers {
    fn default() -> Self {
        Self { inner: Arc::new(ProcessLocal::new(Default::default())) }
    }
}

fn wake_thread((state, wake): &(Mutex<WatcherState>, Condvar)) {
    state.lock().poked = true;
    wake.notify_one();
}

impl Watchers {
    pub fn add(&self, on_change: OnChange, device: Option<DeviceWord>) -> Result<Watcher> {
        let watch = Arc::new(Watch {
            polled: AtomicBool::new(device.is_some()),
            word: device.map_or_else(
                || WatchedWord::Host(HostWord(AtomicU64::new(0))),
                WatchedWord::Device,
            ),
            on_change,
            seen: AtomicU64::new(0),
            seen_at: AtomicU64::new(0),
            begun: Instant::now(),
            dropped: AtomicBool::new(false),
        });
        let inner = self.inner.get()?;
        let mut state = inner.0.lock();
        if state.closed {
            return Err(EngineError::Closed);
        }
        if state.thread.is_none() {
            let watchers = self.clone();
            let thread = std::thread::Builder::new()
                .name("fabric-watcher".into())
                .spawn(move || watchers.work())
                .map_err(|e| EngineError::Resource {
                    call: "pthread_create",
                    cause: e.to_string(),
                    hint: "raise the limit of threads or processes (ulimit -u)".into(),
                })?;
            state.thread = Some(thread);
        }
        state.watches.push(Arc::clone(&watch));
        drop(state);
        wake_thread(inner);
        Ok(Watcher { watch, watchers: self.clone() })
    }

    pub fn close(&self) {
        let Ok(inner) = self.inner.get() else { return };
        let (thread, watches) = {
            let mut state = inner.0.lock();
            state.closed = true;
            (state.thread.take(), std::mem::take(&mut state.watches))
        };
        drop(watches);
        wake_thread(inner);
        if let Some(t) = thread {
            if t.thread().id() != std::thread::current().id() {
                let _ = t.join();
            }
        }
    }

    fn work(&self) {
        let Ok((state, wake)) = self.inner.get() else { return };
        let mut watches: Vec<Arc<Watch>> = Vec::new();
        let mut changed_at = Instant::now();
        loop {
            let changed = (0..POLLS_BEFORE_YIELD).any(|_| look(&watches));
            let mut state = if changed {
                changed_at = Instant::now();
                // A word that changes all the time keeps neither a new watch nor the end waiting.
                state.lock()
            } else {
                let quiet = changed_at.elapsed();
                let polls = watches.iter().any(|w| w.polled.load(SeqCst));
                if quiet < SPIN && polls {
                    std::thread::yield_now();
                    continue;
                }
                let mut state = state.lock();
                if !state.poked {
                    match polls {
                        false => wake.wait(&mut state),
                        // The sleep grows with the time since the last change.
                        true => drop(wake.wait_for(&mut state, (quiet / 8).min(LONGEST_NAP))),
                    }
                }
                state
            };
            if state.closed {
                return;
            }
            // Whatever changes the list pokes.
            if !std::mem::take(&mut state.poked) {
                continue;
            }
            changed_at = Instant::now();
            let current = state.watches.clone();
            // Without the lock: a user's callback may take any lock as it ends.
            drop(state);
            watches = current;
        }
    }
}

/// Runs the callback of each word that has changed; false if none has.
fn look(watches: &[Arc<Watch>]) -> bool {
    let changed = watches.iter().fold(false, |changed, w| w.look() | changed);
    if !changed {
        std::hint::spin_loop();
    }
    changed
}

impl Watch {
    fn look(&self) -> bool {
        let new = self.word.load();
        let old = self.seen.load(Acquire);
        if new == old || self.dropped.load(SeqCst) {
            return false;
        }
        // Stored before the value, so that a reader never pairs the value with an older time.
        self.seen_at.store(self.begun.elapsed().as_nanos() as u64, Release);
        self.seen.store(new, Release);
        if run_callback(|| (self.on_change)(old, new)).is_err() {
            tracing::error!("a watcher callback panicked; the engine goes on");
        }
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// What a user's callback owns, whose end looks at the watchers.
    struct LooksAtItsEnd(Watchers, mpsc::Sender<()>);

    impl Drop for LooksAtItsEnd {
        fn drop(&mut self) {
            drop(self.0.add(Box::new(|_, _| ()), None));
            let _ = self.1.send(());
        }
    }

    fn watch(watchers: &Watchers) -> (Watcher, mpsc::Receiver<()>) {
        let (ended, ends) = mpsc::channel();
        let owned = LooksAtItsEnd(watchers.clone(), ended);
        (watchers.add(Box::new(move |_, _| _ = &owned), None).unwrap(), ends)
    }

    #[test]
    fn a_callback_ends_without_the_lock() {
        let watchers = Watchers::default();
        for closes in [false, true] {
            let (watcher, ends) = watch(&watchers);
            // The watching thread has the watch now, and drops it last.
            watcher.store(1).unwrap();
            while watcher.seen().0 == 0 {
                std::thread::yield_now();
            }
            let theirs = watchers.clone();
            std::thread::spawn(move || {
                if closes {
                    theirs.close();
                }
                drop(watcher);
            });
            ends.recv_timeout(Duration::from_secs(30)).expect("the end of the callback");
        }
    }
    #[test]
    fn a_word_that_changes_all_the_time_keeps_no_other_waiting() {
        let watchers = Watchers::default();
        let word = Arc::new(std::sync::OnceLock::<usize>::new());
        let own = Arc::clone(&word);
        let busy = move |_, new: u64| {
            // SAFETY: the watch that calls this keeps its word.
            let word = unsafe { &*(*own.wait() as *const AtomicU64) };
            word.store(new.wrapping_add(1), SeqCst);
        };
        let first = watchers.add(Box::new(busy), None).unwrap();
        word.set(first.addr()).unwrap();
        let (tell, seen) = mpsc::channel();
        let told = tell.clone();
        let second = watchers.add(Box::new(move |_, new| told.send(new).unwrap()), None).unwrap();
        second.addr();
        first.store(1).unwrap();
        second.store(7).unwrap();
        let limit = Duration::from_secs(30);
        assert_eq!(seen.recv_timeout(limit), Ok(7), "the other word is not looked at");
        let told = tell.clone();
        let third = watchers.add(Box::new(move |_, new| told.send(new).unwrap()), None).unwrap();
        third.store(8).unwrap();
        assert_eq!(seen.recv_timeout(limit), Ok(8), "a later word is not looked at");
        let (theirs, closed) = (watchers.clone(), tell);
        std::thread::spawn(move || {
            theirs.close();
            let _ = closed.send(9);
        });
        assert_eq!(seen.recv_timeout(limit), Ok(9), "it never ends");
        drop((first, second, third));
    }
}
