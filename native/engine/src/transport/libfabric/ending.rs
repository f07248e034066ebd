//! Ends: of links that are lost or dropped, and of the domain.

use std::time::{Duration, Instant};

use fabric_sys::libfabric::mr_mode;

use super::{grave, ops::Use, LibfabricDomain, Slot};
use crate::{
    domain::{Completion, DomainError, LinkId},
    time::Time,
};

/// How long an engine that closes waits for what is under way, and for its farewells to go out.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// How long nothing may happen before an endpoint is closed, and where more depends on that.
const SETTLED: Duration = Duration::from_millis(3);
const WELL_SETTLED: Duration = Duration::from_millis(40);
/// How a farewell begins when nothing of its sender's is under way any more.
pub(super) const CLEAN: &str = "nothing is under way: ";

impl LibfabricDomain {
    /// Shows life on quiet links, and gives up on those that show none (RS-4).
    pub(super) fn tick(&mut self, now: Time) -> bool {
        let mut moved = self.tick_setups(now);
        let away = now.since(std::mem::replace(&mut self.ticked_at, now));
        for id in self.link_ids() {
            let timeout = self.peer_timeout;
            let Some(link) = self.link(id) else { continue };
            // Who didn't listen, because the machine had no time for it, can't tell whether the peer was
            // silent. Otherwise this is done for each sign of life: in each quarter of the timeout.
            if away > timeout / 2 {
                link.heard_at = link.heard_at.after(away).min(now);
            }
            if now >= link.heard_at.after(timeout) {
                let cause = link.silence(timeout);
                self.take_down(id, cause, false);
                moved = true;
                continue;
            }
            if link.fences.due.is_some() {
                self.answer_fence(id);
                moved |= self.pump(id);
            }
            let Some(link) = self.link(id) else { continue };
            if now >= link.spoke_at.after(timeout / 4) || now >= link.confirm_at {
                link.channel.heartbeat();
                (link.spoke_at, link.confirm_at) = (now, Time::NEVER);
                moved |= self.pump(id);
            }
        }
        if let Some(nic) = &self.nic {
            self.addresses.sweep(nic, &self.table);
        }
        moved
    }

    pub(super) fn take_down(&mut self, id: LinkId, cause: DomainError, tell: bool) {
        let Some(address) = self.link(id).map(|l| l.address) else { return };
        if tell {
            let busy = self.table.ops.iter().any(|(_, o)| o.link == id);
            let clean = if busy { "" } else { CLEAN };
            if let Some(link) = self.link(id) {
                link.channel.close(false, &format!("{clean}{cause}"));
            }
            self.pump(id);
        }
        self.remove_link(id, cause, false);
        if !tell {
            self.cut_off(address);
        }
    }

    /// Has the provider end what is under way to an address that nobody uses any more.
    pub(super) fn cut_off(&mut self, address: usize) {
        if let Some(nic) = &self.nic {
            self.addresses.cut(address, nic, &self.table);
        }
    }

    /// A link is over. `clean`: nothing of the peer's is under way any more.
    pub(super) fn remove_link(&mut self, id: LinkId, cause: DomainError, clean: bool) {
        let slot = Self::slot(id);
        if self.link(id).is_none() {
            return;
        }
        let Slot::Up(mut link) = self.links.remove(slot) else { return };
        for frame in link.pending.drain(..) {
            self.table.give_back(frame.context);
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
                Use::Frame(of, _) if of == id => flight.what = Use::Orphan,
                _ => {}
            }
        }
        self.drop_stalled(id);
        for op in mine {
            let Some(op) = self.table.ops.try_remove(op as usize) else { continue };
            let result = Err(cause.clone());
            self.news.push(Completion::Done { link: id, token: op.token, result });
        }
        for token in link.channel.abandon() {
            let result = Err(cause.clone());
            self.news.push(Completion::Done { link: id, token, result });
        }
        self.addresses.release(link.address);
        // The results are out: what is still on its way must not land after them (MR-1).
        if self.table.touches_memory(link.address) {
            self.cut_off(link.address);
        }
        self.news.push(Completion::LinkDown {
            link: id,
            cause,
            receipt: crate::domain::Receipt::Unknown,
            unfinished: Vec::new(),
        });
        self.fences_passed(id, u32::MAX);
    }

    /// Ends everything: the endpoint is closed, so that nothing touches memory any more (MR-1).
    pub(super) fn shut_down(&mut self) {
        if self.nic.is_none() {
            return;
        }
        self.closing = true;
        self.wait_for(|this| this.table.ops.is_empty());
        // Farewells that came meanwhile need no answer.
        self.poll_queue();
        for id in self.link_ids() {
            self.take_down(id, super::closed(), true);
        }
        self.wait_for(|this| !this.table.is_busy());
        if self.offer.closes_late() {
            // What peers have under way would come in the middle of closing: their writes end here.
            self.regions.unregister();
            self.scratch.unregister();
        }
        self.settle();
        self.setups.clear();
        let Some(nic) = self.nic.take() else { return };
        if self.offer.mr_mode & mr_mode::ENDPOINT != 0 {
            // Such registrations would keep the endpoint open while the memory of its slots goes.
            self.regions.unregister();
        }
        let slots = [&mut self.rx, &mut self.tx, &mut self.scratch].map(|s| s.take());
        grave::bury(nic, slots);
        for index in self.regions.clear() {
            self.news.push(Completion::RegionQuiet { index });
        }
    }

    /// Lets what peers have sent come in, and the provider's answers to it go out: some providers
    /// don't survive being closed in the middle of that.
    fn settle(&mut self) {
        let settled = if self.offer.closes_late() { WELL_SETTLED } else { SETTLED };
        let start = Instant::now();
        let mut quiet_since = start;
        while quiet_since.elapsed() < settled && start.elapsed() < LAST_WORDS {
            if self.poll_queue() | self.push_on() {
                quiet_since = Instant::now();
            }
            std::thread::yield_now();
        }
        // What is still kept back would be about contexts that go now.
        self.shuffle = None;
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
