//! Links that are up: sending operations as frames, and handling received frames.

use std::sync::Arc;

use super::{
    frame::{describe, reason, shown, Header, Kind, Refusal, HEADER},
    link::{Incoming, StreamKey, Unnumbered, MAX_OPS, MESSAGE_WINDOW},
    page_cursor::{PageCursor, PageIndex},
    stream::{reply_cost, Body, StreamStep},
    Role, TcpDomain, HOT_TIME,
};
use crate::{
    domain::{Completion, Count, Data, DomainError, LinkId, MessageRoom, Token, WorkRequest},
    memory::RegionMemory,
};

/// Smallest part of a large operation; shorter ones are not cut.
pub(super) const MIN_PART: u64 = 512 << 10;
/// System calls on one stream per poll.
const READS_PER_POLL: usize = 8;

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
                let op = link.open_unnumbered(token, Unnumbered::Message, 1);
                let header = Header { op, len: message.len() as u64, ..Header::new(Kind::Message) };
                let Some(key) = link.urgent_stream() else { return };
                let stream = &mut self.sockets[key].stream;
                stream.queue_bytes(&header.encode());
                stream.queue_bytes(message);
            }
            WorkRequest::Write { data, count } => self.write(id, token, data, *count),
            WorkRequest::Read { data } => self.read(id, token, data),
            WorkRequest::Prepare { .. } => unreachable!("nothing is sent for it"),
        }
    }

    /// Queues a frame that is acknowledged in the order of its stream.
    fn frame(&mut self, id: LinkId, body: Option<PageCursor>, token: Token, mut header: Header) {
        let Some(link) = self.link(id) else { return };
        header.op = link.open_op(token, 1);
        let Some(key) = link.urgent_stream() else { return };
        let stream = &mut self.sockets[key].stream;
        stream.queue_op(&header, &[], body);
    }

    fn write(&mut self, id: LinkId, token: Token, data: &Data, count: Option<Count>) {
        let cursor = PageCursor::local(data);
        let (mut header, indices) = describe(Kind::Write, data);
        header.code = u8::from(count.is_some());
        header.count = count.unwrap_or(Count { imm: 0, n: 0 });
        header.parts = 1;
        let bytes = data.bytes();
        if bytes < self.bulk_from && indices.is_empty() {
            return self.frame(id, Some(cursor), token, header);
        }
        let Some(link) = self.link(id) else { return };
        let mut streams = link.bulk_streams();
        // Only a single page is cut; its parts use all streams at once.
        let cut =
            if data.pages == 1 { (bytes / MIN_PART).clamp(1, streams.len() as u64) } else { 1 };
        header.parts = cut as u16;
        header.op = link.open_op(token, header.parts);
        if cut == 1 {
            // Successive writes use one stream, so that the receiver polls no more than that.
            streams.sort_unstable();
        }
        streams.sort_by_key(|key| self.sockets[*key].stream.backlog());
        for (i, key) in streams.iter().enumerate().take(cut as usize) {
            let stream = &mut self.sockets[*key].stream;
            if cut == 1 {
                return stream.queue_op(&header, &indices, Some(cursor));
            }
            let (from, len) = part(bytes, cut, i as u64);
            let h = Header { offset: header.offset + from, len, ..header };
            stream.queue_op(&h, &[], Some(cursor.part(from, len)));
        }
    }

    fn read(&mut self, id: LinkId, token: Token, data: &Data) {
        let cursor = PageCursor::local(data);
        let (mut header, indices) = describe(Kind::Read, data);
        let bytes = data.bytes();
        let Some(link) = self.link(id) else { return };
        let streams = link.bulk_streams();
        let cut =
            if data.pages == 1 { (bytes / MIN_PART).clamp(1, streams.len() as u64) } else { 1 };
        let cost = reply_cost(bytes / cut, indices.len() as u64);
        let op = link.open_unnumbered(token, Unnumbered::Read, cut as u16);
        for (i, key) in streams.iter().enumerate().take(cut as usize) {
            let (from, len) = part(bytes, cut, i as u64);
            let into = if cut == 1 { cursor.clone() } else { cursor.part(from, len) };
            let Some(link) = self.links.get_mut(Self::slot(id)) else { return };
            header.op = link.open_fetch(op, into, cost);
            let h = match cut {
                1 => header,
                _ => Header { offset: header.offset + from, len, ..header },
            };
            self.sockets[*key].stream.queue_frame(&h, &indices, None);
        }
    }

    /// Reads a socket; false if it had nothing.
    pub(super) fn on_readable(
        &mut self,
        key: StreamKey,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> bool {
        let progressed = self.read_from(key, room, out);
        self.update_throttle(key);
        progressed
    }

    /// Watches the socket unless the peer leaves too many replies unread.
    pub(super) fn update_throttle(&mut self, key: StreamKey) {
        let Some(s) = self.sockets.get_mut(key) else { return };
        let was = s.stream.is_throttled();
        if s.stream.update_throttle() != was {
            self.update_interest(key);
        }
    }

    fn read_from(
        &mut self,
        key: StreamKey,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> bool {
        let mut progressed = false;
        for _ in 0..READS_PER_POLL {
            let Some(s) = self.sockets.get(key) else { return true };
            if progressed && s.stream.drained {
                return true;
            }
            if s.stream.exceeds_reply_limit() {
                return progressed;
            }
            let Role::Link(id) = s.role else {
                if let Err(e) = self.advance_handshake(key) {
                    self.socket_failed(key, e);
                }
                return true;
            };
            // Until all streams are proven, frames stay in the kernel.
            if self.link(id).is_none_or(|l| !l.is_complete()) {
                return progressed;
            }
            match self.receive_once(key, id, room, out) {
                Ok(true) => progressed = true,
                Ok(false) => return progressed,
                Err(e) => {
                    self.socket_failed(key, e);
                    return true;
                }
            }
        }
        progressed
    }

    /// Handles the frames of one system call; false if there was nothing to read.
    fn receive_once(
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
        self.process_frames(key, id, room, out)?;
        let Some(s) = self.sockets.get_mut(key) else { return Ok(true) };
        if s.stream.exceeds_reply_limit() || s.stream.fill()?.is_none() {
            return Ok(false);
        }
        s.stream.hot_until = now.after(HOT_TIME);
        if let Some(link) = self.link(id) {
            link.received_at = now;
        }
        self.process_frames(key, id, room, out)?;
        Ok(true)
    }

    /// Handles every complete frame.
    fn process_frames(
        &mut self,
        key: StreamKey,
        id: LinkId,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> Result<(), DomainError> {
        loop {
            let Some(s) = self.sockets.get_mut(key) else { return Ok(()) };
            if s.stream.exceeds_reply_limit() {
                // The rest stays in the buffer.
                s.stream.mark_leftover();
                return Ok(());
            }
            match s.stream.next_step()? {
                StreamStep::Starved => return Ok(()),
                StreamStep::Head(header, index) => {
                    let body = self.destination(key, id, &header, index)?;
                    let Some(s) = self.sockets.get_mut(key) else { return Ok(()) };
                    match body {
                        Some(body) => s.stream.set_body(header, body),
                        None => self.on_frame(key, id, &header, None, room, out)?,
                    }
                }
                StreamStep::Tail(header, body) => {
                    self.on_frame(key, id, &header, Some(body), room, out)?
                }
            }
        }
    }

    /// Destination of the bytes after a header; `None` if none follow.
    fn destination(
        &mut self,
        key: StreamKey,
        id: LinkId,
        header: &Header,
        index: PageIndex,
    ) -> Result<Option<Body>, DomainError> {
        let n = header.body();
        let peer = self.links.get(Self::slot(id)).and_then(|l| Some(l.peer.as_ref()?.id()));
        Ok(match header.kind {
            Kind::Write => {
                let own_endpoint = self
                    .book
                    .lookup_for(peer, header.key)
                    .and_then(|region| PageCursor::in_region(region, header, index));
                Some(match own_endpoint {
                    Ok(cursor) => Body::IntoPages(cursor),
                    Err(e) => {
                        self.send_nak(key, header.op, &e);
                        Body::Discard(n)
                    }
                })
            }
            Kind::Read => {
                let own_endpoint = self.book.lookup_for(peer, header.key).cloned();
                let own_endpoint = own_endpoint
                    .and_then(|r: Arc<RegionMemory>| PageCursor::in_region(&r, header, index));
                match own_endpoint {
                    Ok(cursor) => {
                        let stream = &mut self.sockets[key].stream;
                        let h = Header {
                            op: header.op,
                            len: cursor.left(),
                            ..Header::new(Kind::ReadData)
                        };
                        let cost = reply_cost(cursor.left(), u64::from(header.indices));
                        stream.queue_frame(&h, &[], Some(cursor));
                        stream.charge_reply(cost);
                    }
                    Err(e) => self.send_nak(key, header.op, &e),
                }
                None
            }
            Kind::ReadData => {
                let Some(link) = self.link(id) else { return Ok(Some(Body::Discard(n))) };
                match link.fetches.get_mut(&header.op) {
                    Some(f) if f.into.left() == n && !f.begun => {
                        f.begun = true;
                        Some(Body::IntoPages(f.into.clone()))
                    }
                    _ => {
                        return Err(DomainError::Handshake("data without a pending read".into()));
                    }
                }
            }
            Kind::Message | Kind::Nak | Kind::Close | Kind::ControlMessage => {
                Some(Body::Collect(Vec::with_capacity(n as usize)))
            }
            Kind::Count | Kind::Ack | Kind::MessageResult | Kind::Ping => None,
        })
    }

    fn send_nak(&mut self, key: StreamKey, op: u64, e: &DomainError) {
        let text = reason(&e.to_string());
        let code = match e {
            DomainError::Stale(_) => Refusal::Stale,
            _ => Refusal::Refused,
        };
        let nak = Header { code: code as u8, op, len: text.len() as u64, ..Header::new(Kind::Nak) };
        let stream = &mut self.sockets[key].stream;
        stream.queue_bytes(&nak.encode());
        stream.queue_bytes(&text);
        stream.charge_reply((HEADER + text.len()) as u64);
    }

    /// Handles a complete frame.
    fn on_frame(
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
                stream.executed += 1;
                self.on_write_part(id, header, refused, out)?;
            }
            Kind::Count => {
                stream.executed += 1;
                self.on_op_executed(id, header.op, true);
                report_count(header.count, out);
            }
            Kind::Ack => {
                let mut ops = std::mem::take(&mut self.acked);
                ops.clear();
                stream.acked(header.op, &mut ops)?;
                ops.iter().for_each(|op| self.part_done(id, *op, out));
                self.acked = ops;
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
                if link.waiting_messages.len() >= MESSAGE_WINDOW {
                    return Err(DomainError::Handshake("too many messages".into()));
                }
                if let Some(Body::Collect(bytes)) = body {
                    link.waiting_messages.push_back((header.op, bytes));
                }
                self.deliver_waiting(room, out);
            }
            Kind::MessageResult => {
                let limit = header.len;
                let Some(link) = self.link(id) else { return Ok(()) };
                let token = link.message_done(header.op)?;
                let result = match header.code {
                    0 => Ok(()),
                    _ => Err(DomainError::Refused(format!(
                        "the message is longer than the peer's receive buffers of {limit} bytes"
                    ))),
                };
                out.push(Completion::Done { link: id, token, result });
            }
            Kind::ControlMessage => {
                let Some(link) = self.link(id) else { return Ok(()) };
                // Of each peer: one that sends too many ends its own link only.
                if link.control_messages > MAX_OPS {
                    return Err(DomainError::Handshake("too many control messages".into()));
                }
                link.control_messages += 1;
                if let Some(Body::Collect(bytes)) = body {
                    self.control_messages.push_back((id, bytes));
                }
            }
            Kind::Ping => {}
            Kind::Close => {
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
    fn on_write_part(
        &mut self,
        id: LinkId,
        header: &Header,
        refused: bool,
        out: &mut Vec<Completion>,
    ) -> Result<(), DomainError> {
        let count = (header.code != 0 && !refused).then_some(header.count);
        if header.parts == 1 {
            self.on_op_executed(id, header.op, !refused);
            count.into_iter().for_each(|count| report_count(count, out));
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
                self.on_op_executed(id, header.op, !whole.refused);
                whole.count.into_iter().for_each(|count| report_count(count, out));
            }
        }
        Ok(())
    }

    fn on_op_executed(&mut self, id: LinkId, op: u64, done: bool) {
        if let Some(link) = self.link(id) {
            link.on_op_executed(op, done);
        }
    }

    fn part_done(&mut self, id: LinkId, op: u64, out: &mut Vec<Completion>) {
        if let Some((token, result)) = self.link(id).and_then(|l| l.part_done(op)) {
            out.push(Completion::Done { link: id, token, result });
        }
    }
}

/// Reports a count; successive ones with the same immediate are merged.
fn report_count(count: Count, out: &mut Vec<Completion>) {
    if let Some(Completion::Count(last)) = out.last_mut() {
        if let Some(n) = last.n.checked_add(count.n).filter(|_| last.imm == count.imm) {
            last.n = n;
            return;
        }
    }
    out.push(Completion::Count(count));
}

/// Part `i` of `n` of `bytes` bytes: offset and length.
fn part(bytes: u64, n: u64, i: u64) -> (u64, u64) {
    let (from, to) = (bytes * i / n, bytes * (i + 1) / n);
    (from, to - from)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ic_1_merged_counts_add_up() {
        let counts = [(1, 2), (1, 3), (2, 1), (1, u32::MAX), (1, 1), (1, 1)];
        let mut out = Vec::new();
        counts.into_iter().for_each(|(imm, n)| report_count(Count { imm, n }, &mut out));
        let merged = [(1, 5), (2, 1), (1, u32::MAX), (1, 2)];
        let merged = merged.map(|(imm, n)| Completion::Count(Count { imm, n }));
        assert_eq!(format!("{out:?}"), format!("{merged:?}"));
    }
}
