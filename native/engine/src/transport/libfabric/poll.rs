//! Reads the completion queue and handles its entries.

use fabric_sys::libfabric::{flag, CqDataEntry};
use smallvec::SmallVec;

use super::{
    ops::{ContextUse, InFlight},
    raw::{Failure, Polled},
    LibfabricDomain, LinkEntry,
};
use crate::{
    api::Imm,
    domain::{Completion, Count, DomainError, LinkId, MessageRoom},
    time::Time,
};

/// Entries per read, and reads per poll.
const BATCH: usize = 64;
const ROUNDS: usize = 4;

/// An entry of the completion queue.
#[derive(Debug)]
pub(super) enum Event {
    Completed(u32),
    Failed(u32, String),
    /// A message arrived in a receive slot.
    Received(u32, usize),
    /// A counted write arrived; it may have consumed a receive slot.
    Counted(u32, Option<u32>),
    /// A receive slot is free again.
    Freed(u32),
}

/// Whether an entry with remote data is a write. Messages of peers carry no data; one with data
/// comes from a stranger, since sending needs no key, and must not count (IC-6). Providers set
/// different flags for a write.
fn is_counted_write(flags: u64, in_slot: bool, imms_take_slots: bool) -> bool {
    let sent = flags & (flag::MSG | flag::RECV) != 0;
    let written = flags & (flag::RMA | flag::REMOTE_WRITE) != 0;
    (written || !sent) && (imms_take_slots || !in_slot)
}

impl LibfabricDomain {
    /// Reads the queue and handles its entries.
    pub(super) fn poll_queue(&mut self) -> bool {
        let mut events = std::mem::take(&mut self.events);
        self.read_queue(&mut events);
        let shuffled = self.shuffle.as_mut().map(|s| {
            s.deliver(&mut events);
            !s.is_empty()
        });
        let progressed = !events.is_empty();
        self.flush_gpus(&mut events);
        for event in events.drain(..) {
            self.handle(event);
        }
        self.events = events;
        progressed || shuffled == Some(true)
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
                    events.extend(entries[..n].iter().filter_map(|e| self.decode_entry(e)));
                    if n < BATCH {
                        return;
                    }
                }
                Ok(Polled::Failed(failure)) => events.extend(self.decode_failure(&failure)),
                Err(e) => {
                    tracing::error!(nic = %self.offer.domain, error = %e, "can't read completions");
                    return;
                }
            }
        }
    }

    fn decode_entry(&self, e: &CqDataEntry) -> Option<Event> {
        let context = self.table.contexts.index(e.op_context);
        if e.flags & flag::REMOTE_CQ_DATA != 0 {
            let slot = context.filter(|c| *c < self.table.receives);
            return match is_counted_write(e.flags, slot.is_some(), self.imms_take_slots()) {
                true => Some(Event::Counted(e.data as u32, slot)),
                false => slot.map(Event::Freed),
            };
        }
        let context = context?;
        Some(match context < self.table.receives {
            true => Event::Received(context, e.len),
            false => Event::Completed(context),
        })
    }

    fn decode_failure(&self, failure: &Failure) -> Option<Event> {
        let context = self.table.contexts.index(failure.context);
        tracing::debug!(nic = %self.offer.domain, text = %failure.text, ?context, "an operation failed");
        let context = context?;
        Some(match context < self.table.receives {
            true => Event::Freed(context),
            false => Event::Failed(context, failure.text.clone()),
        })
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Counted(data, slot) => {
                let (imm, n) = Imm::unweighted(data);
                self.completions.push(Completion::Count(Count { imm, n }));
                self.unposted.extend(slot);
            }
            Event::Received(slot, len) => {
                self.on_message(slot, len);
                self.unposted.push(slot);
            }
            Event::Freed(slot) => self.unposted.push(slot),
            Event::Completed(context) => {
                let flight = self.on_completed(context, true);
                if let ContextUse::Op(op) = flight.used_for {
                    let id = self.table.ops.get(op as usize).map(|o| o.link);
                    let (now, by_software) = (self.now, !self.offer.is_rdma());
                    // A software provider's delivery shows that the peer runs; a NIC's does not.
                    if let Some(link) = id.filter(|_| by_software).and_then(|id| self.link(id)) {
                        link.received_at = now;
                    }
                    self.chunks_done(op, 1, None);
                }
            }
            Event::Failed(context, text) => self.on_failed(context, text),
        }
    }

    /// Takes a context back, with its part of the link's limits. `well` is the provider's result.
    fn on_completed(&mut self, context: u32, well: bool) -> InFlight {
        let now = self.now;
        let flight = self.table.land(context);
        if let (Some(buffer), true) = (self.table.buffers.remove(&context), well) {
            if matches!(flight.used_for, ContextUse::Op(_)) {
                // SAFETY: the provider has reported the read as done, and `uses` still counts it.
                unsafe { buffer.deliver() };
            }
        }
        self.on_chunk_done(flight.region);
        match flight.used_for {
            ContextUse::Op(op) => {
                let id = self.table.ops.get(op as usize).map(|o| o.link);
                if let Some(link) = id.and_then(|id| self.link(id)) {
                    link.bytes -= u64::from(flight.len);
                    link.chunks -= 1;
                    if !well {
                        // Other frames under way may be lost with it.
                        link.unconfirmed.expedite(now);
                    }
                }
            }
            ContextUse::Frame(id, number) => {
                if let Some(link) = self.link(id) {
                    link.frames -= 1;
                    link.unconfirmed.on_completed(now, number, well);
                }
            }
            ContextUse::Orphan | ContextUse::HandshakeFragment | ContextUse::Free => {}
        }
        flight
    }

    fn on_failed(&mut self, context: u32, text: String) {
        let flight = self.on_completed(context, false);
        match flight.used_for {
            ContextUse::Op(op) => self.chunks_done(op, 1, Some(DomainError::LinkDown(text))),
            ContextUse::HandshakeFragment => self.on_undelivered(flight.address, &text),
            ContextUse::Frame(id, _) => {
                if let Some(link) = self.link(id) {
                    link.last_error = Some(text);
                }
            }
            ContextUse::Orphan | ContextUse::Free => {}
        }
    }

    pub(super) fn finish_op(&mut self, op: u32, result: Result<(), DomainError>) {
        let Some(op) = self.table.ops.try_remove(op as usize) else { return };
        if let Some(link) = self.link(op.link) {
            link.imms -= op.imms;
        }
        if op.fenced {
            self.answer_fence(op.link);
        }
        self.completions.push(Completion::Done { link: op.link, token: op.token, result });
    }

    /// Delivers complete messages as far as `room` admits.
    pub(super) fn deliver_messages(
        &mut self,
        room: &dyn MessageRoom,
        out: &mut Vec<Completion>,
    ) -> bool {
        // Report a link as up before its first message.
        out.append(&mut self.completions);
        let before = out.len();
        let holding = self.links.iter().filter_map(|(_, entry)| match entry {
            LinkEntry::Up(link) if link.channel.holds_messages() => {
                Some((link.delivered_at, link.id))
            }
            _ => None,
        });
        let mut holding: SmallVec<[(Time, LinkId); 8]> = holding.collect();
        // A link with ever more messages keeps out no other.
        holding.sort_unstable();
        let now = self.now;
        for (_, id) in holding {
            let Some(link) = self.link(id) else { continue };
            // One message per call: there is less room once it is taken.
            if let Some(message) = link.channel.take_message(room) {
                link.delivered_at = now;
                out.push(Completion::Message { link: id, message });
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
            assert!(
                is_counted_write(flags, false, false) && is_counted_write(flags, true, true),
                "{flags:#x}"
            );
            assert!(!is_counted_write(flags, true, false), "writes take no slots here: {flags:#x}");
        }
        for flags in [flag::MSG | flag::RECV, flag::MSG, flag::RECV] {
            assert!(
                !is_counted_write(bare | flags, true, true)
                    && !is_counted_write(bare | flags, false, false)
            );
        }
    }
}
