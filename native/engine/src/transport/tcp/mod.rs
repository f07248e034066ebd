//! Links between any two hosts without special hardware: several streams per peer; bytes are
//! received straight into their region and acknowledged afterwards.

#[cfg(test)]
mod ack_tests;
#[cfg(test)]
mod bulk_tests;
#[cfg(test)]
mod flood_tests;
mod frame;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod handshake;
#[cfg(test)]
mod handshake_tests;
mod link;
mod messages;
mod net;
mod page_cursor;
mod protocol;
mod raw;
mod stream;
mod teardown;
#[cfg(test)]
mod teardown_tests;
#[cfg(test)]
mod throttle_tests;

use std::{
    collections::VecDeque,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use rustix::event::{epoll, Timespec};
use slab::Slab;
use smallvec::smallvec;

use crate::{
    api::{Endpoint, EngineAddress, EngineConfig, EngineId, TransportKind},
    domain::{
        Attendance, Caps, Completion, Domain, DomainError, LinkId, MessageRoom, NicKeys, Pinned,
        Post, Receipts, RegionRelease, Token, WakeFds, WorkRequest,
    },
    memory::{RegionBook, RegionMemory},
    time::Time,
    transport::{
        handshake::{Credentials, Secret},
        listener::Listener,
        log_limit::LogLimit,
        staged::ControlChannel,
    },
};
use frame::{Header, Kind};
use handshake::PendingStream;
use link::{Link, StreamKey, MESSAGE_WINDOW};
use net::TcpEndpoint;
use stream::Stream;

/// Interval at which a polling thread asks the kernel about idle sockets.
const SOCKET_POLL_INTERVAL: Duration = Duration::from_micros(20);
/// Time after the last receive during which every poll tries a stream.
const HOT_TIME: Duration = Duration::from_micros(300);
/// Bytes of small frames that are sent together while earlier ones are unacknowledged.
const COALESCE: u64 = 16 << 10;

const LISTENER: u64 = 1 << 62;

/// A socket and its use.
struct Socket {
    stream: Stream,
    role: Role,
}

enum Role {
    /// In its handshake.
    Handshake(Box<PendingStream>),
    /// One of a link's streams.
    Link(LinkId),
}

/// The tcp transport; see the module.
pub struct TcpDomain {
    credentials: Credentials,
    log: LogLimit,
    listeners: Vec<Listener>,
    own_endpoint: TcpEndpoint,
    epoll: OwnedFd,
    sockets: Slab<Socket>,
    links: Slab<Link>,
    generation: u32,
    book: RegionBook,
    retiring: Vec<u32>,
    streams: usize,
    peer_timeout: Duration,
    attendance: Attendance,
    completions: Vec<Completion>,
    /// The operations of one acknowledgement; kept for its memory.
    acked: Vec<u64>,
    /// Control messages that were received and not taken yet.
    control_messages: VecDeque<(LinkId, Vec<u8>)>,
    poll_sockets_at: Time,
    /// Time of the last poll, for posts between polls.
    now: Time,
    bulk_from: u64,
}

impl std::fmt::Debug for TcpDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TcpDomain({} links, {} sockets)", self.links.len(), self.sockets.len())
    }
}

impl TcpDomain {
    pub(crate) fn open(id: EngineId, config: &EngineConfig) -> Result<Self, DomainError> {
        let (listeners, own_endpoint) = net::listen(config)?;
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(DomainError::io("epoll_create"))?;
        let listeners = (LISTENER..)
            .zip(listeners)
            .map(|(tag, socket)| Listener::new(socket, tag, &epoll))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            log: LogLimit::default(),
            credentials: Credentials::new(
                EngineAddress { id, name: String::new(), endpoints: Vec::new() },
                Secret::new(config.token.as_deref())?,
            ),
            listeners,
            own_endpoint,
            epoll,
            sockets: Slab::new(),
            links: Slab::new(),
            generation: 0,
            book: RegionBook::default(),
            retiring: Vec::new(),
            streams: 1 + config.tcp_streams.clamp(1, 15),
            peer_timeout: config.peer_timeout,
            attendance: Attendance::default(),
            completions: Vec::new(),
            acked: Vec::new(),
            control_messages: VecDeque::new(),
            poll_sockets_at: Time(0),
            now: Time(0),
            bulk_from: 16 << 10,
        })
    }

    fn slot(id: LinkId) -> usize {
        (id & 0xFFFF) as usize
    }

    #[inline]
    fn link(&mut self, id: LinkId) -> Option<&mut Link> {
        self.links.get_mut(Self::slot(id)).filter(|l| l.id == id)
    }

    /// Updates the events for which the socket is watched.
    fn update_interest(&self, key: StreamKey) {
        let Some(s) = self.sockets.get(key) else { return };
        let mut flags = match s.stream.is_throttled() {
            true => epoll::EventFlags::empty(),
            false => epoll::EventFlags::IN,
        };
        let connecting = matches!(&s.role, Role::Handshake(h) if h.is_connecting());
        if s.stream.blocked || connecting {
            flags |= epoll::EventFlags::OUT;
        }
        let _ =
            epoll::modify(&self.epoll, s.stream.fd(), epoll::EventData::new_u64(key as u64), flags);
    }

    /// Sends a stream's queue; closes its link if that fails.
    fn send_queued(&mut self, key: StreamKey) -> bool {
        let Some(s) = self.sockets.get_mut(key) else { return false };
        if s.stream.unsent == 0 {
            return false;
        }
        let was_blocked = s.stream.blocked;
        let sent = s.stream.send();
        let is_blocked = s.stream.blocked;
        // A throttled peer that receives its replies is alive.
        let takes = s.stream.is_throttled() && matches!(sent, Ok(true));
        if let Role::Link(id) = s.role {
            let now = self.now;
            if let Some(link) = self.link(id) {
                link.sent_at = now;
                link.received_at = if takes { now } else { link.received_at };
            }
        }
        self.update_throttle(key);
        if was_blocked != is_blocked {
            self.update_interest(key);
        }
        match sent {
            Ok(progressed) => progressed,
            Err(e) => {
                self.socket_failed(key, e);
                true
            }
        }
    }

    /// Asks the kernel which sockets are ready, without waiting.
    fn poll_sockets(&mut self, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let blank =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [blank; 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let n = epoll::wait(self.epoll.as_fd(), &mut events[..], Some(&now)).unwrap_or(0);
        for event in &events[..n] {
            match event.data.u64() {
                tag if tag & LISTENER != 0 => self.accept_all((tag & !LISTENER) as usize),
                tag => {
                    let key = tag as StreamKey;
                    let flags = event.flags;
                    if flags.contains(epoll::EventFlags::OUT) {
                        self.on_writable(key);
                    }
                    self.on_readable(key, room, out);
                }
            }
        }
        n > 0
    }

    /// Whether frames wait in a stream's buffer since its handshake, and may be processed.
    fn has_leftover(&self, s: &Socket) -> bool {
        let Role::Link(id) = s.role else { return false };
        let link = self.links.get(Self::slot(id)).filter(|l| l.id == id);
        let may = s.stream.leftover && !s.stream.exceeds_reply_limit();
        may && link.is_some_and(Link::is_complete)
    }

    /// Reports regions whose last read has been sent.
    fn report_released(&mut self, out: &mut Vec<Completion>) {
        let sockets = &self.sockets;
        self.retiring.retain(|index| {
            let used = sockets.iter().any(|(_, s)| s.stream.uses(*index));
            if !used {
                out.push(Completion::RegionReleased { index: *index });
            }
            used
        });
    }
}

impl Domain for TcpDomain {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn caps(&self) -> Caps {
        Caps { max_bytes: u64::MAX, max_pages: frame::MAX_PAGES, max_message: frame::MAX_MESSAGE }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: TransportKind::Tcp, data: self.own_endpoint.encode() }
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
        if self.book.remove(index).is_none() {
            return RegionRelease::Now;
        }
        for (_, s) in &mut self.sockets {
            s.stream.discard_region(index);
        }
        if self.sockets.iter().any(|(_, s)| s.stream.uses(index)) {
            self.retiring.push(index);
            return RegionRelease::Later;
        }
        RegionRelease::Now
    }

    fn unfit(&self, peer: &EngineAddress) -> Option<String> {
        let Some(endpoint) = peer.endpoint(TransportKind::Tcp) else {
            return Some("the peer does not offer tcp".into());
        };
        match TcpEndpoint::decode(&endpoint.data) {
            Err(e) => Some(e.to_string()),
            Ok(w) if w.candidates(&self.own_endpoint.host).is_empty() => Some(
                "the peer listens on its own loopback only, because it has no token; give all \
                engines the same token"
                    .into(),
            ),
            Ok(_) => None,
        }
    }

    fn connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        _endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        self.now = now;
        self.start_connect(now, peer)
    }

    fn receipts(&self) -> Receipts {
        Receipts::Numbered
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        self.close_link(link, DomainError::LinkDown(cause.to_owned()), true);
    }

    #[inline]
    fn post(&mut self, id: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        let Some(link) = self.link(id).filter(|l| l.is_complete()) else {
            return Err(DomainError::LinkDown("the link is down".into()));
        };
        if matches!(wr, WorkRequest::Prepare { .. }) {
            return Ok(Post::Done);
        }
        let too_many_messages =
            matches!(wr, WorkRequest::Send(_)) && link.messages >= MESSAGE_WINDOW;
        let too_much_asked = match wr {
            WorkRequest::Read { data } => !link.can_read(stream::read_cost(data)),
            _ => false,
        };
        if link.is_full() || too_many_messages || too_much_asked {
            return Ok(Post::Full);
        }
        self.enqueue(id, token, wr);
        Ok(Post::Queued)
    }

    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        self.now = now;
        out.append(&mut self.completions);
        let before = out.len();
        let mut progressed = before > 0;
        for key in 0..self.sockets.capacity() {
            let Some(s) = self.sockets.get(key) else { continue };
            if !matches!(s.role, Role::Link(_)) {
                continue;
            }
            let (hot, blocked) = (s.stream.hot_until > now, s.stream.blocked);
            if s.stream.owes_bulk_ack() && !blocked {
                self.sockets[key].stream.acknowledge();
                progressed |= self.send_queued(key);
            }
            let Some(s) = self.sockets.get(key) else { continue };
            let heard = (hot || self.has_leftover(s)) && self.on_readable(key, room, out);
            progressed |= heard;
            let Some(s) = self.sockets.get_mut(key) else { continue };
            if !heard {
                s.stream.acknowledge();
            }
            if s.stream.unsent > 0 && (!blocked || hot) {
                progressed |= self.send_queued(key);
            }
        }
        if now >= self.poll_sockets_at {
            self.poll_sockets_at = now.after(SOCKET_POLL_INTERVAL);
            progressed |= self.poll_sockets(room, out);
            progressed |= self.deliver_waiting(room, out);
            progressed |= self.tick(now);
        }
        if !self.retiring.is_empty() {
            self.report_released(out);
        }
        out.append(&mut self.completions);
        progressed || out.len() > before
    }

    fn flush(&mut self) {
        for key in 0..self.sockets.capacity() {
            let Some(s) = self.sockets.get_mut(key) else { continue };
            let stream = &mut s.stream;
            if stream.unsent == 0 || stream.blocked {
                continue;
            }
            // While earlier small frames are unacknowledged, later ones are collected; the
            // acknowledgement or the next poll sends them.
            let waits = stream.unsent < COALESCE && !stream.is_first_flight();
            if !waits {
                stream.acknowledge();
                self.send_queued(key);
            }
        }
    }

    fn arm(&mut self) -> bool {
        self.poll_sockets_at = Time(0);
        let busy = |s: &Socket| {
            (s.stream.unsent > 0 && !s.stream.blocked)
                || s.stream.executed != s.stream.executed_acked
                || self.has_leftover(s)
        };
        let completions = !self.completions.is_empty() || !self.control_messages.is_empty();
        !completions && !self.sockets.iter().any(|(_, s)| busy(s))
    }

    fn disarm(&mut self) {
        self.poll_sockets_at = Time(0);
    }

    fn wake_fds(&self) -> WakeFds {
        smallvec![self.epoll.as_raw_fd()]
    }

    fn next_timer(&self) -> Time {
        let links = self.links.iter().map(|(_, l)| l.next_timer(self.peer_timeout));
        let pending = self.sockets.iter().filter_map(|(_, s)| match &s.role {
            Role::Handshake(h) => Some(h.deadline),
            Role::Link(_) => None,
        });
        let listeners = self.listeners.iter().map(|l| l.wakes_at);
        let pending = pending.fold(Time::NEVER, Time::min);
        let look = match pending {
            Time::NEVER => Time::NEVER,
            _ => self.attendance.next_look(self.peer_timeout),
        };
        links.chain(listeners).fold(pending.min(look), Time::min)
    }

    fn describe(&self, id: LinkId) -> String {
        match self.links.get(Self::slot(id)).filter(|l| l.id == id) {
            Some(l) => format!("{} streams to {}", l.streams.len(), l.remote),
            None => "connecting".into(),
        }
    }

    fn close(&mut self) {
        self.listeners.clear();
        let ids: Vec<LinkId> = self.links.iter().map(|(_, l)| l.id).collect();
        for id in ids {
            self.close_link(id, DomainError::Gone("its engine was closed".into()), true);
        }
        self.sockets.clear();
    }
}

impl ControlChannel for TcpDomain {
    fn is_up(&self, id: LinkId) -> bool {
        let link = self.links.get(Self::slot(id)).filter(|l| l.id == id);
        link.is_some_and(|l| l.is_complete())
    }

    fn peer(&self, id: LinkId) -> Option<EngineId> {
        let link = self.links.get(Self::slot(id)).filter(|l| l.id == id)?;
        Some(link.peer.as_ref()?.id())
    }

    fn send_control(&mut self, id: LinkId, frame: Vec<u8>) {
        let Some(key) = self.link(id).filter(|l| l.is_complete()).and_then(|l| l.urgent_stream())
        else {
            return;
        };
        let header = Header { len: frame.len() as u64, ..Header::new(Kind::ControlMessage) };
        let stream = &mut self.sockets[key].stream;
        stream.queue_bytes(&header.encode());
        stream.queue_bytes(&frame);
        // Most control messages are answers.
        stream.charge_reply(frame.len() as u64);
    }

    fn receive_control(&mut self) -> Option<(LinkId, Vec<u8>)> {
        let (id, message) = self.control_messages.pop_front()?;
        if let Some(link) = self.link(id) {
            link.control_messages -= 1;
        }
        Some((id, message))
    }
}
