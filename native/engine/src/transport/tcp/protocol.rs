//! Links that are up: sending operations as frames, and handling received frames.

use std::sync::Arc;

use super::{
    frame::{describe, reason, shown, Header, Kind, Refusal, HEADER},
    link::{Incoming, StreamKey, MAX_OPS, MESSAGE_WINDOW},
    place::{Index, Walk},
    stream::{reply_cost, Body, Step},
    Role, TcpDomain, HOT,
};
use crate::{
    domain::{
        Admit, Completion, Count, Data, DomainError, LinkId, MessageRoom, Token, WorkRequest,
    },
    memory::RegionMemory,
};

/// Smallest part of a large operation; shorter ones are not cut.
const MIN_PART: u64 = 512 << 10;
/// System calls on one stream per poll.
const TURNS: usize = 8;

impl TcpDomain {
    /// Queues the frames of an operation. The link is up and not full.
    pub(super) fn enqueue(&mut self, id: LinkId, token: Token, wr: &WorkRequest) {
        match wr {
            WorkRequest::Count(count) => {
                self.frame(id, None, token, Header { count: *count, ..Header::new(Kind::Count) });
            }
            WorkRequest::Send(message) => {
                let Some(link) = self.link(id) else { return };
                link.messages += 1;
                let op = link.open_unnumbered(token, 1);
                let header = Header { op, len: message.len() as u64, ..Header::new(Kind::Message) };
                let Some(key) = link.quick() else { return };
                let stream = &mut self.sockets[key].stream;
                stream.say(&header.encode());
                stream.say(message);
            }
            WorkRequest::Write { data, count } => self.write(id, token, data, *count),
            WorkRequest::Read { data } => self.read(id, token, data),
            WorkRequest::Prepare { .. } => unreachable!("nothing is sent for it"),
        }
    }

    /// Queues a frame that is acknowledged in the order of its stream.
    fn frame(&mut self, id: LinkId, body: Option<Walk>, token: Token, mut header: Header) {
        let Some(link) = self.link(id) else { return };
        header.op = link.open(token, 1);
        let Some(key) = link.quick() else { return };
        let stream = &mut self.sockets[key].stream;
        stream.await_ack(header.op);
        stream.frame(&header, &[], body);
    }

    fn write(&mut self, id: LinkId, token: Token, data: &Data, count: Option<Count>) {
        let walk = Walk::local(data);
        let (mut header, indices) = describe(Kind::Write, data);
        header.code = u8::from(count.is_some());
        header.count = count.unwrap_or(Count { imm: 0, n: 0 });
        header.parts = 1;
        let bytes = data.bytes();
        if bytes < self.bulk_from && indices.is_empty() {
            return self.frame(id, Some(walk), token, header);
        }
        let Some(link) = self.link(id) else { return };
        let streams = link.bulk();
        // Only a single page is cut; its parts use all streams at once.
        let cut =
            if data.pages == 1 { (bytes / MIN_PART).clamp(1, streams.len() as u64) } else { 1 };
        header.parts = cut as u16;
        header.op = link.open(token, header.parts);
        for (i, key) in streams.iter().enumerate().take(cut as usize) {
            let stream = &mut self.sockets[*key].stream;
            stream.await_ack(header.op);
            if cut == 1 {
                stream.frame(&header, &indices, Some(walk));
                return;
            }
            let (from, len) = part(bytes, cut, i as u64);
            let h = Header { offset: header.offset + from, len, ..header };
            stream.frame(&h, &[], Some(walk.part(from, len)));
        }
    }

    fn read(&mut self, id: LinkId, token: Token, data: &Data) {
        let walk = Walk::local(data);
        let (mut header, indices) = describe(Kind::Read, data);
        let bytes = data.bytes();
        let Some(link) = self.link(id) else { return };
        let streams = link.bulk();
        let cut =
            if data.pages == 1 { (bytes / MIN_PART).clamp(1, streams.len() as u64) } else { 1 };
        let cost = reply_cost(bytes / cut, indices.len() as u64);
        let op = link.open_unnumbered(token, cut as u16);
        for (i, key) in streams.iter().enumerate().take(cut as usize) {
            let (from, len) = part(bytes, cut, i as u64);
            let into = if cut == 1 { walk.clone() } else { walk.part(from, len) };
            let Some(link) = self.links.get_mut(Self::slot(id)) else { return };
            header.op = link.open_fetch(op, into, cost);
            let h = match cut {
                1 => header,
                _ => Header { offset: header.offset + from, len, ..header },
            };
            self.sockets[*key].stream.frame(&h, &indices, None);
        }
    }

    /// Reads a socket; false if it had nothing.
    pub(super) fn readable(
        &mut self,
        key: StreamKey,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> bool {
        let moved = self.read_from(key, room, out);
        self.listen_or_stall(key);
        moved
    }

    /// Watches the socket unless the peer leaves too many replies unread.
    pub(super) fn listen_or_stall(&mut self, key: StreamKey) {
        let Some(s) = self.sockets.get_mut(key) else { return };
        let was = s.stream.is_stalled();
        if s.stream.stalls() != was {
            self.watch(key);
        }
    }

    fn read_from(
        &mut self,
        key: StreamKey,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> bool {
        let mut moved = false;
        for _ in 0..TURNS {
            let Some(s) = self.sockets.get(key) else { return true };
            if s.stream.owes_too_much() {
                return moved;
            }
            let Role::Of(id) = s.role else {
                if let Err(e) = self.shake(key) {
                    self.socket_failed(key, e);
                }
                return true;
            };
            // Until all streams are proven, frames stay in the kernel.
            if self.link(id).is_none_or(|l| !l.is_complete()) {
                return moved;
            }
            match self.gulp(key, id, room, out) {
                Ok(true) => moved = true,
                Ok(false) => break,
                Err(e) => {
                    self.socket_failed(key, e);
                    return true;
                }
            }
        }
        moved
    }

    /// Handles the frames of one system call; false if there was nothing to read.
    fn gulp(
        &mut self,
        key: StreamKey,
        id: LinkId,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> Result<bool, DomainError> {
        let now = self.now;
        // Bytes received with the last handshake message are in the buffer already.
        if let Some(s) = self.sockets.get_mut(key) {
            s.stream.leftover = false;
        }
        self.digest(key, id, room, out)?;
        let Some(s) = self.sockets.get_mut(key) else { return Ok(true) };
        if s.stream.owes_too_much() || s.stream.fill()?.is_none() {
            return Ok(false);
        }
        s.stream.hot_until = now.after(HOT);
        if let Some(link) = self.link(id) {
            link.heard_at = now;
        }
        self.digest(key, id, room, out)?;
        Ok(true)
    }

    /// Handles every complete frame.
    fn digest(
        &mut self,
        key: StreamKey,
        id: LinkId,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> Result<(), DomainError> {
        loop {
            let Some(s) = self.sockets.get_mut(key) else { return Ok(()) };
            if s.stream.owes_too_much() {
                // The rest stays in the buffer.
                s.stream.shaken();
                return Ok(());
            }
            match s.stream.step()? {
                Step::Starved => return Ok(()),
                Step::Head(header, index) => {
                    let body = self.destination(key, id, &header, index)?;
                    let Some(s) = self.sockets.get_mut(key) else { return Ok(()) };
                    match body {
                        Some(body) => s.stream.begin(header, body),
                        None => self.act(key, id, &header, None, room, out)?,
                    }
                }
                Step::Tail(header, body) => self.act(key, id, &header, Some(body), room, out)?,
            }
        }
    }

    /// Where the bytes after a header go; `None` if none follow.
    fn destination(
        &mut self,
        key: StreamKey,
        id: LinkId,
        header: &Header,
        index: Index,
    ) -> Result<Option<Body>, DomainError> {
        let n = header.body();
        let peer = self.links.get(Self::slot(id)).and_then(|l| Some(l.peer.as_ref()?.id()));
        Ok(match header.kind {
            Kind::Write => {
                let place = self
                    .book
                    .lookup_for(peer, header.key)
                    .and_then(|region| Walk::in_region(region, header, index));
                Some(match place {
                    Ok(walk) => Body::Place(walk),
                    Err(e) => {
                        self.say_no(key, header.op, &e);
                        Body::Discard(n)
                    }
                })
            }
            Kind::Read => {
                let place = self.book.lookup_for(peer, header.key).cloned();
                let place =
                    place.and_then(|r: Arc<RegionMemory>| Walk::in_region(&r, header, index));
                match place {
                    Ok(walk) => {
                        let stream = &mut self.sockets[key].stream;
                        let h = Header {
                            op: header.op,
                            len: walk.left(),
                            ..Header::new(Kind::ReadData)
                        };
                        let cost = reply_cost(walk.left(), u64::from(header.indices));
                        stream.frame(&h, &[], Some(walk));
                        stream.owe(cost);
                    }
                    Err(e) => self.say_no(key, header.op, &e),
                }
                None
            }
            Kind::ReadData => {
                let Some(link) = self.link(id) else { return Ok(Some(Body::Discard(n))) };
                match link.fetches.get_mut(&header.op) {
                    Some(f) if f.into.left() == n && !f.begun => {
                        f.begun = true;
                        Some(Body::Place(f.into.clone()))
                    }
                    _ => {
                        return Err(DomainError::Handshake("data without a pending read".into()));
                    }
                }
            }
            Kind::Message | Kind::Nak | Kind::Bye | Kind::Whisper => {
                Some(Body::Collect(Vec::with_capacity(n as usize)))
            }
            Kind::Count | Kind::Ack | Kind::Taken | Kind::Ping => None,
        })
    }

    fn say_no(&mut self, key: StreamKey, op: u64, e: &DomainError) {
        let text = reason(&e.to_string());
        let code = match e {
            DomainError::Stale(_) => Refusal::Stale,
            _ => Refusal::Refused,
        };
        let nak = Header { code: code as u8, op, len: text.len() as u64, ..Header::new(Kind::Nak) };
        let stream = &mut self.sockets[key].stream;
        stream.say(&nak.encode());
        stream.say(&text);
        stream.owe((HEADER + text.len()) as u64);
    }

    /// Handles a complete frame.
    fn act(
        &mut self,
        key: StreamKey,
        id: LinkId,
        header: &Header,
        body: Option<Body>,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> Result<(), DomainError> {
        let refused = matches!(body, Some(Body::Discard(_)));
        let text = match &body {
            Some(Body::Collect(bytes)) => bytes.as_slice(),
            _ => &[],
        };
        let stream = &mut self.sockets[key].stream;
        match header.kind {
            Kind::Write => {
                stream.done += 1;
                self.landed(id, header, refused, out)?;
            }
            Kind::Count => {
                stream.done += 1;
                self.over_here(id, header.op, true);
                out.push(Completion::Count(header.count));
            }
            Kind::Ack => {
                for op in stream.acked(header.op)? {
                    self.part_done(id, op, out);
                }
            }
            Kind::ReadData => {
                let fetch = self.link(id).and_then(|l| l.close_fetch(header.op));
                if let Some(fetch) = fetch {
                    self.part_done(id, fetch.op, out);
                }
            }
            Kind::Nak => {
                let why = shown(text);
                let error = match header.code {
                    c if c == Refusal::Stale as u8 => DomainError::Stale(why),
                    _ => DomainError::Refused(why),
                };
                let Some(link) = self.link(id) else { return Ok(()) };
                // A read has no acknowledgement; a refusal ends it.
                match link.close_fetch(header.op) {
                    Some(fetch) if fetch.begun => {
                        let what = "a refusal of a read whose data has started";
                        return Err(DomainError::Handshake(what.into()));
                    }
                    Some(fetch) => {
                        link.refuse(fetch.op, error);
                        self.part_done(id, fetch.op, out);
                    }
                    None => link.refuse(header.op, error),
                }
            }
            Kind::Message => {
                let Some(link) = self.link(id) else { return Ok(()) };
                if link.held.len() >= MESSAGE_WINDOW {
                    return Err(DomainError::Handshake("too many messages".into()));
                }
                if let Some(Body::Collect(bytes)) = body {
                    link.held.push_back((header.op, bytes));
                }
                self.hand_up(id, room, out);
            }
            Kind::Taken => {
                let limit = header.len;
                let Some(link) = self.link(id) else { return Ok(()) };
                link.messages = link.messages.saturating_sub(1);
                if header.code != 0 {
                    let why = format!(
                        "the message is longer than the peer's receive buffers of {limit} bytes"
                    );
                    link.refuse(header.op, DomainError::Refused(why));
                }
                self.part_done(id, header.op, out);
            }
            Kind::Whisper => {
                if self.whispers.len() > MAX_OPS {
                    return Err(DomainError::Handshake("too many control messages".into()));
                }
                if let Some(Body::Collect(bytes)) = body {
                    self.whispers.push_back((id, bytes));
                }
            }
            Kind::Ping => {}
            Kind::Bye => {
                let text = format!("the peer closed the connection: {}", shown(text));
                return Err(match header.code {
                    0 => DomainError::LinkDown(text),
                    _ => DomainError::Gone(text),
                });
            }
            Kind::Read => {}
        }
        Ok(())
    }

    /// A part of the peer's write is in place. The count of a write follows its last part (IC-2),
    /// once for all parts (IC-1, IC-3).
    fn landed(
        &mut self,
        id: LinkId,
        header: &Header,
        refused: bool,
        out: &mut Vec<Completion>,
    ) -> Result<(), DomainError> {
        let count = (header.code != 0 && !refused).then_some(header.count);
        if header.parts == 1 {
            self.over_here(id, header.op, !refused);
            out.extend(count.map(Completion::Count));
            return Ok(());
        }
        let Some(link) = self.link(id) else { return Ok(()) };
        if link.incoming.len() > MAX_OPS {
            return Err(DomainError::Handshake("too many unfinished writes".into()));
        }
        let fresh = || Incoming { left: header.parts, count: Some(header.count), refused: false };
        let incoming = link.incoming.entry(header.op).or_insert_with(fresh);
        if incoming.left > header.parts {
            return Err(DomainError::Handshake("write parts with different part counts".into()));
        }
        incoming.left -= 1;
        incoming.refused |= refused;
        if count.is_none() {
            // Refused, or not counted.
            incoming.count = None;
        }
        if incoming.left == 0 {
            let whole = link.incoming.remove(&header.op);
            if let Some(whole) = whole {
                self.over_here(id, header.op, !whole.refused);
                out.extend(whole.count.map(Completion::Count));
            }
        }
        Ok(())
    }

    fn over_here(&mut self, id: LinkId, op: u64, done: bool) {
        if let Some(link) = self.link(id) {
            link.over_here(op, done);
        }
    }

    fn part_done(&mut self, id: LinkId, op: u64, out: &mut Vec<Completion>) {
        if let Some((token, result)) = self.link(id).and_then(|l| l.part_done(op)) {
            out.push(Completion::Done { link: id, token, result });
        }
    }

    /// Delivers the oldest message if the pool has room. One at a time: each takes its buffer
    /// before the next is admitted.
    fn hand_up(&mut self, id: LinkId, room: &dyn MessageRoom, out: &[Completion]) -> bool {
        let mut reported = out.iter().chain(&self.news);
        let waiting = reported.any(|c| matches!(c, Completion::Message { .. }));
        let Some(link) = self.link(id) else { return false };
        let Some((op, message)) = link.held.pop_front() else { return false };
        let (code, limit) = match room.admit(message.len()) {
            Admit::Take if !waiting => {
                let message = message.into_boxed_slice();
                // After a pending `LinkUp`: before it the group does not know the link.
                self.news.push(Completion::Message { link: id, message });
                (0, 0)
            }
            Admit::TooLong { limit } => (1, limit as u64),
            _ => {
                link.held.push_front((op, message));
                return false;
            }
        };
        let Some(key) = self.link(id).and_then(|l| l.quick()) else { return true };
        let taken = Header { code, op, len: limit, ..Header::new(Kind::Taken) };
        let stream = &mut self.sockets[key].stream;
        stream.say(&taken.encode());
        stream.owe(HEADER as u64);
        true
    }

    /// Delivers messages that waited for room.
    pub(super) fn take_held(&mut self, room: &dyn MessageRoom, out: &[Completion]) -> bool {
        let waiting: Vec<LinkId> =
            self.links.iter().filter(|(_, l)| !l.held.is_empty()).map(|(_, l)| l.id).collect();
        waiting.into_iter().fold(false, |moved, id| self.hand_up(id, room, out) | moved)
    }
}

/// Part `i` of `n` of `bytes` bytes: offset and length.
fn part(bytes: u64, n: u64, i: u64) -> (u64, u64) {
    let (from, to) = (bytes * i / n, bytes * (i + 1) / n);
    (from, to - from)
}
