//! Asynchronous copies between host memory and other memory. A GPU's copy engine executes them in
//! order, beside the user's streams. Copies of files use the engine's file queue.

use std::sync::Arc;

use fabric_sys::cuda as sys;
use parking_lot::Mutex;

use super::{driver::Driver, Location};
use crate::{
    error::DomainError,
    memory::file::{FileQueue, FileWork},
};

/// A range to copy: `len` bytes from one address to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyRange {
    pub to: usize,
    pub from: usize,
    pub len: usize,
}

/// The engine's stream on one device. It is non-blocking, so it waits for no kernels.
struct CopyStream {
    driver: &'static Driver,
    device: i32,
    stream: usize,
    /// Unused events.
    idle: Vec<usize>,
}

impl CopyStream {
    fn new(driver: &'static Driver, device: i32) -> Result<Self, DomainError> {
        let _current = driver.enter(device)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: a context is current; writes the stream.
        let rc = unsafe { (driver.table.stream_create)(&mut stream, sys::STREAM_NON_BLOCKING) };
        driver.check("cuStreamCreate", rc)?;
        Ok(Self { driver, device, stream: stream as usize, idle: Vec::new() })
    }

    /// Queues copies and an event behind them.
    ///
    /// # Safety
    /// All ranges must stay allocated until the event has come.
    unsafe fn start(&mut self, pieces: &[CopyRange]) -> Result<usize, DomainError> {
        let _current = self.driver.enter(self.device)?;
        let (table, stream) = (&self.driver.table, self.stream as *mut _);
        let event = match self.idle.pop() {
            Some(event) => event,
            None => {
                let mut event = std::ptr::null_mut();
                let flags = sys::EVENT_DISABLE_TIMING | sys::EVENT_BLOCKING_SYNC;
                // SAFETY: a context is current; writes the event.
                let rc = unsafe { (table.event_create)(&mut event, flags) };
                self.driver.check("cuEventCreate", rc)?;
                event as usize
            }
        };
        let queue = || {
            for p in pieces {
                // SAFETY: the caller's ranges; the stream is ours.
                let rc = unsafe { (table.copy_async)(p.to as u64, p.from as u64, p.len, stream) };
                self.driver.check("cuMemcpyAsync", rc)?;
            }
            // SAFETY: event and stream are ours.
            self.driver
                .check("cuEventRecord", unsafe { (table.event_record)(event as *mut _, stream) })
        };
        match queue() {
            Ok(()) => Ok(event),
            Err(e) => {
                // Some copies may have begun. They must be over before the caller sees the error.
                // SAFETY: the stream is ours.
                unsafe { (table.stream_synchronize)(stream) };
                self.idle.push(event);
                Err(e)
            }
        }
    }

    fn poll(&mut self, event: usize) -> Option<Result<(), DomainError>> {
        let _current = match self.driver.enter(self.device) {
            Ok(current) => current,
            Err(e) => return Some(Err(e)),
        };
        // SAFETY: an event of this stream.
        match unsafe { (self.driver.table.event_query)(event as *mut _) } {
            sys::ERROR_NOT_READY => None,
            rc => {
                self.idle.push(event);
                Some(self.driver.check("cuEventQuery", rc))
            }
        }
    }

    fn wait(&mut self, event: usize) -> Result<(), DomainError> {
        let _current = self.driver.enter(self.device)?;
        // SAFETY: an event of this stream.
        let rc = unsafe { (self.driver.table.event_synchronize)(event as *mut _) };
        self.idle.push(event);
        self.driver.check("cuEventSynchronize", rc)
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: stream and events belong to this stream and are not used after this; the copies
        // have ended when the first call returns.
        unsafe {
            (self.driver.table.stream_synchronize)(self.stream as *mut _);
            for event in self.idle.drain(..) {
                (self.driver.table.event_destroy)(event as *mut _);
            }
            (self.driver.table.stream_destroy)(self.stream as *mut _);
        }
    }
}

/// Copies that were started together.
#[derive(Debug)]
#[must_use]
pub(crate) enum PendingCopy {
    Done,
    /// An event of the stream of this device and direction.
    Device {
        device: i32,
        inward: bool,
        event: usize,
    },
    File(Arc<FileWork>),
}

impl PendingCopy {
    /// Whether a thread must poll it: it has ended, or its end wakes no thread.
    pub fn needs_check(&self) -> bool {
        match self {
            Self::Done | Self::Device { .. } => true,
            Self::File(work) => work.is_over(),
        }
    }

    /// Waits until no byte is touched any more. For copy engines, dropping the copier waits.
    pub fn quiesce(&self) {
        if let Self::File(work) = self {
            work.quiesce();
        }
    }
}

/// The copies of one domain between staging memory and memory of any kind.
pub(crate) struct AsyncCopier {
    streams: Vec<((i32, bool), CopyStream)>,
    files: Arc<FileQueue>,
}

impl std::fmt::Debug for AsyncCopier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AsyncCopier({})", self.streams.len())
    }
}

impl AsyncCopier {
    pub fn new(files: &Arc<FileQueue>) -> Self {
        Self { streams: Vec::new(), files: Arc::clone(files) }
    }

    /// The name of what reads and writes files.
    pub fn files_by(&self) -> &'static str {
        self.files.backend_name().unwrap_or("the file's owner")
    }

    /// Ends the engine's file queue, for all its transports.
    pub fn close_files(&self) {
        self.files.close();
    }

    /// Wakes a thread that polls the transports.
    pub fn wake(&self) {
        self.files.wake();
    }

    /// Waits until the copy engines have ended.
    pub fn close(&mut self) {
        self.streams.clear();
    }

    /// Starts copies into (`inward`) or out of memory at `location`. Copies of one location and
    /// direction end in the order in which they began.
    ///
    /// # Safety
    /// All ranges must stay allocated, and no other code may rely on their bytes, until `poll` has
    /// said that the copy is over.
    pub unsafe fn start(
        &mut self,
        location: &Location,
        inward: bool,
        pieces: &[CopyRange],
    ) -> Result<PendingCopy, DomainError> {
        if let Some(file) = location.file() {
            // SAFETY: the caller's.
            return Ok(PendingCopy::File(unsafe { self.files.start(file, inward, pieces)? }));
        }
        let Some(range) = location.cuda() else {
            for p in pieces {
                // SAFETY: the caller's; processors reach both ends.
                unsafe { std::ptr::copy(p.from as *const u8, p.to as *mut u8, p.len) }
            }
            return Ok(PendingCopy::Done);
        };
        let device = range.device;
        // SAFETY: the caller's.
        let event = unsafe { self.stream(device, inward)?.start(pieces)? };
        Ok(PendingCopy::Device { device, inward, event })
    }

    fn stream(&mut self, device: i32, inward: bool) -> Result<&mut CopyStream, DomainError> {
        let at = match self.streams.iter().position(|(key, _)| *key == (device, inward)) {
            Some(at) => at,
            None => {
                let stream = CopyStream::new(Driver::open()?, device)?;
                self.streams.push(((device, inward), stream));
                self.streams.len() - 1
            }
        };
        Ok(&mut self.streams[at].1)
    }

    /// Result of pending copies; `None` while they run.
    pub fn poll(&mut self, copy: &PendingCopy) -> Option<Result<(), DomainError>> {
        match copy {
            PendingCopy::Done => Some(Ok(())),
            PendingCopy::File(work) => work.result(),
            PendingCopy::Device { device, inward, event } => match self.stream(*device, *inward) {
                Ok(stream) => stream.poll(*event),
                Err(e) => Some(Err(e)),
            },
        }
    }
}

/// Idle streams of threads that wait for their copies.
static IDLE_STREAMS: Mutex<Vec<CopyStream>> = Mutex::new(Vec::new());

/// Copies between memory of `device`, of its neighbours, and of the host, and waits for the end.
///
/// # Safety
/// All ranges must be allocated, here or by a mapping of a peer's allocation.
pub(crate) unsafe fn copy_now(device: i32, pieces: &[CopyRange]) -> Result<(), DomainError> {
    let resting = {
        let mut all = IDLE_STREAMS.lock();
        let at = all.iter().position(|stream| stream.device == device);
        at.map(|at| all.swap_remove(at))
    };
    let mut stream = match resting {
        Some(stream) => stream,
        None => CopyStream::new(Driver::open()?, device)?,
    };
    // SAFETY: the caller's; this waits for the end.
    let result = unsafe { stream.start(pieces) }.and_then(|event| stream.wait(event));
    IDLE_STREAMS.lock().push(stream);
    result
}
