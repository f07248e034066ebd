//! Large copies: cut into chunks that helper threads, and callers who wait anyway, take in turn.

use std::{
    sync::{
        atomic::{
            AtomicBool, AtomicU32, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, SeqCst},
        },
        Arc,
    },
    thread::JoinHandle,
};

use crossbeam_queue::SegQueue;
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::{
    imports::{Import, Reach},
    raw::{across, piece, Direction, Piece},
};
use crate::{
    domain::{Assist, Count, Data, DomainError, LinkId, Token},
    memory::Copier,
    transport::Waker,
};

/// What one thread copies before it looks around: some hundred microseconds of work.
const CHUNK: u64 = 1 << 20;
/// Pieces in one kernel call; IOV_MAX is 1024.
const PIECES: u32 = 512;

/// What is done with the bytes of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Motion {
    Copy(Direction),
    /// Page tables are filled, so that a later copy meets no page fault.
    Touch,
}

/// A copy between local memory and an imported region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy<'a> {
    pub data: &'a Data,
    pub import: &'a Import,
    pub motion: Motion,
}

impl Copy<'_> {
    /// How many chunks it is cut into, pages per chunk and bytes per chunk of a page.
    fn cut(&self) -> (u32, u32, u64) {
        let Data { page_len, pages, .. } = *self.data;
        if page_len > CHUNK {
            return ((page_len.div_ceil(CHUNK) as u32).saturating_mul(pages), 1, CHUNK);
        }
        let per_chunk = ((CHUNK / page_len.max(1)) as u32).clamp(1, PIECES);
        (pages.div_ceil(per_chunk), per_chunk, page_len)
    }

    /// All of it, on this thread.
    #[inline]
    pub fn run(&self, copier: &Copier) -> Result<(), DomainError> {
        if self.data.pages == 1 && self.data.page_len <= CHUNK {
            return self.pieces(0..1, 0, self.data.page_len, copier);
        }
        let (chunks, ..) = self.cut();
        (0..chunks).try_for_each(|c| self.run_chunk(c, copier))
    }

    fn run_chunk(&self, chunk: u32, copier: &Copier) -> Result<(), DomainError> {
        let Data { page_len, pages, .. } = *self.data;
        let (_, per_chunk, bytes) = self.cut();
        if page_len > CHUNK {
            let per_page = page_len.div_ceil(CHUNK) as u32;
            let (page, part) = (chunk / per_page, u64::from(chunk % per_page));
            let from = part * bytes;
            return self.pieces(page..page + 1, from, bytes.min(page_len - from), copier);
        }
        let first = chunk * per_chunk;
        self.pieces(first..(first + per_chunk).min(pages), 0, page_len, copier)
    }

    /// Copies `len` bytes from byte `from` of each of some pages.
    #[inline]
    fn pieces(
        &self,
        pages: std::ops::Range<u32>,
        from: u64,
        len: u64,
        copier: &Copier,
    ) -> Result<(), DomainError> {
        let Data { local, local_seq, remote_seq, .. } = self.data;
        let local_at = |i: u32| local.0 + (local_seq.nth(i) + from) as usize;
        let remote_at = |i: u32| self.import.base + (remote_seq.nth(i) + from) as usize;
        let (pid, direction) = match (&self.import.reach, self.motion) {
            (Reach::Mapped(mapping), Motion::Touch) => {
                pages.for_each(|i| mapping.populate(remote_at(i), len as usize));
                return Ok(());
            }
            (Reach::Process(_), Motion::Touch) => return Ok(()),
            (Reach::Mapped(mapping), Motion::Copy(direction)) => {
                let at = |i: u32| {
                    let (l, r) = (local_at(pages.start + i), remote_at(pages.start + i));
                    if len >= 512 {
                        mapping.populate(r, len as usize);
                    }
                    match direction {
                        Direction::Out => (r, l),
                        Direction::In => (l, r),
                    }
                };
                // SAFETY: the remote ranges were checked against the import's length when this copy
                // was made, and the import keeps its mapping; the local ranges lie in a region that
                // the request keeps registered; they are different mappings.
                unsafe { copier.copy_pages(pages.len() as u32, len as usize, at) };
                return Ok(());
            }
            (Reach::Process(pid), Motion::Copy(direction)) => (*pid, direction),
        };
        let cut = |at: &dyn Fn(u32) -> usize| -> Vec<Piece> {
            pages.clone().map(|i| piece(at(i), len as usize)).collect()
        };
        let (mut l, mut r) = (cut(&local_at), cut(&remote_at));
        // SAFETY: the local ranges lie in a region that the request keeps registered.
        unsafe { across(pid, direction, &mut l, &mut r) }.map_err(|e| match e {
            Errno::SRCH => DomainError::LinkDown("its process has ended".into()),
            Errno::FAULT => DomainError::Refused(
                "the memory behind the region is not there any more; its owner must deregister \
                 before it frees"
                    .into(),
            ),
            errno => DomainError::Io { call: "process_vm_writev", errno },
        })
    }
}

/// A copy on its way through the pool.
#[derive(Debug)]
pub(super) struct Job {
    data: Data,
    import: Arc<Import>,
    motion: Motion,
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
        motion: Motion,
        (link, token, count): (LinkId, Token, Option<Count>),
    ) -> Arc<Self> {
        let (chunks, ..) = Copy { data: &data, import: &import, motion }.cut();
        Arc::new(Self {
            data,
            import,
            motion,
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

    /// Takes the next chunk; false if all are taken.
    fn work(&self, copier: &Copier) -> Option<bool> {
        let chunk = self.next.fetch_add(1, Relaxed);
        if chunk >= self.chunks {
            self.next.store(self.chunks, Relaxed);
            return None;
        }
        if !self.cancelled.load(Acquire) {
            let copy = Copy { data: &self.data, import: &self.import, motion: self.motion };
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
            waker: waker.clone(),
        })
    }

    pub fn submit(self: &Arc<Self>, job: Arc<Job>) {
        let chunks = job.chunks as usize;
        let mut q = self.queue.lock();
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
        let worked = self.front().is_some_and(|job| match job.work(&self.copier) {
            None => {
                self.remove(&job);
                true
            }
            Some(last) => {
                if last {
                    self.remove(&job);
                    self.done.push(job);
                    self.waker.wake();
                }
                true
            }
        });
        self.active.fetch_sub(1, SeqCst);
        worked
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
    }
}

impl Assist for Pool {
    #[inline]
    fn assist(&self) -> bool {
        self.is_busy() && self.step()
    }
}
