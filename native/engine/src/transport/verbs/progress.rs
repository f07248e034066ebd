//! Polling: completions, frames, device events, timers, closing of links.

use std::time::Duration;

use fabric_sys::ibverbs as sys;
use rustix::event::{epoll, Timespec};

use super::{
    connect::HelperResult, connect::Role, cq_pool::CqSlot, link::Link, memory::Slots, raw::Qp,
    CompletionKind, LinkState, VerbsDomain, COMPLETIONS, EVENTS, HELPER_DONE, LISTENER,
};
use crate::{
    domain::{excuse, Completion, DomainError, LinkId, MessageRoom, Receipt},
    time::Time,
    transport::nic::frame::{self, Body},
};

/// Interval at which a polling thread asks the kernel for socket and device events.
const FD_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Time for the close frame of a link.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);
/// Completions of one queue per poll, so that one queue does not starve the others.
const BATCH: usize = 32;
const BATCHES: usize = 16;

/// The message queue pair of a closed link, until its close frame is sent.
pub(super) struct ClosingLink {
    id: LinkId,
    frames: usize,
    until: Time,
    cq_slot: CqSlot,
    // Dropped before the memory.
    _message_qp: Qp,
    _slots: Slots,
}

impl VerbsDomain {
    pub(super) fn progress(
        &mut self,
        now: Time,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> bool {
        self.now = now;
        out.append(&mut self.completions);
        let before = out.len();
        let mut progressed = before > 0;
        progressed |= self.poll_completions(out);
        progressed |= self.poll_datagrams();
        if now >= self.poll_fds_at {
            self.poll_fds_at = now.after(FD_POLL_INTERVAL);
            progressed |= self.poll_fds();
        }
        if now >= self.tick_at {
            self.tick(now);
        }
        let awaits_room = !self.awaiting_room.is_empty();
        for id in std::mem::take(&mut self.awaiting_room) {
            self.mark_dirty(id);
        }
        // Report a link as up before its first message.
        out.append(&mut self.completions);
        let mut dirty = std::mem::take(&mut self.dirty);
        if awaits_room {
            // A link with ever more messages keeps out no other.
            dirty.sort_by_key(|id| self.link(*id).map_or(Time(0), |link| link.delivered_at));
        }
        for id in &dirty {
            progressed |= self.advance_link(*id, room, out);
        }
        if self.dirty.is_empty() {
            self.dirty = dirty;
            self.dirty.clear();
        }
        if !self.failing.is_empty() {
            // Counts that were acknowledged before the failure still count (IC-4). The queue pair
            // is stopped first, because some NICs drop the completions of a destroyed queue pair.
            for i in 0..self.failing.len() {
                let id = self.failing[i].0;
                if let Some(link) = self.link(id) {
                    link.stop();
                }
            }
            while self.poll_completions(out) {}
            for (id, cause) in std::mem::take(&mut self.failing) {
                self.close_link(id, cause);
            }
            progressed = true;
        }
        out.append(&mut self.completions);
        progressed || out.len() > before
    }

    /// Takes completions of all queues.
    fn poll_completions(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut progressed = false;
        let before = out.len();
        let mut wcs = [sys::Wc::default(); BATCH];
        for pool_index in 0..self.cqs.len() {
            for _ in 0..BATCHES {
                let n = self.cqs.poll(pool_index, &mut wcs);
                for wc in &wcs[..n] {
                    self.on_completion(wc, out);
                }
                progressed |= n > 0;
                if n < BATCH {
                    break;
                }
            }
        }
        if self.regions.has_gpus() {
            self.flush_gpus(out, before);
        }
        progressed
    }

    /// IC-2 for GPU memory: the NIC's completion does not mean that the GPU sees bytes that a peer
    /// wrote or that a read returned. If the flush fails, counts are withheld, operations fail, and
    /// the device is unusable.
    fn flush_gpus(&mut self, out: &mut Vec<Completion>, from: usize) {
        let reports_success = |c: &Completion| {
            matches!(c, Completion::Count(_) | Completion::Done { result: Ok(()), .. })
        };
        if !out[from..].iter().any(reports_success) {
            return;
        }
        if let Err(cause) = self.regions.flush_gpus() {
            let new = out.split_off(from);
            out.extend(new.into_iter().filter_map(|c| match c {
                Completion::Count(_) => None,
                Completion::Done { link, token, result: Ok(()) } => {
                    Some(Completion::Done { link, token, result: Err(cause.clone()) })
                }
                c => Some(c),
            }));
            let why = format!("GPU memory can't be flushed: {cause}");
            self.dead = Some(DomainError::Unavailable(why.clone()));
            self.fail_all_links(&why);
        }
    }

    fn poll_datagrams(&mut self) -> bool {
        let mut frames: Vec<Vec<u8>> = Vec::new();
        let progressed = self.datagrams.poll(|f| frames.push(f.to_vec()));
        for f in frames {
            self.on_handshake_frame(None, &f);
        }
        progressed
    }

    fn on_handshake_frame(&mut self, side_channel: Option<usize>, frame: &[u8]) {
        let Ok((_, Body::HandshakeFragment(fragment))) = frame::decode(frame) else { return };
        match fragment.to_initiator {
            true => {
                if let Some(id) = self.attempts.get(&fragment.exchange).copied() {
                    self.on_acceptor_fragment(id, &fragment);
                }
            }
            false => self.on_initiator_fragment(side_channel, &fragment),
        }
        self.tick_at = Time(0);
    }

    /// Asks the kernel which descriptors are ready, without waiting.
    fn poll_fds(&mut self) -> bool {
        let blank =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [blank; 32];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let n = epoll::wait(&self.epoll, &mut events[..], Some(&zero)).unwrap_or(0);
        let mut progressed = false;
        for event in &events[..n] {
            match event.data.u64() {
                // Completions are polled anyway; the descriptor is drained before sleeping.
                COMPLETIONS => continue,
                EVENTS => self.poll_device_events(),
                HELPER_DONE => self.poll_helpers(),
                tag if tag & LISTENER != 0 => {
                    self.side_channel.accept(self.now, (tag & !LISTENER) as usize, &self.epoll);
                }
                key => {
                    for f in self.side_channel.read_frames(key as usize, &self.epoll) {
                        self.on_handshake_frame(Some(key as usize), &f);
                    }
                }
            }
            progressed = true;
        }
        progressed
    }

    fn poll_helpers(&mut self) {
        self.helper.clear_event();
        while let Some(outcome) = self.helper.next() {
            match outcome {
                HelperResult::AddressResolved(Role::Initiator(id), target) => {
                    self.on_address_resolved(id, target)
                }
                HelperResult::AddressResolved(Role::Acceptor(exchange), target) => {
                    self.on_return_address(exchange, target);
                }
                HelperResult::QpsBuilt(id, cq_slot, pair) => self.on_qps_built(id, cq_slot, pair),
                HelperResult::QpsConnected(id, cq_slot, made) => {
                    let accepting = self.slot(id).and_then(|s| match s.state {
                        LinkState::Accepting(exchange) => Some(exchange),
                        _ => None,
                    });
                    match accepting {
                        Some(exchange) => {
                            self.on_accepted_qps_connected(id, exchange, cq_slot, made)
                        }
                        None => self.on_qps_connected(id, cq_slot, made),
                    }
                }
                HelperResult::SideConnected(id, stream) => self.on_side_connected(id, stream),
                HelperResult::RegionReleased(index, true) => {
                    self.completions.push(Completion::RegionReleased { index });
                }
                HelperResult::RegionReleased(_, false) => {}
            }
        }
        self.tick_at = Time(0);
    }

    /// Advances a link that has work pending.
    fn advance_link(
        &mut self,
        id: LinkId,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> bool {
        let now = self.now;
        let Some(link) = self.link(id) else { return false };
        link.dirty = false;
        let before = out.len();
        // One message per poll: the room is known again only after the message was taken.
        if !out.iter().any(|c| matches!(c, Completion::Message { .. })) {
            if let Some(message) = link.channel.take_message(room) {
                link.delivered_at = now;
                out.push(Completion::Message { link: id, message });
            }
        }
        let done = link.channel.finished();
        out.extend(done.map(|(token, result)| Completion::Done { link: id, token, result }));
        let served = link
            .post_flush_read()
            .and_then(|()| link.repost_imm_receives())
            .and_then(|()| link.send_frames(now));
        let holds = link.channel.holds_messages();
        if holds {
            self.awaiting_room.push(id);
        }
        match served {
            Ok(progressed) => progressed || out.len() > before,
            Err(e) => {
                self.failing.push((id, e));
                true
            }
        }
    }

    /// Sends heartbeats, detects silent peers, and advances handshakes and closing links.
    fn tick(&mut self, now: Time) {
        self.tick_attempts(now);
        self.tick_accepts(now);
        self.side_channel.tick(now, &self.epoll);
        let timeout = self.peer_timeout;
        let missed = self.attendance.missed(now, timeout);
        let ids: Vec<LinkId> = self.slots.iter().map(|(_, s)| s.id).collect();
        for id in ids {
            let Some(link) = self.link(id) else { continue };
            link.received_at = excuse(link.received_at, missed, now);
            if link.next_timer(timeout) > now {
                continue;
            }
            if let Some(b) = link.data_failure.as_ref().filter(|b| b.until <= now) {
                let cause = b.cause.clone();
                self.failing.push((id, cause));
            } else if now >= link.received_at.after(timeout) {
                let remote = link.remote.label();
                let here = self.device.label();
                let why = format!("from {here} to {remote}: nothing received for {timeout:?}");
                self.failing.push((id, DomainError::Gone(why)));
            } else if link.announced && now >= link.sent_at.after(timeout / 4) {
                link.channel.heartbeat();
                self.mark_dirty(id);
            }
        }
        let over = |f: &ClosingLink| f.frames == 0 || f.until <= now;
        for i in (0..self.closing.len()).rev() {
            if over(&self.closing[i]) {
                let gone = self.closing.swap_remove(i);
                self.cqs.release(gone.cq_slot);
            }
        }
        self.tick_at = self.timers().max(now.after(Duration::from_millis(1)));
    }

    fn timers(&self) -> Time {
        let slots = self.slots.iter().map(|(_, s)| match &s.state {
            LinkState::Up(link) => link.next_timer(self.peer_timeout),
            LinkState::Opening(attempt) => attempt.next_timer(),
            LinkState::Accepting(_) => Time::NEVER,
        });
        let accepts = self.accepts.values().map(|v| v.deadline);
        let closing = self.closing.iter().map(|f| f.until);
        let all = slots.chain(accepts).chain(closing).chain([self.side_channel.next_timer()]);
        all.fold(Time::NEVER, Time::min)
    }

    pub(super) fn next_deadline(&self) -> Time {
        self.tick_at.max(self.now)
    }

    /// Arms all descriptors; false if there is work to do first.
    pub(super) fn arm_events(&mut self) -> bool {
        self.poll_fds_at = Time(0);
        if !(self.completions.is_empty() && self.dirty.is_empty() && self.failing.is_empty()) {
            return false;
        }
        self.device.channel.drain();
        self.cqs.notify();
        self.datagrams.notify();
        // Completions between the last poll and now raise no event.
        let mut out = Vec::new();
        let missed = self.poll_completions(&mut out) | self.poll_datagrams();
        self.completions.append(&mut out);
        !missed && self.completions.is_empty() && self.dirty.is_empty() && self.failing.is_empty()
    }

    /// A close frame has been sent.
    pub(super) fn on_close_frame_sent(&mut self, id: LinkId) {
        if let Some(f) = self.closing.iter_mut().find(|f| f.id == id) {
            f.frames = f.frames.saturating_sub(1);
            if f.frames == 0 {
                self.tick_at = Time(0);
            }
        }
    }

    /// Closes a link: it can no longer access memory, all its work fails (RS-4), and the peer is
    /// notified.
    pub(super) fn close_link(&mut self, id: LinkId, cause: DomainError) {
        if self.slot(id).is_some_and(|s| matches!(s.state, LinkState::Opening(_))) {
            return self.drop_attempt(id, cause);
        }
        if self.link(id).is_none() {
            return;
        }
        let LinkState::Up(link) = self.slots.remove(Self::index(id)).state else { return };
        let mut link: Link = *link;
        // After the data queue pair is destroyed the NIC no longer uses it (MR-1).
        link.data = None;
        let refused = link.data_failure.take().and_then(|b| b.refused);
        for (token, result) in link.channel.finished() {
            self.completions.push(Completion::Done { link: id, token, result });
        }
        for token in link.abandon() {
            let why = match &refused {
                Some((t, why)) if *t == token => why.clone().unwrap_or_else(|| {
                    DomainError::Stale(format!(
                        "{cause}; the peer did not say why: the region may be deregistered, or its \
                         descriptor forged"
                    ))
                }),
                _ => cause.clone(),
            };
            self.completions.push(Completion::Done { link: id, token, result: Err(why) });
        }
        let announced = link.announced;
        // The queue pair is destroyed and all its completions were taken. Counts withheld for GPU
        // memory are in the number, hence `Unknown`.
        let receipt = match self.dead {
            Some(_) => Receipt::Unknown,
            None => Receipt::InOrder(link.counted),
        };
        if announced {
            self.completions.push(Completion::LinkDown {
                link: id,
                cause: cause.clone(),
                receipt,
                unfinished: Vec::new(),
            });
        } else {
            self.log.unproven(&link.peer.address.label(), &cause);
            let (peer, name) = (link.peer.clone(), link.name);
            self.completions.push(Completion::Unused { peer, name, receipt });
        }
        link.channel.close(matches!(cause, DomainError::Gone(_)), &cause.to_string());
        let _ = link.send_frames(self.now);
        let frames = link.frames_under_way();
        let Link { message_qp, slots, cq_slot, .. } = link;
        let until = self.now.after(CLOSE_TIMEOUT);
        let closing_link =
            ClosingLink { id, frames, until, cq_slot, _message_qp: message_qp, _slots: slots };
        self.closing.push(closing_link);
        self.tick_at = Time(0);
    }

    /// Closes a link after a failure; the error names the peer, the port and the cause.
    pub(super) fn fail_link(&mut self, id: LinkId, why: &str) {
        let here = self.device.label();
        let Some(link) = self.link(id) else { return };
        let cause = format!("from {here} to {}: {why}", link.remote.label());
        self.failing.push((id, DomainError::LinkDown(cause)));
    }

    /// Closes all links, and waits for their close frames.
    pub(super) fn close_all(&mut self) {
        self.side_channel.close();
        let ids: Vec<LinkId> = self.slots.iter().map(|(_, s)| s.id).collect();
        for id in ids {
            self.close_link(id, DomainError::Gone("its engine was closed".into()));
        }
        let start = Time::now();
        while self.closing.iter().any(|f| f.frames > 0) && Time::now().since(start) < CLOSE_TIMEOUT
        {
            self.poll_completions(&mut Vec::new());
            std::thread::yield_now();
        }
        self.closing.clear();
        self.accepts.clear();
    }
}

impl CompletionKind {
    /// Whether the completion shows that the peer's process runs. An acknowledgement by its NIC
    /// does not: the process may hang, or a forked child may hold the queue pairs.
    pub(super) fn proves_peer_alive(self) -> bool {
        matches!(self, Self::Imm | Self::FrameReceived)
    }
}
