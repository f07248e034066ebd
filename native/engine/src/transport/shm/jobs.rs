//! Large copies, cut into chunks. Copy threads, and callers that wait anyway, take the chunks in
//! turn.

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

use super::{
    copies::{CopyTask, Operation},
    imports::{Import, RegionAccess},
};
use crate::{
    domain::{Assist, Count, Data, DomainError, LinkId, Token},
    locks::{Condvar, Mutex},
    memory::Copier,
    wake::Waker,
};

/// Nanoseconds for which the end of a copy may stay unreported: while more chunks wait than have
/// ended, and otherwise. One chunk of mapped memory comes on top.
const NOTIFY_AFTER: u64 = 500_000;
const NOTIFY_SOON: u64 = 100_000;

/// A copy in the pool.
#[derive(Debug)]
pub(super) struct CopyJob {
    data: Data,
    import: Arc<Import>,
    operation: Operation,
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

impl CopyJob {
    pub fn new(
        data: Data,
        import: Arc<Import>,
        (operation, device): (Operation, Option<i32>),
        (link, token, count): (LinkId, Token, Option<Count>),
    ) -> Arc<Self> {
        let (chunks, ..) = CopyTask { data: &data, import: &import, operation, device }.cut();
        Arc::new(Self {
            data,
            import,
            operation,
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

    /// Whether a chunk may block much longer than a copy to mapped memory, since another process is
    /// involved.
    fn may_block(&self) -> bool {
        self.device.is_some() || !matches!(self.import.reach, RegionAccess::Mapped(_))
    }

    /// Copies the next chunk; `None` if all are taken, else whether it was the last to end.
    fn work(&self, copier: &Copier) -> Option<bool> {
        let chunk = self.next.fetch_add(1, Relaxed);
        if chunk >= self.chunks {
            self.next.store(self.chunks, Relaxed);
            return None;
        }
        if !self.cancelled.load(Acquire) {
            let Self { data, import, operation, device, .. } = self;
            let copy = CopyTask { data, import, operation: *operation, device: *device };
            if let Err(e) = copy.run_chunk(chunk, copier) {
                self.failure.lock().get_or_insert(e);
                self.cancelled.store(true, SeqCst);
            }
        }
        Some(self.left.fetch_sub(1, AcqRel) == 1)
    }
}

struct Queue {
    jobs: Vec<Arc<CopyJob>>,
    threads: Vec<JoinHandle<()>>,
    closed: bool,
}

/// The copy threads of one engine and their queue.
pub(super) struct CopyPool {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// Jobs in the queue, readable without the lock.
    pending: AtomicUsize,
    /// Threads that copy now, including callers; at most `limit`.
    active: AtomicUsize,
    limit: usize,
    pub copier: Copier,
    pub done: SegQueue<Arc<CopyJob>>,
    /// Chunks that are not copied yet.
    waiting: AtomicU64,
    /// When the first unreported copy ended, in nanoseconds after `started`; 0 if there is none.
    unreported_since: AtomicU64,
    /// Chunks of all unreported copies.
    unreported_chunks: AtomicU64,
    started: Instant,
    waker: Waker,
}

impl std::fmt::Debug for CopyPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool(limit {}, {:?})", self.limit, self.copier)
    }
}

impl CopyPool {
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
            unreported_since: AtomicU64::new(0),
            unreported_chunks: AtomicU64::new(0),
            started: Instant::now(),
            waker: waker.clone(),
        })
    }

    pub fn submit(self: &Arc<Self>, job: Arc<CopyJob>) {
        let chunks = job.chunks as usize;
        let mut q = self.queue.lock();
        self.waiting.fetch_add(chunks as u64, SeqCst);
        q.jobs.push(job);
        self.pending.store(q.jobs.len(), SeqCst);
        while q.threads.len() < self.limit {
            let pool = Arc::clone(self);
            let thread = std::thread::Builder::new()
                .name("fabric-copy".into())
                .spawn(move || pool.run_thread());
            match thread {
                Ok(t) => q.threads.push(t),
                Err(e) => {
                    // Callers that wait, and the worker, copy as well.
                    tracing::warn!(error = %e, "can't start a copy thread; copying with fewer");
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

    fn front(&self) -> Option<Arc<CopyJob>> {
        self.queue.lock().jobs.first().cloned()
    }

    fn remove(&self, job: &Arc<CopyJob>) {
        let mut q = self.queue.lock();
        q.jobs.retain(|j| !Arc::ptr_eq(j, job));
        self.pending.store(q.jobs.len(), SeqCst);
    }

    /// Copies one chunk of the oldest job, unless `limit` threads copy already.
    fn step(&self) -> bool {
        if self.active.fetch_add(1, SeqCst) >= self.limit {
            self.active.fetch_sub(1, SeqCst);
            return false;
        }
        let worked = self.front().is_some_and(|job| {
            if job.may_block() {
                self.notify_now();
            }
            let chunks = u64::from(job.chunks);
            match job.work(&self.copier) {
                None => {
                    self.remove(&job);
                    self.notify(0);
                    true
                }
                Some(last) => {
                    self.waiting.fetch_sub(1, SeqCst);
                    if last {
                        self.remove(&job);
                        self.done.push(job);
                    }
                    self.notify(if last { chunks } else { 0 });
                    true
                }
            }
        });
        self.active.fetch_sub(1, SeqCst);
        worked
    }

    /// Notifies the engine of ended copies; this one had `ended` chunks. While more chunks wait,
    /// several copies are reported together. Once fewer wait than have ended, the delay is shorter,
    /// so that the group can refill its window of writes.
    fn notify(&self, ended: u64) {
        if ended == 0 && self.unreported_since.load(SeqCst) == 0 {
            return;
        }
        let now = self.started.elapsed().as_nanos() as u64;
        if ended > 0 {
            self.unreported_chunks.fetch_add(ended, SeqCst);
            let _ = self.unreported_since.compare_exchange(0, now.max(1), SeqCst, SeqCst);
        }
        // A thread that finds no waiting chunk passes here afterwards.
        let first = self.unreported_since.load(SeqCst);
        if first == 0 {
            return;
        }
        let more_waits = self.waiting.load(SeqCst) > self.unreported_chunks.load(SeqCst);
        let late = if more_waits { NOTIFY_AFTER } else { NOTIFY_SOON };
        if !self.is_busy() || now.saturating_sub(first) >= late {
            self.notify_now();
        }
    }

    fn notify_now(&self) {
        // In this order: chunks that end in between count for the next notification.
        self.unreported_chunks.store(0, SeqCst);
        if self.unreported_since.swap(0, SeqCst) != 0 {
            self.waker.poll_here();
        }
    }

    fn run_thread(&self) {
        loop {
            while self.is_busy() && self.step() {}
            let mut q = self.queue.lock();
            if q.closed {
                return;
            }
            let enough = self.active.load(SeqCst) >= self.limit;
            if q.jobs.is_empty() || enough {
                // If enough threads copy, check again now and then: a caller that helped may stop.
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
        // Callers that help may be in the middle of a chunk (MR-1).
        while self.active.load(SeqCst) > 0 {
            std::thread::yield_now();
        }
    }
}

impl Assist for CopyPool {
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

    fn copy(src: &[u8], import: &Arc<Import>, offset: usize, len: usize) -> Arc<CopyJob> {
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
        let operation = (Operation::Copy(Direction::Out), None);
        CopyJob::new(data, Arc::clone(import), operation, (0, Token::default(), None))
    }

    #[test]
    fn a_small_copy_is_reported_before_a_large_one_behind_it() {
        const LARGE: usize = 64 << 20;
        let (src, _dst, import) = memory(LARGE + PAGE);
        let (waker, (tell, told)) = (Waker::default(), mpsc::channel());
        let pool = CopyPool::new(1, &waker);
        let jobs = [copy(&src, &import, 0, PAGE), copy(&src, &import, PAGE, LARGE)];
        let large = Arc::clone(&jobs[1]);
        waker.set(move |_| tell.send(large.left.load(SeqCst)).unwrap());
        // Both jobs are queued before the thread runs.
        pool.active.fetch_add(1, SeqCst);
        jobs.into_iter().for_each(|job| pool.submit(job));
        pool.active.fetch_sub(1, SeqCst);
        let left = told.recv_timeout(Duration::from_secs(20)).expect("no notification");
        assert!(left > 16, "the first copy was reported with the last");
        pool.close();
    }

    #[test]
    fn ic_3_every_copy_is_reported() {
        let (src, dst, import) = memory(64 * PAGE);
        let (waker, (tell, told)) = (Waker::default(), mpsc::channel());
        waker.set(move |_| tell.send(()).unwrap());
        let pool = CopyPool::new(2, &waker);
        for round in 0..300u64 {
            let jobs = 1 + round % 64;
            for page in 0..jobs {
                pool.submit(copy(&src, &import, page as usize * PAGE, PAGE));
            }
            // Like an engine: it polls only after a notification.
            let mut over = 0;
            while over < jobs {
                told.recv_timeout(Duration::from_secs(20)).expect("no notification");
                over += std::iter::from_fn(|| pool.done.pop()).count() as u64;
            }
        }
        pool.close();
        // SAFETY: mapped for as long as `dst` lives, and there is no writer any more.
        let arrived = unsafe { std::slice::from_raw_parts(dst.base() as *const u8, src.len()) };
        assert!(arrived == src);
    }
}
