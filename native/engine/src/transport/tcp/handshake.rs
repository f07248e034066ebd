//! Handshakes of streams, and the end of links.

use std::{net::SocketAddr, time::Duration};

use rustix::event::epoll;
use serde::{Deserialize, Serialize};

use super::{
    link::{Link, LinkNonce, StreamKey},
    net::{self, TcpEndpoint},
    stream::Stream,
    Role, Socket, TcpDomain,
};
use crate::{
    api::{EngineAddress, Envelope, TransportKind},
    domain::{Completion, DomainError, LinkId, PeerIdentity},
    time::Time,
    transport::{
        handshake::{Acceptor, Failure, Initiator, UnprovenAcceptor, MAX_MESSAGE},
        listener::Admission,
    },
    EngineError,
};

/// Time for one address: connect and handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);

const ENVELOPE: Envelope = Envelope::new(*b"FRts", "a stream id", 128);

/// Identifies a stream of a link.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct StreamId {
    link: LinkNonce,
    index: u8,
    count: u8,
}

enum Stage {
    Connecting,
    AwaitWelcome(Initiator),
    AwaitAccepted(UnprovenAcceptor),
    AwaitHello,
    AwaitProof(Acceptor, StreamId),
}

/// A socket in its handshake.
pub(super) struct PendingStream {
    stage: Stage,
    /// The link and stream index, if this side is the initiator.
    pub link: Option<(LinkId, usize)>,
    remote: String,
    started_at: Time,
    pub deadline: Time,
}

impl PendingStream {
    pub fn is_connecting(&self) -> bool {
        matches!(self.stage, Stage::Connecting)
    }
}

fn length_prefixed(message: &[u8]) -> Vec<u8> {
    let mut out = (message.len() as u32).to_le_bytes().to_vec();
    out.extend_from_slice(message);
    out
}

impl TcpDomain {
    pub(super) fn start_connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
    ) -> Result<LinkId, DomainError> {
        let endpoint = peer
            .endpoint(TransportKind::Tcp)
            .ok_or_else(|| DomainError::Unavailable("the peer does not offer tcp".into()))?;
        let candidates = TcpEndpoint::decode(&endpoint.data)?.candidates(&self.own_endpoint.host);
        let mut nonce = [0; 16];
        getrandom::fill(&mut nonce)
            .map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
        let id = self.add_link(nonce, self.streams, true)?;
        let link = &mut self.links[Self::slot(id)];
        link.target = Some(peer.clone());
        link.candidates = candidates.into();
        link.deadline = Time::NEVER;
        self.try_next_address(now, id);
        Ok(id)
    }

    fn add_link(
        &mut self,
        nonce: LinkNonce,
        streams: usize,
        initiator: bool,
    ) -> Result<LinkId, DomainError> {
        let entry = self.links.vacant_entry();
        let slot = entry.key() as u32;
        if slot > 0xFFFF {
            return Err(DomainError::Unavailable("65536 links are open already".into()));
        }
        self.generation = (self.generation + 1) & 0xFFFF;
        let id = self.generation << 16 | slot;
        entry.insert(Link::new(id, nonce, streams, initiator, self.now));
        Ok(id)
    }

    /// Connects the first stream to the next address of a peer; closes the link if none is left.
    fn try_next_address(&mut self, now: Time, id: LinkId) {
        while let Some(link) = self.link(id) {
            let Some(addr) = link.candidates.pop_front() else {
                let errors = link.errors.join(", ");
                // A handshake that was interrupted may be tried again.
                let cause = match link.interrupted {
                    true => DomainError::LinkDown(errors),
                    false => DomainError::Gone(errors),
                };
                return self.close_link(id, cause, false);
            };
            link.remote = addr.to_string();
            match self.open_stream(now, id, 0, &addr) {
                Ok(()) => return,
                // A limit of this process: another address would not help.
                Err(e @ DomainError::Io { errno, .. }) if EngineError::is_limit(errno) => {
                    return self.close_link(id, e, false);
                }
                Err(e) => {
                    if let Some(link) = self.link(id) {
                        link.errors.push(e.to_string());
                    }
                }
            }
        }
    }

    fn open_stream(
        &mut self,
        now: Time,
        id: LinkId,
        index: usize,
        addr: &SocketAddr,
    ) -> Result<(), DomainError> {
        let socket = net::connect(addr)?;
        let pending = PendingStream {
            stage: Stage::Connecting,
            link: Some((id, index)),
            remote: addr.to_string(),
            started_at: now,
            deadline: now.after(HANDSHAKE_TIMEOUT),
        };
        self.add_socket(socket, pending).map(drop)
    }

    fn add_socket(
        &mut self,
        socket: std::os::fd::OwnedFd,
        pending: PendingStream,
    ) -> Result<StreamKey, DomainError> {
        let mut flags = epoll::EventFlags::IN;
        if pending.is_connecting() {
            flags |= epoll::EventFlags::OUT;
        }
        let entry = self.sockets.vacant_entry();
        let key = entry.key();
        epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(key as u64), flags)
            .map_err(DomainError::io("epoll_ctl"))?;
        entry.insert(Socket {
            stream: Stream::new(socket),
            role: Role::Handshake(Box::new(pending)),
        });
        Ok(key)
    }

    pub(super) fn accept_all(&mut self, listener: usize) {
        let now = self.now;
        while let Some(l) = self.listeners.get_mut(listener) {
            let unproven = self.sockets.iter().filter_map(|(key, s)| match &s.role {
                Role::Handshake(h) if h.link.is_none() => Some((key, h.started_at)),
                _ => None,
            });
            match l.admit(now, unproven, 1, &self.epoll) {
                Admission::Accept => {}
                Admission::Displace(key) => {
                    let cause =
                        "displaced by newer connections before the peer was proven".to_owned();
                    self.socket_failed(key, DomainError::LinkDown(cause));
                    continue;
                }
                Admission::Wait => return,
            }
            let Some(socket) = l.accept(now, &self.epoll) else { return };
            net::tune(&socket);
            let remote = rustix::net::getpeername(&socket)
                .ok()
                .and_then(|a| SocketAddr::try_from(a?).ok())
                .map_or_else(|| "a peer".to_owned(), |a| a.to_string());
            let pending = PendingStream {
                stage: Stage::AwaitHello,
                link: None,
                remote,
                started_at: now,
                deadline: now.after(HANDSHAKE_TIMEOUT),
            };
            if let Err(e) = self.add_socket(socket, pending) {
                self.log.warn("refusing a connection", &e);
            }
        }
    }

    /// A connect has finished, or a blocked socket has room.
    pub(super) fn on_writable(&mut self, key: StreamKey) {
        let Some(s) = self.sockets.get_mut(key) else { return };
        let connecting = matches!(&s.role, Role::Handshake(h) if h.is_connecting());
        if connecting {
            if let Err(e) = self.send_hello(key) {
                self.socket_failed(key, e);
            }
        }
        self.send_queued(key);
        self.update_interest(key);
    }

    fn send_hello(&mut self, key: StreamKey) -> Result<(), DomainError> {
        let Some(Socket { stream, role: Role::Handshake(pending) }) = self.sockets.get_mut(key)
        else {
            return Ok(());
        };
        net::connect_result(&stream.fd())
            .map_err(|e| DomainError::Gone(format!("connect to {}: {e}", pending.remote)))?;
        let Some((id, index)) = pending.link else { return Ok(()) };
        let link = self.links.get(Self::slot(id)).filter(|l| l.id == id);
        let Some((link, target)) = link.and_then(|l| l.target.as_ref().map(|w| (l, w))) else {
            return Err(DomainError::LinkDown("the link is closed".into()));
        };
        let stream_id =
            StreamId { link: link.nonce, index: index as u8, count: link.streams.len() as u8 };
        let (init, hello) =
            Initiator::start(&self.credentials, target.id, ENVELOPE.encode(&stream_id))?;
        pending.stage = Stage::AwaitWelcome(init);
        stream.queue_bytes(&length_prefixed(&hello));
        Ok(())
    }

    /// Advances a socket's handshake as far as its bytes allow.
    pub(super) fn advance_handshake(&mut self, key: StreamKey) -> Result<(), DomainError> {
        loop {
            let Some(Socket { stream, role: Role::Handshake(_) }) = self.sockets.get_mut(key)
            else {
                return Ok(());
            };
            let Some(message) = stream.handshake_message(MAX_MESSAGE)? else {
                match stream.fill()? {
                    Some(_) => continue,
                    None => return Ok(()),
                }
            };
            if let Err(Failure { reply, error }) = self.on_handshake_message(key, &message) {
                if let (Some(reply), Some(s)) = (reply, self.sockets.get_mut(key)) {
                    s.stream.queue_bytes(&length_prefixed(&reply));
                    let _ = s.stream.send();
                }
                return Err(error);
            }
            self.send_queued(key);
        }
    }

    fn on_handshake_message(&mut self, key: StreamKey, message: &[u8]) -> Result<(), Failure> {
        let Some(Socket { stream, role: Role::Handshake(pending) }) = self.sockets.get_mut(key)
        else {
            return Ok(());
        };
        match std::mem::replace(&mut pending.stage, Stage::AwaitHello) {
            Stage::Connecting => Ok(()),
            Stage::AwaitHello => {
                let (acceptor, welcome) = Acceptor::on_hello(&self.credentials, message)?;
                let stream_id: StreamId = ENVELOPE.decode(&acceptor.extra).map_err(|e| {
                    Failure { reply: None, error: DomainError::Handshake(e.to_string()) }
                })?;
                stream.queue_bytes(&length_prefixed(&welcome));
                pending.stage = Stage::AwaitProof(acceptor, stream_id);
                Ok(())
            }
            Stage::AwaitWelcome(init) => {
                let welcomed = init.on_welcome(message)?;
                stream.queue_bytes(&length_prefixed(&welcomed.proof));
                pending.stage = Stage::AwaitAccepted(welcomed.pending);
                Ok(())
            }
            Stage::AwaitAccepted(unproven) => {
                let peer = unproven.on_accepted(message)?;
                let link = pending.link;
                if let Some((id, index)) = link {
                    self.on_stream_proven(key, id, index, peer);
                }
                Ok(())
            }
            Stage::AwaitProof(acceptor, stream_id) => {
                let accepted = acceptor.on_proof(message)?;
                stream.queue_bytes(&length_prefixed(&accepted));
                self.assign_stream(key, stream_id, acceptor.peer)
                    .map_err(|error| Failure { reply: None, error })
            }
        }
    }

    /// Acceptor: finds or creates the link of a proven stream.
    fn assign_stream(
        &mut self,
        key: StreamKey,
        stream_id: StreamId,
        peer: PeerIdentity,
    ) -> Result<(), DomainError> {
        let (index, count) = (usize::from(stream_id.index), usize::from(stream_id.count));
        if count == 0 || count > 16 || index >= count {
            return Err(DomainError::Handshake("an impossible number of streams".into()));
        }
        let known = self.links.iter().find(|(_, l)| {
            !l.initiator
                && l.nonce == stream_id.link
                && l.peer.as_ref().is_some_and(|p| p.id() == peer.id())
        });
        let known = known.map(|(_, l)| (l.id, l.streams.len(), l.streams.get(index).copied()));
        let id = match known {
            Some((id, n, Some(None))) if n == count => id,
            Some(_) => return Err(DomainError::Handshake("the stream exists already".into())),
            None => {
                let id = self.add_link(stream_id.link, count, false)?;
                let deadline = self.now.after(HANDSHAKE_TIMEOUT);
                let link = &mut self.links[Self::slot(id)];
                link.peer = Some(peer.clone());
                link.deadline = deadline;
                id
            }
        };
        self.on_stream_proven(key, id, index, peer);
        Ok(())
    }

    /// A stream is proven. With the last one the link is up.
    fn on_stream_proven(&mut self, key: StreamKey, id: LinkId, index: usize, peer: PeerIdentity) {
        let now = self.now;
        let Some(s) = self.sockets.get_mut(key) else { return };
        let Role::Handshake(pending) = std::mem::replace(&mut s.role, Role::Link(id)) else {
            return;
        };
        s.stream.hot_until = now.after(super::HOT_TIME);
        s.stream.mark_leftover();
        s.stream.is_bulk = index > 0;
        let Some(link) = self.link(id) else {
            self.sockets.remove(key);
            return;
        };
        link.streams[index] = Some(key);
        link.remote.clone_from(&pending.remote);
        link.peer = Some(peer.clone());
        if link.is_complete() {
            (link.received_at, link.sent_at) = (now, now);
            let description = format!("handshake with {}", pending.remote);
            let (endpoint, name) = (peer.address.first_of(TransportKind::Tcp), link.name());
            self.completions.push(Completion::LinkUp {
                link: id,
                peer,
                endpoint,
                name,
                description,
            });
        } else if link.initiator && index == 0 {
            let n = link.streams.len();
            let addr: Option<SocketAddr> = pending.remote.parse().ok();
            for i in 1..n {
                let opened = addr
                    .ok_or_else(|| DomainError::Unavailable("the peer's address is unknown".into()))
                    .and_then(|a| self.open_stream(now, id, i, &a));
                if let Err(e) = opened {
                    return self.close_link(id, e, false);
                }
            }
        }
        self.update_interest(key);
    }

    /// A socket has failed: its link closes, or tries another address.
    pub(super) fn socket_failed(&mut self, key: StreamKey, error: DomainError) {
        let Some(s) = self.sockets.try_remove(key) else { return };
        match s.role {
            Role::Link(id) => self.close_link(id, error, false),
            Role::Handshake(pending) => {
                let Some((id, index)) = pending.link else {
                    self.log.unproven(&pending.remote, &error);
                    return;
                };
                let now = self.now;
                // The peer refused, or this process is at a limit: another address would not help.
                let refused = match &error {
                    DomainError::Handshake(_) | DomainError::Stale(_) => true,
                    DomainError::Io { errno, .. } => EngineError::is_limit(*errno),
                    _ => false,
                };
                match self.link(id) {
                    Some(link) if index == 0 && !refused => {
                        link.interrupted |= matches!(error, DomainError::LinkDown(_));
                        let why = error.to_string();
                        link.errors.push(match why.contains(&pending.remote) {
                            true => why,
                            false => format!("connect to {}: {why}", pending.remote),
                        });
                        self.try_next_address(now, id);
                    }
                    _ => self.close_link(id, error, false),
                }
            }
        }
    }
}
