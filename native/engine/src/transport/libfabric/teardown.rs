//! Heartbeats, lost and closed links, and the end of the domain.

use std::time::{Duration, Instant};

use fabric_sys::libfabric::mr_mode;

use super::{
    deferred_close,
    ops::{ContextUse, NO_REGION},
    LibfabricDomain, LinkEntry,
};
use crate::{
    domain::{excuse, Completion, DomainError, LinkId},
    time::Time,
};

/// Time that a closing engine waits for transfers and close frames.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);
/// Idle time before an endpoint is closed; longer for providers that need it.
const IDLE_BEFORE_CLOSE: Duration = Duration::from_millis(3);
const LONG_IDLE_BEFORE_CLOSE: Duration = Duration::from_millis(40);
/// Prefix of the reason in a close frame whose sender has no operation under way.
pub(super) const QUIESCED_PREFIX: &str = "nothing is under way: ";

impl LibfabricDomain {
    /// Sends heartbeats on idle links, and drops links of silent peers (RS-4).
    pub(super) fn tick(&mut self, now: Time) -> bool {
        let mut progressed = self.tick_handshakes(now);
        let missed = self.attendance.missed(now, self.peer_timeout);
        for id in self.link_ids() {
            let timeout = self.peer_timeout;
            let Some(link) = self.link(id) else { continue };
            link.received_at = excuse(link.received_at, missed, now);
            if now >= link.received_at.after(timeout) {
                let cause = link.silent_error(timeout);
                self.close_link(id, cause, false);
                progressed = true;
                continue;
            }
            if link.fences.due.is_some() {
                self.answer_fence(id);
                progressed |= self.send_frames(id);
            }
            let Some(link) = self.link(id) else { continue };
            if now >= link.sent_at.after(timeout / 4) || now >= link.confirm_at {
                link.channel.heartbeat();
                (link.sent_at, link.confirm_at) = (now, Time::NEVER);
                progressed |= self.send_frames(id);
            }
        }
        if let Some(nic) = &self.nic {
            self.addresses.sweep(nic, &self.table);
        }
        progressed
    }

    pub(super) fn close_link(&mut self, id: LinkId, cause: DomainError, notify: bool) {
        let Some(address) = self.link(id).map(|l| l.address) else { return };
        if notify {
            let busy = self.table.ops.iter().any(|(_, o)| o.link == id);
            let quiesced = if busy { "" } else { QUIESCED_PREFIX };
            if let Some(link) = self.link(id) {
                link.channel.close(false, &format!("{quiesced}{cause}"));
            }
            self.send_frames(id);
        }
        self.remove_link(id, cause, false);
        if !notify {
            self.abort_transfers(address);
        }
    }

    /// Has the provider end transfers to an address without users.
    pub(super) fn abort_transfers(&mut self, address: usize) {
        if let Some(nic) = &self.nic {
            self.addresses.abort(address, nic, &self.table);
        }
    }

    /// Removes a link. `quiesced`: the peer has no operation under way.
    pub(super) fn remove_link(&mut self, id: LinkId, cause: DomainError, quiesced: bool) {
        let slot = Self::slot(id);
        if self.link(id).is_none() {
            return;
        }
        let LinkEntry::Up(mut link) = self.links.remove(slot) else { return };
        for frame in link.pending.drain(..) {
            self.table.give_back(frame.context);
        }
        if !quiesced {
            self.regions.on_peer_lost(link.peer.id());
        }
        // Before the operations are removed: the library still holds their memory (MR-1).
        let ops = &self.table.ops;
        let mine: Vec<u32> =
            ops.iter().filter(|(_, o)| o.link == id).map(|(i, _)| i as u32).collect();
        let (buffered, mut unused) = (!self.table.buffers.is_empty(), Vec::new());
        for flight in self.table.flights() {
            match flight.used_for {
                ContextUse::Op(op) if mine.contains(&op) => {
                    flight.used_for = ContextUse::Orphan;
                    if flight.is_read && buffered {
                        unused.push(std::mem::replace(&mut flight.region, NO_REGION));
                    }
                }
                ContextUse::Frame(of, _) if of == id => flight.used_for = ContextUse::Orphan,
                _ => {}
            }
        }
        unused.into_iter().for_each(|region| self.on_chunk_done(region));
        self.drop_partials(id);
        for op in mine {
            let Some(op) = self.table.ops.try_remove(op as usize) else { continue };
            let result = Err(cause.clone());
            self.completions.push(Completion::Done { link: id, token: op.token, result });
        }
        for token in link.channel.abandon() {
            let result = Err(cause.clone());
            self.completions.push(Completion::Done { link: id, token, result });
        }
        self.addresses.release(link.address);
        // The results are reported: transfers under way must not land after them (MR-1).
        if self.table.touches_memory(link.address) {
            self.abort_transfers(link.address);
        }
        self.completions.push(Completion::LinkDown {
            link: id,
            cause,
            receipt: crate::domain::Receipt::Unknown,
            unfinished: Vec::new(),
        });
        self.on_fence_answered(id, u32::MAX);
    }

    /// Closes the endpoint, after which nothing touches memory any more (MR-1).
    pub(super) fn close_endpoint(&mut self) {
        if self.nic.is_none() {
            return;
        }
        self.closing = true;
        self.wait_for(|this| this.table.ops.is_empty());
        // Close frames that arrived meanwhile need no answer.
        self.poll_queue();
        for id in self.link_ids() {
            self.close_link(id, super::closed(), true);
        }
        self.wait_for(|this| !this.table.is_busy());
        if self.offer.closes_late() {
            // Peers' transfers would arrive while closing, so their registrations end here.
            self.regions.unregister();
            self.scratch.unregister();
        }
        self.drain_provider();
        self.handshakes.clear();
        // The provider had no room for these; their slots are freed below.
        self.outbox.clear();
        let Some(nic) = self.nic.take() else { return };
        if self.offer.mr_mode & mr_mode::ENDPOINT != 0 {
            // Such registrations keep the endpoint open, while the memory of its slots is freed.
            self.regions.unregister();
        }
        let slots = [&mut self.rx, &mut self.tx, &mut self.scratch].map(|s| s.take());
        match nic.closes_during_reads() || !self.table.reads() {
            true => deferred_close::close(nic, slots),
            false => {
                deferred_close::never_close(nic, slots, std::mem::take(&mut self.table.buffers))
            }
        }
        for index in self.regions.clear() {
            self.completions.push(Completion::RegionReleased { index });
        }
    }

    /// Processes what peers have sent, and lets the provider's answers go out: some providers crash
    /// if they are closed in between.
    fn drain_provider(&mut self) {
        let settled =
            if self.offer.closes_late() { LONG_IDLE_BEFORE_CLOSE } else { IDLE_BEFORE_CLOSE };
        let start = Instant::now();
        let mut quiet_since = start;
        while quiet_since.elapsed() < settled && start.elapsed() < CLOSE_TIMEOUT {
            if self.poll_queue() | self.send_pending() {
                quiet_since = Instant::now();
            }
            std::thread::yield_now();
        }
        // Events held back would refer to contexts that are freed now.
        self.shuffle = None;
    }

    fn wait_for(&mut self, done: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) && start.elapsed() < CLOSE_TIMEOUT {
            self.poll_queue();
            self.send_pending();
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        api::{EngineAddress, EngineConfig, EngineId, NicConfig},
        domain::{Admit, Domain, MessageRoom},
        transport::libfabric::{discover, library},
    };

    pub struct TestMessageRoom;

    impl MessageRoom for TestMessageRoom {
        fn admit(&self, _: usize) -> Admit {
            Admit::Take
        }
    }

    /// A domain over a provider and its address.
    pub fn open(id: u8, provider: &str) -> Result<(LibfabricDomain, EngineAddress), DomainError> {
        let provider = Some(provider.into());
        let nics = NicConfig { provider, max_rails: 1, ..Default::default() };
        let config = EngineConfig { nics, token: Some(vec![1]), ..Default::default() };
        let (api, id) = (library::get()?, EngineId([id; 16]));
        let info = discover::choose(&api, &config.nics, true)?.remove(0);
        let mut domain = LibfabricDomain::open(api, info, id, &config, 0)?;
        let address = EngineAddress { id, name: String::new(), endpoints: vec![domain.endpoint()] };
        domain.announce(&address);
        Ok((domain, address))
    }

    #[test]
    fn mr_1_a_closed_endpoint_sends_nothing_that_waited_for_the_provider() {
        let tcp = "tcp;ofi_rxm";
        let ((mut domain, _), (_peer, address)) = match (open(1, tcp), open(2, tcp)) {
            (Ok(one), Ok(other)) => (one, other),
            (Err(e), _) | (_, Err(e)) => return eprintln!("skipped: {e}"),
        };
        // The peer makes no progress, so the provider connects to it for as long as it is polled.
        domain.connect(Time::now(), &address, 0).unwrap();
        let mut out = Vec::new();
        domain.poll(Time::now(), &TestMessageRoom, &mut out);
        assert!(!domain.outbox.is_empty(), "the provider had room: {out:?}");
        domain.close();
        domain.poll(Time::now(), &TestMessageRoom, &mut out);
        assert!(domain.outbox.is_empty() && domain.next_timer() == Time::NEVER);
    }
}
