//! Frames and handshake fragments: receive slots and transmit slots.

use super::{
    access_check::NO_FAULT,
    delivery::{ReceivedFrames, CONFIRM_WITHIN},
    link::{FilledSlot, SEAL},
    ops::{ContextUse, InFlight, NO_REGION},
    shuffle::Shuffle,
    slots::SLOT,
    teardown::QUIESCED_PREFIX,
    LibfabricDomain, LinkEntry,
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
    /// Handles a message in a receive slot: a link's frame, or a handshake fragment.
    pub(super) fn on_message(&mut self, slot: u32, len: usize) {
        let mut frame = std::mem::take(&mut self.frame);
        frame.clear();
        frame.extend_from_slice(self.rx.bytes(slot as usize, len));
        if let Some((seal, bytes)) = frame.split_first_chunk::<SEAL>() {
            match frame::decode(bytes) {
                Ok((_, Body::HandshakeFragment(fragment))) => self.on_handshake_fragment(&fragment),
                Ok((header, body)) => self.on_frame(*seal, &header, &body, bytes),
                // Not from a peer: a peer's frames decode.
                Err(_) => {}
            }
        }
        self.frame = frame;
    }

    fn on_frame(&mut self, seal: [u8; SEAL], header: &Header, body: &Body<'_>, bytes: &[u8]) {
        let (id, now) = (header.link, self.now);
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, confirms @ ..] = seal;
        let seal = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let number = u32::from_le_bytes([n0, n1, n2, n3]);
        // A lost close is not repeated.
        let may_lose = !matches!(body, Body::Close { .. });
        let lost = may_lose && self.shuffle.as_mut().is_some_and(Shuffle::drops);
        let Some(link) = self.link(id).filter(|l| l.seal_in == seal && !lost) else { return };
        link.received_at = now;
        link.unconfirmed.on_confirmed(now, &ReceivedFrames::decode(confirms));
        match link.received.insert(number) {
            Some(true) => {}
            Some(false) => {
                // The peer has no confirmation yet, or it was lost.
                link.confirm_at = now;
                link.unconfirmed.expedite(now);
                return;
            }
            None => {
                let why = "a frame's number exceeds the window";
                return self.close_link(id, DomainError::LinkDown(why.into()), true);
            }
        }
        if !matches!(body, Body::Heartbeat) {
            link.confirm_at = link.confirm_at.min(now.after(CONFIRM_WITHIN));
        }
        link.channel.slot_freed();
        let first = !std::mem::replace(&mut link.confirmed, true);
        let heard = link.channel.on_frame(bytes);
        if first {
            self.report_link_up(id);
        }
        match heard {
            Ok(FrameEvent::Handled) => {}
            Ok(FrameEvent::AccessQuery { key, offset, len }) => {
                let Some(peer) = self.link(id).map(|l| l.peer.id()) else { return };
                let answer = self.regions.check_access(peer, key, (offset, len));
                let why = answer.err().unwrap_or(DomainError::Refused(NO_FAULT.into()));
                if let Some(link) = self.link(id) {
                    link.channel.answer_access(&why);
                }
            }
            Ok(FrameEvent::AccessAnswer(answer)) => self.on_access_answer(id, answer),
            Ok(FrameEvent::Fence(number)) => self.on_fence(id, number),
            Ok(FrameEvent::Fenced(number)) => {
                let Some(link) = self.link(id) else { return };
                let fences = &mut link.fences;
                if number != fences.sent || fences.answered == number {
                    return;
                }
                fences.answered = number;
                let (losses, peer) = (fences.losses, link.peer.id());
                self.regions.on_peer_quiesced(peer, losses);
                self.send_fence(id);
                self.on_fence_answered(id, number);
                self.release_quiesced();
            }
            Ok(FrameEvent::GroupFrame(_)) => {}
            Ok(FrameEvent::Close { reason, .. }) => {
                let (quiesced, reason) = match reason.strip_prefix(QUIESCED_PREFIX) {
                    Some(rest) => (true, rest.to_owned()),
                    None => (false, reason),
                };
                self.remove_link(id, DomainError::LinkDown(reason), quiesced);
            }
            Err(e) => self.close_link(id, e, true),
        }
        self.report_messages(id);
        self.send_frames(id);
    }

    /// Reports messages that have completed.
    fn report_messages(&mut self, id: LinkId) {
        let Some(LinkEntry::Up(link)) = self.links.get_mut(Self::slot(id)) else { return };
        let done = link.channel.finished();
        self.completions.extend(done.map(|(token, result)| Completion::Done {
            link: id,
            token,
            result,
        }));
    }

    /// Sends pending frames, handshake fragments, chunks, and receive slots.
    pub(super) fn send_pending(&mut self) -> bool {
        let mut progressed = false;
        if !self.unposted.is_empty() {
            if let Err(e) = self.post_receives() {
                tracing::error!(nic = %self.offer.domain, error = %e, "can't post receive slots");
            }
        }
        for i in 0..self.links.capacity() {
            let Some(LinkEntry::Up(link)) = self.links.get(i) else { continue };
            if !link.pending.is_empty()
                || link.unconfirmed.next_due() <= self.now
                || (link.channel.has_frame() && link.unconfirmed.has_room())
            {
                let id = link.id;
                progressed |= self.send_frames(id);
            }
        }
        if !self.outbox.is_empty() {
            progressed |= self.send_handshake_fragments();
        }
        if !self.partial_posts.is_empty() {
            progressed |= self.post_partials();
        }
        progressed
    }

    /// Posts free receive slots.
    pub(super) fn post_receives(&mut self) -> Result<(), DomainError> {
        let Some(nic) = &self.nic else { return Ok(()) };
        while let Some(slot) = self.unposted.pop() {
            let (addr, desc) = (self.rx.addr(slot as usize), self.rx.desc());
            let context = self.table.contexts.at(slot);
            // SAFETY: the slot is free until it is posted, and not read until its completion.
            let posted = unsafe { nic.receive(addr, SLOT, desc, context) };
            if !matches!(posted, Ok(true)) {
                self.unposted.push(slot);
                return posted.map(drop);
            }
        }
        Ok(())
    }

    /// Sends a link's frames while slots and the provider have room.
    pub(super) fn send_frames(&mut self, id: LinkId) -> bool {
        let mut progressed = false;
        while let Some(frame) = self.next_frame(id) {
            let FilledSlot { context, number, len } = frame;
            let Some(LinkEntry::Up(link)) = self.links.get(Self::slot(id)) else {
                return progressed;
            };
            link.seal(number, self.tx.fill(self.table.slot_of(context)));
            let address = link.address;
            match self.send_slot(context, len, address, ContextUse::Frame(id, number)) {
                Ok(true) => progressed = true,
                Ok(false) => {
                    if let Some(link) = self.link(id) {
                        link.pending.push_front(frame);
                    }
                    return progressed;
                }
                Err(e) => {
                    self.close_link(id, DomainError::LinkDown(e.to_string()), false);
                    return true;
                }
            }
            let now = self.now;
            if let Some(link) = self.link(id) {
                (link.sent_at, link.confirm_at) = (now, Time::NEVER);
            }
        }
        progressed
    }

    /// The next frame of a link, in a slot: one that the provider had no room for, a repetition, or
    /// a new one.
    fn next_frame(&mut self, id: LinkId) -> Option<FilledSlot> {
        let Some(LinkEntry::Up(link)) = self.links.get_mut(Self::slot(id)) else { return None };
        if link.id != id || !link.confirmed {
            return None;
        }
        if let Some(frame) = link.pending.pop_front() {
            return Some(frame);
        }
        let is_new = link.unconfirmed.has_room() && link.channel.has_frame();
        let waits = is_new || link.unconfirmed.next_due() <= self.now;
        if !waits || link.frames >= self.table.slot_share() {
            return None;
        }
        let context = self.table.take_slot()?;
        let out = &mut self.tx.fill(self.table.slot_of(context))[SEAL..];
        let again = link.unconfirmed.take_due(self.now, out);
        let filled = again.or_else(|| {
            let n = if is_new { link.channel.next_frame(out) } else { None }?;
            Some((link.unconfirmed.enter(&out[..n]), n))
        });
        let Some((number, n)) = filled else {
            self.table.give_back(context);
            return None;
        };
        link.frames += 1;
        Some(FilledSlot { context, number, len: SEAL + n })
    }

    /// Posts a filled transmit slot. After an error the slot is free again.
    fn send_slot(
        &mut self,
        context: u32,
        len: usize,
        address: usize,
        used_for: ContextUse,
    ) -> Result<bool, DomainError> {
        let nic = self.nic.as_ref().ok_or_else(super::closed)?;
        let bytes = self.tx.addr(self.table.slot_of(context));
        let (desc, scratch) = (self.tx.desc(), self.table.contexts.at(context));
        // SAFETY: the slot belongs to this context until it lands.
        let sent = unsafe { nic.send(self.addresses.addr(address), bytes, len, desc, scratch) };
        match sent {
            Ok(true) => {
                let (len, is_read) = (len as u32, false);
                let flight = InFlight { used_for, region: NO_REGION, address, len, is_read };
                self.table.launch(context, flight);
            }
            Ok(false) => {}
            Err(_) => self.table.give_back(context),
        }
        sent
    }

    /// Sends handshake fragments; the provider may still be connecting.
    pub(super) fn send_handshake_fragments(&mut self) -> bool {
        let mut progressed = false;
        // Each once: an address that does not answer must not delay the others.
        for _ in 0..self.outbox.len() {
            let Some((address, fragment)) = self.outbox.pop_front() else { break };
            // Half of the slots stay free for links, since handshakes may wait long for an answer.
            let context = match self.table.handshake_slots() < self.table.slots as usize / 2 {
                true => self.table.take_slot(),
                false => None,
            };
            let Some(context) = context else {
                self.outbox.push_front((address, fragment));
                break;
            };
            let slot = self.tx.fill(self.table.slot_of(context));
            slot[..SEAL].fill(0);
            slot[SEAL..SEAL + fragment.len()].copy_from_slice(&fragment);
            match self.send_slot(
                context,
                SEAL + fragment.len(),
                address,
                ContextUse::HandshakeFragment,
            ) {
                Ok(true) => {
                    progressed = true;
                    self.addresses.release(address);
                }
                Ok(false) => {
                    self.table.give_back(context);
                    // Without a handshake that waits for the answer it is not sent again.
                    match self.has_handshake(address) {
                        true => self.outbox.push_back((address, fragment)),
                        false => self.addresses.release(address),
                    }
                }
                Err(e) => {
                    self.on_undelivered(address, &e.to_string());
                    self.addresses.release(address);
                }
            }
        }
        progressed
    }
}
