//! Access queries and fences: why an access was refused, and whether operations are under way.

use super::LibfabricDomain;
use crate::domain::{DomainError, LinkId};

/// Answer of a peer that finds no fault in an access.
pub(super) const NO_FAULT: &str = "";

impl LibfabricDomain {
    /// Asks the peer why its NIC refused a failed operation. If it knows no reason, the connection
    /// is at fault.
    pub(super) fn query_failure(&mut self, op: u32) {
        let Some(o) = self.table.ops.get(op as usize) else { return };
        let (id, error) = (o.link, o.error.clone());
        if o.access.is_none() {
            let cause = error.unwrap_or_else(super::closed);
            return self.close_link(id, cause, false);
        }
        if let Some(link) = self.link(id) {
            link.queries.ops.push_back(op);
        }
        self.send_next_query(id);
    }

    pub(super) fn send_next_query(&mut self, id: LinkId) {
        let Some(link) = self.link(id).filter(|l| !l.queries.in_flight) else { return };
        let Some(op) = link.queries.ops.front().copied() else { return };
        let Some((key, offset, len)) = self.table.ops.get(op as usize).and_then(|o| o.access)
        else {
            return;
        };
        // Queries before an access cover all bytes up to its end, for later accesses.
        let first = self.parked.contains_key(&op);
        let (offset, len) = if first { (0, offset.saturating_add(len)) } else { (offset, len) };
        if let Some(link) = self.link(id) {
            (link.queries.in_flight, link.queries.outdated) = (true, false);
            link.channel.query_access(key, offset, len);
        }
        self.send_frames(id);
    }

    pub(super) fn on_access_answer(&mut self, id: LinkId, answer: DomainError) {
        let Some(link) = self.link(id) else { return };
        if !std::mem::take(&mut link.queries.in_flight) {
            return;
        }
        let Some(op) = link.queries.ops.pop_front() else { return };
        let no_fault = answer == DomainError::Refused(NO_FAULT.into());
        if no_fault && self.parked.contains_key(&op) {
            let access = self.table.ops.get(op as usize).and_then(|o| o.access);
            if let (Some((key, offset, len)), Some(link)) = (access, self.link(id)) {
                if !link.queries.outdated {
                    let limit = link.queries.allowed_up_to.entry(key).or_default();
                    *limit = (*limit).max(offset.saturating_add(len));
                }
            }
            self.launch_parked(op);
            return self.send_next_query(id);
        }
        self.parked.remove(&op);
        if no_fault {
            let error = self.table.ops.get(op as usize).and_then(|o| o.error.clone());
            return self.close_link(id, error.unwrap_or_else(super::closed), true);
        }
        self.finish_op(op, Err(answer));
        self.send_next_query(id);
    }

    /// The peer requests an answer when no earlier operation of this side is under way (MR-1).
    pub(super) fn on_fence(&mut self, id: LinkId, number: u32) {
        for (_, op) in self.table.ops.iter_mut().filter(|(_, o)| o.link == id) {
            op.fenced = true;
        }
        if let Some(link) = self.link(id) {
            link.fences.due = Some(number);
            link.queries.allowed_up_to.clear();
            link.queries.outdated = true;
        }
        self.answer_fence(id);
    }

    /// Answers a fence once no earlier operation is under way, including those of closed links.
    pub(super) fn answer_fence(&mut self, id: LinkId) {
        let Some((number, address)) = self.link(id).and_then(|l| Some((l.fences.due?, l.address)))
        else {
            return;
        };
        let open = self.table.ops.iter().any(|(_, o)| o.link == id && o.fenced);
        let addresses = &self.addresses;
        if open || self.table.orphans().any(|a| addresses.same(a, address)) {
            return;
        }
        if let Some(link) = self.link(id) {
            link.fences.due = None;
            link.channel.fenced(number);
        }
    }
}
