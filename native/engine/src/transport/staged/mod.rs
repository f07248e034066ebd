//! Staging: moves memory that a transport can't access through memory that it can. This covers GPU
//! memory over sockets and shared memory, files, and memory of processes that the kernel isolates.
//!
//! The owner of such memory gives each peer a window: slots in pinned host memory that the
//! transport accesses. A write is cut into chunks. Each chunk is copied from local GPU memory or a
//! file into a local slot, written into a slot of the peer's window, copied from there by the
//! owner, and only then acknowledged or counted (IC-2). Reads take the reverse path. Chunks are in
//! different stages at the same time, so copy engines and network overlap. All other work goes to
//! the transport unchanged.

mod chunks;
mod frames;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod job;
#[cfg(test)]
mod tests;
mod windows;

use std::{collections::HashMap, sync::Arc};

use slab::Slab;

use crate::{
    api::{Endpoint, EngineAddress, EngineId, RegionKey, TransportKind},
    domain::{
        Assist, Caps, Completion, Count, Data, Domain, DomainError, LinkId, LinkName, MessageRoom,
        NicKeys, PeerMapping, Pinned, Post, Receipt, Receipts, RegionRelease, SmallWrite, Token,
        WakeFds, WorkRequest,
    },
    memory::{
        device::{AsyncCopier, MemoryKind},
        file::FileQueue,
        RegionBook, RegionMemory, FIRST_INTERNAL_INDEX,
    },
    time::Time,
};
use frames::Frame;
use job::{Chunk, Job, PeerWindow, StagingMemory};
use windows::{Window, WindowCopy};

/// Slots of a window, and of the local staging memory.
const SLOTS: u8 = 8;
/// Large enough to keep a copy engine busy while the next copy is requested.
const SLOT_BYTES: u64 = 1 << 20;
/// Jobs of one link; further ones wait in the group.
const MAX_JOBS: usize = 1 << 12;

/// A transport that carries small messages beside its traffic, in order.
pub(crate) trait ControlChannel: Domain {
    /// Whether a link is up; false once `poll` has reported its `LinkDown`.
    fn is_up(&self, link: LinkId) -> bool;

    /// The peer of a link that is up.
    fn peer(&self, link: LinkId) -> Option<EngineId>;

    /// Sends a message of at most 3584 bytes; drops it if the link is closing.
    fn send_control(&mut self, link: LinkId, frame: Vec<u8>);

    /// Takes the next received message; messages of one link are in order.
    fn receive_control(&mut self) -> Option<(LinkId, Vec<u8>)>;

    /// Whether the transport itself moves bytes of this kind of memory.
    fn reaches(&self, memory_kind: MemoryKind) -> bool {
        memory_kind == MemoryKind::Host
    }
}

/// State of one link.
#[derive(Debug, Default)]
struct LinkState {
    peer_window: PeerWindow,
    /// The window that the peer was given.
    window: Option<Window>,
    /// Jobs that are not fully cut into chunks, in order.
    queue: std::collections::VecDeque<usize>,
    jobs: usize,
    /// Why it is closing; reported after the last copy has ended.
    closing: Option<DomainError>,
    /// The transport's receipt.
    receipt: Receipt,
    unfinished: Vec<(Token, u64)>,
    /// Whether device memory was staged, for `describe`.
    device: bool,
    file: bool,
    host: bool,
}

/// A transport with staging; see the module.
pub(crate) struct Staged<D> {
    inner: D,
    /// Local regions that the transport can't access.
    book: RegionBook,
    copier: AsyncCopier,
    own: Option<StagingMemory>,
    link_states: HashMap<LinkId, LinkState>,
    jobs: Slab<Job>,
    chunks: Slab<Chunk>,
    window_copies: Vec<WindowCopy>,
    /// Deregistered regions whose last copy has not ended.
    retiring: Vec<u32>,
    /// Windows of closed links that the transport has not released.
    closing_windows: Vec<Window>,
    /// Number of windows created.
    next_window: u32,
    serial: u32,
    /// Whether GPU memory was registered.
    device: bool,
    completions: Vec<Completion>,
    /// Stages everything, so that tests cover each stage on a machine without a GPU.
    #[cfg(test)]
    pub stage_all: bool,
}

impl<D> std::fmt::Debug for Staged<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staged({} jobs, {} landings)", self.jobs.len(), self.window_copies.len())
    }
}

impl<D: ControlChannel> Staged<D> {
    pub fn new(inner: D, files: &Arc<FileQueue>) -> Self {
        Self {
            inner,
            book: RegionBook::default(),
            copier: AsyncCopier::new(files),
            own: None,
            link_states: HashMap::new(),
            jobs: Slab::new(),
            chunks: Slab::new(),
            window_copies: Vec::new(),
            retiring: Vec::new(),
            closing_windows: Vec::new(),
            next_window: 0,
            serial: 0,
            device: false,
            completions: Vec::new(),
            #[cfg(test)]
            stage_all: false,
        }
    }

    #[cfg(test)]
    fn is_forced(&self) -> bool {
        self.stage_all
    }

    #[cfg(not(test))]
    fn is_forced(&self) -> bool {
        false
    }

    /// Whether a local region is accessed by staging only.
    fn is_staged_region(&self, region: &RegionMemory) -> bool {
        !self.inner.reaches(region.key.memory_kind()) || self.is_forced()
    }

    /// A local region, if the transport can't access it.
    #[inline]
    fn staged_local(&self, index: u32) -> Option<&Arc<RegionMemory>> {
        let region = self.book.get(index)?;
        let reached = || self.inner.reaches(region.key.memory_kind());
        let staged = !region.location.is_host() && !reached();
        (staged || self.is_forced()).then_some(region)
    }

    /// The local region of a request, if the transport can't access it.
    fn local(&self, data: &Data) -> Option<Arc<RegionMemory>> {
        self.staged_local(data.local_region).cloned()
    }

    /// Whether the transport can't access a local region or a peer's.
    #[inline]
    fn is_staged(&self, (local, remote): (u32, RegionKey)) -> bool {
        !self.inner.reaches(remote.memory_kind())
            || self.is_forced()
            || self.staged_local(local).is_some()
    }

    /// Whether the transport carries a work request as it is.
    #[inline]
    fn passes(&self, wr: &WorkRequest) -> bool {
        match wr {
            WorkRequest::Write { data, .. }
            | WorkRequest::Read { data }
            | WorkRequest::Prepare { data } => !self.is_staged((data.local_region, data.remote)),
            WorkRequest::Count(_) | WorkRequest::Send(_) => true,
        }
    }

    fn is_remote_staged(&self, data: &Data) -> bool {
        !self.inner.reaches(data.remote.memory_kind()) || self.is_forced()
    }

    fn is_idle(&self) -> bool {
        let own =
            self.jobs.is_empty() && self.window_copies.is_empty() && self.link_states.is_empty();
        own && self.completions.is_empty() && self.closing_windows.is_empty()
    }

    /// Takes completions of staged transfers out of those for the group.
    fn take_own_completions(&mut self, from: usize, out: &mut Vec<Completion>) {
        let mut i = from;
        while i < out.len() {
            match &out[i] {
                Completion::Done { token, .. } if token.part == job::STAGED_PART => {
                    if let Completion::Done { token, result, .. } = out.remove(i) {
                        self.on_transfer_done(token, result);
                    }
                }
                Completion::RegionReleased { index } if index & FIRST_INTERNAL_INDEX != 0 => {
                    let index = *index;
                    self.closing_windows.retain(|w| w.key.index != index);
                    out.remove(i);
                }
                Completion::LinkDown { link, .. } if self.link_states.contains_key(link) => {
                    let Completion::LinkDown { link, cause, receipt, unfinished } = out.remove(i)
                    else {
                        continue;
                    };
                    if let Some(state) = self.link_states.get_mut(&link) {
                        (state.receipt, state.unfinished) = (receipt, unfinished);
                    }
                    self.link_lost(link, &cause);
                }
                _ => i += 1,
            }
        }
    }

    fn poll_control(&mut self) -> bool {
        let mut heard = false;
        while let Some((link, bytes)) = self.inner.receive_control() {
            heard = true;
            if let Err(e) = self.on_control(link, &bytes) {
                self.inner.disconnect(link, &e.to_string());
            }
        }
        heard
    }

    fn on_control(&mut self, link: LinkId, bytes: &[u8]) -> Result<(), DomainError> {
        let frame = Frame::decode(bytes)?;
        if let Frame::Group(frame) = frame {
            self.completions.push(Completion::GroupFrame { link, frame });
            return Ok(());
        }
        // The other frames are about windows, which end with their link.
        let closing = self.link_states.get(&link).is_some_and(|state| state.closing.is_some());
        if closing || !self.inner.is_up(link) {
            return Ok(());
        }
        self.link_states.entry(link).or_default();
        match frame {
            Frame::OpenWindow => self.open_window(link),
            Frame::Window { key } => self.on_window(link, key),
            Frame::CopyRequest { slot, chunk, pages, inward, count } => {
                self.start_window_copy(link, (slot, chunk, inward), &pages, count)
            }
            Frame::CopyDone { chunk, result } => self.on_copy_done(link, chunk, result),
            Frame::Group(_) => Ok(()),
        }
    }
}

impl<D: ControlChannel> Domain for Staged<D> {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn device(&self) -> &str {
        self.inner.device()
    }

    fn is_rdma(&self) -> bool {
        self.inner.is_rdma()
    }

    fn caps(&self) -> Caps {
        self.inner.caps()
    }

    fn endpoint(&self) -> Endpoint {
        self.inner.endpoint()
    }

    fn announce(&mut self, own: &EngineAddress) {
        self.inner.announce(own);
    }

    fn register(
        &mut self,
        region: &Arc<RegionMemory>,
        pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        self.device |= region.location.cuda().is_some();
        if !self.is_staged_region(region) {
            return self.inner.register(region, pinned);
        }
        self.book.insert(region);
        Ok(NicKeys::new())
    }

    fn deregister(&mut self, index: u32) -> RegionRelease {
        match self.deregister_staged(index) {
            Some(quiet) => quiet,
            None => self.inner.deregister(index),
        }
    }

    fn map_peer_region(
        &mut self,
        link: LinkId,
        key: RegionKey,
        by: Option<i32>,
    ) -> Result<Arc<PeerMapping>, String> {
        match self.inner.reaches(key.memory_kind()) && !self.is_forced() {
            true => self.inner.map_peer_region(link, key, by),
            false => Err(format!("{} stages it through host memory", self.kind())),
        }
    }

    fn unfit(&self, peer: &EngineAddress) -> Option<String> {
        self.inner.unfit(peer)
    }

    fn connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        self.inner.connect(now, peer, endpoint)
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        self.inner.disconnect(link, cause);
    }

    fn end_unused(&mut self, name: LinkName, cause: &str) -> bool {
        self.inner.end_unused(name, cause)
    }

    fn receipts(&self) -> Receipts {
        self.inner.receipts()
    }

    fn send_group_frame(&mut self, link: LinkId, frame: Vec<u8>) {
        self.inner.send_control(link, Frame::Group(frame).encode());
    }

    fn begin_request(&mut self) {
        self.inner.begin_request();
    }

    #[inline]
    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        if self.passes(wr) {
            return self.inner.post(link, token, wr);
        }
        let (data, count, write) = match wr {
            WorkRequest::Write { data, count } => (data, *count, true),
            WorkRequest::Read { data } | WorkRequest::Prepare { data } => (data, None, false),
            WorkRequest::Count(_) | WorkRequest::Send(_) => unreachable!("they carry no data"),
        };
        let (local, remote) = (self.local(data), self.is_remote_staged(data));
        if !self.inner.is_up(link) {
            // The group may not have seen the link's end yet. Work posted now, after the link came
            // up and went down in one poll, would never complete (RS-4).
            return Err(DomainError::LinkDown("the link is down".into()));
        }
        if matches!(wr, WorkRequest::Prepare { .. }) {
            if remote {
                self.request_window(link);
            }
            return Ok(Post::Done);
        }
        self.submit(
            link,
            token,
            Job::new((link, token), (data.clone(), count, write), local, remote),
        )
    }

    #[inline]
    fn write_small(
        &mut self,
        link: LinkId,
        token: Token,
        writes: &[SmallWrite],
        count: Option<Count>,
    ) -> Option<Post> {
        let passes = |w: &SmallWrite| !self.is_staged((w.local_region, w.remote));
        writes.iter().all(passes).then(|| self.inner.write_small(link, token, writes, count))?
    }

    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let from = out.len();
        let mut progressed = self.inner.poll(now, room, out);
        progressed |= self.poll_control();
        if self.is_idle() {
            return progressed;
        }
        self.take_own_completions(from, out);
        progressed |= self.report_window_copies(out);
        progressed |= self.advance_chunks();
        progressed |= self.start_all_chunks();
        self.close_lost_links();
        progressed |= !self.completions.is_empty();
        out.append(&mut self.completions);
        progressed
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn arm(&mut self) -> bool {
        let armed = self.inner.arm();
        // Copy engines do not wake the engine, so it keeps polling while they copy.
        let look = self.window_copies.iter().any(|l| l.copy.needs_check())
            || self.chunks.iter().any(|(_, c)| c.needs_check());
        armed && !look && self.completions.is_empty()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn wake_fds(&self) -> WakeFds {
        self.inner.wake_fds()
    }

    fn is_staging(&self, link: LinkId) -> bool {
        self.link_states.get(&link).is_some_and(|state| state.jobs > 0)
    }

    fn stages(&self, key: RegionKey) -> bool {
        !self.inner.reaches(key.memory_kind())
    }

    fn takes_files(&self) -> bool {
        true
    }

    fn next_timer(&self) -> Time {
        self.inner.next_timer()
    }

    fn assistant(&self) -> Option<Arc<dyn Assist>> {
        self.inner.assistant()
    }

    fn describe(&self, link: LinkId) -> String {
        let mut text = self.inner.describe(link);
        let state = self.link_states.get(&link);
        let here = |memory_kind: MemoryKind| !self.inner.reaches(memory_kind);
        if self.device && here(MemoryKind::Device) || state.is_some_and(|s| s.device) {
            text += "; GPU memory is staged through pinned host memory";
        }
        if state.is_some_and(|s| s.file) {
            text += "; files are staged through host memory, by ";
            text += self.copier.files_by();
        }
        if state.is_some_and(|s| s.host) {
            text += "; memory that the engine did not allocate is staged through a window";
        }
        text
    }

    fn close(&mut self) {
        self.inner.close();
        // Waits for the copies under way: after this nothing lands (MR-1).
        self.copier.close();
        self.window_copies.iter().for_each(|l| l.copy.quiesce());
        self.chunks.iter().for_each(|(_, c)| c.quiesce());
        self.window_copies.clear();
        self.chunks.clear();
        self.jobs.clear();
        self.link_states.clear();
        self.completions.clear();
    }

    fn keeps(&self, index: u32) -> bool {
        self.inner.keeps(index)
    }
}
