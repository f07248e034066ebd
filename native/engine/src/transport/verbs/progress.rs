//! What a poll does: completions, frames, device events, timers, closing of links.

use std::time::Duration;

use fabric_sys::ibverbs as sys;
use rustix::event::{epoll, Timespec};

use super::{
    link::Link, memory::Slots, raw::Qp, shake::Outcome, shake::Who, shelves::Seat, Kind, State,
    VerbsDomain, BELL, COMPLETIONS, EVENTS, LISTENER,
};
use crate::{
    domain::{Completion, DomainError, LinkId, MessageRoom, Receipt},
    time::Time,
    transport::nic::frame::{self, Body},
};

/// How often a polling thread asks the kernel about sockets and events.
const LOOK_EVERY: Duration = Duration::from_micros(100);
/// Time for the close frame of a link.
const FAREWELL: Duration = Duration::from_millis(200);
/// Completions of one queue per poll, so that one queue does not starve the others.
const BATCH: usize = 32;
const BATCHES: usize = 16;

/// The message queue pair of a closed link, until its close frame is sent.
pub(super) struct Farewell {
    id: LinkId,
    frames: usize,
    until: Time,
    seat: Seat,
    // Dropped before the memory.
    _mail: Qp,
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
        out.append(&mut self.news);
        let before = out.len();
        let mut moved = before > 0;
        moved |= self.drain(out);
        moved |= self.hear_datagrams();
        if now >= self.look_at {
            self.look_at = now.after(LOOK_EVERY);
            moved |= self.look();
        }
        if now >= self.tick_at {
            self.tick(now);
        }
        for id in std::mem::take(&mut self.holding) {
            self.touch(id);
        }
        // Report a link as up before its first message.
        out.append(&mut self.news);
        let dirty = std::mem::take(&mut self.dirty);
        for id in &dirty {
            moved |= self.serve(*id, room, out);
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
            while self.drain(out) {}
            for (id, cause) in std::mem::take(&mut self.failing) {
                self.take_down(id, cause, true);
            }
            moved = true;
        }
        out.append(&mut self.news);
        moved || out.len() > before
    }

    /// Takes completions of all queues.
    fn drain(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut moved = false;
        let before = out.len();
        let mut wcs = [sys::Wc::default(); BATCH];
        for shelf in 0..self.shelves.len() {
            for _ in 0..BATCHES {
                let n = self.shelves.poll(shelf, &mut wcs);
                for wc in &wcs[..n] {
                    self.completed(wc, out);
                }
                moved |= n > 0;
                if n < BATCH {
                    break;
                }
            }
        }
        if self.regions.has_gpus() {
            self.flush_gpus(out, before);
        }
        moved
    }

    /// IC-2 for GPU memory: the NIC's completion does not mean that the GPU sees bytes that a peer
    /// wrote or that a read returned. If the flush fails, counts are withheld, operations fail, and
    /// the device is unusable.
    fn flush_gpus(&mut self, out: &mut Vec<Completion>, from: usize) {
        let tells = |c: &Completion| {
            matches!(c, Completion::Count(_) | Completion::Done { result: Ok(()), .. })
        };
        if !out[from..].iter().any(tells) {
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
            self.everything_failed(&why);
        }
    }

    fn hear_datagrams(&mut self) -> bool {
        let mut frames: Vec<Vec<u8>> = Vec::new();
        let moved = self.datagrams.poll(|f| frames.push(f.to_vec()));
        for f in frames {
            self.hear_handshake(None, &f);
        }
        moved
    }

    fn hear_handshake(&mut self, side: Option<usize>, frame: &[u8]) {
        let Ok((_, Body::HandshakeFragment(piece))) = frame::decode(frame) else { return };
        match piece.to_initiator {
            true => {
                if let Some(id) = self.attempts.get(&piece.exchange).copied() {
                    self.answered(id, &piece);
                }
            }
            false => self.visited(side, &piece),
        }
        self.tick_at = Time(0);
    }

    /// Asks the kernel which descriptors are ready, without waiting.
    fn look(&mut self) -> bool {
        let blank =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [blank; 32];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let n = epoll::wait(&self.epoll, &mut events[..], Some(&zero)).unwrap_or(0);
        let mut moved = false;
        for event in &events[..n] {
            match event.data.u64() {
                // Completions are polled anyway; the descriptor is drained before sleeping.
                COMPLETIONS => continue,
                EVENTS => self.device_events(),
                BELL => self.outcomes(),
                tag if tag & LISTENER != 0 => {
                    self.side.accept(self.now, (tag & !LISTENER) as usize, &self.epoll);
                }
                key => {
                    for f in self.side.ready(key as usize, &self.epoll) {
                        self.hear_handshake(Some(key as usize), &f);
                    }
                }
            }
            moved = true;
        }
        moved
    }

    fn outcomes(&mut self) {
        self.helper.quiet();
        while let Some(outcome) = self.helper.next() {
            match outcome {
                Outcome::Reached(Who::Initiator(id), target) => self.reached(id, target),
                Outcome::Reached(Who::Acceptor(exchange), target) => {
                    self.way_back(exchange, target);
                }
                Outcome::Built(id, seat, pair) => self.built(id, seat, pair),
                Outcome::Joined(id, seat, made) => {
                    let accepting = self.slot(id).and_then(|s| match s.state {
                        State::Accepting(exchange) => Some(exchange),
                        _ => None,
                    });
                    match accepting {
                        Some(exchange) => self.joined_visit(id, exchange, seat, made),
                        None => self.joined(id, seat, made),
                    }
                }
                Outcome::Side(id, stream) => self.side_connected(id, stream),
                Outcome::Released(index, true) => {
                    self.news.push(Completion::RegionQuiet { index });
                }
                Outcome::Released(_, false) => {}
            }
        }
        self.tick_at = Time(0);
    }

    /// Advances a link that has work pending.
    fn serve(&mut self, id: LinkId, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        let now = self.now;
        let Some(link) = self.link(id) else { return false };
        link.dirty = false;
        let before = out.len();
        // One message per poll: the room is known again only after the message was taken.
        if !out.iter().any(|c| matches!(c, Completion::Message { .. })) {
            let message = link.channel.take_message(room);
            out.extend(message.map(|message| Completion::Message { link: id, message }));
        }
        let done = link.channel.finished();
        out.extend(done.map(|(token, result)| Completion::Done { link: id, token, result }));
        let served =
            link.settle_writes().and_then(|()| link.replace_imms()).and_then(|()| link.pump(now));
        let holds = link.channel.holds_messages();
        if holds {
            self.holding.push(id);
        }
        match served {
            Ok(moved) => moved || out.len() > before,
            Err(e) => {
                self.failing.push((id, e));
                true
            }
        }
    }

    /// Sends heartbeats, detects silent peers, and advances handshakes and closing links.
    fn tick(&mut self, now: Time) {
        self.tick_attempts(now);
        self.tick_visits(now);
        self.side.tick(now, &self.epoll);
        let timeout = self.peer_timeout;
        let ids: Vec<LinkId> = self.slots.iter().map(|(_, s)| s.id).collect();
        for id in ids {
            let Some(link) = self.link(id) else { continue };
            if link.next_timer(timeout) > now {
                continue;
            }
            if let Some(b) = link.broken.as_ref().filter(|b| b.until <= now) {
                let cause = b.cause.clone();
                self.failing.push((id, cause));
            } else if now >= link.heard_at.after(timeout) {
                let there = link.there.words();
                let here = self.device.words();
                let why = format!("from {here} to {there}: no frame for {timeout:?}");
                self.failing.push((id, DomainError::Gone(why)));
            } else if link.announced && now >= link.spoke_at.after(timeout / 4) {
                link.channel.heartbeat();
                self.touch(id);
            }
        }
        let over = |f: &Farewell| f.frames == 0 || f.until <= now;
        for i in (0..self.farewells.len()).rev() {
            if over(&self.farewells[i]) {
                let gone = self.farewells.swap_remove(i);
                self.shelves.leave(gone.seat);
            }
        }
        self.tick_at = self.timers().max(now.after(Duration::from_millis(1)));
    }

    fn timers(&self) -> Time {
        let slots = self.slots.iter().map(|(_, s)| match &s.state {
            State::Up(link) => link.next_timer(self.peer_timeout),
            State::Opening(attempt) => attempt.next_timer(),
            State::Accepting(_) => Time::NEVER,
        });
        let visits = self.visits.values().map(|v| v.deadline);
        let farewells = self.farewells.iter().map(|f| f.until);
        let all = slots.chain(visits).chain(farewells).chain([self.side.next_timer()]);
        all.fold(Time::NEVER, Time::min)
    }

    pub(super) fn earliest(&self) -> Time {
        self.tick_at.max(self.now)
    }

    /// Arms all descriptors; false if there is work to do first.
    pub(super) fn get_ready_to_sleep(&mut self) -> bool {
        self.look_at = Time(0);
        if !(self.news.is_empty() && self.dirty.is_empty() && self.failing.is_empty()) {
            return false;
        }
        self.device.channel.drain();
        self.shelves.notify();
        self.datagrams.notify();
        // Completions between the last poll and now raise no event.
        let mut out = Vec::new();
        let missed = self.drain(&mut out) | self.hear_datagrams();
        self.news.append(&mut out);
        !missed && self.news.is_empty() && self.dirty.is_empty() && self.failing.is_empty()
    }

    /// A close frame has been sent.
    pub(super) fn farewell_sent(&mut self, id: LinkId) {
        if let Some(f) = self.farewells.iter_mut().find(|f| f.id == id) {
            f.frames = f.frames.saturating_sub(1);
            if f.frames == 0 {
                self.tick_at = Time(0);
            }
        }
    }

    /// Closes a link: nothing can touch memory on its behalf any more, all its work fails (RS-4),
    /// and the peer is told.
    pub(super) fn take_down(&mut self, id: LinkId, cause: DomainError, tell: bool) {
        if self.slot(id).is_some_and(|s| matches!(s.state, State::Opening(_))) {
            return self.give_up(id, cause);
        }
        if self.link(id).is_none() {
            return;
        }
        let State::Up(link) = self.slots.remove(Self::index(id)).state else { return };
        let mut link: Link = *link;
        // After the data queue pair is destroyed the NIC no longer uses it (MR-1).
        link.data = None;
        let refused = link.broken.take().and_then(|b| b.refused);
        for (token, result) in link.channel.finished() {
            self.news.push(Completion::Done { link: id, token, result });
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
            self.news.push(Completion::Done { link: id, token, result: Err(why) });
        }
        let announced = link.announced;
        // The queue pair is destroyed and all its completions were taken. Counts withheld for GPU
        // memory are in the number, hence `Unknown`.
        let receipt = match self.dead {
            Some(_) => Receipt::Unknown,
            None => Receipt::InOrder(link.counted),
        };
        if announced {
            self.news.push(Completion::LinkDown {
                link: id,
                cause: cause.clone(),
                receipt,
                unfinished: Vec::new(),
            });
        } else {
            self.log.unproven(&link.peer.address.label(), &cause);
            let (peer, name) = (link.peer.clone(), link.name);
            self.news.push(Completion::Unused { peer, name, receipt });
        }
        if tell {
            link.channel.close(matches!(cause, DomainError::Gone(_)), &cause.to_string());
            let _ = link.pump(self.now);
        }
        let frames = link.frames_under_way();
        let Link { message_qp, slots, seat, .. } = link;
        let until = self.now.after(FAREWELL);
        let farewell = Farewell { id, frames, until, seat, _mail: message_qp, _slots: slots };
        self.farewells.push(farewell);
        self.tick_at = Time(0);
    }

    /// Closes a link after a failure; the error names the peer, the port and the cause.
    pub(super) fn fail(&mut self, id: LinkId, why: &str) {
        let here = self.device.words();
        let Some(link) = self.link(id) else { return };
        let cause = format!("from {here} to {}: {why}", link.there.words());
        self.failing.push((id, DomainError::LinkDown(cause)));
    }

    /// Closes all links, and waits for their close frames.
    pub(super) fn shut(&mut self) {
        self.side.close();
        let ids: Vec<LinkId> = self.slots.iter().map(|(_, s)| s.id).collect();
        for id in ids {
            self.take_down(id, DomainError::Gone("its engine was closed".into()), true);
        }
        let start = Time::now();
        while self.farewells.iter().any(|f| f.frames > 0) && Time::now().since(start) < FAREWELL {
            self.drain(&mut Vec::new());
            std::thread::yield_now();
        }
        self.farewells.clear();
        self.visits.clear();
    }
}

impl Kind {
    /// Whether the completion shows that the peer's process runs. An acknowledgement by its NIC
    /// does not: the process may hang, or a forked child may hold the queue pairs.
    pub(super) fn is_heard(self) -> bool {
        matches!(self, Self::Imm | Self::FrameReceived)
    }
}
