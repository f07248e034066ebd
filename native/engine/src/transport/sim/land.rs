//! Arrivals: writes, reads, counts, messages and connections.

use std::sync::Arc;

use super::{
    free_schedule,
    node::{LinkEnd, LinkEndState, Port, WaitingMessage},
    wire::{Event, Route, World},
};
use crate::{
    api::RegionKey,
    domain::{
        Completion, Count, Data, DomainError, LinkId, LinkName, PeerIdentity, Receipt, Token,
        WorkRequest,
    },
    locks::Mutex,
};

/// Pages longer than this arrive in two halves, so that an early count is detected.
const MAX_WHOLE_PAGE: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Read,
    Count,
}

/// A part of a page.
struct Chunk {
    /// Address at the poster. `remote_offset`: offset in the peer's region.
    local: usize,
    remote_offset: u64,
    page: usize,
    len: usize,
    /// The bytes under way. A write's bytes are taken when it is posted and, if the sender still
    /// has it posted, again when it lands, like a retransmission. Empty if the simulation copies no
    /// bytes.
    bytes: Mutex<Vec<u8>>,
}

/// A work request under way.
pub(crate) struct Job {
    pub from: LinkEnd,
    /// The peer's NIC, and its id of the link.
    pub to: LinkEnd,
    pub name: LinkName,
    pub token: Token,
    number: u64,
    kind: Kind,
    key: RegionKey,
    chunks: Vec<Chunk>,
    count: Option<Count>,
    /// Whether each page is counted separately.
    page_counts: bool,
    /// Number of deliveries of a bare count: a NIC's immediate may not hold all of it.
    parts: usize,
    left: Mutex<MissingParts>,
}

/// The parts that have not arrived.
struct MissingParts {
    chunks: usize,
    of_pages: Vec<u8>,
    error: Option<DomainError>,
}

impl Job {
    /// `None` for work without a transfer.
    pub fn new(
        (from, to, name): (LinkEnd, LinkEnd, LinkName),
        (token, number): (Token, u64),
        wr: &WorkRequest,
        (page_counts, carries): (bool, bool),
    ) -> Option<Self> {
        let (data, kind, count) = match wr {
            WorkRequest::Write { data, count } => (Some(data), Kind::Write, *count),
            WorkRequest::Read { data } => (Some(data), Kind::Read, None),
            WorkRequest::Count(count) => (None, Kind::Count, Some(*count)),
            WorkRequest::Send(_) | WorkRequest::Prepare { .. } => return None,
        };
        let chunks = data.map(|d| cut(d, kind == Kind::Write, carries)).unwrap_or_default();
        let pages = data.map_or(0, |d| d.pages);
        let mut of_pages = vec![0; pages as usize];
        chunks.iter().for_each(|p| of_pages[p.page] += 1);
        let parts = match (kind, count) {
            (Kind::Count, Some(c)) if page_counts => c.n as usize,
            _ => 1,
        };
        let left = MissingParts { chunks: chunks.len().max(parts), of_pages, error: None };
        Some(Self {
            from,
            to,
            name,
            token,
            number,
            kind,
            key: data.map_or(Default::default(), |d| d.remote),
            chunks,
            count,
            page_counts: page_counts && count.is_some_and(|c| c.n == pages),
            parts,
            left: Mutex::new(left),
        })
    }

    pub fn describe(&self) -> String {
        let what = match self.kind {
            Kind::Write => "write",
            Kind::Read => "read",
            Kind::Count => "count",
        };
        format!("{what} {}", self.number)
    }

    pub fn route(&self) -> Route {
        Route { from: self.from.0, to: self.to.0, name: self.name }
    }

    fn return_route(&self) -> Route {
        Route { from: self.to.0, to: self.from.0, name: self.name }
    }

    /// Bytes of each delivery towards the peer.
    pub fn deliveries(&self) -> Vec<usize> {
        match (self.chunks.is_empty(), self.kind) {
            (true, _) => vec![0; self.parts],
            (_, Kind::Read) => vec![0; self.chunks.len()],
            _ => self.chunks.iter().map(|p| p.len).collect(),
        }
    }
}

/// The chunks in which a work request's bytes land.
fn cut(data: &Data, write: bool, carries: bool) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for page in 0..data.pages {
        let n = data.page_len as usize;
        let half = if n > MAX_WHOLE_PAGE && carries { n / 2 } else { n };
        for (from, to) in [(0, half), (half, n)] {
            if from == to {
                continue;
            }
            let local = data.local.0 + data.local_seq.nth(page) as usize + from;
            let len = to - from;
            let mut bytes = vec![0; if carries { len } else { 0 }];
            if write {
                // SAFETY: the request keeps its local region registered, and its bounds were
                // checked.
                unsafe { take(local, &mut bytes) };
            }
            let remote_offset = data.remote_seq.nth(page) + from as u64;
            chunks.push(Chunk {
                local,
                remote_offset,
                page: page as usize,
                len,
                bytes: Mutex::new(bytes),
            });
        }
    }
    chunks
}

/// # Safety
/// `bytes.len()` bytes must be readable at `from`.
unsafe fn take(from: usize, bytes: &mut [u8]) {
    // SAFETY: by this function's contract.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), bytes.len()) }
}

/// # Safety
/// `bytes.len()` bytes must be writable at `to`.
unsafe fn place(bytes: &[u8], to: usize) {
    // SAFETY: by this function's contract.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) }
}

impl World {
    /// A chunk lands; the last one brings the count (IC-2) and the acknowledgement.
    pub(crate) fn land(&mut self, job: &Arc<Job>, at: usize) {
        // Irrelevant if no bytes are copied.
        let sending = self.config.carries
            && self.nodes.get(&job.from.0).is_some_and(|n| n.is_posted(job.from.1, job.token));
        let ((to, back), from) = (job.to, job.from.0.engine);
        let Some(target) = self.nodes.get(&to).filter(|n| n.links.contains_key(&back)) else {
            return;
        };
        let mut error = None;
        let mut found = None;
        if let Some(chunk) = job.chunks.get(at) {
            let mut bytes = chunk.bytes.lock();
            match target.book.resolve(from, job.key, chunk.remote_offset, chunk.len as u64) {
                Err(e) => error = Some(e),
                Ok(addr) => {
                    // SAFETY: the book holds the peer's region registered, and the range lies
                    // inside. While the sender has the work posted, the request keeps its local
                    // region registered. A simulation runs on one thread.
                    unsafe {
                        match job.kind {
                            Kind::Read => take(addr, &mut bytes),
                            Kind::Write | Kind::Count => {
                                if self.free.is_some() {
                                    let mut before = vec![u8::from(sending); bytes.len() + 1];
                                    take(addr, &mut before[1..]);
                                    found = Some(free_schedule::hash(&before));
                                }
                                if sending {
                                    take(chunk.local, &mut bytes);
                                }
                                place(&bytes, addr);
                            }
                        }
                    }
                }
            }
        }
        if let (Some(free), Some(found)) = (&mut self.free, found) {
            // Tests check one node's memory when something ends at another node.
            free.record_seen(to.engine, found);
        }
        if job.kind == Kind::Read && error.is_none() {
            let n = job.chunks.get(at).map_or(0, |p| p.len);
            if let Some(end) = self.end_of(job.to) {
                end.on_executed(job.number, true);
            }
            return self.send(
                job.return_route(),
                n,
                Event::Fetched { job: Arc::clone(job), chunk: at },
            );
        }
        let refused = error.is_some();
        let (page, over) = self.arrived(job, at, error);
        if let (Some(count), Some(node)) = (job.count, self.nodes.get_mut(&to)) {
            let n = match job.page_counts {
                true => u32::from(page),
                false if job.parts > 1 => 1,
                false if matches!(over, Some(Ok(()))) => count.n,
                false => 0,
            };
            if let Some(end) = node.links.get_mut(&back).filter(|_| n > 0) {
                let count = Count { imm: count.imm, n };
                end.count(count);
                node.inbox.push_back(Completion::Count(count));
            }
        }
        if let Some(result) = over {
            if let Some(end) = self.end_of(job.to) {
                end.on_executed(job.number, result.is_ok());
            }
            let (to, token) = (job.from, job.token);
            self.send(job.return_route(), 0, Event::Done { to, token, result });
        }
        if refused && self.config.ordered {
            // Such a link ends with the first refused work request, so later ones don't count
            // either.
            let cause = DomainError::LinkDown("it refused a work request".into());
            self.cut(job.to, &cause);
            self.send(job.return_route(), 0, Event::Cut { at: job.from, cause });
        }
    }

    /// Whether a page is complete with this chunk, and the result if it was the last chunk.
    fn arrived(
        &self,
        job: &Job,
        at: usize,
        error: Option<DomainError>,
    ) -> (bool, Option<Result<(), DomainError>>) {
        let mut left = job.left.lock();
        let refused = error.is_some();
        if let Some(e) = error {
            left.error.get_or_insert(e);
        }
        let page = job.chunks.get(at).is_some_and(|p| {
            // A page with a refused chunk is never complete.
            let n = &mut left.of_pages[p.page];
            *n = if refused { u8::MAX } else { n.saturating_sub(1) };
            *n == 0
        });
        left.chunks -= 1;
        let over = left.chunks == 0;
        (page, over.then(|| left.error.take().map_or(Ok(()), Err)))
    }

    /// A chunk that was read arrives; it is stored while the read is pending.
    pub(crate) fn fetched(&mut self, job: &Job, at: usize) {
        let (port, link) = job.from;
        let waits = |w: &Self| w.nodes.get(&port).is_some_and(|n| n.is_posted(link, job.token));
        let Some(chunk) = job.chunks.get(at).filter(|_| waits(self)) else { return };
        // SAFETY: the request keeps its local region registered until it completes.
        unsafe { place(&chunk.bytes.lock(), chunk.local) };
        if let (_, Some(result)) = self.arrived(job, at, None) {
            if let Some(node) = self.nodes.get_mut(&port) {
                node.complete(link, job.token, result);
            }
        }
    }

    fn end_of(&mut self, (port, link): LinkEnd) -> Option<&mut LinkEndState> {
        self.nodes.get_mut(&port)?.links.get_mut(&link)
    }

    pub(crate) fn deliver_message(
        &mut self,
        (from, to): (LinkEnd, LinkEnd),
        (token, number): (Token, u64),
        message: Arc<[u8]>,
    ) {
        if let Some(end) = self.end_of(to) {
            end.on_executed(number, true);
        }
        let Some(node) = self.nodes.get_mut(&to.0) else { return };
        if node.links.contains_key(&to.1) {
            node.waiting.push_back(WaitingMessage { link: to.1, message, sender: from, token });
        }
    }

    pub(crate) fn deliver_group_frame(&mut self, to: LinkEnd, frame: Vec<u8>) {
        let Some(node) = self.nodes.get_mut(&to.0) else { return };
        if node.links.contains_key(&to.1) {
            node.inbox.push_back(Completion::GroupFrame { link: to.1, frame });
            self.group_frames += 1;
        }
    }

    pub(crate) fn link_up(&mut self, from: Port, to: Port, link: LinkId) {
        let name = match &self.free {
            Some(free) => free.name(),
            None => self.rng.u64(1..),
        };
        let route = Route { from, to, name };
        let half = self.config.half_open;
        let half = half > 0 && self.rng.u32(..half) == 0;
        let apart = self.blocked(route) > self.now();
        let address = |w: &Self, port| {
            let node = w.nodes.get(&port);
            node.filter(|n| !n.unplugged && !apart).and_then(|n| n.address.clone())
        };
        let (own_end, remote_end) = (address(self, from), address(self, to));
        let (Some(own_end), Some(remote_end)) = (own_end, remote_end) else {
            return self.fail_to_connect((from, link), "no engine answers at its address");
        };
        let Some(acceptor) = self.nodes.get_mut(&to) else { return };
        let back = acceptor.new_link();
        acceptor.links.insert(back, LinkEndState::new((from, link), name));
        acceptor.inbox.push_back(up(back, own_end, from, name));
        if half {
            // The last handshake message is lost: the acceptor learns of it later.
            let cause = DomainError::LinkDown("the initiator's end never came up".into());
            let time = self.delay() * 4;
            self.after(time, Event::Cut { at: (to, back), cause });
            return self.fail_to_connect((from, link), "the handshake was interrupted");
        }
        let Some(initiator) = self.nodes.get_mut(&from) else { return };
        initiator.links.insert(link, LinkEndState::new((to, back), name));
        initiator.inbox.push_back(up(link, remote_end, to, name));
    }

    fn fail_to_connect(&mut self, (port, link): LinkEnd, why: &str) {
        let Some(node) = self.nodes.get_mut(&port) else { return };
        let cause = DomainError::LinkDown(why.into());
        node.inbox.push_back(Completion::LinkDown {
            link,
            cause,
            receipt: Receipt::Unknown,
            unfinished: Vec::new(),
        });
    }
}

fn up(link: LinkId, address: crate::api::EngineAddress, of: Port, name: LinkName) -> Completion {
    Completion::LinkUp {
        link,
        peer: PeerIdentity { address, version: None },
        endpoint: of.rail.into(),
        name,
        description: "simulated".to_owned(),
    }
}
