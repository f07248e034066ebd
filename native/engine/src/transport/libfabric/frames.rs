//! Frames and letters: what comes in receive slots, and what goes out from transmit slots.

use super::{
    delivery::{Seen, CONFIRM},
    doubt::BLAMELESS,
    ending::CLEAN,
    link::{Filled, SEAL},
    ops::{InFlight, Use, NO_REGION},
    shuffle::Shuffle,
    slots::SLOT,
    LibfabricDomain, Slot,
};
use crate::{
    domain::{Completion, DomainError, LinkId},
    time::Time,
    transport::nic::{
        frame::{self, Body, Header},
        message_channel::FrameEvent,
    },
};

impl LibfabricDomain {
    /// A message in a receive slot: a frame of a link, or a piece of a stranger's letter.
    pub(super) fn heard(&mut self, slot: u32, len: usize) {
        let mut frame = std::mem::take(&mut self.frame);
        frame.clear();
        frame.extend_from_slice(self.rx.bytes(slot as usize, len));
        if let Some((seal, bytes)) = frame.split_first_chunk::<SEAL>() {
            match frame::decode(bytes) {
                Ok((_, Body::HandshakeFragment(piece))) => self.hear_piece(&piece),
                Ok((header, body)) => self.hear_frame(*seal, &header, &body, bytes),
                // Whoever sent it, it was no peer: those are known by what their frames say.
                Err(_) => {}
            }
        }
        self.frame = frame;
    }

    fn hear_frame(&mut self, seal: [u8; SEAL], header: &Header, body: &Body<'_>, bytes: &[u8]) {
        let (id, now) = (header.link, self.now);
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, confirms @ ..] = seal;
        let seal = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let number = u32::from_le_bytes([n0, n1, n2, n3]);
        // Nobody would say good-bye again.
        let may_lose = !matches!(body, Body::Close { .. });
        let lost = may_lose && self.shuffle.as_mut().is_some_and(Shuffle::loses);
        let Some(link) = self.link(id).filter(|l| l.seal_in == seal && !lost) else { return };
        link.heard_at = now;
        link.sent.confirmed(now, &Seen::decode(confirms));
        match link.seen.take(number) {
            Some(true) => {}
            Some(false) => {
                // The peer hasn't been told yet, or what told it was lost.
                link.confirm_at = now;
                link.sent.hasten(now);
                return;
            }
            None => {
                let why = "a frame whose number is further ahead than the peer may be";
                return self.take_down(id, DomainError::LinkDown(why.into()), true);
            }
        }
        if !matches!(body, Body::Heartbeat) {
            link.confirm_at = link.confirm_at.min(now.after(CONFIRM));
        }
        link.channel.slot_freed();
        let first = !std::mem::replace(&mut link.confirmed, true);
        let heard = link.channel.on_frame(bytes);
        if first {
            self.report_up(id);
        }
        match heard {
            Ok(FrameEvent::Handled) => {}
            Ok(FrameEvent::AccessQuery { key, offset, len }) => {
                let Some(peer) = self.link(id).map(|l| l.peer.id()) else { return };
                let verdict = self.regions.verdict(peer, key, (offset, len));
                let why = verdict.err().unwrap_or(DomainError::Refused(BLAMELESS.into()));
                if let Some(link) = self.link(id) {
                    link.channel.answer_access(&why);
                }
            }
            Ok(FrameEvent::AccessAnswer(verdict)) => self.judged(id, verdict),
            Ok(FrameEvent::Fence(number)) => self.fence_asked(id, number),
            Ok(FrameEvent::Fenced(number)) => {
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
                self.laid_to_rest();
            }
            Ok(FrameEvent::Note(_)) => {}
            Ok(FrameEvent::Close { reason, .. }) => {
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

    /// What became of messages of ours.
    fn report_messages(&mut self, id: LinkId) {
        let Some(Slot::Up(link)) = self.links.get_mut(Self::slot(id)) else { return };
        let done = link.channel.finished();
        self.news.extend(done.map(|(token, result)| Completion::Done { link: id, token, result }));
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
            if !link.pending.is_empty()
                || link.sent.next_due() <= self.now
                || (link.channel.has_frame() && link.sent.has_room())
            {
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
        while let Some(frame) = self.next_frame(id) {
            let Filled { context, number, len } = frame;
            let Some(Slot::Up(link)) = self.links.get(Self::slot(id)) else { return moved };
            link.seal(number, self.tx.fill(self.table.slot_of(context)));
            let address = link.address;
            match self.send_slot(context, len, address, Use::Frame(id, number)) {
                Ok(true) => moved = true,
                Ok(false) => {
                    if let Some(link) = self.link(id) {
                        link.pending.push_front(frame);
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
                (link.spoke_at, link.confirm_at) = (now, Time::NEVER);
            }
        }
        moved
    }

    /// The frame to send next, in a slot: one that the provider had no room for, one that is sent
    /// again, or a new one.
    fn next_frame(&mut self, id: LinkId) -> Option<Filled> {
        let Some(Slot::Up(link)) = self.links.get_mut(Self::slot(id)) else { return None };
        if link.id != id || !link.confirmed {
            return None;
        }
        if let Some(frame) = link.pending.pop_front() {
            return Some(frame);
        }
        let is_new = link.sent.has_room() && link.channel.has_frame();
        let waits = is_new || link.sent.next_due() <= self.now;
        if !waits || link.frames >= self.table.slot_share() {
            return None;
        }
        let context = self.table.take_slot()?;
        let out = &mut self.tx.fill(self.table.slot_of(context))[SEAL..];
        let again = link.sent.again(self.now, out);
        let filled = again.or_else(|| {
            let n = if is_new { link.channel.next_frame(out) } else { None }?;
            Some((link.sent.enter(&out[..n]), n))
        });
        let Some((number, n)) = filled else {
            self.table.give_back(context);
            return None;
        };
        link.frames += 1;
        Some(Filled { context, number, len: SEAL + n })
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
            // Some slots stay free for links: those of letters may wait long for an answer.
            let context = match self.table.letters() < self.table.slots as usize / 2 {
                true => self.table.take_slot(),
                false => None,
            };
            let Some(context) = context else {
                self.outbox.push_front((address, piece));
                break;
            };
            let slot = self.tx.fill(self.table.slot_of(context));
            slot[..SEAL].fill(0);
            slot[SEAL..SEAL + piece.len()].copy_from_slice(&piece);
            match self.send_slot(context, SEAL + piece.len(), address, Use::HandshakeMessage) {
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
}
