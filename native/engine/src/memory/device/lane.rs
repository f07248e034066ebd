//! Copies between host memory and memory of other kinds: a GPU's copy engine carries them out in
//! order, beside whatever the user's streams do; those of files go through the engine's file queue.

use std::sync::Arc;

use fabric_sys::cuda as sys;
use parking_lot::Mutex;

use super::{driver::Driver, Location};
use crate::{
    error::DomainError,
    memory::file::{FileQueue, Work},
};

/// `len` bytes from one address to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub to: usize,
    pub from: usize,
    pub len: usize,
}

/// A stream of our own on one device. Non-blocking: it waits for no kernels.
struct Lane {
    driver: &'static Driver,
    device: i32,
    stream: usize,
    /// Events at rest.
    idle: Vec<usize>,
}

impl Lane {
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
    unsafe fn start(&mut self, pieces: &[Piece]) -> Result<usize, DomainError> {
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
                // Some copies may have begun: they must be over before the caller hears of it.
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
        // SAFETY: an event of this lane.
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
        // SAFETY: an event of this lane.
        let rc = unsafe { (self.driver.table.event_synchronize)(event as *mut _) };
        self.idle.push(event);
        self.driver.check("cuEventSynchronize", rc)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: stream and events belong to this lane and are not used after this; the copies have ended
        // when the first call returns.
        unsafe {
            (self.driver.table.stream_synchronize)(self.stream as *mut _);
            for event in self.idle.drain(..) {
                (self.driver.table.event_destroy)(event as *mut _);
            }
            (self.driver.table.stream_destroy)(self.stream as *mut _);
        }
    }
}

/// Copies under way.
#[derive(Debug)]
#[must_use]
pub(crate) enum Ticket {
    Done,
    /// An event of the lane of this device and way.
    Lane {
        device: i32,
        inward: bool,
        event: usize,
    },
    File(Arc<Work>),
}

impl Ticket {
    /// Whether a thread must look now, for no bell rings at its end or it has ended.
    pub fn needs_check(&self) -> bool {
        match self {
            Self::Done | Self::Lane { .. } => true,
            Self::File(work) => work.is_over(),
        }
    }

    /// Sees to it that no byte is touched any more; copy engines are waited for by dropping lanes.
    pub fn quiesce(&self) {
        if let Self::File(work) = self {
            work.quiesce();
        }
    }
}

/// The copies of one domain between staging memory and memory of any kind.
pub(crate) struct Lanes {
    lanes: Vec<((i32, bool), Lane)>,
    files: Arc<FileQueue>,
}

impl std::fmt::Debug for Lanes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lanes({})", self.lanes.len())
    }
}

impl Lanes {
    pub fn new(files: &Arc<FileQueue>) -> Self {
        Self { lanes: Vec::new(), files: Arc::clone(files) }
    }

    /// What reads and writes files.
    pub fn files_by(&self) -> &'static str {
        self.files.by().unwrap_or("the file's owner")
    }

    /// Ends the file queue, of all transports of the engine.
    pub fn close_files(&self) {
        self.files.close();
    }

    /// Wakes a thread that polls the transports.
    pub fn wake(&self) {
        self.files.wake();
    }

    /// Waits for the copy engines' end.
    pub fn close(&mut self) {
        self.lanes.clear();
    }

    /// Begins copies into (`inward`) or out of memory that lies where `location` says. Those of one
    /// location and way end in the order in which they began.
    ///
    /// # Safety
    /// All ranges must stay allocated, and no other code may rely on their bytes, until `poll` has
    /// said that the ticket is over.
    pub unsafe fn start(
        &mut self,
        location: &Location,
        inward: bool,
        pieces: &[Piece],
    ) -> Result<Ticket, DomainError> {
        if let Some(file) = location.file() {
            // SAFETY: the caller's.
            return Ok(Ticket::File(unsafe { self.files.start(file, inward, pieces)? }));
        }
        let Some(range) = location.cuda() else {
            for p in pieces {
                // SAFETY: the caller's; processors reach both ends.
                unsafe { std::ptr::copy(p.from as *const u8, p.to as *mut u8, p.len) }
            }
            return Ok(Ticket::Done);
        };
        let device = range.device;
        // SAFETY: the caller's.
        let event = unsafe { self.lane(device, inward)?.start(pieces)? };
        Ok(Ticket::Lane { device, inward, event })
    }

    fn lane(&mut self, device: i32, inward: bool) -> Result<&mut Lane, DomainError> {
        let at = match self.lanes.iter().position(|(key, _)| *key == (device, inward)) {
            Some(at) => at,
            None => {
                let lane = Lane::new(Driver::open()?, device)?;
                self.lanes.push(((device, inward), lane));
                self.lanes.len() - 1
            }
        };
        Ok(&mut self.lanes[at].1)
    }

    /// How the copies behind a ticket ended; `None` while they run.
    pub fn poll(&mut self, ticket: &Ticket) -> Option<Result<(), DomainError>> {
        match ticket {
            Ticket::Done => Some(Ok(())),
            Ticket::File(work) => work.result(),
            Ticket::Lane { device, inward, event } => match self.lane(*device, *inward) {
                Ok(lane) => lane.poll(*event),
                Err(e) => Some(Err(e)),
            },
        }
    }
}

/// Lanes at rest of threads that wait for their copies.
static RESTING: Mutex<Vec<Lane>> = Mutex::new(Vec::new());

/// Copies between memory of `device`, of its neighbours, and of the host, and waits for the end.
///
/// # Safety
/// All ranges must be allocated, here or by a mapping of a peer's allocation.
pub(crate) unsafe fn copy_now(device: i32, pieces: &[Piece]) -> Result<(), DomainError> {
    let resting = {
        let mut all = RESTING.lock();
        let at = all.iter().position(|lane| lane.device == device);
        at.map(|at| all.swap_remove(at))
    };
    let mut lane = match resting {
        Some(lane) => lane,
        None => Lane::new(Driver::open()?, device)?,
    };
    // SAFETY: the caller's; this waits for the end.
    let result = unsafe { lane.start(pieces) }.and_then(|event| lane.wait(event));
    RESTING.lock().push(lane);
    result
}
