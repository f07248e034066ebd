//! Large copies: cut into chunks that helper threads, and callers who wait anyway, take in turn.

use std::{
    sync::{
        atomic::{
            AtomicBool, AtomicU32, AtomicU64, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, SeqCst},
        },
        Arc,
    },
    thread::JoinHandle,
    time::Instant,
};

use crossbeam_queue::SegQueue;
use parking_lot::{Condvar, Mutex};

use super::{
    copies::{Copy, Motion},
    imports::{Import, Reach},
};
use crate::{
    domain::{Assist, Count, Data, DomainError, LinkId, Token},
    memory::Copier,
    wake::Waker,
};

/// How long the end of a copy may go untold while others wait, nanoseconds: so long while more waits than has ended, and
/// the shorter time after that. A chunk of mapped memory comes on top.
const TELL_AFTER: u64 = 500_000;
const TELL_SOON: u64 = 100_000;

/// A copy on its way through the pool.
#[derive(Debug)]
pub(super) struct Job {
    data: Data,
    import: Arc<Import>,
    motion: Motion,
    device: Option<i32>,
    pub link: LinkId,
    pub token: Token,
    pub count: Option<Count>,
    chunks: u32,
    next: AtomicU32,
    left: AtomicU32,
    pub cancelled: AtomicBool,
    failure: Mutex<Option<DomainError>>,
}

impl Job {
    pub fn new(
        data: Data,
        import: Arc<Import>,
        (motion, device): (Motion, Option<i32>),
        (link, token, count): (LinkId, Token, Option<Count>),
    ) -> Arc<Self> {
        let (chunks, ..) = Copy { data: &data, import: &import, motion, device }.cut();
        Arc::new(Self {
            data,
            import,
            motion,
            device,
            link,
            token,
            count,
            chunks,
            next: AtomicU32::new(0),
            left: AtomicU32::new(chunks),
            cancelled: AtomicBool::new(false),
            failure: Mutex::new(None),
        })
    }

    pub fn result(&self) -> Result<(), DomainError> {
        self.failure.lock().clone().map_or(Ok(()), Err)
    }

    /// Whether a chunk may keep a thread for much longer than mapped memory does: another process may make it wait.
    fn takes_long(&self) -> bool {
        self.device.is_some() || !matches!(self.import.reach, Reach::Mapped(_))
    }

    /// Takes the next chunk; false if all are taken.
    fn work(&self, copier: &Copier) -> Option<bool> {
        let chunk = self.next.fetch_add(1, Relaxed);
        if chunk >= self.chunks {
            self.next.store(self.chunks, Relaxed);
            return None;
        }
        if !self.cancelled.load(Acquire) {
            let Self { data, import, motion, device, .. } = self;
            let copy = Copy { data, import, motion: *motion, device: *device };
            if let Err(e) = copy.run_chunk(chunk, copier) {
                self.failure.lock().get_or_insert(e);
                self.cancelled.store(true, SeqCst);
            }
        }
        Some(self.left.fetch_sub(1, AcqRel) == 1)
    }
}

struct Queue {
    jobs: Vec<Arc<Job>>,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
}

/// The copying threads of one engine and their queue.
pub(super) struct Pool {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Jobs in the queue, readable without the lock.
    pending: AtomicUsize,
    /// Threads that copy now, the waiting callers among them; at most `limit`.
    active: AtomicUsize,
    limit: usize,
    pub copier: Copier,
    pub done: SegQueue<Arc<Job>>,
    /// Chunks that aren't copied yet.
    waiting: AtomicU64,
    /// When the first copy ended that nobody was told of, in nanoseconds after `born`; 0 if there is none.
    untold: AtomicU64,
    /// Chunks of all of those.
    untold_chunks: AtomicU64,
    born: Instant,
    waker: Waker,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool(limit {}, {:?})", self.limit, self.copier)
    }
}

impl Pool {
    pub fn new(limit: usize, waker: &Waker) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::new(Queue { jobs: Vec::new(), threads: Vec::new(), closed: false }),
            wake: Condvar::new(),
            pending: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            limit: limit.max(1),
            copier: Copier::default(),
            done: SegQueue::new(),
            waiting: AtomicU64::new(0),
            untold: AtomicU64::new(0),
            untold_chunks: AtomicU64::new(0),
            born: Instant::now(),
            waker: waker.clone(),
        })
    }

    pub fn submit(self: &Arc<Self>, job: Arc<Job>) {
        let chunks = job.chunks as usize;
        let mut q = self.queue.lock();
        self.waiting.fetch_add(chunks as u64, SeqCst);
        q.jobs.push(job);
        self.pending.store(q.jobs.len(), SeqCst);
        while q.threads.len() < self.limit {
            let pool = Arc::clone(self);
            let thread =
                std::thread::Builder::new().name("fabric-copy".into()).spawn(move || pool.serve());
            match thread {
                Ok(t) => q.threads.push(t),
                Err(e) => {
                    // Callers who wait, and the worker, copy as well.
                    tracing::warn!(error = %e, "fewer copying threads than configured");
                    break;
                }
            }
        }
        drop(q);
        for _ in 0..chunks.min(self.limit) {
            self.wake.notify_one();
        }
    }

    pub fn is_busy(&self) -> bool {
        self.pending.load(SeqCst) > 0
    }

    fn front(&self) -> Option<Arc<Job>> {
        self.queue.lock().jobs.first().cloned()
    }

    fn remove(&self, job: &Arc<Job>) {
        let mut q = self.queue.lock();
        q.jobs.retain(|j| !Arc::ptr_eq(j, job));
        self.pending.store(q.jobs.len(), SeqCst);
    }

    /// Copies one chunk of the oldest job, unless enough threads are at it.
    fn step(&self) -> bool {
        if self.active.fetch_add(1, SeqCst) >= self.limit {
            self.active.fetch_sub(1, SeqCst);
            return false;
        }
        let worked = self.front().is_some_and(|job| {
            if job.takes_long() {
                self.tell_at_once();
            }
            let chunks = u64::from(job.chunks);
            match job.work(&self.copier) {
                None => {
                    self.remove(&job);
                    self.tell(0);
                    true
                }
                Some(last) => {
                    self.waiting.fetch_sub(1, SeqCst);
                    if last {
                        self.remove(&job);
                        self.done.push(job);
                    }
                    self.tell(if last { chunks } else { 0 });
                    true
                }
            }
        });
        self.active.fetch_sub(1, SeqCst);
        worked
    }

    /// Has the engine look at copies that have ended, of which this one had so many chunks. While others wait for their
    /// turn, several are told of at once: that takes as long as copying a part of the next. As soon as fewer wait than
    /// have ended it is less put off, so that who keeps a window of writes full has the time to.
    fn tell(&self, ended: u64) {
        if ended == 0 && self.untold.load(SeqCst) == 0 {
            return;
        }
        let now = self.born.elapsed().as_nanos() as u64;
        if ended > 0 {
            self.untold_chunks.fetch_add(ended, SeqCst);
            let _ = self.untold.compare_exchange(0, now.max(1), SeqCst, SeqCst);
        }
        // Whoever finds that no chunk waits any more comes by here after it.
        let first = self.untold.load(SeqCst);
        if first == 0 {
            return;
        }
        let more_waits = self.waiting.load(SeqCst) > self.untold_chunks.load(SeqCst);
        let late = if more_waits { TELL_AFTER } else { TELL_SOON };
        if !self.is_busy() || now.saturating_sub(first) >= late {
            self.tell_at_once();
        }
    }

    fn tell_at_once(&self) {
        // In this order: chunks that end in between count for the next time.
        self.untold_chunks.store(0, SeqCst);
        if self.untold.swap(0, SeqCst) != 0 {
            self.waker.act();
        }
    }

    fn serve(&self) {
        loop {
            while self.is_busy() && self.step() {}
            let mut q = self.queue.lock();
            if q.closed {
                return;
            }
            let enough = self.active.load(SeqCst) >= self.limit;
            if q.jobs.is_empty() || enough {
                // When others are enough, look again now and then: a caller that helped may stop.
                match q.jobs.is_empty() {
                    true => self.wake.wait(&mut q),
                    false => {
                        let _ = self.wake.wait_for(&mut q, std::time::Duration::from_micros(500));
                    }
                }
            }
        }
    }

    pub fn close(&self) {
        let threads = {
            let mut q = self.queue.lock();
            q.closed = true;
            for job in &q.jobs {
                job.cancelled.store(true, SeqCst);
            }
            std::mem::take(&mut q.threads)
        };
        self.wake.notify_all();
        for t in threads {
            let _ = t.join();
        }
        // Callers that wait for something may be in the middle of a chunk (MR-1).
        while self.active.load(SeqCst) > 0 {
            std::thread::yield_now();
        }
    }
}

impl Assist for Pool {
    #[inline]
    fn assist(&self) -> bool {
        self.is_busy() && self.step()
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;
    use crate::{
        api::{RailKeys, RegionKey},
        domain::{LocalAddr, Seq},
        memory::Allocation,
        transport::shm::{imports::Imports, raw::Direction},
    };

    const KEY: RegionKey = RegionKey { index: 1, rkey: 1 };
    const PAGE: usize = 4096;

    fn memory(len: usize) -> (Vec<u8>, Allocation, Arc<Import>) {
        let (src, dst) = (vec![7u8; len], Allocation::new(len as u64).unwrap());
        let mut imports = Imports::default();
        let memory = dst.fd().try_clone_to_owned().unwrap();
        imports.add_mapped(KEY, dst.len(), (dst.id(), dst.len(), 0), memory).unwrap();
        let import = Arc::clone(imports.get(KEY).unwrap());
        (src, dst, import)
    }

    fn copy(src: &[u8], import: &Arc<Import>, offset: usize, len: usize) -> Arc<Job> {
        let seq = Seq::Strided { offset: offset as u64, stride: 0 };
        let data = Data {
            local: LocalAddr(src.as_ptr() as usize),
            local_region: 0,
            local_seq: seq.clone(),
            remote: KEY,
            remote_keys: RailKeys::default(),
            remote_seq: seq,
            page_len: len as u64,
            pages: 1,
        };
        let motion = (Motion::Copy(Direction::Out), None);
        Job::new(data, Arc::clone(import), motion, (0, Token::default(), None))
    }

    #[test]
    fn the_end_of_a_small_copy_is_told_before_that_of_a_large_one_behind_it() {
        const LARGE: usize = 64 << 20;
        let (src, _dst, import) = memory(LARGE + PAGE);
        let (waker, (tell, told)) = (Waker::default(), mpsc::channel());
        let pool = Pool::new(1, &waker);
        let jobs = [copy(&src, &import, 0, PAGE), copy(&src, &import, PAGE, LARGE)];
        let large = Arc::clone(&jobs[1]);
        waker.set(move |_| tell.send(large.left.load(SeqCst)).unwrap());
        // Both are there before the thread looks.
        pool.active.fetch_add(1, SeqCst);
        jobs.into_iter().for_each(|job| pool.submit(job));
        pool.active.fetch_sub(1, SeqCst);
        let left = told.recv_timeout(Duration::from_secs(20)).expect("nobody tells");
        assert!(left > 16, "the end of the first was told with that of the last, or nearly");
        pool.close();
    }

    #[test]
    fn ic_3_the_end_of_every_copy_is_told() {
        let (src, dst, import) = memory(64 * PAGE);
        let (waker, (tell, told)) = (Waker::default(), mpsc::channel());
        waker.set(move |_| tell.send(()).unwrap());
        let pool = Pool::new(2, &waker);
        for round in 0..300u64 {
            let jobs = 1 + round % 64;
            for page in 0..jobs {
                pool.submit(copy(&src, &import, page as usize * PAGE, PAGE));
            }
            // As an engine: it looks when it is told to, and never else.
            let mut over = 0;
            while over < jobs {
                told.recv_timeout(Duration::from_secs(20)).expect("nobody tells");
                over += std::iter::from_fn(|| pool.done.pop()).count() as u64;
            }
        }
        pool.close();
        // SAFETY: mapped for as long as `dst` lives, and nobody writes any more.
        let arrived = unsafe { std::slice::from_raw_parts(dst.base() as *const u8, src.len()) };
        assert!(arrived == src);
    }
}
