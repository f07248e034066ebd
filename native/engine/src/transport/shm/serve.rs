//! The slow half of the shm domain: sockets, handshakes, resolutions, farewells.

use std::{os::fd::OwnedFd, time::Duration};

use rustix::event::{epoll, Timespec};
use smallvec::smallvec;

use super::{
    as_fd,
    control::{socket_name, Control, Fds, Frame, Gone, Setup},
    link::{Link, Stage},
    ShmDomain, BELL, LISTENER, PATIENCE,
};
use crate::{
    api::{EngineAddress, EngineId, RegionKey},
    domain::{Completion, DomainError, LinkId},
    memory::{device::Driver, Backing},
    time::Time,
    transport::{
        handshake::{Acceptor, Failure, Initiator},
        listener::Admission,
    },
};

/// Whispers that nobody has taken yet: far more than one poll of honest peers brings.
const MAX_WHISPERS: usize = 1 << 16;
/// Frames of one peer that are acted on before the others have their turn.
const TURNS: usize = 256;

impl ShmDomain {
    pub(super) fn begin(&mut self, now: Time, peer: &EngineAddress) -> Result<LinkId, DomainError> {
        let control = Control::connect(&socket_name(self.kind, &peer.id))?;
        self.check_user(&control)?;
        let (init, hello) = Initiator::start(&self.credentials, peer.id, Vec::new())?;
        let id = self.add(now, control, Stage::AwaitWelcome(init))?;
        let link = &mut self.links[Self::slot(id)];
        link.control.send(hello, smallvec![]).map_err(|Gone(why)| DomainError::LinkDown(why))?;
        Ok(id)
    }

    fn add(&mut self, now: Time, control: Control, stage: Stage) -> Result<LinkId, DomainError> {
        let entry = self.links.vacant_entry();
        let slot = entry.key() as u32;
        if slot > 0xFFFF {
            return Err(DomainError::Unavailable("65536 links are open already".into()));
        }
        self.lives = (self.lives + 1) & 0xFFFF;
        let id = self.lives << 16 | slot;
        let tag = epoll::EventData::new_u64(u64::from(id));
        epoll::add(&self.epoll, control.fd(), tag, epoll::EventFlags::IN)
            .map_err(DomainError::io("epoll_ctl"))?;
        entry.insert(Link::new(id, control, stage, (now, now.after(PATIENCE)))?);
        Ok(id)
    }

    /// Has the socket watched for what the link now waits for.
    pub(super) fn watch(&mut self, id: LinkId) {
        let Some(link) = self.links.get(Self::slot(id)).filter(|l| l.id == id) else { return };
        let mut flags = match link.control.stalls() {
            true => epoll::EventFlags::empty(),
            false => epoll::EventFlags::IN,
        };
        if link.control.wants_write() {
            flags |= epoll::EventFlags::OUT;
        }
        let tag = epoll::EventData::new_u64(u64::from(id));
        let _ = epoll::modify(&self.epoll, link.control.fd(), tag, flags);
    }

    /// Looks at the sockets, without waiting.
    pub(super) fn look(&mut self, now: Time, out: &mut Vec<Completion>) -> bool {
        self.look_for(now, Duration::ZERO, out)
    }

    pub(super) fn look_for(
        &mut self,
        now: Time,
        patience: Duration,
        out: &mut Vec<Completion>,
    ) -> bool {
        let blank =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [blank; 32];
        let patience = Timespec {
            tv_sec: patience.as_secs() as i64,
            tv_nsec: i64::from(patience.subsec_nanos()),
        };
        let n = epoll::wait(as_fd(&self.epoll), &mut events[..], Some(&patience)).unwrap_or(0);
        for event in &events[..n] {
            match event.data.u64() {
                BELL => self.bell.clear(),
                LISTENER => self.accept_all(now, out),
                tag => self.serve(tag as LinkId, out),
            }
        }
        if let Some(l) = &mut self.listener {
            l.tick(now, &self.epoll);
        }
        let expired: Vec<LinkId> =
            self.links.iter().filter(|(_, l)| l.deadline <= now).map(|(_, l)| l.id).collect();
        for id in &expired {
            let cause = "it did not finish the handshake in time";
            self.fail(*id, DomainError::LinkDown(cause.into()), out);
        }
        let ended = self.sweep(out);
        n > 0 || !expired.is_empty() || ended
    }

    fn accept_all(&mut self, now: Time, out: &mut Vec<Completion>) {
        while let Some(l) = &mut self.listener {
            let unproven = self.links.iter().filter_map(|(_, l)| match l.stage {
                Stage::AwaitHello | Stage::AwaitProof(_) if l.closing.is_none() => {
                    Some((l.id, l.begun))
                }
                _ => None,
            });
            // Each has a socket and an inbox.
            match l.admit(now, unproven, 2, &self.epoll) {
                Admission::Accept => {}
                Admission::Displace(id) => {
                    let cause = "newer connections came before it had proven itself".to_owned();
                    self.fail(id, DomainError::LinkDown(cause), out);
                    continue;
                }
                Admission::Wait => return,
            }
            let Some(socket) = l.accept(now, &self.epoll) else { return };
            let control = Control::new(socket);
            let added =
                self.check_user(&control).and_then(|()| self.add(now, control, Stage::AwaitHello));
            if let Err(e) = added {
                self.log.warn("a connection was turned away", &e);
            }
        }
    }

    /// Without a token, one user's processes alone are believed.
    fn check_user(&self, control: &Control) -> Result<(), DomainError> {
        let other = control.other_user().filter(|_| !self.credentials.secret.is_token());
        match other {
            None => Ok(()),
            Some(uid) => Err(DomainError::Handshake(format!(
                "its process is user {uid}'s and not this one's; give both engines the same token"
            ))),
        }
    }

    /// Reads what one peer has said, unless it leaves too many replies untaken.
    fn serve(&mut self, id: LinkId, out: &mut Vec<Completion>) {
        for _ in 0..TURNS {
            let Some(link) = self.link(id) else { return };
            let _ = link.control.flush();
            if link.control.stalls() {
                break;
            }
            match link.control.receive() {
                Ok(None) => break,
                Ok(Some((bytes, fds))) => {
                    if let Err(f) = self.hear(id, &bytes, fds, out) {
                        if let (Some(reply), Some(l)) = (f.reply, self.link(id)) {
                            let _ = l.control.send(reply, smallvec![]);
                        }
                        return match self.link(id).is_some_and(|l| l.is_up()) {
                            true => self.leave(id, f.error, out),
                            false => self.fail(id, f.error, out),
                        };
                    }
                }
                Err(cause) => {
                    let shaking = !(link.is_up() || link.closing.is_some());
                    let cause = match cause {
                        DomainError::LinkDown(why) if shaking => {
                            DomainError::LinkDown(format!("during the handshake: {why}"))
                        }
                        cause => cause,
                    };
                    return match cause {
                        // The connection is whole: this process has no room for what came by it.
                        DomainError::Io { .. } if !shaking => self.leave(id, cause, out),
                        cause => self.fail(id, cause, out),
                    };
                }
            }
        }
        self.watch(id);
    }

    fn hear(
        &mut self,
        id: LinkId,
        bytes: &[u8],
        fds: Fds,
        out: &mut Vec<Completion>,
    ) -> Result<(), Failure> {
        let Some(link) = self.links.get_mut(Self::slot(id)) else { return Ok(()) };
        let silent = |error| Failure { reply: None, error };
        let say = |link: &mut Link, bytes: Vec<u8>| {
            link.control
                .send(bytes, smallvec![])
                .map_err(|Gone(why)| silent(DomainError::LinkDown(why)))
        };
        if !matches!(link.stage, Stage::Up(_)) {
            // An engine that closes in the middle of a handshake says so as it does over a link.
            if let Ok(Frame::Bye { reason }) = Frame::decode(bytes) {
                return Err(silent(farewell(&reason)));
            }
        }
        match std::mem::replace(&mut link.stage, Stage::AwaitHello) {
            Stage::AwaitHello => {
                let (acceptor, welcome) = Acceptor::on_hello(&self.credentials, bytes)?;
                link.stage = Stage::AwaitProof(acceptor);
                say(link, welcome)
            }
            Stage::AwaitWelcome(init) => {
                let welcomed = init.on_welcome(bytes)?;
                link.stage = Stage::AwaitAccepted(welcomed.pending);
                say(link, welcomed.proof)
            }
            Stage::AwaitProof(acceptor) => {
                let accepted = acceptor.on_proof(bytes)?;
                link.stage = Stage::AwaitSetup(acceptor.peer);
                say(link, accepted)?;
                self.send_setup(id).map_err(silent)
            }
            Stage::AwaitAccepted(pending) => {
                link.stage = Stage::AwaitSetup(pending.on_accepted(bytes)?);
                // Descriptors of this process go to a proven peer alone.
                self.send_setup(id).map_err(silent)
            }
            Stage::AwaitSetup(peer) => match Frame::decode(bytes).map_err(silent)? {
                Frame::Setup(setup) => {
                    link.bring_up(&setup, fds).map_err(silent)?;
                    link.peer = Some(peer.id());
                    let note = "the shared-memory handshake worked".to_owned();
                    let endpoint = peer.address.first_of(self.kind);
                    out.push(Completion::LinkUp { link: id, peer, endpoint, name: 0, note });
                    Ok(())
                }
                _ => Err(silent(DomainError::Handshake("it sent no setup".into()))),
            },
            up @ Stage::Up(_) => {
                link.stage = up;
                let frame = Frame::decode(bytes).map_err(silent)?;
                self.act(id, frame, fds, out).map_err(silent)
            }
        }
    }

    fn send_setup(&mut self, id: LinkId) -> Result<(), DomainError> {
        let dup = |fd: &OwnedFd| {
            rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(DomainError::io("fcntl(F_DUPFD)"))
        };
        let (bell, event) = (dup(&self.bell.memory)?, dup(&self.bell.event)?);
        let setup = Setup { probe_addr: self.probe.as_ptr() as u64, probe: *self.probe };
        let link = &mut self.links[Self::slot(id)];
        let inbox = link
            .inbox_fd
            .take()
            .ok_or_else(|| DomainError::Handshake("the setup was sent already".into()))?;
        link.send(&Frame::Setup(setup), smallvec![inbox, bell, event])
            .map_err(|Gone(why)| DomainError::LinkDown(why))
    }

    /// Acts on what a peer says over a link that is up.
    fn act(
        &mut self,
        id: LinkId,
        frame: Frame,
        mut fds: Fds,
        out: &mut Vec<Completion>,
    ) -> Result<(), DomainError> {
        let link = &mut self.links[Self::slot(id)];
        match frame {
            Frame::Setup(_) => return Err(DomainError::Handshake("a second setup".into())),
            Frame::Resolve(key) => {
                let peer = link.peer;
                let (frame, fds) = self.resolve(peer, key);
                let link = &mut self.links[Self::slot(id)];
                if !matches!(frame, Frame::Unknown { .. } | Frame::Denied { .. }) {
                    link.exported.insert(key.index);
                }
                link.reply(&frame, fds).map_err(|Gone(why)| DomainError::LinkDown(why))?;
            }
            Frame::Mapped { key, len, allocation, allocation_len, offset } => {
                let fd = fds.pop().ok_or_else(|| {
                    DomainError::Handshake("a mapped region came without its memory".into())
                })?;
                let added =
                    link.imports.add_mapped(key, len, (allocation, allocation_len, offset), fd);
                self.resolved(id, key, added, out);
            }
            Frame::Foreign { key, len, addr } => {
                let reach = link.lines().map(|l| l.process.clone());
                let added = match reach {
                    Some(Ok(pid)) => {
                        link.imports.add_foreign(key, len, addr as usize, pid);
                        Ok(())
                    }
                    Some(Err(why)) => Err(DomainError::Unavailable(format!(
                        "its region is not memory of the engine, and its process can't be reached \
                         ({why}); allocate with alloc(), or use transport tcp"
                    ))),
                    None => return Ok(()),
                };
                self.resolved(id, key, added, out);
            }
            Frame::Device { key, len, handle, uuid, offset, base } => {
                let here = link.control.peer_pid() == Some(std::process::id() as i32);
                let at = (uuid, offset, base);
                let added = link.imports.add_device(key, len, &handle, at, here);
                self.resolved(id, key, added, out);
            }
            Frame::Unknown { key, reason } => {
                self.resolved(id, key, Err(DomainError::Stale(reason)), out);
            }
            Frame::Denied { key, reason } => {
                let reason: String = reason.chars().take(200).collect();
                self.resolved(id, key, Err(DomainError::Refused(reason)), out);
            }
            Frame::Revoke { index } => {
                if link.imports.revoke(index) {
                    link.send(&Frame::Revoked { index }, smallvec![])
                        .map_err(|Gone(why)| DomainError::LinkDown(why))?;
                }
            }
            Frame::Revoked { index } => self.let_go(id, index, out),
            Frame::Whisper(frame) => {
                if self.whispers.len() >= MAX_WHISPERS {
                    return Err(DomainError::Handshake("more whispers than agreed".into()));
                }
                self.whispers.push_back((id, frame));
            }
            Frame::Bye { reason } => return Err(farewell(&reason)),
        }
        Ok(())
    }

    /// What to answer to a peer that asks for a region: its key is its right to know, unless another was
    /// granted it (MR-3).
    fn resolve(&self, peer: Option<EngineId>, key: RegionKey) -> (Frame, Fds) {
        let unknown = |reason: String| (Frame::Unknown { key, reason }, smallvec![]);
        let region = match self.book.lookup_for(peer, key) {
            Ok(r) => r,
            Err(DomainError::Refused(reason)) => {
                return (Frame::Denied { key, reason }, smallvec![])
            }
            Err(e) => return unknown(e.to_string()),
        };
        if let Some(range) = region.location.cuda() {
            let export = || {
                let driver = Driver::open()?;
                let handle = driver.export(range.device, range.base)?.to_vec();
                let uuid = driver.device(range.device)?.uuid;
                let (len, base) = (region.len, range.base);
                let offset = region.base as u64 - base;
                Ok(Frame::Device { key, len, handle, uuid, offset, base })
            };
            return match export() {
                Ok(frame) => (frame, smallvec![]),
                Err(e @ DomainError::Unavailable(_)) => unknown(e.to_string()),
                Err(e) => unknown(format!("its GPU memory could not be shared: {e}")),
            };
        }
        match &region.backing {
            Backing::Foreign => {
                (Frame::Foreign { key, len: region.len, addr: region.base as u64 }, smallvec![])
            }
            Backing::Owned { allocation, offset } => match allocation.fd().try_clone_to_owned() {
                Ok(fd) => {
                    let frame = Frame::Mapped {
                        key,
                        len: region.len,
                        allocation: allocation.id(),
                        allocation_len: allocation.len(),
                        offset: *offset,
                    };
                    (frame, smallvec![fd])
                }
                Err(e) => unknown(format!("its memory could not be shared: {e}")),
            },
        }
    }

    /// A region that work waited for is known now, or known to be out of reach.
    fn resolved(
        &mut self,
        id: LinkId,
        key: RegionKey,
        result: Result<(), DomainError>,
        out: &mut Vec<Completion>,
    ) {
        let Some(link) = self.link(id) else { return };
        let waiting = link.resolving.remove(&key).unwrap_or_default();
        match result {
            Ok(()) => {
                link.deferred.extend(waiting);
                self.retry_deferred(id, out);
            }
            Err(e) => out.extend(waiting.into_iter().map(|(token, _)| Completion::Done {
                link: id,
                token,
                result: Err(e.clone()),
            })),
        }
    }

    /// A peer can't reach a region any more.
    fn let_go(&mut self, id: LinkId, index: u32, out: &mut Vec<Completion>) {
        if let Some(holders) = self.retiring.get_mut(&index) {
            holders.remove(&id);
            if holders.is_empty() {
                self.retiring.remove(&index);
                out.push(Completion::RegionQuiet { index });
            }
        }
    }

    /// Begins to take a link down whose connection has ended; `sweep` ends it when its copies have ended.
    /// The kernel closes a dead peer's socket, so that this follows every death at once (RS-4).
    pub(super) fn fail(&mut self, id: LinkId, cause: DomainError, out: &mut Vec<Completion>) {
        self.leave(id, cause, out);
        let Some(link) = self.links.get_mut(Self::slot(id)).filter(|l| l.id == id) else { return };
        link.gone = true;
        let _ = epoll::delete(&self.epoll, link.control.fd());
    }

    /// Has nothing more to do with the peer. It may be in the middle of a copy: our memory is quiet when
    /// it has ended its side of the connection (MR-1).
    fn leave(&mut self, id: LinkId, cause: DomainError, out: &mut Vec<Completion>) {
        let Some(link) = self.link(id).filter(|l| !l.deaf) else { return };
        // What the peer counted before it went away has arrived and counts; if it is still there, it
        // learns that nothing more does (IC-4).
        link.stop_counting();
        while link.take_arrivals(&NoMessages, out) {}
        let unproven = !link.is_up();
        link.closing.get_or_insert_with(|| cause.clone());
        link.deaf = true;
        link.deadline = Time::NEVER;
        link.stop_copying();
        if unproven {
            self.log.unproven("a process on this host", &cause);
        }
    }

    /// Ends links that are on their way down, and answers revocations whose last copy has ended.
    fn sweep(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut moved = false;
        for slot in 0..self.links.capacity() {
            let Some(link) = self.links.get_mut(slot) else { continue };
            for index in link.imports.left() {
                moved = true;
                let _ = link.send(&Frame::Revoked { index }, smallvec![]);
            }
            let Some(cause) = link.closing.clone() else { continue };
            link.imports.shut(&cause.to_string());
            for token in link.abandon() {
                moved = true;
                let result = Err(cause.clone());
                out.push(Completion::Done { link: link.id, token, result });
            }
            if !link.jobs.is_empty() {
                continue;
            }
            // The peer's memory is not quiet while a device of ours stores there (MR-1).
            let stores = link.imports.is_entered();
            if !link.finished && !stores {
                link.finished = true;
                link.control.finish();
            }
            if link.deaf && !link.told {
                (link.told, moved) = (true, true);
                out.push(Completion::LinkDown {
                    link: link.id,
                    cause,
                    receipt: crate::domain::Receipt::Unknown,
                    unfinished: Vec::new(),
                });
            }
            if link.gone && !stores {
                moved = true;
                let link = self.links.remove(slot);
                let held: Vec<u32> = self.retiring.keys().copied().collect();
                held.into_iter().for_each(|index| self.let_go(link.id, index, out));
            }
        }
        moved
    }
}

/// The peer has left. Its reason is a stranger's: kept short.
fn farewell(reason: &str) -> DomainError {
    let reason: String = reason.chars().take(200).collect();
    DomainError::LinkDown(format!("it closed the connection: {reason}"))
}

struct NoMessages;

impl crate::domain::MessageRoom for NoMessages {
    fn admit(&self, _: usize) -> crate::domain::Admit {
        crate::domain::Admit::Wait
    }
}
