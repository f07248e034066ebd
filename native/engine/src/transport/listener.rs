//! A listening socket that rests while the process is out of descriptors: what can't be accepted
//! stays ready for ever, and a worker would never sleep again.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use rustix::{
    event::epoll,
    io::Errno,
    net::{accept_with, SocketFlags},
};

use crate::{domain::DomainError, time::Time};

const REST: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    tag: u64,
    /// When it listens again; `Time::NEVER` while it does.
    pub wakes_at: Time,
    /// Nothing has been accepted since the last rest.
    tired: bool,
}

impl Listener {
    /// `tag` is what `epoll` will report for it.
    pub fn new(socket: OwnedFd, tag: u64, epoll: &OwnedFd) -> Result<Self, DomainError> {
        let data = epoll::EventData::new_u64(tag);
        epoll::add(epoll, &socket, data, epoll::EventFlags::IN)
            .map_err(DomainError::io("epoll_ctl"))?;
        Ok(Self { socket, tag, wakes_at: Time::NEVER, tired: false })
    }

    /// The next connection, if any.
    pub fn accept(&mut self, now: Time, epoll: &OwnedFd) -> Option<OwnedFd> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            return match accept_with(self.socket.as_fd(), flags) {
                Ok(connection) => {
                    self.tired = false;
                    Some(connection)
                }
                // It was gone before it was accepted.
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(Errno::AGAIN) => None,
                Err(error) => {
                    if !std::mem::replace(&mut self.tired, true) {
                        tracing::warn!(%error, "connections wait; raise the open-file limit");
                    }
                    self.wakes_at = now.after(REST);
                    self.listen(epoll, epoll::EventFlags::empty());
                    None
                }
            };
        }
    }

    /// Ends the rest if it is over.
    pub fn tick(&mut self, now: Time, epoll: &OwnedFd) {
        if self.wakes_at <= now {
            self.wakes_at = Time::NEVER;
            self.listen(epoll, epoll::EventFlags::IN);
        }
    }

    fn listen(&self, epoll: &OwnedFd, flags: epoll::EventFlags) {
        let _ = epoll::modify(epoll, &self.socket, epoll::EventData::new_u64(self.tag), flags);
    }
}
