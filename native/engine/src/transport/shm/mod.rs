//! Same-host links: one copy into the peer's memory, then a record in a ring.
//!
//! A peer that completes a handshake over a Unix socket and maps the memory sent with it runs on
//! this host; nothing is inferred from names. Memory that the engine allocated is mapped and copied
//! to by this process; the kernel copies to other memory (process_vm_writev).

mod close;
mod control_plane;
mod control_socket;
mod copies;
mod doorbell;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
mod hostile_peer_tests;
mod imports;
mod jobs;
mod layout;
mod link;
#[cfg(test)]
mod link_tests;
mod messages;
mod posting;
#[cfg(test)]
mod posting_tests;
mod raw;
mod regions;
mod ring;

use std::{
    collections::{HashMap, HashSet, VecDeque},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::event::epoll;
use slab::Slab;
use smallvec::{smallvec, SmallVec};

use crate::{
    api::{Endpoint, EngineAddress, EngineConfig, EngineId, RegionKey, TransportKind},
    domain::{
        Assist, Caps, Completion, Count, Domain, DomainError, LinkId, MessageRoom, NicKeys,
        PeerMapping, Pinned, Post, RegionRelease, SmallWrite, Token, WakeFds, WorkRequest,
    },
    memory::{device::MemoryKind, RegionBook, RegionMemory},
    time::Time,
    transport::{
        handshake::{Credentials, Secret},
        listener::Listener,
        log_limit::LogLimit,
        staged::ControlChannel,
    },
    wake::Waker,
};
use control_socket::Frame;
use doorbell::Doorbell;
use jobs::CopyPool;
use link::{Link, Stage};

/// Interval at which a thread that polls the rings polls the sockets too.
const SOCKET_POLL_INTERVAL: Duration = Duration::from_micros(20);
/// Time that a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

const LISTENER: u64 = u64::MAX;
const DOORBELL: u64 = u64::MAX - 1;

/// A region that is deregistered and not released.
struct RetiringRegion {
    memory: Arc<RegionMemory>,
    /// The links that still hold it.
    holders: HashSet<LinkId>,
}

/// The shm transport; see the module.
pub struct ShmDomain {
    /// Shm, or CudaIpc: the same links, over which GPU memory is mapped as well.
    kind: TransportKind,
    credentials: Credentials,
    log: LogLimit,
    /// `None` once the engine is closed, so that new connections are refused at once.
    listener: Option<Listener>,
    epoll: OwnedFd,
    doorbell: Doorbell,
    links: Slab<Link>,
    /// Polled first: the one after the last that delivered a message. None takes all the room.
    first_link: usize,
    /// Upper half of link ids, so that no id is used twice.
    generation: u32,
    book: RegionBook,
    /// Regions being deregistered.
    retiring: HashMap<u32, RetiringRegion>,
    /// Regions that peers had not released when the engine closed.
    kept: HashSet<u32>,
    pool: Arc<CopyPool>,
    waker: Waker,
    inline_bytes: u64,
    inline_left: u64,
    /// Whether a request is being posted. Its peers are woken after all of it is posted.
    batching: bool,
    /// Links whose peers are woken then.
    to_wake: SmallVec<[LinkId; 4]>,
    /// Completions to report at the next poll.
    completions: Vec<Completion>,
    /// Control messages that were received and not taken yet.
    control_messages: VecDeque<(LinkId, Vec<u8>)>,
    poll_sockets_at: Time,
    /// Peers read it to find out whether they can access this process's memory.
    probe: Box<[u8; 16]>,
}

impl std::fmt::Debug for ShmDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShmDomain({} links)", self.links.len())
    }
}

impl ShmDomain {
    pub(crate) fn open(
        kind: TransportKind,
        id: EngineId,
        config: &EngineConfig,
        waker: &Waker,
    ) -> Result<Self, DomainError> {
        let listener = control_socket::listen(&control_socket::socket_name(kind, &id))?;
        let doorbell = Doorbell::new()?;
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(DomainError::io("epoll_create"))?;
        let listener = Listener::new(listener, LISTENER, &epoll)?;
        epoll::add(
            &epoll,
            &doorbell.event,
            epoll::EventData::new_u64(DOORBELL),
            epoll::EventFlags::IN,
        )
        .map_err(DomainError::io("epoll_ctl"))?;
        if !config.stage_foreign {
            raw::admit_peers();
        }
        let mut probe = Box::new([0; 16]);
        getrandom::fill(&mut *probe)
            .map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
        Ok(Self {
            kind,
            log: LogLimit::default(),
            credentials: Credentials::new(
                EngineAddress { id, name: String::new(), endpoints: Vec::new() },
                Secret::or_kernel(config.token.as_deref())?,
            ),
            listener: Some(listener),
            epoll,
            doorbell,
            links: Slab::new(),
            first_link: 0,
            generation: 0,
            book: RegionBook::default(),
            retiring: HashMap::new(),
            kept: HashSet::new(),
            pool: CopyPool::new(config.copy_threads, waker),
            waker: waker.clone(),
            inline_bytes: config.inline_bytes,
            inline_left: config.inline_bytes,
            batching: false,
            to_wake: SmallVec::new(),
            completions: Vec::new(),
            control_messages: VecDeque::new(),
            poll_sockets_at: Time(0),
            probe,
        })
    }

    fn slot(id: LinkId) -> usize {
        (id & 0xFFFF) as usize
    }

    #[inline]
    fn link(&mut self, id: LinkId) -> Option<&mut Link> {
        self.links.get_mut(Self::slot(id)).filter(|l| l.id == id)
    }
}

impl Domain for ShmDomain {
    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn caps(&self) -> Caps {
        Caps {
            max_bytes: u64::MAX,
            max_pages: u32::MAX,
            max_message: messages::longest(layout::MESSAGE_RING.capacity),
        }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: self.kind, data: Vec::new() }
    }

    fn announce(&mut self, own: &EngineAddress) {
        self.credentials.own = own.clone();
    }

    fn register(
        &mut self,
        region: &Arc<RegionMemory>,
        _pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        self.book.insert(region);
        Ok(NicKeys::new())
    }

    fn deregister(&mut self, index: u32) -> RegionRelease {
        let Some(memory) = self.book.remove(index) else { return RegionRelease::Now };
        let mut holders = HashSet::new();
        for (_, link) in &mut self.links {
            if link.exported.remove(&index) {
                let _ = link.send(&Frame::Revoke { index }, smallvec![]);
                holders.insert(link.id);
            }
        }
        if holders.is_empty() {
            return RegionRelease::Now;
        }
        holders.iter().for_each(|id| self.update_interest(*id));
        self.retiring.insert(index, RetiringRegion { memory, holders });
        RegionRelease::Later
    }

    fn map_peer_region(
        &mut self,
        id: LinkId,
        key: RegionKey,
        by: Option<i32>,
    ) -> Result<Arc<PeerMapping>, String> {
        let waker = self.waker.clone();
        let Some(link) = self.link(id).filter(|l| l.is_up() && l.closing.is_none()) else {
            return Err("the link is down".into());
        };
        link.imports.map_peer_region(key, by, move || {
            waker.wake();
            close::finish_closed_links();
        })
    }

    fn unfit(&self, peer: &EngineAddress) -> Option<String> {
        match peer.endpoint(self.kind) {
            Some(_) => None,
            None => Some(format!("the peer does not offer {}", self.kind)),
        }
    }

    fn connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        _endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        self.start_connect(now, peer)
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        let reason = cause.to_owned();
        if let Some(l) = self.link(link) {
            let _ = l.send(&Frame::Close { reason: reason.clone() }, smallvec![]);
            l.closing = Some(DomainError::LinkDown(reason));
            l.stop_copying();
        }
    }

    fn begin_request(&mut self) {
        self.inline_left = self.inline_bytes;
        self.batching = true;
    }

    fn flush(&mut self) {
        self.batching = false;
        for id in std::mem::take(&mut self.to_wake) {
            if let Some(link) = self.link(id) {
                link.ring_doorbell();
            }
        }
    }

    #[inline]
    fn post(&mut self, id: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        let Some(link) = self.link(id).filter(|l| l.is_up() && l.closing.is_none()) else {
            return Err(DomainError::LinkDown("the link is down".into()));
        };
        match wr {
            WorkRequest::Write { .. } | WorkRequest::Read { .. } | WorkRequest::Prepare { .. } => {
                self.post_data(id, token, wr)
            }
            WorkRequest::Count(count) => {
                if !link.can_count() {
                    return Ok(Post::Full);
                }
                Ok(self.post_count(id, token, *count))
            }
            WorkRequest::Send(message) => match link.push_message(token, message) {
                true => Ok(Post::Queued),
                false => Ok(Post::Full),
            },
        }
    }

    #[inline]
    fn write_small(
        &mut self,
        link: LinkId,
        token: Token,
        writes: &[SmallWrite],
        count: Option<Count>,
    ) -> Option<Post> {
        self.post_small(link, token, writes, count)
    }

    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let before = out.len();
        out.append(&mut self.completions);
        let mut progressed = out.len() > before;
        // A `pop` of an empty queue costs a fence.
        while !self.pool.done.is_empty() {
            let Some(job) = self.pool.done.pop() else { break };
            progressed = true;
            self.finish_job(&job, out);
        }
        let first = self.first_link.min(self.links.capacity());
        for slot in (first..self.links.capacity()).chain(0..first) {
            let open = |l: &&mut Link| l.is_up() && !l.receiving_stopped;
            let Some(link) = self.links.get_mut(slot).filter(open) else { continue };
            let before = out.len();
            progressed |= link.take_arrivals(room, out);
            if out[before..].iter().any(|c| matches!(c, Completion::Message { .. })) {
                self.first_link = slot + 1;
            }
            progressed |= link.flush_counts(out);
            let id = link.id;
            if link.corrupt {
                let cause = "the peer's message ring is corrupt";
                self.stop_receiving(id, DomainError::Handshake(cause.into()), out);
                continue;
            }
            if !link.deferred.is_empty() {
                progressed |= self.retry_deferred(id, out);
            }
            progressed |= self.link(id).is_some_and(Link::take_count_refusal);
        }
        if now >= self.poll_sockets_at {
            self.poll_sockets_at = now.after(SOCKET_POLL_INTERVAL);
            progressed |= self.poll_sockets(now, out);
        }
        progressed
    }

    fn arm(&mut self) -> bool {
        self.doorbell.arm();
        let busy = !self.pool.done.is_empty()
            || !self.completions.is_empty()
            || !self.control_messages.is_empty();
        !busy && !self.links.iter_mut().any(|(_, l)| l.has_work())
    }

    fn disarm(&mut self) {
        self.doorbell.disarm();
        self.poll_sockets_at = Time(0);
    }

    fn wake_fds(&self) -> WakeFds {
        smallvec![self.epoll.as_raw_fd()]
    }

    fn next_timer(&self) -> Time {
        let listener = self.listener.as_ref().map_or(Time::NEVER, |l| l.wakes_at);
        self.links.iter().map(|(_, l)| l.deadline).fold(listener, Time::min)
    }

    fn assistant(&self) -> Option<Arc<dyn Assist>> {
        Some(Arc::clone(&self.pool) as Arc<dyn Assist>)
    }

    fn describe(&self, id: LinkId) -> String {
        let link = self.links.get(Self::slot(id)).filter(|l| l.id == id);
        let said = match link.map(|l| &l.stage) {
            Some(Stage::Up(outbound)) => match &outbound.process {
                Ok(pid) => format!(
                    "engine memory is mapped; other memory is copied by process_vm_writev to process \
                    {pid}"
                ),
                Err(why) => {
                    format!("engine memory is mapped; other memory can't be accessed: {why}")
                }
            },
            _ => return "connecting".into(),
        };
        match self.kind {
            TransportKind::CudaIpc => format!("the copy engine copies GPU memory; {said}"),
            _ => said,
        }
    }

    fn close(&mut self) {
        self.listener = None;
        self.pool.close();
        self.close_links();
    }

    fn keeps(&self, index: u32) -> bool {
        self.kept.contains(&index)
    }
}

impl ControlChannel for ShmDomain {
    fn is_up(&self, id: LinkId) -> bool {
        let link = self.links.get(Self::slot(id)).filter(|l| l.id == id);
        link.is_some_and(|l| l.is_up() && l.closing.is_none())
    }

    fn peer(&self, id: LinkId) -> Option<EngineId> {
        self.links.get(Self::slot(id)).filter(|l| l.id == id)?.peer
    }

    fn send_control(&mut self, id: LinkId, frame: Vec<u8>) {
        if let Some(link) = self.link(id).filter(|l| l.is_up() && l.closing.is_none()) {
            // If the peer is gone, the socket reports it soon. Most control messages are answers.
            let _ = link.reply(&Frame::ControlMessage(frame), smallvec![]);
            self.update_interest(id);
        }
    }

    fn receive_control(&mut self) -> Option<(LinkId, Vec<u8>)> {
        let (id, message) = self.control_messages.pop_front()?;
        if let Some(link) = self.link(id) {
            link.control_messages -= 1;
        }
        Some((id, message))
    }

    fn reaches(&self, memory_kind: MemoryKind) -> bool {
        let exported = self.kind == TransportKind::CudaIpc && memory_kind == MemoryKind::Exportable;
        memory_kind == MemoryKind::Host || exported
    }
}

impl Drop for ShmDomain {
    fn drop(&mut self) {
        self.pool.close();
    }
}

/// `fd` for an epoll call.
fn as_fd(fd: &OwnedFd) -> std::os::fd::BorrowedFd<'_> {
    fd.as_fd()
}
