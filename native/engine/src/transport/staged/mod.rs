//! Staging: moves memory that a transport can't access through memory that it can. This covers GPU
//! memory over sockets and shared memory, files, and memory of processes that the kernel isolates.
//!
//! The owner of such memory gives each peer a window: slots in pinned host memory that the
//! transport accesses. A write is cut into chunks. Each chunk is copied from local GPU memory or a
//! file into a local slot, written into a slot of the peer's window, copied from there by the
//! owner, and only then acknowledged or counted (IC-2). Reads take the reverse path. Chunks are in
//! different stages at the same time, so copy engines and network overlap. All other work goes to
//! the transport unchanged.

mod far;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod job;
mod near;
#[cfg(test)]
mod tests;
mod wire;

use std::{collections::HashMap, sync::Arc};

use slab::Slab;

use crate::{
    api::{Endpoint, EngineAddress, EngineId, RegionKey, TransportKind},
    domain::{
        Aperture, Assist, Caps, Completion, Data, Domain, DomainError, LinkId, LinkName,
        MessageRoom, NicKeys, Pinned, Post, Quiet, Receipt, Receipts, Token, WakeFds, WorkRequest,
    },
    memory::{
        device::{Lanes, Nature},
        file::FileQueue,
        RegionBook, RegionMemory, HIDDEN,
    },
    time::Time,
};
use job::{Chunk, Far, Job, Own};
use near::{Landing, Window};
use wire::Frame;

/// Slots of a window, and of the local staging memory.
const SLOTS: u8 = 8;
/// Large enough to keep a copy engine busy while the next copy is requested.
const SLOT_BYTES: u64 = 1 << 20;
/// Jobs of one link; further ones wait in the group.
const MAX_JOBS: usize = 1 << 12;

/// A transport that carries small messages beside its traffic, in order.
pub(crate) trait Whispers: Domain {
    /// Whether a link is up; false once `poll` has reported its `LinkDown`.
    fn is_up(&self, link: LinkId) -> bool;

    /// The peer of a link that is up.
    fn peer(&self, link: LinkId) -> Option<EngineId>;

    /// Sends a message of at most 3584 bytes; drops it if the link is closing.
    fn whisper(&mut self, link: LinkId, frame: Vec<u8>);

    /// Takes the next received message; messages of one link are in order.
    fn heard(&mut self) -> Option<(LinkId, Vec<u8>)>;

    /// Whether the transport itself moves bytes of this nature.
    fn reaches(&self, nature: Nature) -> bool {
        nature == Nature::Plain
    }
}

/// State of one link.
#[derive(Debug, Default)]
struct Side {
    far: Far,
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
    /// What has been staged, for `describe`.
    device: bool,
    file: bool,
    host: bool,
}

/// A transport with staging; see the module.
pub(crate) struct Staged<D> {
    inner: D,
    /// Local regions that the transport can't access.
    book: RegionBook,
    lanes: Lanes,
    own: Option<Own>,
    sides: HashMap<LinkId, Side>,
    jobs: Slab<Job>,
    chunks: Slab<Chunk>,
    landings: Vec<Landing>,
    /// Deregistered regions whose last copy has not ended.
    retiring: Vec<u32>,
    /// Windows of closed links that the transport has not released.
    shut: Vec<Window>,
    /// Number of windows created.
    windows: u32,
    serial: u32,
    /// A device of this process with registered memory: staging memory is pinned for it.
    device: Option<i32>,
    news: Vec<Completion>,
    /// Stages everything, so that tests cover each stage on a machine without a GPU.
    #[cfg(test)]
    pub everything: bool,
}

impl<D> std::fmt::Debug for Staged<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staged({} jobs, {} landings)", self.jobs.len(), self.landings.len())
    }
}

impl<D: Whispers> Staged<D> {
    pub fn new(inner: D, files: &Arc<FileQueue>) -> Self {
        Self {
            inner,
            book: RegionBook::default(),
            lanes: Lanes::new(files),
            own: None,
            sides: HashMap::new(),
            jobs: Slab::new(),
            chunks: Slab::new(),
            landings: Vec::new(),
            retiring: Vec::new(),
            shut: Vec::new(),
            windows: 0,
            serial: 0,
            device: None,
            news: Vec::new(),
            #[cfg(test)]
            everything: false,
        }
    }

    #[cfg(test)]
    fn is_forced(&self) -> bool {
        self.everything
    }

    #[cfg(not(test))]
    fn is_forced(&self) -> bool {
        false
    }

    /// Whether a local region is accessed by staging only.
    fn keeps(&self, region: &RegionMemory) -> bool {
        !self.inner.reaches(region.key.nature()) || self.is_forced()
    }

    /// The local region of a request, if the transport can't access it.
    fn local(&self, data: &Data) -> Option<Arc<RegionMemory>> {
        let region = self.book.get(data.local_region)?;
        let nature = region.key.nature();
        let staged = !region.location.is_host() && !self.inner.reaches(nature);
        (staged || self.is_forced()).then(|| Arc::clone(region))
    }

    fn is_remote_staged(&self, data: &Data) -> bool {
        !self.inner.reaches(data.remote.nature()) || self.is_forced()
    }

    fn is_idle(&self) -> bool {
        let own = self.jobs.is_empty() && self.landings.is_empty() && self.sides.is_empty();
        own && self.news.is_empty() && self.shut.is_empty()
    }

    /// Takes completions of staged transfers out of those for the group.
    fn sort(&mut self, from: usize, out: &mut Vec<Completion>) {
        let mut i = from;
        while i < out.len() {
            match &out[i] {
                Completion::Done { token, .. } if token.part == job::OWN => {
                    if let Completion::Done { token, result, .. } = out.remove(i) {
                        self.wired(token, result);
                    }
                }
                Completion::RegionQuiet { index } if index & HIDDEN != 0 => {
                    let index = *index;
                    self.shut.retain(|w| w.key.index != index);
                    out.remove(i);
                }
                Completion::LinkDown { link, .. } if self.sides.contains_key(link) => {
                    let Completion::LinkDown { link, cause, receipt, unfinished } = out.remove(i)
                    else {
                        continue;
                    };
                    if let Some(side) = self.sides.get_mut(&link) {
                        (side.receipt, side.unfinished) = (receipt, unfinished);
                    }
                    self.link_lost(link, &cause);
                }
                _ => i += 1,
            }
        }
    }

    fn hear(&mut self) -> bool {
        let mut heard = false;
        while let Some((link, bytes)) = self.inner.heard() {
            heard = true;
            if let Err(e) = self.understand(link, &bytes) {
                self.inner.disconnect(link, &e.to_string());
            }
        }
        heard
    }

    fn understand(&mut self, link: LinkId, bytes: &[u8]) -> Result<(), DomainError> {
        let frame = Frame::decode(bytes)?;
        if let Frame::Note(frame) = frame {
            self.news.push(Completion::Note { link, frame });
            return Ok(());
        }
        // The other frames are about windows, which end with their link.
        let closing = self.sides.get(&link).is_some_and(|side| side.closing.is_some());
        if closing || !self.inner.is_up(link) {
            return Ok(());
        }
        self.sides.entry(link).or_default();
        match frame {
            Frame::Open => self.open_window(link),
            Frame::Window { key } => self.window_opened(link, key),
            Frame::Move { slot, chunk, pages, inward, count } => {
                self.land(link, (slot, chunk, inward), &pages, count)
            }
            Frame::Moved { chunk, result } => self.moved(link, chunk, result),
            Frame::Note(_) => Ok(()),
        }
    }
}

impl<D: Whispers> Domain for Staged<D> {
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
        if let Some(range) = region.location.cuda() {
            self.device = Some(range.device);
        }
        if !self.keeps(region) {
            return self.inner.register(region, pinned);
        }
        self.book.insert(region);
        Ok(NicKeys::new())
    }

    fn deregister(&mut self, index: u32) -> Quiet {
        match self.withdraw(index) {
            Some(quiet) => quiet,
            None => self.inner.deregister(index),
        }
    }

    fn aperture(
        &mut self,
        link: LinkId,
        key: RegionKey,
        by: Option<i32>,
    ) -> Result<Arc<Aperture>, String> {
        match self.inner.reaches(key.nature()) && !self.is_forced() {
            true => self.inner.aperture(link, key, by),
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

    fn note(&mut self, link: LinkId, frame: Vec<u8>) {
        self.inner.whisper(link, Frame::Note(frame).encode());
    }

    fn begin_request(&mut self) {
        self.inner.begin_request();
    }

    #[inline]
    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        let (data, count, write) = match wr {
            WorkRequest::Write { data, count } => (data, *count, true),
            WorkRequest::Read { data } | WorkRequest::Prepare { data } => (data, None, false),
            WorkRequest::Count(_) | WorkRequest::Send(_) => {
                return self.inner.post(link, token, wr);
            }
        };
        let remote = self.is_remote_staged(data);
        let local = match self.book.is_empty() {
            true => None,
            false => self.local(data),
        };
        if !remote && local.is_none() {
            return self.inner.post(link, token, wr);
        }
        if !self.inner.is_up(link) {
            // The group may not have seen the link's end yet. Work posted now, after the link came
            // up and went down in one poll, would never complete (RS-4).
            return Err(DomainError::LinkDown("the link is down".into()));
        }
        if matches!(wr, WorkRequest::Prepare { .. }) {
            if remote {
                self.ask_for_window(link);
            }
            return Ok(Post::Done);
        }
        self.begin(
            link,
            token,
            Job::new((link, token), (data.clone(), count, write), local, remote),
        )
    }

    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let from = out.len();
        let mut moved = self.inner.poll(now, room, out);
        moved |= self.hear();
        if self.is_idle() {
            return moved;
        }
        self.sort(from, out);
        moved |= self.settle(out);
        moved |= self.step_chunks();
        moved |= self.pump_all();
        self.bury();
        moved |= !self.news.is_empty();
        out.append(&mut self.news);
        moved
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn arm(&mut self) -> bool {
        let armed = self.inner.arm();
        // Copy engines do not wake the engine, so it keeps polling while they copy.
        let look = self.landings.iter().any(|l| l.ticket.wants_a_look())
            || self.chunks.iter().any(|(_, c)| c.wants_a_look());
        armed && !look && self.news.is_empty()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn wake_fds(&self) -> WakeFds {
        self.inner.wake_fds()
    }

    fn is_staging(&self, link: LinkId) -> bool {
        self.sides.get(&link).is_some_and(|side| side.jobs > 0)
    }

    fn stages(&self, key: RegionKey) -> bool {
        !self.inner.reaches(key.nature())
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
        let mut said = self.inner.describe(link);
        let side = self.sides.get(&link);
        let here = |nature: Nature| !self.inner.reaches(nature);
        if self.device.is_some() && here(Nature::Device) || side.is_some_and(|s| s.device) {
            said += "; GPU memory is staged through pinned host memory";
        }
        if side.is_some_and(|s| s.file) {
            said += "; files are staged through host memory, by ";
            said += self.lanes.files_by();
        }
        if side.is_some_and(|s| s.host) {
            said += "; memory that the engine did not allocate is staged through a window";
        }
        said
    }

    fn close(&mut self) {
        self.inner.close();
        // Waits for the copies under way: after this nothing lands (MR-1).
        self.lanes.close();
        self.landings.iter().for_each(|l| l.ticket.quiesce());
        self.chunks.iter().for_each(|(_, c)| c.quiesce());
        self.landings.clear();
        self.chunks.clear();
        self.jobs.clear();
        self.sides.clear();
        self.news.clear();
    }
}
