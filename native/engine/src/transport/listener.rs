//! A listening socket: how many connections may be open before their peer is proven, and a pause while no
//! more can be accepted. What isn't accepted stays ready, so that a worker would never sleep again.

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

/// A connection has this long before a newer one may displace it, if its peer isn't proven by then. Peers of
/// a burst wait in the kernel's queue meanwhile.
const GRACE: Duration = Duration::from_millis(50);
/// While all of the unproven are younger than that.
const PAUSE: Duration = Duration::from_millis(5);

/// Unproven connections of a listener: this part of the process's descriptors, within these bounds.
const PART: u64 = 8;
const FEWEST: usize = 8;
const MOST: usize = 1024;
/// Descriptors that are kept for the application: beyond them only the fewest are unproven.
const RESERVE: u64 = 128;

/// What is to be done before another connection is accepted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admission<K> {
    Accept,
    /// Close this one, which has had its time, and ask again.
    Displace(K),
    Wait,
}

#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    tag: u64,
    /// When it listens again; `Time::NEVER` while it does.
    pub wakes_at: Time,
    /// The descriptor of the last connection: the kernel gives out the lowest that is free.
    newest: RawFd,
    log: LogLimit,
}

impl Listener {
    /// `tag` is what `epoll` will report for it.
    pub fn new(socket: OwnedFd, tag: u64, epoll: &OwnedFd) -> Result<Self, DomainError> {
        let data = epoll::EventData::new_u64(tag);
        epoll::add(epoll, &socket, data, epoll::EventFlags::IN)
            .map_err(DomainError::io("epoll_ctl"))?;
        Ok(Self { socket, tag, wakes_at: Time::NEVER, newest: 0, log: LogLimit::default() })
    }

    /// Bounds the connections whose peers aren't proven: `unproven`, each with the time at which it was accepted,
    /// of which one takes `each` descriptors.
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
                self.rest(now, PAUSE, epoll);
                Admission::Wait
            }
            _ => Admission::Accept,
        }
    }

    fn most(&self) -> usize {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let reserve = RESERVE.min(limit / PART);
        match u64::try_from(self.newest).is_ok_and(|fd| fd < limit - reserve) {
            true => (limit / PART).clamp(FEWEST as u64, MOST as u64) as usize,
            false => FEWEST,
        }
    }

    /// The next connection, if any.
    pub fn accept(&mut self, now: Time, epoll: &OwnedFd) -> Option<OwnedFd> {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            return match accept_with(self.socket.as_fd(), flags) {
                Ok(connection) => {
                    self.newest = connection.as_raw_fd();
                    Some(connection)
                }
                // It was gone before it was accepted.
                Err(Errno::CONNABORTED | Errno::INTR) => continue,
                Err(Errno::AGAIN) => None,
                Err(error) => {
                    self.log.warn("connections wait; raise the open-file limit", &error);
                    self.newest = RawFd::MAX;
                    self.rest(now, REST, epoll);
                    None
                }
            };
        }
    }

    fn rest(&mut self, now: Time, how_long: Duration, epoll: &OwnedFd) {
        self.wakes_at = now.after(how_long);
        self.listen(epoll, epoll::EventFlags::empty());
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::transport::sockets::{self, Demand};

    #[test]
    fn unproven_connections_are_bounded_and_the_oldest_makes_way() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let here = [std::net::Ipv4Addr::LOCALHOST.into()];
        let (_, socket) = sockets::listen(&here, Demand::All, None).unwrap().sockets.remove(0);
        let mut listener = Listener::new(socket, 0, &epoll).unwrap();
        let most = listener.most();
        assert!((FEWEST..=MOST).contains(&most));
        let (start, late) = (Time(1), Time(1).after(GRACE));
        let unproven = |n: usize| (0..n).map(move |i| (i, start));
        let mut admit = |now, n| listener.admit(now, unproven(n), 1, &epoll);
        assert_eq!(admit(late, most - 1), Admission::Accept);
        assert_eq!(admit(late, most), Admission::Displace(0));
        // A burst of peers: each has time to prove itself, and the worker sleeps meanwhile.
        assert_eq!(admit(start, most), Admission::Wait);
        assert_eq!(listener.wakes_at, start.after(PAUSE));
        // Where the process is short of descriptors.
        listener.newest = RawFd::MAX;
        assert_eq!(listener.admit(late, unproven(FEWEST), 1, &epoll), Admission::Displace(0));
        assert_eq!(listener.admit(late, unproven(FEWEST - 1), 1, &epoll), Admission::Accept);
    }
}
