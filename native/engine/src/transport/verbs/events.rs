//! Handlers of single completions and device events.

use fabric_sys::ibverbs as sys;

use super::{
    chain,
    link::{DataQpFailure, Link},
    raw, read_work_id, status_text, work_id, CompletionKind, VerbsDomain,
};
use crate::{
    api::Imm,
    domain::{Completion, Count, DomainError, LinkId},
    transport::nic::message_channel::FrameEvent,
};

impl VerbsDomain {
    #[inline]
    pub(super) fn on_completion(&mut self, wc: &sys::Wc, out: &mut Vec<Completion>) {
        let (kind, number, id) = read_work_id(wc.wr_id);
        let now = self.now;
        let Some(link) = self.link(id) else {
            // The link is closed and the completion is void (IC-6), but a close frame may have been
            // sent.
            if kind == CompletionKind::FrameSent {
                self.on_close_frame_sent(id);
            }
            return;
        };
        if wc.status != sys::WC_SUCCESS {
            return self.on_failed_completion(wc);
        }
        if kind.proves_peer_alive() {
            link.received_at = now;
        }
        match kind {
            CompletionKind::Data => {
                let number = link.ledger.number(number);
                link.ledger.retire(number, |token| {
                    out.push(Completion::Done { link: id, token, result: Ok(()) });
                });
            }
            CompletionKind::Imm if wc.opcode != sys::WC_RECV_RDMA_WITH_IMM => {
                self.fail_link(id, "the peer sent a message on the queue pair for immediates");
            }
            CompletionKind::Imm => {
                let (imm, n) = Imm::unweighted(u32::from_be(wc.imm_data));
                out.push(Completion::Count(Count { imm, n }));
                link.imms_used += 1;
                link.counted += u64::from(n);
                self.mark_dirty(id);
                self.on_first_use(id);
            }
            CompletionKind::FrameSent => {
                link.slot_sent(number);
                if link.channel.has_frame() {
                    self.mark_dirty(id);
                }
            }
            CompletionKind::FrameReceived => {
                if let Err(e) = self.on_frame(id, number, wc.byte_len as usize) {
                    self.failing.push((id, e));
                }
                self.mark_dirty(id);
                self.on_first_use(id);
            }
        }
    }

    /// An accepted link is up once its initiator uses it.
    fn on_first_use(&mut self, id: LinkId) {
        let Some(link) = self.link(id).filter(|l| !l.announced) else { return };
        link.announced = true;
        let (peer, endpoint, name) = (link.peer.clone(), link.endpoint, link.name);
        // The handshake is done: the initiator has the last answer.
        self.accepts.retain(|_, v| !v.is_done_for(id));
        let Some(link) = self.link(id) else { return };
        let description = format!("{} connected", link.remote.label());
        self.completions.push(Completion::LinkUp { link: id, peer, endpoint, name, description });
    }

    fn on_frame(&mut self, id: LinkId, slot: u32, len: usize) -> Result<(), DomainError> {
        let Some(link) = self.link(id) else { return Ok(()) };
        let event = link.channel.on_frame(link.slots.read(slot as usize, len))?;
        chain::receive(
            &link.message_qp,
            work_id(CompletionKind::FrameReceived, slot, id),
            link.slots.whole(slot as usize),
        )?;
        link.channel.slot_freed();
        match event {
            FrameEvent::Handled => Ok(()),
            FrameEvent::AccessQuery { key, offset, len } => {
                let peer = link.peer.id();
                let why = match self.regions.book.resolve(peer, key, offset, len) {
                    Err(why) => why,
                    Ok(_) => DomainError::Refused(
                        "the peer's NIC refused the access, though the region is registered and \
                         the range is inside it"
                            .into(),
                    ),
                };
                if let Some(link) = self.link(id) {
                    link.channel.answer_access(&why);
                }
                Ok(())
            }
            FrameEvent::AccessAnswer(why) => {
                if let Some(b) = self.link(id).and_then(|l| l.data_failure.as_mut()) {
                    let cause = b.cause.clone();
                    if let Some((_, verdict)) = &mut b.refused {
                        *verdict = Some(why);
                    }
                    self.failing.push((id, cause));
                }
                Ok(())
            }
            FrameEvent::Close { gone, reason } => {
                let text = format!("the peer closed the link: {reason}");
                Err(if gone { DomainError::Gone(text) } else { DomainError::LinkDown(text) })
            }
            FrameEvent::GroupFrame(frame) => {
                self.completions.push(Completion::GroupFrame { link: id, frame });
                Ok(())
            }
            // Reliable connections keep order, so a peer has no reason to send fences.
            FrameEvent::Fence(_) | FrameEvent::Fenced(_) => Err(DomainError::LinkDown(
                "the peer sent a fence, which verbs does not support".into(),
            )),
        }
    }

    /// A request failed; the first failure of a queue pair gives the reason.
    fn on_failed_completion(&mut self, wc: &sys::Wc) {
        let (kind, number, id) = read_work_id(wc.wr_id);
        let flushed = wc.status == sys::WC_WR_FLUSH_ERR;
        let Some(link) = self.link(id) else { return };
        match kind {
            CompletionKind::FrameSent | CompletionKind::FrameReceived => {
                if kind == CompletionKind::FrameSent {
                    link.slot_sent(number);
                }
                self.fail_link(id, &status_text::status(wc));
            }
            CompletionKind::Imm => {
                self.on_data_qp_failed(id, status_text::event(sys::EVENT_QP_ACCESS_ERR), None)
            }
            CompletionKind::Data => {
                let number = link.ledger.number(number);
                let asked = matches!(wc.status, sys::WC_REM_ACCESS_ERR | sys::WC_REM_INV_REQ_ERR);
                match asked {
                    _ if link.data_failure.is_some() => {}
                    true => self.on_data_qp_failed(id, &status_text::status(wc), Some(number)),
                    // The local queue pair failed because the peer's access was refused; the peer
                    // will ask why.
                    false if flushed => {
                        self.on_data_qp_failed(
                            id,
                            status_text::event(sys::EVENT_QP_ACCESS_ERR),
                            None,
                        );
                    }
                    false => self.fail_link(id, &status_text::status(wc)),
                }
            }
        }
    }

    /// The data queue pair failed because a NIC refused an access. The side that made the request
    /// asks the other for the reason over the message queue pair, which still works.
    fn on_data_qp_failed(&mut self, id: LinkId, why: &str, request: Option<u32>) {
        let (here, until) = (self.device.label(), self.now.after(self.peer_timeout / 4));
        let Some(link) = self.link(id) else { return };
        if link.data_failure.is_some() {
            return;
        }
        let cause = DomainError::LinkDown(format!("from {here} to {}: {why}", link.remote.label()));
        let entry_of = request.and_then(|number| link.ledger.entry_of(number));
        if let Some(e) = entry_of {
            link.channel.query_access(e.region, e.from, e.to.saturating_sub(e.from));
        }
        let refused = entry_of.map(|e| (e.token, None));
        link.data_failure = Some(DataQpFailure { cause, refused, until });
        // From here on the NIC accepts nothing for it. It is destroyed after its completions were
        // taken.
        link.stop();
        link.ledger.unflushed = None;
        self.mark_dirty(id);
        self.tick_at = self.tick_at.min(until);
    }

    pub(super) fn poll_device_events(&mut self) {
        while let Some(event) = self.device.context.next_event() {
            match event {
                raw::Event::Queue { number, kind } => self.on_qp_event(number, kind),
                raw::Event::Port { port, kind } if port == u32::from(self.address.port) => {
                    self.fail_all_links(status_text::event(kind));
                }
                raw::Event::Device(kind @ (sys::EVENT_DEVICE_FATAL | sys::EVENT_CQ_ERR)) => {
                    let why = format!("{}: {}", self.device.label(), status_text::event(kind));
                    self.dead = Some(DomainError::Unavailable(why));
                    self.fail_all_links(status_text::event(kind));
                }
                raw::Event::Port { .. } | raw::Event::Device(_) => {}
            }
        }
    }

    fn on_qp_event(&mut self, number: u32, kind: u32) {
        let is = |l: &Link| l.data.as_ref().is_some_and(|q| q.number() == number);
        let links = self.slots.iter().filter_map(|(_, s)| match &s.state {
            super::LinkState::Up(l) => Some(l),
            _ => None,
        });
        let found: Option<(LinkId, bool)> = links
            .map(|l| (l.id, is(l), l.message_qp.number() == number))
            .find_map(|(id, data, messages)| (data || messages).then_some((id, data)));
        match found {
            Some((id, true)) if kind == sys::EVENT_QP_ACCESS_ERR => {
                self.on_data_qp_failed(id, status_text::event(kind), None);
            }
            Some((id, _)) => self.fail_link(id, status_text::event(kind)),
            None => {}
        }
    }

    pub(super) fn fail_all_links(&mut self, why: &str) {
        tracing::warn!(nic = %self.device.label(), why, "closing all links of a NIC");
        let ids: Vec<LinkId> = self.slots.iter().map(|(_, s)| s.id).collect();
        ids.into_iter().for_each(|id| self.fail_link(id, why));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_work_id_names_kind_request_and_link() {
        for kind in [
            CompletionKind::Data,
            CompletionKind::Imm,
            CompletionKind::FrameSent,
            CompletionKind::FrameReceived,
        ] {
            let id = work_id(kind, super::super::SEQ_MASK, 0xFFFF_0001);
            assert_eq!(read_work_id(id), (kind, super::super::SEQ_MASK, 0xFFFF_0001));
        }
    }
}
