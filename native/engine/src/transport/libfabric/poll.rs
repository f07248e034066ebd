//! What the completion queue tells, and what follows from it.

use fabric_sys::libfabric::{flag, CqDataEntry};

use super::{
    ops::{InFlight, Use},
    raw::{Failure, Polled},
    LibfabricDomain, Slot,
};
use crate::{
    api::Imm,
    domain::{Completion, Count, DomainError, MessageRoom},
};

/// Entries read at once, and how often before the others have their turn.
const BATCH: usize = 64;
const ROUNDS: usize = 4;

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

/// Whether what came with data is a write. No message of ours carries data; one that does comes from
/// a stranger, for sending takes no key, and must not count (IC-6). Providers differ in what they say
/// of a write.
fn counts(flags: u64, in_slot: bool, imms_take_slots: bool) -> bool {
    let sent = flags & (flag::MSG | flag::RECV) != 0;
    let written = flags & (flag::RMA | flag::REMOTE_WRITE) != 0;
    (written || !sent) && (imms_take_slots || !in_slot)
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
        self.flush_gpus(&mut events);
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
        if e.flags & flag::REMOTE_CQ_DATA != 0 {
            let slot = context.filter(|c| *c < self.table.receives);
            return match counts(e.flags, slot.is_some(), self.imms_take_slots()) {
                true => Some(Event::Counted(e.data as u32, slot)),
                false => slot.map(Event::Freed),
            };
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
                let flight = self.landed(context, true);
                if let Use::Op(op) = flight.what {
                    let id = self.table.ops.get(op as usize).map(|o| o.link);
                    let (now, by_software) = (self.now, !self.offer.is_rdma());
                    // Delivered by somebody's software: it is alive. A NIC's word says nothing.
                    if let Some(link) = id.filter(|_| by_software).and_then(|id| self.link(id)) {
                        link.heard_at = now;
                    }
                    self.pieces_over(op, 1, None);
                }
            }
            Event::Failed(context, words) => self.failed(context, words),
        }
    }

    /// A context is ours again, and so is what it took of its link's share. `well`: the provider says
    /// so.
    fn landed(&mut self, context: u32, well: bool) -> InFlight {
        let now = self.now;
        let flight = self.table.land(context);
        self.unused(flight.region);
        match flight.what {
            Use::Op(op) => {
                let id = self.table.ops.get(op as usize).map(|o| o.link);
                if let Some(link) = id.and_then(|id| self.link(id)) {
                    link.bytes -= u64::from(flight.len);
                    link.pieces -= 1;
                    if !well {
                        // What else was on its way may be lost with it.
                        link.sent.hasten(now);
                    }
                }
            }
            Use::Frame(id, number) => {
                if let Some(link) = self.link(id) {
                    link.frames -= 1;
                    link.sent.landed(now, number, well);
                }
            }
            Use::Orphan | Use::HandshakeMessage | Use::Free => {}
        }
        flight
    }

    fn failed(&mut self, context: u32, words: String) {
        let flight = self.landed(context, false);
        match flight.what {
            Use::Op(op) => self.pieces_over(op, 1, Some(DomainError::LinkDown(words))),
            Use::HandshakeMessage => self.undelivered(flight.address, &words),
            Use::Frame(id, _) => {
                if let Some(link) = self.link(id) {
                    link.trouble = Some(words);
                }
            }
            Use::Orphan | Use::Free => {}
        }
    }

    pub(super) fn op_over(&mut self, op: u32, result: Result<(), DomainError>) {
        let Some(op) = self.table.ops.try_remove(op as usize) else { return };
        if let Some(link) = self.link(op.link) {
            link.imms -= op.imms;
        }
        if op.fenced {
            self.answer_fence(op.link);
        }
        self.news.push(Completion::Done { link: op.link, token: op.token, result });
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
            if !link.channel.holds_messages() {
                continue;
            }
            // One each time: there is less room once it is taken.
            if let Some(message) = link.channel.take_message(room) {
                out.push(Completion::Message { link: link.id, message });
                break;
            }
        }
        out.len() > before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ic_6_a_message_with_data_does_not_count() {
        let (write, bare) = (flag::RMA | flag::REMOTE_WRITE, flag::REMOTE_CQ_DATA);
        for flags in [bare, bare | write, bare | flag::REMOTE_WRITE] {
            assert!(counts(flags, false, false) && counts(flags, true, true), "{flags:#x}");
            assert!(!counts(flags, true, false), "writes take no slots here: {flags:#x}");
        }
        for flags in [flag::MSG | flag::RECV, flag::MSG, flag::RECV] {
            assert!(!counts(bare | flags, true, true) && !counts(bare | flags, false, false));
        }
    }
}
