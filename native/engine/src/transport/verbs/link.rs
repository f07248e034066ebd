//! A link: two queue pairs to one peer, and the work under way on them.

use std::time::Duration;

use fabric_sys::ibverbs as sys;

use super::{
    address::{NicAddress, QpSetup},
    chain::{Chain, Wr},
    cq_pool::CqSlot,
    device::{Device, Pair, FRAME_DEPTH},
    ledger::Ledger,
    memory::Slots,
    raw::Qp,
    work_id, CompletionKind,
};
use crate::{
    domain::{DomainError, LinkId, LinkName, PeerIdentity, Token},
    time::Time,
    transport::nic::message_channel::{MessageChannel, SPARE},
};

/// The data queue pair has failed; the link stays until both sides know why.
#[derive(Debug)]
pub(super) struct DataQpFailure {
    pub cause: DomainError,
    /// The request that the peer's NIC refused, and the peer's reason once it has answered.
    pub refused: Option<(Token, Option<DomainError>)>,
    pub until: Time,
}

/// Identity of a new link.
pub(super) struct LinkIdentity {
    pub id: LinkId,
    pub peer: PeerIdentity,
    pub endpoint: usize,
    pub name: LinkName,
    pub remote: NicAddress,
    pub cq_slot: CqSlot,
}

pub(super) struct Link {
    pub id: LinkId,
    pub peer: PeerIdentity,
    pub endpoint: usize,
    pub remote: NicAddress,
    pub cq_slot: CqSlot,
    pub mtu: u8,
    /// `None` once it has failed: nothing can touch memory on its behalf then (MR-1).
    pub data: Option<Qp>,
    pub message_qp: Qp,
    pub slots: Slots,
    pub channel: MessageChannel,
    pub chain: Chain,
    message_chain: Chain,
    pub inline: u32,
    pub ledger: Ledger,
    /// Target of flush reads.
    pub scratch: sys::Sge,
    /// Immediates whose receive requests must be posted again.
    pub imms_used: u32,
    /// Counted writes of the peer that arrived over this link.
    pub counted: u64,
    /// The link's name at both ends.
    pub name: LinkName,
    imms: u32,
    frames: u32,
    free_slots: Vec<u32>,
    /// Whether `LinkUp` was reported. An acceptor reports it once the initiator uses the link.
    pub announced: bool,
    /// Whether the next poll must advance this link.
    pub dirty: bool,
    pub data_failure: Option<DataQpFailure>,
    pub received_at: Time,
    pub sent_at: Time,
    /// When a message of the peer was last delivered.
    pub delivered_at: Time,
}

impl Link {
    pub fn new(
        device: &Device,
        origin: LinkIdentity,
        pair: Pair,
        remote_setup: &QpSetup,
        now: Time,
    ) -> Self {
        let frames = device.own.slots + SPARE;
        // The last send slot receives the byte of flush reads.
        let scratch = pair.slots.sge((frames + FRAME_DEPTH - 1) as usize, 1);
        Self {
            id: origin.id,
            peer: origin.peer,
            endpoint: origin.endpoint,
            remote: origin.remote,
            cq_slot: origin.cq_slot,
            mtu: device.mtu.min(remote_setup.mtu),
            data: Some(pair.data),
            message_qp: pair.messages,
            slots: pair.slots,
            channel: MessageChannel::new(device.own, remote_setup.receive_limits, 0),
            chain: Chain::new(),
            message_chain: Chain::new(),
            inline: pair.inline,
            ledger: Ledger::new(device.limits.send_depth),
            scratch,
            imms_used: 0,
            counted: 0,
            name: origin.name,
            imms: device.own.imms,
            frames,
            free_slots: (frames..frames + FRAME_DEPTH - 1).collect(),
            announced: false,
            dirty: false,
            data_failure: None,
            received_at: now,
            sent_at: now,
            delivered_at: Time(0),
        }
    }

    /// Adds a request to the chain; returns its number.
    #[inline]
    pub fn push(&mut self, mut wr: Wr) -> Result<u32, DomainError> {
        let Some(qp) = self.data.as_ref().filter(|_| self.data_failure.is_none()) else {
            return Err(DomainError::LinkDown("the link is failing".into()));
        };
        self.ledger.push(|number| {
            wr.id = work_id(CompletionKind::Data, number, self.id);
            self.chain.push(qp, &wr)
        })
    }

    #[inline]
    pub fn submit(&mut self) -> Result<(), DomainError> {
        match &self.data {
            Some(qp) => self.ledger.submit(|| self.chain.submit(qp)),
            None => Ok(()),
        }
    }

    /// Whether the data queue pair has failed or refused a request. The link will end.
    #[inline]
    pub fn is_failing(&self) -> bool {
        self.data_failure.is_some() || self.ledger.is_refused()
    }

    /// Posts the read that shows that uncounted writes are readable (IC-2).
    pub fn post_flush_read(&mut self) -> Result<(), DomainError> {
        let Some(u) = self.ledger.unflushed.take() else { return Ok(()) };
        let wr = Wr {
            opcode: sys::WR_RDMA_READ,
            flags: sys::SEND_SIGNALED,
            local: self.scratch,
            remote: u.addr,
            rkey: u.rkey,
            ..Wr::default()
        };
        let last = self.push(wr)?;
        self.submit()?;
        self.ledger.flushed_by(u.writes, last);
        Ok(())
    }

    /// Sends frames while slots and credits last.
    pub fn send_frames(&mut self, now: Time) -> Result<bool, DomainError> {
        let mut progressed = false;
        while self.channel.has_frame() {
            let Some(slot) = self.free_slots.pop() else { break };
            let Some(n) = self.channel.next_frame(self.slots.fill(slot as usize)) else {
                self.free_slots.push(slot);
                break;
            };
            let wr = Wr {
                id: work_id(CompletionKind::FrameSent, slot, self.id),
                opcode: sys::WR_SEND,
                flags: sys::SEND_SIGNALED,
                local: self.slots.sge(slot as usize, n),
                ..Wr::default()
            };
            self.message_chain.push(&self.message_qp, &wr)?;
            self.message_chain.submit(&self.message_qp)?;
            self.sent_at = now;
            progressed = true;
        }
        Ok(progressed)
    }

    pub fn slot_sent(&mut self, slot: u32) {
        debug_assert!(slot >= self.frames && self.free_slots.len() < FRAME_DEPTH as usize);
        self.free_slots.push(slot);
    }

    /// Stops the data queue pair: the NIC accepts no more writes and carries out no more requests.
    pub fn stop(&self) {
        if let Some(Err(error)) = self.data.as_ref().map(super::raw::Qp::stop) {
            // It will be destroyed, which does the same.
            tracing::debug!(%error, "can't stop a queue pair");
        }
    }

    /// Frames that the NIC is still sending.
    pub fn frames_under_way(&self) -> usize {
        FRAME_DEPTH as usize - 1 - self.free_slots.len()
    }

    /// Posts receive requests for immediates again, an eighth of them at a time.
    pub fn repost_imm_receives(&mut self) -> Result<(), DomainError> {
        let n = self.imms_used;
        if n < (self.imms / 8).max(1) {
            return Ok(());
        }
        if let Some(qp) = self.data.as_ref().filter(|_| self.data_failure.is_none()) {
            super::chain::receive_imms(qp, work_id(CompletionKind::Imm, 0, self.id), n)?;
            self.channel.imms_freed(n);
            self.imms_used = 0;
        }
        Ok(())
    }

    /// Removes all work under way, to be failed.
    pub fn abandon(&mut self) -> Vec<Token> {
        let mut tokens: Vec<Token> = self.ledger.abandon().collect();
        tokens.extend(self.channel.abandon());
        tokens
    }

    /// The next time for a heartbeat, for the peer's timeout, or for the end of a failed link.
    pub fn next_timer(&self, peer_timeout: Duration) -> Time {
        let end = self.data_failure.as_ref().map_or(Time::NEVER, |b| b.until);
        self.sent_at.after(peer_timeout / 4).min(self.received_at.after(peer_timeout)).min(end)
    }
}
