//! Asynchronous copies between host memory and other memory. A GPU's copy engine executes them in
//! order, beside the user's streams. Copies of files use the engine's file queue.

use std::sync::Arc;

use fabric_sys::cuda as sys;

use super::{
    driver::{CurrentContext, Driver},
    Location,
};
use crate::{
    error::DomainError,
    locks::Mutex,
    memory::file::{FileQueue, FileWork},
};

/// A range to copy: `len` bytes from one address to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyRange {
    pub to: usize,
    pub from: usize,
    pub len: usize,
}

/// Copies of the same length at constant distances, which the driver takes in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rows {
    first: CopyRange,
    to_pitch: usize,
    from_pitch: usize,
    count: usize,
}

/// Distances that every device allows.
const MAX_PITCH: usize = i32::MAX as usize;

impl Rows {
    /// The copies, in order, as few rows as follow each other.
    fn of(pieces: &[CopyRange]) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for piece in pieces {
            if !all.last_mut().is_some_and(|last| last.append(piece)) {
                all.push(Self { first: *piece, to_pitch: 0, from_pitch: 0, count: 1 });
            }
        }
        all
    }

    /// Whether a copy is the next of these rows; they have it then.
    fn append(&mut self, next: &CopyRange) -> bool {
        let distances =
            (next.to.checked_sub(self.first.to), next.from.checked_sub(self.first.from));
        let (Some(to), Some(from)) = distances else { return false };
        let fits = match self.count {
            // Rows must not overlap.
            1 => (self.first.len..=MAX_PITCH).contains(&to.min(from)) && to.max(from) <= MAX_PITCH,
            count => (to, from) == (count * self.to_pitch, count * self.from_pitch),
        };
        if next.len != self.first.len || next.len == 0 || !fits {
            return false;
        }
        if self.count == 1 {
            (self.to_pitch, self.from_pitch) = (to, from);
        }
        self.count += 1;
        true
    }

    /// Each of them.
    fn each(&self) -> impl Iterator<Item = CopyRange> {
        let Self { first, to_pitch, from_pitch, count } = *self;
        (0..count).map(move |i| CopyRange {
            to: first.to + i * to_pitch,
            from: first.from + i * from_pitch,
            len: first.len,
        })
    }

    /// The one range that they are, if they follow each other without gaps at both ends.
    fn range(&self) -> Option<CopyRange> {
        let CopyRange { to, from, len } = self.first;
        let dense = self.count == 1 || (self.to_pitch, self.from_pitch) == (len, len);
        dense.then_some(CopyRange { to, from, len: len * self.count })
    }
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

    /// Makes the context of the stream current, which `start` and `wait` need.
    fn enter(&self) -> Result<CurrentContext, DomainError> {
        self.driver.enter(self.device)
    }

    /// Queues copies and an event behind them.
    ///
    /// # Safety
    /// All ranges must stay allocated until the event has come.
    unsafe fn start(
        &mut self,
        _current: &CurrentContext,
        pieces: &[CopyRange],
    ) -> Result<usize, DomainError> {
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
        let one = |p: CopyRange| {
            // SAFETY: a range of the caller's; the stream is ours.
            let rc = unsafe { (table.copy_async)(p.to as u64, p.from as u64, p.len, stream) };
            self.driver.check("cuMemcpyAsync", rc)
        };
        let queue = || {
            for rows in Rows::of(pieces) {
                if let Some(p) = rows.range() {
                    one(p)?;
                    continue;
                }
                let parameters = self.parameters(&rows)?;
                // SAFETY: the caller's ranges, by rows; the stream is ours.
                match unsafe { (table.copy_rows_async)(&parameters, stream) } {
                    // Inside a device, distances that cuMemAllocPitch didn't give may be refused.
                    sys::ERROR_INVALID_VALUE => rows.each().try_for_each(one)?,
                    rc => self.driver.check("cuMemcpy2DAsync", rc)?,
                }
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

    fn parameters(&self, rows: &Rows) -> Result<sys::CopyRows, DomainError> {
        // Host memory that the driver doesn't know is named as such.
        let place = |addr: usize| -> Result<(u32, usize, u64), DomainError> {
            let [kind] = self.driver.attributes([sys::pointer::MEMORY_TYPE], addr as u64)?;
            Ok(match kind as u32 {
                0 => (sys::MEMORYTYPE_HOST, addr, 0),
                _ => (sys::MEMORYTYPE_UNIFIED, 0, addr as u64),
            })
        };
        let (from_type, from_host, from_device) = place(rows.first.from)?;
        let (to_type, to_host, to_device) = place(rows.first.to)?;
        Ok(sys::CopyRows {
            from_x: 0,
            from_y: 0,
            from_type,
            from_host: from_host as *const _,
            from_device,
            from_array: std::ptr::null_mut(),
            from_pitch: rows.from_pitch,
            to_x: 0,
            to_y: 0,
            to_type,
            to_host: to_host as *mut _,
            to_device,
            to_array: std::ptr::null_mut(),
            to_pitch: rows.to_pitch,
            width: rows.first.len,
            height: rows.count,
        })
    }

    /// Result of the copies before an event; `None` while they run, or may run: if the context
    /// can't be made current, the event can't be asked.
    fn poll(&mut self, event: usize) -> Option<Result<(), DomainError>> {
        let _current = self.enter().ok()?;
        // SAFETY: an event of this stream.
        match unsafe { (self.driver.table.event_query)(event as *mut _) } {
            sys::ERROR_NOT_READY => None,
            rc => {
                self.idle.push(event);
                Some(self.driver.check("cuEventQuery", rc))
            }
        }
    }

    /// Copies, and waits for the end.
    ///
    /// # Safety
    /// All ranges must be allocated.
    unsafe fn copy_and_wait(&mut self, pieces: &[CopyRange]) -> Result<(), DomainError> {
        // The context stays current: nothing that may fail stands between the copies and their end.
        let current = self.enter()?;
        // SAFETY: the caller's; this waits for the end.
        let event = unsafe { self.start(&current, pieces) }?;
        self.wait(&current, event)
    }

    fn wait(&mut self, _current: &CurrentContext, event: usize) -> Result<(), DomainError> {
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
        let stream = self.stream(device, inward)?;
        let current = stream.enter()?;
        // SAFETY: the caller's.
        let event = unsafe { stream.start(&current, pieces)? };
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
    // SAFETY: the caller's.
    let result = unsafe { stream.copy_and_wait(pieces) };
    IDLE_STREAMS.lock().push(stream);
    result
}

#[cfg(test)]
#[path = "async_copy_tests.rs"]
mod tests;
