//! Questions between peers: why an access was refused, and whether anything is still under way.

use super::LibfabricDomain;
use crate::domain::{DomainError, LinkId};

/// What a peer answers that finds no fault in an access.
pub(super) const BLAMELESS: &str = "";

impl LibfabricDomain {
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
            link.channel.query_access(key, offset, len);
        }
        self.pump(id);
    }

    pub(super) fn judged(&mut self, id: LinkId, verdict: DomainError) {
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

    /// The peer wants to know when nothing that we began until now is under way (MR-1).
    pub(super) fn fence_asked(&mut self, id: LinkId, number: u32) {
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
