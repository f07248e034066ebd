//! A listening socket. It bounds the connections whose peer is unproven, and pauses when no more
//! can be accepted: unaccepted connections keep the socket readable and the worker awake.

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    time::Duration,
};

use rustix::{
    event::epoll,
    io::Errno,
    net::{accept_with, SocketFlags},
    process::{getrlimit, Resource},
};

use super::log_limit::LogLimit;
use crate::{domain::DomainError, time::Time};

const REST: Duration = Duration::from_millis(100);

/// Time that an unproven connection has before a newer one may displace it. Further peers of a
/// burst wait in the kernel's queue meanwhile.
const GRACE: Duration = Duration::from_millis(50);
/// Pause while all unproven connections are younger than [`GRACE`].
const PAUSE: Duration = Duration::from_millis(5);

/// Limit of unproven connections: this fraction of the descriptor limit, within these bounds.
const PART: u64 = 8;
const MIN_UNPROVEN: usize = 8;
const MAX_UNPROVEN: usize = 1024;
/// Descriptors kept for the application. When fewer are free, the limit is [`MIN_UNPROVEN`].
const RESERVE: u64 = 128;

/// Action to take before the next connection is accepted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission<K> {
    Accept,
    /// Close this connection, whose time is over, and ask again.
    Displace(K),
    Wait,
}

#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    tag: u64,
    /// When listening resumes; `Time::NEVER` while it listens.
    pub wakes_at: Time,
    /// Descriptor of the last connection. The kernel assigns the lowest free number.
    newest: RawFd,
    log: LogLimit,
}

impl Listener {
    /// `tag` is the number that `epoll` reports for this socket.
    pub fn new(socket: OwnedFd, tag: u64, epoll: &OwnedFd) -> Result<Self, DomainError> {
        let data = epoll::EventData::new_u64(tag);
        epoll::add(epoll, &socket, data, epoll::EventFlags::IN)
            .map_err(DomainError::io("epoll_ctl"))?;
        Ok(Self { socket, tag, wakes_at: Time::NEVER, newest: 0, log: LogLimit::default() })
    }

    /// Bounds the unproven connections. `unproven` yields each with the time at which it was
    /// accepted; each takes `each` descriptors.
    pub fn admit<K>(
        &mut self,
        now: Time,
        unproven: impl Iterator<Item = (K, Time)>,
        each: usize,
        epoll: &OwnedFd,
    ) -> Admission<K> {
        let (mut n, mut oldest) = (0, None::<(K, Time)>);
        for (key, at) in unproven {
            n += 1;
            if oldest.as_ref().is_none_or(|(_, first)| at < *first) {
                oldest = Some((key, at));
            }
        }
        match oldest {
            Some((key, at)) if n * each >= self.most() => {
                if now >= at.after(GRACE) {
                    return Admission::Displace(key);
                }
                self.pause(now, PAUSE, epoll);
                Admission::Wait
            }
            _ => Admission::Accept,
        }
    }

    fn most(&self) -> usize {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let reserve = RESERVE.min(limit / PART);
        match u64::try_from(self.newest).is_ok_and(|fd| fd < limit - reserve) {
            true => (limit / PART).clamp(MIN_UNPROVEN as u64, MAX_UNPROVEN as u64) as usize,
            false => MIN_UNPROVEN,
        }
    }

    /// Accepts the next connection, if any.
    pub fn accept(&mut self, now: Time, epoll: &OwnedFd) -> Option<OwnedFd> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            return match accept_with(self.socket.as_fd(), flags) {
                Ok(connection) => {
                    self.newest = connection.as_raw_fd();
                    Some(connection)
                }
                // The peer closed it before it was accepted.
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(Errno::AGAIN) => None,
                Err(error) => {
                    self.log.warn("connections wait; raise the open-file limit", &error);
                    self.newest = RawFd::MAX;
                    self.pause(now, REST, epoll);
                    None
                }
            };
        }
    }

    fn pause(&mut self, now: Time, duration: Duration, epoll: &OwnedFd) {
        self.wakes_at = now.after(duration);
        self.listen(epoll, epoll::EventFlags::empty());
    }

    /// Ends the pause if it is over.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::transport::sockets::{self, AddressPolicy};

    #[test]
    fn unproven_connections_are_bounded_and_the_oldest_is_displaced() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let here = [std::net::Ipv4Addr::LOCALHOST.into()];
        let (_, socket) =
            sockets::listen(&here, AddressPolicy::All, None).unwrap().sockets.remove(0);
        let mut listener = Listener::new(socket, 0, &epoll).unwrap();
        let most = listener.most();
        assert!((MIN_UNPROVEN..=MAX_UNPROVEN).contains(&most));
        let (start, late) = (Time(1), Time(1).after(GRACE));
        let unproven = |n: usize| (0..n).map(move |i| (i, start));
        let mut admit = |now, n| listener.admit(now, unproven(n), 1, &epoll);
        assert_eq!(admit(late, most - 1), Admission::Accept);
        assert_eq!(admit(late, most), Admission::Displace(0));
        // In a burst each peer has time to prove itself, and the worker sleeps meanwhile.
        assert_eq!(admit(start, most), Admission::Wait);
        assert_eq!(listener.wakes_at, start.after(PAUSE));
        // The process is short of descriptors.
        listener.newest = RawFd::MAX;
        assert_eq!(listener.admit(late, unproven(MIN_UNPROVEN), 1, &epoll), Admission::Displace(0));
        assert_eq!(listener.admit(late, unproven(MIN_UNPROVEN - 1), 1, &epoll), Admission::Accept);
    }
}
