//! A link: two queue pairs to one peer, and what is under way over them.

use std::{collections::VecDeque, time::Duration};

use fabric_sys::ibverbs as sys;

use super::{
    chain::{Chain, Wr},
    device::{Device, Pair, MAIL_DEPTH},
    memory::Slots,
    place::{Place, Setup},
    raw::Qp,
    shelves::Seat,
    work_id, Kind,
};
use crate::{
    api::RegionKey,
    domain::{DomainError, LinkId, LinkName, PeerIdentity, Token},
    time::Time,
    transport::nic::mail::{Mail, SPARE},
};

/// Work of the group's on the data queue pair: requests `first` to `last`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub token: Token,
    pub first: u32,
    /// With this one it is done.
    pub last: u32,
    /// Which bytes of which region it touches at the peer.
    pub region: RegionKey,
    pub from: u64,
    pub to: u64,
}

/// Uncounted writes that are not known to be readable yet: a read of the last one's last byte
/// tells. The peer's NIC answers it only after its writes have passed the bus: on PCIe a read
/// pushes the writes before it (PCIe 2.4.1, table 2-40, C2a), and an acknowledgement alone doesn't
/// say that they are there (InfiniBand 9.7.5.1.2).
#[derive(Clone, Copy, Debug)]
pub(super) struct Unflushed {
    /// How many, and their bytes.
    pub writes: usize,
    pub bytes: u64,
    /// Where the last byte of the last one lies.
    pub region: RegionKey,
    pub addr: u64,
    pub rkey: u32,
}

/// The data queue pair has failed; the link stays until both sides know why.
#[derive(Debug)]
pub(super) struct Broken {
    pub cause: DomainError,
    /// The request that the peer's NIC refused, and why as soon as the peer has said it.
    pub refused: Option<(Token, Option<DomainError>)>,
    pub until: Time,
}

/// What a new link is made of, besides its queue pairs.
pub(super) struct Origin {
    pub id: LinkId,
    pub peer: PeerIdentity,
    pub endpoint: usize,
    pub name: LinkName,
    pub there: Place,
    pub seat: Seat,
}

pub(super) struct Link {
    pub id: LinkId,
    pub peer: PeerIdentity,
    pub endpoint: usize,
    pub there: Place,
    pub seat: Seat,
    pub mtu: u8,
    /// None once it has failed: nothing can touch memory on its behalf then (MR-1).
    pub data: Option<Qp>,
    pub mail_qp: Qp,
    pub slots: Slots,
    pub mail: Mail,
    pub chain: Chain,
    mail_chain: Chain,
    pub inline: u32,
    pub depth: u32,
    /// Requests posted and retired on the data queue pair; both only grow, and wrap.
    pub posted: u32,
    pub retired: u32,
    pub entries: VecDeque<Entry>,
    /// Entries at the end that wait for a read to be posted, and which.
    pub unflushed: Option<Unflushed>,
    /// Where such a read puts its byte.
    pub scratch: sys::Sge,
    /// Immediates whose places are to be given back.
    pub imms_used: u32,
    /// Writes of the peer's that were counted over this link.
    pub counted: u64,
    /// What both ends call it.
    pub name: LinkName,
    imms: u32,
    frames: u32,
    free_slots: Vec<u32>,
    /// It has been reported; an acceptor's is when the initiator has first used it.
    pub announced: bool,
    /// Something waits to be done in the next poll.
    pub dirty: bool,
    pub broken: Option<Broken>,
    pub heard_at: Time,
    pub spoke_at: Time,
}

impl Link {
    pub fn new(device: &Device, origin: Origin, pair: Pair, theirs: &Setup, now: Time) -> Self {
        let frames = device.own.slots + SPARE;
        // The last slot of those that send is for the byte that a flush reads.
        let scratch = pair.slots.sge((frames + MAIL_DEPTH - 1) as usize, 1);
        Self {
            id: origin.id,
            peer: origin.peer,
            endpoint: origin.endpoint,
            there: origin.there,
            seat: origin.seat,
            mtu: device.mtu.min(theirs.mtu),
            data: Some(pair.data),
            mail_qp: pair.mail,
            slots: pair.slots,
            mail: Mail::new(device.own, theirs.places, 0),
            chain: Chain::new(),
            mail_chain: Chain::new(),
            inline: pair.inline,
            depth: device.limits.send_depth,
            posted: 0,
            retired: 0,
            entries: VecDeque::with_capacity(device.limits.send_depth as usize),
            unflushed: None,
            scratch,
            imms_used: 0,
            counted: 0,
            name: origin.name,
            imms: device.own.imms,
            frames,
            free_slots: (frames..frames + MAIL_DEPTH - 1).collect(),
            announced: false,
            dirty: false,
            broken: None,
            heard_at: now,
            spoke_at: now,
        }
    }

    /// Requests that the data queue pair has room for; one is kept for a flush.
    #[inline]
    pub fn room(&self) -> u32 {
        (self.depth - 1).saturating_sub(self.posted.wrapping_sub(self.retired))
    }

    /// Puts a request into the chain; its number.
    #[inline]
    pub fn push(&mut self, mut wr: Wr) -> Result<u32, DomainError> {
        let number = self.posted;
        let Some(qp) = self.data.as_ref().filter(|_| self.broken.is_none()) else {
            return Err(DomainError::LinkDown("the link is failing".into()));
        };
        wr.id = work_id(Kind::Data, number, self.id);
        self.chain.push(qp, &wr)?;
        self.posted = number.wrapping_add(1);
        Ok(number)
    }

    #[inline]
    pub fn ring(&mut self) -> Result<(), DomainError> {
        match &self.data {
            Some(qp) => self.chain.ring(qp),
            None => Ok(()),
        }
    }

    /// Has uncounted writes end with a read that shows that they are readable (IC-2).
    pub fn settle_writes(&mut self) -> Result<(), DomainError> {
        let Some(u) = self.unflushed.take() else { return Ok(()) };
        let wr = Wr {
            opcode: sys::WR_RDMA_READ,
            flags: sys::SEND_SIGNALED,
            local: self.scratch,
            remote: u.addr,
            rkey: u.rkey,
            ..Wr::default()
        };
        let last = self.push(wr)?;
        self.ring()?;
        let from = self.entries.len() - u.writes;
        self.entries.range_mut(from..).for_each(|e| e.last = last);
        Ok(())
    }

    /// Enters work of which only a part was handed to the NIC; false if none of it was.
    pub fn own_up(&mut self, token: Token, before: Option<u32>) -> bool {
        let (Some(first), last) = (before, self.posted.wrapping_sub(1)) else { return false };
        let some = self.posted != first;
        if some {
            let region = RegionKey::default();
            self.entries.push_back(Entry { token, first, last, region, from: 0, to: 0 });
        }
        some
    }

    /// The number of the request behind a completion.
    #[inline]
    pub fn number(&self, seq: u32) -> u32 {
        self.retired.wrapping_add(seq.wrapping_sub(self.retired) & super::SEQ_MASK)
    }

    /// A request is complete, and with it all before it: what is done with that.
    #[inline]
    pub fn retire(&mut self, number: u32, mut done: impl FnMut(Token)) {
        self.retired = number.wrapping_add(1);
        let waiting = self.unflushed.map_or(0, |u| u.writes);
        while self.entries.len() > waiting {
            let Some(e) = self.entries.front() else { return };
            if self.retired.wrapping_sub(e.last.wrapping_add(1)) > u32::MAX / 2 {
                return;
            }
            done(e.token);
            self.entries.pop_front();
        }
    }

    /// The work that a failed request belongs to.
    pub fn blamed(&self, number: u32) -> Option<Entry> {
        let at = |e: &&Entry| number.wrapping_sub(e.first) < u32::MAX / 2;
        // The last one that begins at or before it; a flush's read belongs to the last it settles.
        self.entries.iter().rev().find(at).copied()
    }

    /// Sends the frames that may go.
    pub fn pump(&mut self, now: Time) -> Result<bool, DomainError> {
        let mut moved = false;
        while self.mail.has_frame() {
            let Some(slot) = self.free_slots.pop() else { break };
            let Some(n) = self.mail.next_frame(self.slots.fill(slot as usize)) else {
                self.free_slots.push(slot);
                break;
            };
            let wr = Wr {
                id: work_id(Kind::Mail, slot, self.id),
                opcode: sys::WR_SEND,
                flags: sys::SEND_SIGNALED,
                local: self.slots.sge(slot as usize, n),
                ..Wr::default()
            };
            self.mail_chain.push(&self.mail_qp, &wr)?;
            self.mail_chain.ring(&self.mail_qp)?;
            self.spoke_at = now;
            moved = true;
        }
        Ok(moved)
    }

    pub fn slot_sent(&mut self, slot: u32) {
        debug_assert!(slot >= self.frames && self.free_slots.len() < MAIL_DEPTH as usize);
        self.free_slots.push(slot);
    }

    /// Has the NIC accept no more writes and carry out no more of ours.
    pub fn stop(&self) {
        if let Some(Err(error)) = self.data.as_ref().map(super::raw::Qp::stop) {
            // It is destroyed soon, which does the same.
            tracing::debug!(%error, "a queue pair can't be stopped");
        }
    }

    /// Frames of ours that the NIC still has.
    pub fn frames_under_way(&self) -> usize {
        MAIL_DEPTH as usize - 1 - self.free_slots.len()
    }

    /// Gives the places of immediates back once there are enough to be worth it.
    pub fn replace_imms(&mut self) -> Result<(), DomainError> {
        let n = self.imms_used;
        if n < (self.imms / 8).max(1) {
            return Ok(());
        }
        if let Some(qp) = self.data.as_ref().filter(|_| self.broken.is_none()) {
            super::chain::receive_imms(qp, work_id(Kind::Imm, 0, self.id), n)?;
            self.mail.imms_freed(n);
            self.imms_used = 0;
        }
        Ok(())
    }

    /// Everything under way, to be failed.
    pub fn abandon(&mut self) -> Vec<Token> {
        let mut tokens: Vec<Token> = self.entries.drain(..).map(|e| e.token).collect();
        tokens.extend(self.mail.abandon());
        tokens
    }

    /// When it wants attention even if nothing happens: to show life, to miss it, to end.
    pub fn next_timer(&self, peer_timeout: Duration) -> Time {
        let end = self.broken.as_ref().map_or(Time::NEVER, |b| b.until);
        self.spoke_at.after(peer_timeout / 4).min(self.heard_at.after(peer_timeout)).min(end)
    }
}
