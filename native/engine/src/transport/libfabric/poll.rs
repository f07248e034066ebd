//! What the completion queue tells, and what follows from it.

use fabric_sys::libfabric::{flag, CqDataEntry};

use super::{
    ops::Use,
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
}
