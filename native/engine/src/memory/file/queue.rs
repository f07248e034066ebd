//! The file queue of one engine: its transports queue work, and io_uring or threads execute it. The
//! first use starts it.

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        Arc,
    },
    thread::JoinHandle,
};

use rustix::event::{eventfd, EventfdFlags};

use super::{
    pool, raw,
    ring::{Ring, DEPTH},
    FileMemory, FileWork,
};
use crate::{
    error::DomainError,
    locks::{Condvar, Mutex},
    memory::device::CopyRange,
    wake::Waker,
};

/// Work that waits for a thread.
pub(super) struct Inbox {
    works: Mutex<VecDeque<Arc<FileWork>>>,
    arrived: Condvar,
    /// Rung for a ring, which can't wait for the condition.
    pub bell: OwnedFd,
    closed: AtomicBool,
    /// Told when a piece of work is over.
    pub waker: Waker,
}

impl Inbox {
    fn put(&self, work: &Arc<FileWork>) {
        self.works.lock().push_back(Arc::clone(work));
        self.ring_bell();
    }

    fn ring_bell(&self) {
        self.arrived.notify_one();
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    pub fn try_take(&self) -> Option<Arc<FileWork>> {
        self.works.lock().pop_front()
    }

    /// Waits for work; `None` once closed.
    pub fn take(&self) -> Option<Arc<FileWork>> {
        let mut works = self.works.lock();
        loop {
            if let Some(work) = works.pop_front() {
                return Some(work);
            }
            if self.is_closed() {
                return None;
            }
            self.arrived.wait(&mut works);
        }
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }
}

/// The executor of file work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileBackend {
    /// io_uring if the kernel lets us, else threads.
    Best,
    #[cfg(test)]
    Threads,
}

/// See the module.
pub(crate) struct FileQueue {
    backend: FileBackend,
    waker: Waker,
    running: Mutex<Option<RunningThreads>>,
    closed: AtomicBool,
}

struct RunningThreads {
    inbox: Arc<Inbox>,
    threads: Vec<JoinHandle<()>>,
    by: &'static str,
}

impl std::fmt::Debug for FileQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileQueue({:?})", self.backend_name())
    }
}

impl FileQueue {
    pub fn new(waker: &Waker, backend: FileBackend) -> Arc<Self> {
        let (running, closed) = (Mutex::new(None), AtomicBool::new(false));
        Arc::new(Self { backend, waker: waker.clone(), running, closed })
    }

    /// Name of the backend; `None` before the first use.
    pub fn backend_name(&self) -> Option<&'static str> {
        self.running.lock().as_ref().map(|r| r.by)
    }

    /// Begins to move ranges into (`inward`) or out of a file.
    ///
    /// # Safety
    /// The memory of all ranges must stay allocated, and no other code may rely on its bytes, until
    /// the work is over.
    pub unsafe fn start(
        &self,
        file: &Arc<FileMemory>,
        inward: bool,
        pieces: &[CopyRange],
    ) -> Result<Arc<FileWork>, DomainError> {
        if inward && !file.is_writable() {
            let name = file.name();
            let text = format!("file {name}: it was registered for reading only");
            return Err(DomainError::Storage(text));
        }
        let mut running = self.running.lock();
        if self.closed.load(SeqCst) {
            return Err(DomainError::Unavailable("the engine is closed".into()));
        }
        if running.is_none() {
            *running = Some(RunningThreads::new(self.backend, &self.waker)?);
        }
        let work = FileWork::new(file, inward, pieces);
        if let Some(running) = &*running {
            running.inbox.put(&work);
        }
        Ok(work)
    }

    /// Wakes a thread that polls the transports.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Ends the threads when what has begun is over; what hasn't is never begun.
    pub fn close(&self) {
        self.closed.store(true, SeqCst);
        let Some(RunningThreads { inbox, threads, .. }) = self.running.lock().take() else {
            return;
        };
        inbox.closed.store(true, SeqCst);
        let given_up = std::mem::take(&mut *inbox.works.lock());
        given_up.iter().for_each(|work| work.quiesce());
        inbox.arrived.notify_all();
        inbox.ring_bell();
        let here = std::thread::current().id();
        // The last one to let go of an engine may be one of its own threads.
        for thread in threads.into_iter().filter(|t| t.thread().id() != here) {
            let _ = thread.join();
        }
    }
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        self.close();
    }
}

impl RunningThreads {
    fn new(backend: FileBackend, waker: &Waker) -> Result<Self, DomainError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC).map_err(DomainError::io("eventfd"))?;
        let inbox = Arc::new(Inbox {
            works: Mutex::default(),
            arrived: Condvar::new(),
            bell,
            closed: AtomicBool::new(false),
            waker: waker.clone(),
        });
        let mut running = Self { inbox, threads: Vec::new(), by: "io_uring" };
        let ring = match backend {
            FileBackend::Best => raw::open_ring(DEPTH * 2),
            #[cfg(test)]
            FileBackend::Threads => Err(std::io::Error::other("threads were asked for")),
        };
        match ring {
            Ok(ring) => running.spawn(move |inbox| Ring::new(ring, inbox).serve())?,
            Err(why) => {
                tracing::debug!(%why, "files are read and written by threads, not by io_uring");
                running.by = "threads";
                for _ in 0..pool::THREADS {
                    running.spawn(pool::serve)?;
                }
            }
        }
        Ok(running)
    }

    fn spawn(&mut self, f: impl FnOnce(&Inbox) + Send + 'static) -> Result<(), DomainError> {
        let inbox = Arc::clone(&self.inbox);
        let thread =
            std::thread::Builder::new().name("fabric-file".into()).spawn(move || f(&inbox));
        match thread {
            Ok(thread) => self.threads.push(thread),
            Err(e) if self.threads.is_empty() => {
                return Err(DomainError::Unavailable(format!("no thread for files: {e}")));
            }
            Err(error) => tracing::warn!(%error, "fewer threads for files than wished for"),
        }
        Ok(())
    }
}
