//! What the completion queue tells, and what follows from it.

use std::time::{Duration, Instant};

use fabric_sys::libfabric::{flag, CqDataEntry};

use super::{
    grave,
    link::SEAL,
    ops::{InFlight, Use, NO_REGION},
    raw::{Failure, Polled},
    slots::SLOT,
    LibfabricDomain, Slot,
};
use crate::{
    api::Imm,
    domain::{Completion, Count, DomainError, LinkId, MessageRoom},
    time::Time,
    transport::nic::{
        frame::{self, Body, Header},
        mail::Heard,
    },
};

/// Entries read at once, and how often before the others have their turn.
const BATCH: usize = 64;
const ROUNDS: usize = 4;
/// How long an engine that closes waits for what is under way, and for its farewells to go out.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// How long nothing may happen before an endpoint is closed.
const SETTLED: Duration = Duration::from_millis(3);
/// How a farewell begins when nothing of its sender's is under way any more.
const CLEAN: &str = "nothing is under way: ";
/// What a peer answers that finds no fault in an access.
const BLAMELESS: &str = "";

/// Something that happened.
#[derive(Debug)]
pub(super) enum Event {
    Landed(u32),
    Failed(u32, String),
    /// A message in a receive slot.
    Received(u32, usize),
    /// A write that counts, and the receive slot that it used up, if it does.
    Counted(u32, Option<u32>),
    /// A receive slot is free again.
    Freed(u32),
}

impl LibfabricDomain {
    /// Reads the queue and acts on what it had.
    pub(super) fn poll_queue(&mut self) -> bool {
        let mut events = std::mem::take(&mut self.events);
        self.read_queue(&mut events);
        let shuffled = self.shuffle.as_mut().map(|s| {
            s.pass(&mut events);
            !s.is_empty()
        });
        let moved = !events.is_empty();
        for event in events.drain(..) {
            self.act(event);
        }
        self.events = events;
        moved || shuffled == Some(true)
    }

    fn read_queue(&mut self, events: &mut Vec<Event>) {
        let blank = CqDataEntry {
            op_context: std::ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
        };
        let mut entries = [blank; BATCH];
        for _ in 0..ROUNDS {
            let Some(nic) = &self.nic else { return };
            match nic.poll(&mut entries) {
                Ok(Polled::Nothing) => return,
                Ok(Polled::Entries(n)) => {
                    events.extend(entries[..n].iter().filter_map(|e| self.understand(e)));
                    if n < BATCH {
                        return;
                    }
                }
                Ok(Polled::Failed(failure)) => events.extend(self.understand_failure(&failure)),
                Err(e) => {
                    tracing::error!(nic = %self.offer.domain, error = %e, "completions can't be read");
                    return;
                }
            }
        }
    }

    fn understand(&self, e: &CqDataEntry) -> Option<Event> {
        let context = self.table.contexts.index(e.op_context);
        // No message of ours carries data: it is always a write's. Providers differ in what else
        // they say of it.
        if e.flags & flag::REMOTE_CQ_DATA != 0 {
            let slot = context.filter(|c| *c < self.table.receives);
            return Some(Event::Counted(e.data as u32, slot));
        }
        let context = context?;
        Some(match context < self.table.receives {
            true => Event::Received(context, e.len),
            false => Event::Landed(context),
        })
    }

    fn understand_failure(&self, failure: &Failure) -> Option<Event> {
        let context = self.table.contexts.index(failure.context);
        tracing::debug!(nic = %self.offer.domain, words = %failure.words, ?context, "an operation failed");
        let context = context?;
        Some(match context < self.table.receives {
            true => Event::Freed(context),
            false => Event::Failed(context, failure.words.clone()),
        })
    }

    fn act(&mut self, event: Event) {
        match event {
            Event::Counted(data, slot) => {
                let (imm, n) = Imm::unweighted(data);
                self.news.push(Completion::Count(Count { imm, n }));
                self.unposted.extend(slot);
            }
            Event::Received(slot, len) => {
                self.heard(slot, len);
                self.unposted.push(slot);
            }
            Event::Freed(slot) => self.unposted.push(slot),
            Event::Landed(context) => {
                let flight = self.table.land(context);
                self.unused(flight.region);
                if let Use::Op(op) = flight.what {
                    let id = self.table.ops.get(op as usize).map(|o| o.link);
                    let now = self.now;
                    // Delivered: there is somebody.
                    if let Some(link) = id.and_then(|id| self.link(id)) {
                        link.heard_at = now;
                    }
                    self.pieces_over(op, 1, None);
                }
            }
            Event::Failed(context, words) => self.failed(context, words),
        }
    }

    fn failed(&mut self, context: u32, words: String) {
        if let Use::Frame(id) = self.table.what(context) {
            if self.link(id).is_some() {
                let flight = self.table.keep(context);
                if let Some(link) = self.link(id) {
                    link.failed.push((context, flight.len as usize));
                    link.trouble = Some(words);
                }
                return;
            }
        }
        let flight = self.table.land(context);
        self.unused(flight.region);
        match flight.what {
            Use::Op(op) => self.pieces_over(op, 1, Some(DomainError::LinkDown(words))),
            Use::Letter => self.undelivered(flight.address, &words),
            Use::Frame(_) | Use::Orphan | Use::Free => {}
        }
    }

    /// An operation that the provider failed: the peer is asked why its NIC refused it. If it knows
    /// of no reason, the connection is at fault.
    pub(super) fn explain_failure(&mut self, op: u32) {
        let Some(o) = self.table.ops.get(op as usize) else { return };
        let (id, error) = (o.link, o.error.clone());
        if o.access.is_none() {
            let cause = error.unwrap_or_else(super::closed);
            return self.take_down(id, cause, false);
        }
        if let Some(link) = self.link(id) {
            link.asking.ops.push_back(op);
        }
        self.ask_next(id);
    }

    pub(super) fn ask_next(&mut self, id: LinkId) {
        let Some(link) = self.link(id).filter(|l| !l.asking.asked) else { return };
        let Some(op) = link.asking.ops.front().copied() else { return };
        let Some((key, offset, len)) = self.table.ops.get(op as usize).and_then(|o| o.access)
        else {
            return;
        };
        // Asked before an access, for all up to its end: later ones will lie within that.
        let first = self.parked.contains_key(&op);
        let (offset, len) = if first { (0, offset.saturating_add(len)) } else { (offset, len) };
        if let Some(link) = self.link(id) {
            (link.asking.asked, link.asking.outdated) = (true, false);
            link.mail.ask(key, offset, len);
        }
        self.pump(id);
    }

    fn judged(&mut self, id: LinkId, verdict: DomainError) {
        let Some(link) = self.link(id) else { return };
        if !std::mem::take(&mut link.asking.asked) {
            return;
        }
        let Some(op) = link.asking.ops.pop_front() else { return };
        let blameless = verdict == DomainError::Refused(BLAMELESS.into());
        if blameless && self.parked.contains_key(&op) {
            let access = self.table.ops.get(op as usize).and_then(|o| o.access);
            if let (Some((key, offset, len)), Some(link)) = (access, self.link(id)) {
                if !link.asking.outdated {
                    let limit = link.asking.vouched.entry(key).or_default();
                    *limit = (*limit).max(offset.saturating_add(len));
                }
            }
            self.launch_parked(op);
            return self.ask_next(id);
        }
        self.parked.remove(&op);
        if blameless {
            let error = self.table.ops.get(op as usize).and_then(|o| o.error.clone());
            return self.take_down(id, error.unwrap_or_else(super::closed), true);
        }
        self.op_over(op, Err(verdict));
        self.ask_next(id);
    }

    pub(super) fn op_over(&mut self, op: u32, result: Result<(), DomainError>) {
        let Some(op) = self.table.ops.try_remove(op as usize) else { return };
        if let Some(link) = self.link(op.link) {
            link.bytes -= op.bytes;
            link.imms -= op.imms;
        }
        if op.fenced {
            self.answer_fence(op.link);
        }
        self.news.push(Completion::Done { link: op.link, token: op.token, result });
    }

    /// A message in a receive slot: a frame of a link, or a piece of a stranger's letter.
    fn heard(&mut self, slot: u32, len: usize) {
        let mut frame = std::mem::take(&mut self.frame);
        frame.clear();
        frame.extend_from_slice(self.rx.bytes(slot as usize, len));
        if let Some((seal, bytes)) = frame.split_first_chunk::<SEAL>() {
            match frame::decode(bytes) {
                Ok((_, Body::Piece(piece))) => self.hear_piece(&piece),
                Ok((header, _)) => self.hear_frame(*seal, &header, bytes),
                // Whoever sent it, it was no peer: those are known by what their frames say.
                Err(_) => {}
            }
        }
        self.frame = frame;
    }

    fn hear_frame(&mut self, seal: [u8; SEAL], header: &Header, bytes: &[u8]) {
        let (id, now) = (header.link, self.now);
        let [s @ .., n0, n1, n2, n3] = seal;
        let (seal, number) = (u64::from_le_bytes(s), u32::from_le_bytes([n0, n1, n2, n3]));
        let Some(link) = self.link(id).filter(|l| l.seal_in == seal) else { return };
        link.heard_at = now;
        match link.seen.is_new(number) {
            Some(true) => {}
            Some(false) => return,
            None => {
                let why = "a frame that came too late to tell whether it is new";
                return self.take_down(id, DomainError::LinkDown(why.into()), true);
            }
        }
        link.mail.slot_freed();
        let first = !std::mem::replace(&mut link.confirmed, true);
        let heard = link.mail.hear(bytes);
        if first {
            self.report_up(id);
        }
        match heard {
            Ok(Heard::Nothing) => {}
            Ok(Heard::Ask { key, offset, len }) => {
                let verdict = self.regions.verdict(key, offset, len);
                let why = verdict.err().unwrap_or(DomainError::Refused(BLAMELESS.into()));
                if let Some(link) = self.link(id) {
                    link.mail.answer(&why);
                }
            }
            Ok(Heard::Verdict(verdict)) => self.judged(id, verdict),
            Ok(Heard::Fence(number)) => self.fence_asked(id, number),
            Ok(Heard::Fenced(number)) => {
                let Some(link) = self.link(id) else { return };
                let fences = &mut link.fences;
                if number != fences.sent || fences.done == number {
                    return;
                }
                fences.done = number;
                let (losses, peer) = (fences.losses, link.peer.id());
                self.regions.vouched_for(peer, losses);
                self.send_fence(id);
                self.fences_passed(id, number);
            }
            Ok(Heard::Bye(reason)) => {
                let (clean, reason) = match reason.strip_prefix(CLEAN) {
                    Some(rest) => (true, rest.to_owned()),
                    None => (false, reason),
                };
                self.remove_link(id, DomainError::LinkDown(reason), clean);
            }
            Err(e) => self.take_down(id, e, true),
        }
        self.report_messages(id);
        self.pump(id);
    }

    /// The peer wants to know when nothing that we began until now is under way (MR-1).
    fn fence_asked(&mut self, id: LinkId, number: u32) {
        for (_, op) in self.table.ops.iter_mut().filter(|(_, o)| o.link == id) {
            op.fenced = true;
        }
        if let Some(link) = self.link(id) {
            link.fences.due = Some(number);
            link.asking.vouched.clear();
            link.asking.outdated = true;
        }
        self.answer_fence(id);
    }

    /// Answers a fence if nothing from before is under way, not even what lost its link.
    fn answer_fence(&mut self, id: LinkId) {
        let Some((number, address)) = self.link(id).and_then(|l| Some((l.fences.due?, l.address)))
        else {
            return;
        };
        let open = self.table.ops.iter().any(|(_, o)| o.link == id && o.fenced);
        if open || self.table.has_orphans(address) {
            return;
        }
        if let Some(link) = self.link(id) {
            link.fences.due = None;
            link.mail.fenced(number);
        }
    }

    /// What became of messages of ours.
    fn report_messages(&mut self, id: LinkId) {
        let Some(Slot::Up(link)) = self.links.get_mut(Self::slot(id)) else { return };
        let done = link.mail.finished();
        self.news.extend(done.map(|(token, result)| Completion::Done { link: id, token, result }));
    }

    /// Messages that are whole go up as far as there is room.
    pub(super) fn hand_up_messages(
        &mut self,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> bool {
        // A link's first news are that it is up.
        out.append(&mut self.news);
        let before = out.len();
        for (_, slot) in &mut self.links {
            let Slot::Up(link) = slot else { continue };
            if !link.mail.holds_messages() {
                continue;
            }
            // One each time: there is less room once it is taken.
            if let Some(message) = link.mail.take_message(room) {
                out.push(Completion::Message { link: link.id, message });
                break;
            }
        }
        out.len() > before
    }

    /// Sends what waits: frames, letters, pieces, receive slots.
    pub(super) fn push_on(&mut self) -> bool {
        let mut moved = false;
        if !self.unposted.is_empty() {
            if let Err(e) = self.post_receives() {
                tracing::error!(nic = %self.offer.domain, error = %e, "receive slots can't be posted");
            }
        }
        for i in 0..self.links.capacity() {
            let Some(Slot::Up(link)) = self.links.get(i) else { continue };
            if !link.pending.is_empty() || link.mail.has_frame() {
                let id = link.id;
                moved |= self.pump(id);
            }
        }
        if !self.outbox.is_empty() {
            moved |= self.send_letters();
        }
        if !self.stalled.is_empty() {
            moved |= self.push_stalled();
        }
        moved
    }

    /// Gives free receive slots to the library.
    pub(super) fn post_receives(&mut self) -> Result<(), DomainError> {
        let Some(nic) = &self.nic else { return Ok(()) };
        while let Some(slot) = self.unposted.pop() {
            let (addr, desc) = (self.rx.addr(slot as usize), self.rx.desc());
            let context = self.table.contexts.at(slot);
            // SAFETY: the slot is ours until it is posted, and nobody reads it until its completion.
            let posted = unsafe { nic.receive(addr, SLOT, desc, context) };
            if !matches!(posted, Ok(true)) {
                self.unposted.push(slot);
                return posted.map(drop);
            }
        }
        Ok(())
    }

    /// Sends a link's frames as far as slots and the provider allow.
    pub(super) fn pump(&mut self, id: LinkId) -> bool {
        let mut moved = false;
        loop {
            let Some(Slot::Up(link)) = self.links.get_mut(Self::slot(id)) else { return moved };
            if link.id != id || !link.confirmed {
                return moved;
            }
            let (context, len) = match link.pending.pop_front() {
                Some(frame) => frame,
                None => {
                    if !link.mail.has_frame() {
                        return moved;
                    }
                    let Some(context) = self.table.take_slot() else { return moved };
                    let slot = self.tx.fill(self.table.slot_of(context));
                    slot[..8].copy_from_slice(&link.terms.seal.to_le_bytes());
                    slot[8..SEAL].copy_from_slice(&link.next_frame.to_le_bytes());
                    match link.mail.next_frame(&mut slot[SEAL..]) {
                        Some(n) => {
                            link.next_frame = link.next_frame.wrapping_add(1);
                            (context, SEAL + n)
                        }
                        None => {
                            self.table.give_back(context);
                            return moved;
                        }
                    }
                }
            };
            let address = link.address;
            match self.send_slot(context, len, address, Use::Frame(id)) {
                Ok(true) => moved = true,
                Ok(false) => {
                    if let Some(link) = self.link(id) {
                        link.pending.push_front((context, len));
                    }
                    return moved;
                }
                Err(e) => {
                    self.take_down(id, DomainError::LinkDown(e.to_string()), false);
                    return true;
                }
            }
            let now = self.now;
            if let Some(link) = self.link(id) {
                link.spoke_at = now;
            }
        }
    }

    /// Posts a filled transmit slot. Where that fails for good, the slot is free again.
    fn send_slot(
        &mut self,
        context: u32,
        len: usize,
        address: usize,
        what: Use,
    ) -> Result<bool, DomainError> {
        let nic = self.nic.as_ref().ok_or_else(super::closed)?;
        let bytes = self.tx.addr(self.table.slot_of(context));
        let (desc, scratch) = (self.tx.desc(), self.table.contexts.at(context));
        // SAFETY: the slot is this context's until it lands.
        let sent = unsafe { nic.send(self.addresses.addr(address), bytes, len, desc, scratch) };
        match sent {
            Ok(true) => {
                let flight = InFlight { what, region: NO_REGION, address, len: len as u32 };
                self.table.launch(context, flight);
            }
            Ok(false) => {}
            Err(_) => self.table.give_back(context),
        }
        sent
    }

    /// Sends pieces of letters; the provider may still be connecting.
    pub(super) fn send_letters(&mut self) -> bool {
        let mut moved = false;
        // Each once: one address that doesn't answer must not hold up the others.
        for _ in 0..self.outbox.len() {
            let Some((address, piece)) = self.outbox.pop_front() else { break };
            let Some(context) = self.table.take_slot() else {
                self.outbox.push_front((address, piece));
                break;
            };
            let slot = self.tx.fill(self.table.slot_of(context));
            slot[..SEAL].fill(0);
            slot[SEAL..SEAL + piece.len()].copy_from_slice(&piece);
            match self.send_slot(context, SEAL + piece.len(), address, Use::Letter) {
                Ok(true) => {
                    moved = true;
                    self.addresses.release(address);
                }
                Ok(false) => {
                    self.table.give_back(context);
                    // If nobody waits for an answer any more, it is not worth sending.
                    match self.has_setup(address) {
                        true => self.outbox.push_back((address, piece)),
                        false => self.addresses.release(address),
                    }
                }
                Err(e) => {
                    self.undelivered(address, &e.to_string());
                    self.addresses.release(address);
                }
            }
        }
        moved
    }

    /// Shows life on quiet links, and gives up on those that show none (RS-4).
    pub(super) fn tick(&mut self, now: Time) -> bool {
        let mut moved = self.tick_setups(now);
        for id in self.link_ids() {
            let timeout = self.peer_timeout;
            let Some(link) = self.link(id) else { continue };
            let again = std::mem::take(&mut link.failed);
            link.pending.extend(again);
            if now >= link.heard_at.after(timeout) {
                let cause = link.silence(timeout);
                self.take_down(id, cause, false);
                moved = true;
                continue;
            }
            if link.fences.due.is_some() {
                self.answer_fence(id);
            }
            let Some(link) = self.link(id) else { continue };
            if now >= link.spoke_at.after(timeout / 4) {
                link.mail.beat();
                link.spoke_at = now;
                moved |= self.pump(id);
            }
        }
        if let Some(nic) = &self.nic {
            self.addresses.sweep(nic, &self.table);
        }
        moved
    }

    pub(super) fn take_down(&mut self, id: LinkId, cause: DomainError, tell: bool) {
        if self.link(id).is_none() {
            return;
        }
        if tell {
            let busy = self.table.ops.iter().any(|(_, o)| o.link == id);
            let clean = if busy { "" } else { CLEAN };
            if let Some(link) = self.link(id) {
                link.mail.bye(&format!("{clean}{cause}"));
            }
            self.pump(id);
        }
        self.remove_link(id, cause, false);
    }

    /// A link is over. `clean`: nothing of the peer's is under way any more.
    fn remove_link(&mut self, id: LinkId, cause: DomainError, clean: bool) {
        let slot = Self::slot(id);
        if self.link(id).is_none() {
            return;
        }
        let Slot::Up(mut link) = self.links.remove(slot) else { return };
        for (context, _) in link.pending.drain(..).chain(link.failed.drain(..)) {
            self.table.give_back(context);
        }
        if !clean {
            self.regions.lost_peer(link.peer.id());
        }
        // Before the operations are gone: what the library still holds of them is nobody's now, but
        // it keeps its memory (MR-1).
        let ops = &self.table.ops;
        let mine: Vec<u32> =
            ops.iter().filter(|(_, o)| o.link == id).map(|(i, _)| i as u32).collect();
        for flight in self.table.flights() {
            match flight.what {
                Use::Op(op) if mine.contains(&op) => flight.what = Use::Orphan,
                Use::Frame(of) if of == id => flight.what = Use::Orphan,
                _ => {}
            }
        }
        self.drop_stalled(id);
        for op in mine {
            let Some(op) = self.table.ops.try_remove(op as usize) else { continue };
            let result = Err(cause.clone());
            self.news.push(Completion::Done { link: id, token: op.token, result });
        }
        for token in link.mail.abandon() {
            let result = Err(cause.clone());
            self.news.push(Completion::Done { link: id, token, result });
        }
        self.addresses.release(link.address);
        self.news.push(Completion::LinkDown { link: id, cause });
        self.fences_passed(id, u32::MAX);
    }

    /// Ends everything: the endpoint is closed, so that nothing touches memory any more (MR-1).
    pub(super) fn shut_down(&mut self) {
        if self.nic.is_none() {
            return;
        }
        self.wait_for(|this| this.table.ops.is_empty());
        // Farewells that came meanwhile need no answer.
        self.poll_queue();
        for id in self.link_ids() {
            self.take_down(id, super::closed(), true);
        }
        self.wait_for(|this| !this.table.is_busy());
        self.settle();
        self.setups.clear();
        let Some(nic) = self.nic.take() else { return };
        let slots = [&mut self.rx, &mut self.tx, &mut self.scratch].map(|s| s.take());
        grave::bury(nic, slots);
        for index in self.regions.clear() {
            self.news.push(Completion::RegionQuiet { index });
        }
    }

    /// Lets what peers have sent come in, and the provider's answers to it go out: some providers
    /// don't survive being closed in the middle of that.
    fn settle(&mut self) {
        let mut quiet_since = Instant::now();
        while quiet_since.elapsed() < SETTLED {
            if self.poll_queue() | self.push_on() {
                quiet_since = Instant::now();
            }
            std::thread::yield_now();
        }
    }

    fn wait_for(&mut self, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) && start.elapsed() < LAST_WORDS {
            self.poll_queue();
            self.push_on();
            std::thread::yield_now();
        }
    }
}
