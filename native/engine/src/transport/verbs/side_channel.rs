//! Handshakes by TCP where datagrams do not get through: the same messages, each after its length.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::fd::OwnedFd,
    time::Duration,
};

use rustix::event::epoll;
use slab::Slab;

use super::address::gid_ip;
use crate::{
    api::EngineConfig,
    domain::{DomainError, LinkId},
    time::Time,
    transport::{
        listener::Listener,
        nic::{frame::HANDSHAKE_FRAGMENT_HEADER, handshake_fragments::MAX_EXCHANGE_MESSAGE},
        sockets::{self, AddressPolicy},
    },
};

/// Connections of unproven peers at a time.
const MAX_UNPROVEN: usize = 64;
const STREAM_TIMEOUT: Duration = Duration::from_secs(2);

struct Stream {
    socket: TcpStream,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// The link that this side opens over the connection, if any.
    link: Option<LinkId>,
    deadline: Time,
}

pub(super) struct SideChannel {
    listeners: Vec<Listener>,
    streams: Slab<Stream>,
    pub addrs: Vec<SocketAddr>,
    pub loopback: Option<u16>,
}

impl SideChannel {
    /// Listens at the NIC's address or at the configured ones; without a token only on loopback. On
    /// a machine where listening fails there is no side channel.
    pub fn open(
        config: &EngineConfig,
        gid: &[u8; 16],
        (epoll, tag): (&OwnedFd, u64),
    ) -> Result<Self, DomainError> {
        let ip = gid_ip(gid);
        let scoped = matches!(ip, IpAddr::V6(v6) if v6.segments()[0] & 0xFFC0 == 0xFE80);
        let wanted: Vec<IpAddr> = match (config.bind.as_slice(), &config.token) {
            ([], None) => vec![Ipv4Addr::LOCALHOST.into()],
            ([], Some(_)) if !scoped => vec![ip],
            ([], Some(_)) => Vec::new(),
            (some, _) => some.to_vec(),
        };
        let wanted: Vec<IpAddr> =
            wanted.into_iter().filter(|ip| !ip.is_unspecified()).take(4).collect();
        let mut this =
            Self { listeners: Vec::new(), streams: Slab::new(), addrs: Vec::new(), loopback: None };
        let policy = if config.bind.is_empty() { AddressPolicy::Found } else { AddressPolicy::Any };
        let listening = match sockets::listen(&wanted, policy, config.ports) {
            Ok(listening) => listening,
            Err(e @ DomainError::Ports(_)) => return Err(e),
            Err(_) => return Ok(this),
        };
        let port = listening.port;
        for ((ip, socket), tag) in listening.sockets.into_iter().zip(tag..) {
            match ip == Ipv4Addr::LOCALHOST {
                true => this.loopback = Some(port),
                false => this.addrs.push(SocketAddr::new(ip, port)),
            }
            this.listeners.push(Listener::new(socket, tag, epoll)?);
        }
        Ok(this)
    }

    pub fn accept(&mut self, now: Time, listener: usize, epoll: &OwnedFd) {
        while let Some(socket) = self.listeners.get_mut(listener).and_then(|l| l.accept(now, epoll))
        {
            let strangers = self.streams.iter().filter(|(_, s)| s.link.is_none()).count();
            if strangers < MAX_UNPROVEN {
                self.add(now, socket.into(), None, epoll);
            }
        }
    }

    /// Adds a connected, non-blocking socket.
    pub fn add(
        &mut self,
        now: Time,
        socket: TcpStream,
        link: Option<LinkId>,
        epoll: &OwnedFd,
    ) -> Option<usize> {
        let _ = socket.set_nodelay(true);
        let entry = self.streams.vacant_entry();
        let key = entry.key();
        let data = epoll::EventData::new_u64(key as u64);
        epoll::add(epoll, &socket, data, epoll::EventFlags::IN).ok()?;
        let (inbox, outbox, deadline) = (Vec::new(), Vec::new(), now.after(STREAM_TIMEOUT));
        entry.insert(Stream { socket, inbox, outbox, link, deadline });
        Some(key)
    }

    pub fn send(&mut self, key: usize, frame: &[u8], epoll: &OwnedFd) {
        let Some(s) = self.streams.get_mut(key) else { return };
        s.outbox.extend_from_slice(&(frame.len() as u32).to_le_bytes());
        s.outbox.extend_from_slice(frame);
        self.write_pending(key, epoll);
    }

    fn write_pending(&mut self, key: usize, epoll: &OwnedFd) {
        let Some(s) = self.streams.get_mut(key) else { return };
        while !s.outbox.is_empty() {
            match s.socket.write(&s.outbox) {
                Ok(n) => drop(s.outbox.drain(..n)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        let mut flags = epoll::EventFlags::IN;
        if !s.outbox.is_empty() {
            flags |= epoll::EventFlags::OUT;
        }
        let _ = epoll::modify(epoll, &s.socket, epoll::EventData::new_u64(key as u64), flags);
    }

    /// Returns the whole frames that have arrived. A stream that ended or violated the protocol is
    /// removed.
    pub fn read_frames(&mut self, key: usize, epoll: &OwnedFd) -> Vec<Vec<u8>> {
        self.write_pending(key, epoll);
        let Some(s) = self.streams.get_mut(key) else { return Vec::new() };
        let mut open = true;
        let mut some = [0; 4096];
        // Bounds the buffer at two messages, whatever the peer sends.
        while s.inbox.len() < 2 * MAX_EXCHANGE_MESSAGE {
            match s.socket.read(&mut some) {
                Ok(0) => open = false,
                Ok(n) => {
                    s.inbox.extend_from_slice(&some[..n]);
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => open = e.kind() == ErrorKind::WouldBlock,
            }
            break;
        }
        let mut frames = Vec::new();
        while let Some((len, rest)) = s.inbox.split_first_chunk::<4>() {
            let len = u32::from_le_bytes(*len) as usize;
            if len > MAX_EXCHANGE_MESSAGE + HANDSHAKE_FRAGMENT_HEADER {
                open = false;
                break;
            }
            let Some(frame) = rest.get(..len) else { break };
            frames.push(frame.to_vec());
            s.inbox.drain(..4 + len);
        }
        if !open {
            self.streams.remove(key);
        }
        frames
    }

    pub fn drop_link(&mut self, link: LinkId) {
        self.streams.retain(|_, s| s.link != Some(link));
    }

    pub fn tick(&mut self, now: Time, epoll: &OwnedFd) {
        self.listeners.iter_mut().for_each(|l| l.tick(now, epoll));
        self.streams.retain(|_, s| s.deadline > now);
    }

    pub fn next_timer(&self) -> Time {
        let streams = self.streams.iter().map(|(_, s)| s.deadline);
        streams.chain(self.listeners.iter().map(|l| l.wakes_at)).fold(Time::NEVER, Time::min)
    }

    pub fn close(&mut self) {
        self.listeners.clear();
        self.streams.clear();
    }
}

/// Connects to the first address that answers. Blocks; not for the polling thread.
pub(super) fn connect(candidates: &[SocketAddr]) -> Result<TcpStream, String> {
    let mut tried = Vec::new();
    for addr in candidates {
        match TcpStream::connect_timeout(addr, Duration::from_secs(1)) {
            Ok(s) if s.set_nonblocking(true).is_ok() => return Ok(s),
            Ok(_) => {}
            Err(e) => tried.push(format!("{addr}: {e}")),
        }
    }
    match tried.is_empty() {
        true => Err("it has no TCP side channel".into()),
        false => Err(tried.join(", ")),
    }
}
