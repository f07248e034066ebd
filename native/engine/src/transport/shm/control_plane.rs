//! The control plane of the shm transport: sockets, handshakes, closing links.

use std::{os::fd::OwnedFd, time::Duration};

use rustix::event::{epoll, Timespec};
use smallvec::smallvec;

use super::{
    as_fd,
    control_socket::{socket_name, ControlSocket, Disconnected, Fds, Frame, LinkSetup},
    link::{Link, Stage},
    ShmDomain, DOORBELL, HANDSHAKE_TIMEOUT, LISTENER,
};
use crate::{
    api::EngineAddress,
    domain::{Completion, DomainError, LinkId},
    time::Time,
    transport::{
        handshake::{Acceptor, Failure, Initiator},
        listener::Admission,
    },
};

/// Received control messages of a peer that may wait, and unsent answers to its revocations: far
/// more than honest peers cause between two polls.
pub(super) const MAX_CONTROL_MESSAGES: usize = 1 << 16;
/// Frames of one peer per poll.
const FRAMES_PER_POLL: usize = 256;

impl ShmDomain {
    pub(super) fn start_connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
    ) -> Result<LinkId, DomainError> {
        let control = ControlSocket::connect(&socket_name(self.kind, &peer.id))?;
        self.check_user(&control)?;
        let (init, hello) = Initiator::start(&self.credentials, peer.id, Vec::new())?;
        let id = self.add(now, control, Stage::AwaitWelcome(init))?;
        let link = &mut self.links[Self::slot(id)];
        link.control
            .send(hello, smallvec![])
            .map_err(|Disconnected(why)| DomainError::LinkDown(why))?;
        Ok(id)
    }

    fn add(
        &mut self,
        now: Time,
        control: ControlSocket,
        stage: Stage,
    ) -> Result<LinkId, DomainError> {
        let entry = self.links.vacant_entry();
        let slot = entry.key() as u32;
        if slot > 0xFFFF {
            return Err(DomainError::Unavailable("65536 links are open already".into()));
        }
        self.generation = (self.generation + 1) & 0xFFFF;
        let id = self.generation << 16 | slot;
        let tag = epoll::EventData::new_u64(u64::from(id));
        epoll::add(&self.epoll, control.fd(), tag, epoll::EventFlags::IN)
            .map_err(DomainError::io("epoll_ctl"))?;
        entry.insert(Link::new(id, control, stage, (now, now.after(HANDSHAKE_TIMEOUT)))?);
        Ok(id)
    }

    /// Updates the events for which the socket is watched.
    pub(super) fn update_interest(&mut self, id: LinkId) {
        let Some(link) = self.links.get(Self::slot(id)).filter(|l| l.id == id) else { return };
        let mut flags = match link.control.is_throttled() {
            true => epoll::EventFlags::empty(),
            false => epoll::EventFlags::IN,
        };
        if link.control.wants_write() {
            flags |= epoll::EventFlags::OUT;
        }
        let tag = epoll::EventData::new_u64(u64::from(id));
        let _ = epoll::modify(&self.epoll, link.control.fd(), tag, flags);
    }

    /// Polls the sockets, without waiting.
    pub(super) fn poll_sockets(&mut self, now: Time, out: &mut Vec<Completion>) -> bool {
        self.poll_sockets_for(now, Duration::ZERO, out)
    }

    pub(super) fn poll_sockets_for(
        &mut self,
        now: Time,
        timeout: Duration,
        out: &mut Vec<Completion>,
    ) -> bool {
        let blank =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [blank; 32];
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let n = epoll::wait(as_fd(&self.epoll), &mut events[..], Some(&timeout)).unwrap_or(0);
        for event in &events[..n] {
            match event.data.u64() {
                DOORBELL => self.doorbell.clear(),
                LISTENER => self.accept_all(now, out),
                tag => self.on_readable(tag as LinkId, out),
            }
        }
        if let Some(l) = &mut self.listener {
            l.tick(now, &self.epoll);
        }
        let expired: Vec<LinkId> =
            self.links.iter().filter(|(_, l)| l.deadline <= now).map(|(_, l)| l.id).collect();
        for id in &expired {
            let cause = "the peer did not finish the handshake in time";
            self.on_connection_lost(*id, DomainError::LinkDown(cause.into()), out);
        }
        let ended = self.advance_closing(out);
        n > 0 || !expired.is_empty() || ended
    }

    fn accept_all(&mut self, now: Time, out: &mut Vec<Completion>) {
        while let Some(l) = &mut self.listener {
            let unproven = self.links.iter().filter_map(|(_, l)| match l.stage {
                Stage::AwaitHello | Stage::AwaitProof(_) if l.closing.is_none() => {
                    Some((l.id, l.connected_at))
                }
                _ => None,
            });
            // Each has a socket and an inbox.
            match l.admit(now, unproven, 2, &self.epoll) {
                Admission::Accept => {}
                Admission::Displace(id) => {
                    let cause =
                        "displaced by newer connections before the peer was proven".to_owned();
                    self.on_connection_lost(id, DomainError::LinkDown(cause), out);
                    continue;
                }
                Admission::Wait => return,
            }
            let Some(socket) = l.accept(now, &self.epoll) else { return };
            let control = ControlSocket::new(socket);
            let added =
                self.check_user(&control).and_then(|()| self.add(now, control, Stage::AwaitHello));
            if let Err(e) = added {
                self.log.warn("refusing a connection", &e);
            }
        }
    }

    /// Without a token, only processes of the same user are peers.
    fn check_user(&self, control: &ControlSocket) -> Result<(), DomainError> {
        let other = control.other_user().filter(|_| !self.credentials.secret.is_token());
        match other {
            None => Ok(()),
            Some(uid) => Err(DomainError::Handshake(format!(
                "the peer runs as user {uid}, expected this process's user; give both engines the same token"
            ))),
        }
    }

    /// Handles a peer's packets, unless too many replies wait for it.
    fn on_readable(&mut self, id: LinkId, out: &mut Vec<Completion>) {
        for _ in 0..FRAMES_PER_POLL {
            let Some(link) = self.link(id) else { return };
            let _ = link.control.flush();
            if link.control.is_throttled() {
                break;
            }
            match link.control.receive() {
                Ok(None) => break,
                Ok(Some((bytes, fds))) => {
                    if let Err(f) = self.on_packet(id, &bytes, fds, out) {
                        if let (Some(reply), Some(l)) = (f.reply, self.link(id)) {
                            let _ = l.control.send(reply, smallvec![]);
                        }
                        return match self.link(id).is_some_and(|l| l.is_up()) {
                            true => self.stop_receiving(id, f.error, out),
                            false => self.on_connection_lost(id, f.error, out),
                        };
                    }
                }
                Err(cause) => {
                    let in_handshake = !(link.is_up() || link.closing.is_some());
                    let cause = match cause {
                        DomainError::LinkDown(why) if in_handshake => {
                            DomainError::LinkDown(format!("during the handshake: {why}"))
                        }
                        cause => cause,
                    };
                    return match cause {
                        // The connection works, but this process has no room for what it received.
                        DomainError::Io { .. } if !in_handshake => {
                            self.stop_receiving(id, cause, out)
                        }
                        cause => self.on_connection_lost(id, cause, out),
                    };
                }
            }
        }
        self.update_interest(id);
    }

    fn on_packet(
        &mut self,
        id: LinkId,
        bytes: &[u8],
        fds: Fds,
        out: &mut Vec<Completion>,
    ) -> Result<(), Failure> {
        let Some(link) = self.links.get_mut(Self::slot(id)) else { return Ok(()) };
        let silent = |error| Failure { reply: None, error };
        let send = |link: &mut Link, bytes: Vec<u8>| {
            link.control
                .send(bytes, smallvec![])
                .map_err(|Disconnected(why)| silent(DomainError::LinkDown(why)))
        };
        if !matches!(link.stage, Stage::Up(_)) {
            // An engine may close during a handshake.
            if let Ok(Frame::Close { reason }) = Frame::decode(bytes) {
                return Err(silent(peer_closed_error(&reason)));
            }
        }
        match std::mem::replace(&mut link.stage, Stage::AwaitHello) {
            Stage::AwaitHello => {
                let (acceptor, welcome) = Acceptor::on_hello(&self.credentials, bytes)?;
                link.stage = Stage::AwaitProof(acceptor);
                send(link, welcome)
            }
            Stage::AwaitWelcome(init) => {
                let welcomed = init.on_welcome(bytes)?;
                link.stage = Stage::AwaitAccepted(welcomed.pending);
                send(link, welcomed.proof)
            }
            Stage::AwaitProof(acceptor) => {
                let accepted = acceptor.on_proof(bytes)?;
                link.stage = Stage::AwaitSetup(acceptor.peer);
                send(link, accepted)?;
                self.send_setup(id).map_err(silent)
            }
            Stage::AwaitAccepted(pending) => {
                link.stage = Stage::AwaitSetup(pending.on_accepted(bytes)?);
                // Descriptors of this process are sent only to a proven peer.
                self.send_setup(id).map_err(silent)
            }
            Stage::AwaitSetup(peer) => match Frame::decode(bytes).map_err(silent)? {
                Frame::Setup(setup) => {
                    link.open(&setup, fds).map_err(silent)?;
                    link.peer = Some(peer.id());
                    let description = "shared-memory handshake".to_owned();
                    let endpoint = peer.address.first_of(self.kind);
                    out.push(Completion::LinkUp { link: id, peer, endpoint, name: 0, description });
                    Ok(())
                }
                _ => Err(silent(DomainError::Handshake("expected the setup frame".into()))),
            },
            up @ Stage::Up(_) => {
                link.stage = up;
                let frame = Frame::decode(bytes).map_err(silent)?;
                self.on_frame(id, frame, fds, out).map_err(silent)
            }
        }
    }

    fn send_setup(&mut self, id: LinkId) -> Result<(), DomainError> {
        let dup = |fd: &OwnedFd| {
            rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(DomainError::io("fcntl(F_DUPFD)"))
        };
        let (doorbell, event) = (dup(&self.doorbell.memory)?, dup(&self.doorbell.event)?);
        let setup = LinkSetup { probe_addr: self.probe.as_ptr() as u64, probe: *self.probe };
        let link = &mut self.links[Self::slot(id)];
        let inbox = link
            .inbox_fd
            .take()
            .ok_or_else(|| DomainError::Handshake("the setup was sent already".into()))?;
        link.send(&Frame::Setup(setup), smallvec![inbox, doorbell, event])
            .map_err(|Disconnected(why)| DomainError::LinkDown(why))
    }

    /// Handles a frame of a link that is up.
    fn on_frame(
        &mut self,
        id: LinkId,
        frame: Frame,
        mut fds: Fds,
        out: &mut Vec<Completion>,
    ) -> Result<(), DomainError> {
        let link = &mut self.links[Self::slot(id)];
        if let Frame::Mapped { key, .. } | Frame::Foreign { key, .. } | Frame::Device { key, .. } =
            &frame
        {
            // Each is mapped until its owner revokes it, and a process has few mappings.
            if !link.resolving.contains_key(key) {
                return match link.closing {
                    Some(_) => Ok(()),
                    None => Err(DomainError::Handshake("a region that was not asked for".into())),
                };
            }
        }
        match frame {
            Frame::Setup(_) => return Err(DomainError::Handshake("a second setup".into())),
            Frame::Resolve(key) => {
                let peer = link.peer;
                let (frame, fds) = self.resolve(peer, key);
                let link = &mut self.links[Self::slot(id)];
                if !matches!(frame, Frame::Unknown { .. } | Frame::Denied { .. }) {
                    link.exported.insert(key.index);
                }
                link.reply(&frame, fds).map_err(|Disconnected(why)| DomainError::LinkDown(why))?;
            }
            Frame::Mapped { key, len, allocation, allocation_len, offset } => {
                let fd = fds.pop().ok_or_else(|| {
                    DomainError::Handshake("a mapped region came without its descriptor".into())
                })?;
                let added =
                    link.imports.add_mapped(key, len, (allocation, allocation_len, offset), fd);
                self.on_resolved(id, key, added, out);
            }
            Frame::Foreign { key, len, addr } => {
                let reach = link.outbound().map(|l| l.process.clone());
                let added = match reach {
                    Some(Ok(pid)) => {
                        link.imports.add_foreign(key, len, addr as usize, pid);
                        Ok(())
                    }
                    Some(Err(why)) => Err(DomainError::Unavailable(format!(
                        "the region is not engine memory, and its process can't be accessed \
                        ({why}); allocate with alloc(), or use transport tcp"
                    ))),
                    None => return Ok(()),
                };
                self.on_resolved(id, key, added, out);
            }
            Frame::Device { key, len, handle, uuid, offset, base } => {
                let same_process = link.control.peer_pid() == Some(std::process::id() as i32);
                let at = (uuid, offset, base);
                let added = link.imports.add_device(key, len, &handle, at, same_process);
                self.on_resolved(id, key, added, out);
            }
            Frame::Unknown { key, reason } => {
                self.on_resolved(id, key, Err(DomainError::Stale(reason)), out);
            }
            Frame::Denied { key, reason } => {
                let reason: String = reason.chars().take(200).collect();
                self.on_resolved(id, key, Err(DomainError::Refused(reason)), out);
            }
            Frame::Revoke { index } => {
                if link.imports.revoke(index) {
                    if link.control.pending_confirmations() >= MAX_CONTROL_MESSAGES {
                        let why = "it revokes regions and reads no answers";
                        return Err(DomainError::Handshake(why.into()));
                    }
                    link.confirm(&Frame::Revoked { index })
                        .map_err(|Disconnected(why)| DomainError::LinkDown(why))?;
                }
            }
            Frame::Revoked { index } => self.on_released(id, index, out),
            Frame::ControlMessage(frame) => {
                // Of each peer: one that sends too many ends its own link only.
                if link.control_messages >= MAX_CONTROL_MESSAGES {
                    return Err(DomainError::Handshake("too many control messages".into()));
                }
                link.control_messages += 1;
                self.control_messages.push_back((id, frame));
            }
            Frame::Close { reason } => return Err(peer_closed_error(&reason)),
        }
        Ok(())
    }

    /// Starts to close a link whose connection has ended; `advance_closing` ends it after its
    /// copies. The kernel closes a dead peer's socket, so this follows every death at once (RS-4).
    pub(super) fn on_connection_lost(
        &mut self,
        id: LinkId,
        cause: DomainError,
        out: &mut Vec<Completion>,
    ) {
        self.stop_receiving(id, cause, out);
        let Some(link) = self.links.get_mut(Self::slot(id)).filter(|l| l.id == id) else { return };
        link.peer_closed = true;
        let _ = epoll::delete(&self.epoll, link.control.fd());
    }

    /// Stops receiving from the peer. It may be in the middle of a copy: local memory is quiet once
    /// it has closed its side of the connection (MR-1).
    pub(super) fn stop_receiving(
        &mut self,
        id: LinkId,
        cause: DomainError,
        out: &mut Vec<Completion>,
    ) {
        let Some(link) = self.link(id).filter(|l| !l.receiving_stopped) else { return };
        // Counts that the peer sent before it left have arrived and count. A peer that is still
        // there learns that no later count does (IC-4).
        link.stop_counting();
        while link.take_arrivals(&NoMessages, out) {}
        let unproven = !link.is_up();
        link.closing.get_or_insert_with(|| cause.clone());
        link.receiving_stopped = true;
        link.deadline = Time::NEVER;
        link.stop_copying();
        if unproven {
            self.log.unproven("a process on this host", &cause);
        }
    }

    /// Closes links whose copies have ended, and answers revocations.
    fn advance_closing(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut progressed = false;
        for slot in 0..self.links.capacity() {
            let Some(link) = self.links.get_mut(slot) else { continue };
            for index in link.imports.take_released() {
                progressed = true;
                let _ = link.confirm(&Frame::Revoked { index });
            }
            let Some(cause) = link.closing.clone() else { continue };
            link.imports.close_peer_mappings(&cause.to_string());
            for token in link.abandon() {
                progressed = true;
                let result = Err(cause.clone());
                out.push(Completion::Done { link: link.id, token, result });
            }
            if !link.jobs.is_empty() {
                continue;
            }
            // The peer's memory is not quiet while a local device stores to it (MR-1).
            let stores = link.imports.has_stores();
            if !link.send_closed && !stores {
                link.send_closed = true;
                link.control.finish();
            }
            if link.receiving_stopped && !link.down_reported {
                (link.down_reported, progressed) = (true, true);
                out.push(Completion::LinkDown {
                    link: link.id,
                    cause,
                    receipt: crate::domain::Receipt::Unknown,
                    unfinished: Vec::new(),
                });
            }
            if link.peer_closed && !stores {
                progressed = true;
                let link = self.links.remove(slot);
                let to_wake: Vec<u32> = self.retiring.keys().copied().collect();
                to_wake.into_iter().for_each(|index| self.on_released(link.id, index, out));
            }
        }
        progressed
    }
}

/// The error for a peer that closed the link; its reason is untrusted and shortened.
fn peer_closed_error(reason: &str) -> DomainError {
    let reason: String = reason.chars().take(200).collect();
    DomainError::LinkDown(format!("the peer closed the connection: {reason}"))
}

struct NoMessages;

impl crate::domain::MessageRoom for NoMessages {
    fn admit(&self, _: usize) -> crate::domain::Admit {
        crate::domain::Admit::Wait
    }
}
