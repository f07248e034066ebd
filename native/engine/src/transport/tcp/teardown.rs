//! Heartbeats, silent peers, and the end of links.

use super::{
    frame::{reason, Header, Kind, HEADER},
    handshake::HANDSHAKE_TIMEOUT,
    link::StreamKey,
    Role, Socket, TcpDomain,
};
use crate::{
    domain::{excuse, Completion, DomainError, LinkId},
    time::Time,
};

impl TcpDomain {
    pub(super) fn close_link(&mut self, id: LinkId, cause: DomainError, notify: bool) {
        if self.link(id).is_none() {
            return;
        }
        let mut link = self.links.remove(Self::slot(id));
        if let (Some(key), true) = (link.urgent_stream(), notify) {
            if let Some(s) = self.sockets.get_mut(key) {
                let text = reason(&cause.to_string());
                let gone = u8::from(matches!(cause, DomainError::Gone(_)));
                let bye = Header { code: gone, len: text.len() as u64, ..Header::new(Kind::Close) };
                s.stream.queue_bytes(&bye.encode());
                s.stream.queue_bytes(&text);
                let _ = s.stream.send();
            }
        }
        for key in link.streams.iter().flatten() {
            self.sockets.try_remove(*key);
        }
        let of_link = |s: &Socket| matches!(&s.role, Role::Handshake(h) if h.link.is_some_and(|(l, _)| l == id));
        let pending: Vec<StreamKey> =
            self.sockets.iter().filter(|(_, s)| of_link(s)).map(|(k, _)| k).collect();
        for key in pending {
            self.sockets.remove(key);
        }
        let mut unfinished = link.abandon();
        for (token, _) in &unfinished {
            let token = *token;
            let result = Err(cause.clone());
            self.completions.push(Completion::Done { link: id, token, result });
        }
        unfinished.retain(|(_, number)| *number != 0);
        let receipt = link.receipt();
        self.completions.push(Completion::LinkDown { link: id, cause, receipt, unfinished });
    }

    /// Time in which this process did not look at its sockets is no evidence against a peer.
    fn excuse_silence(&mut self, now: Time) {
        let missed = self.attendance.missed(now, self.peer_timeout);
        if missed.is_zero() {
            return;
        }
        // What was begun since then has missed less: none waits longer than from now on.
        let latest = now.after(HANDSHAKE_TIMEOUT);
        let later = |deadline: Time| deadline.after(missed).min(latest).max(deadline);
        for (_, link) in &mut self.links {
            link.received_at = excuse(link.received_at, missed, now);
            link.deadline = later(link.deadline);
        }
        for (_, socket) in &mut self.sockets {
            if let Role::Handshake(pending) = &mut socket.role {
                pending.deadline = later(pending.deadline);
            }
        }
    }

    /// Sends heartbeats on idle links, and closes links of silent peers (RS-4).
    pub(super) fn tick(&mut self, now: Time) -> bool {
        self.listeners.iter_mut().for_each(|l| l.tick(now, &self.epoll));
        self.excuse_silence(now);
        let mut late = Vec::new();
        let mut quiet = Vec::new();
        for (_, link) in &self.links {
            if now < link.next_timer(self.peer_timeout) {
                continue;
            }
            if !link.is_complete() {
                late.push((link.id, "the peer did not finish the handshake in time".to_owned()));
            } else if now >= link.received_at.after(self.peer_timeout) {
                let update_throttle = |key: &StreamKey| {
                    self.sockets.get(*key).is_some_and(|s| s.stream.is_throttled())
                };
                let what = match link.streams.iter().flatten().any(update_throttle) {
                    true => "the peer read none of its replies",
                    false => "nothing received",
                };
                late.push((link.id, format!("{what} for {:?}", self.peer_timeout)));
            } else {
                quiet.extend(link.urgent_stream());
            }
        }
        for key in &quiet {
            if let Some(s) = self.sockets.get_mut(*key) {
                s.stream.queue_bytes(&Header::new(Kind::Ping).encode());
                s.stream.charge_reply(HEADER as u64);
                self.send_queued(*key);
            }
        }
        let slow: Vec<StreamKey> = self
            .sockets
            .iter()
            .filter(|(_, s)| matches!(&s.role, Role::Handshake(h) if h.deadline <= now))
            .map(|(k, _)| k)
            .collect();
        let progressed = !(late.is_empty() && slow.is_empty() && quiet.is_empty());
        for key in slow {
            let cause = "no answer in time".to_owned();
            self.socket_failed(key, DomainError::Gone(cause));
        }
        for (id, cause) in late {
            self.close_link(id, DomainError::Gone(cause), false);
        }
        progressed
    }
}
