//! Arrivals from peers: data, atomics, credits and notices.

use std::sync::atomic::Ordering::AcqRel;

use fabric_engine::{Handle, Local, Op, Remote, Result as EngineResult, Time};

use super::{control_offset, Event, Executor};
use crate::{
    barrier::BarrierRounds,
    inbox::MembershipChange,
    order::{OrderEntry, OrderError, ENTRY},
    peer::{PostedRequest, RankState},
    tag::{Kind, Notice, Tag},
    ProxyError,
};

impl Executor {
    pub(super) fn take_arrivals(&mut self, now: Time) -> bool {
        let mut tags = std::mem::take(&mut self.tags);
        let changes = self.inbox.take(&mut tags);
        let any = !tags.is_empty() || !changes.is_empty();
        for (value, n) in tags.drain(..) {
            if let Some(peer) = self.peers.get_mut(usize::from(Tag::of(value).source)) {
                peer.last_arrival = now;
            }
            self.dispatch(value, n);
        }
        self.tags = tags;
        for item in changes {
            match item {
                MembershipChange::Lost { rank, incarnation, error } => {
                    if self.peers[rank].incarnation == incarnation {
                        self.lose(rank, ProxyError::Engine(error));
                        (self.on_event)(Event::Gone { rank, incarnation });
                    }
                }
                MembershipChange::Mask { rank } => self.mask(rank),
                MembershipChange::Join { rank, incarnation, descriptor } => {
                    self.join(rank, incarnation, &descriptor);
                }
            }
        }
        any
    }

    /// Applies tags of the current incarnation, keeps those of a later one, drops earlier ones
    /// (IC-6).
    fn dispatch(&mut self, value: u32, n: u32) {
        let tag = Tag::of(value);
        let Some(peer) = self.peers.get_mut(usize::from(tag.source)) else { return };
        if peer.incarnation != 0 && tag.incarnation == peer.tag_incarnation() {
            if peer.state == RankState::Alive {
                self.apply(tag, n);
            }
        } else if peer.is_ahead(tag.incarnation) {
            *peer.early.entry(value).or_default() += n;
        }
    }

    /// Applies what an incarnation sent before it was announced here.
    pub(super) fn apply_early(&mut self, rank: usize) {
        for (value, n) in std::mem::take(&mut self.peers[rank].early) {
            self.dispatch(value, n);
        }
    }

    fn apply(&mut self, tag: Tag, n: u32) {
        let rank = usize::from(tag.source);
        let result = match tag.kind {
            Kind::Data | Kind::Atomic => self.apply_in_order(rank, tag, n),
            Kind::Credit => {
                self.peers[rank].waiting_since = None;
                self.peers[rank].sending(tag.channel).credit(n)
            }
            Kind::Notice => self.apply_notice(rank, tag, n),
        };
        if let Err(cause) = result {
            self.lose(rank, ProxyError::Protocol { rank, cause });
        }
    }

    fn apply_notice(&mut self, rank: usize, tag: Tag, n: u32) -> Result<(), OrderError> {
        let (incarnation, ranks) = (self.peers[rank].incarnation, self.peers.len());
        match tag.notice().ok_or(OrderError::Notice(tag.epoch))? {
            Notice::Entered(scope) => self
                .rounds
                .entry((scope, tag.channel))
                .or_insert_with(|| BarrierRounds::new(ranks))
                .on_entered(rank, n),
            Notice::Joined => (self.on_event)(Event::Joined { rank, incarnation }),
            Notice::Masked => (self.on_event)(Event::Masked { rank, incarnation }),
        }
        Ok(())
    }

    fn apply_in_order(&mut self, rank: usize, tag: Tag, n: u32) -> Result<(), OrderError> {
        let words = &self.common.words;
        // Release: a device that reads the sum also sees the bytes of its writes.
        let apply = |entry: OrderEntry| {
            words[usize::from(entry.slot)].fetch_add(entry.value as u64, AcqRel);
        };
        let channel = self.peers[rank].receiving(tag.channel);
        match tag.kind {
            Kind::Atomic => {
                let at = control_offset(rank, tag.channel, tag.epoch);
                let bytes = self.control.with_bytes(at, ENTRY, |b| b.try_into());
                let bytes = bytes.ok().and_then(Result::ok).ok_or(OrderError::Garbled)?;
                let entry = OrderEntry::from_bytes(bytes)?;
                if usize::from(entry.slot) >= words.len() {
                    return Err(OrderError::Slot { slot: entry.slot, slots: words.len() });
                }
                if n != 1 {
                    return Err(OrderError::Twice(tag.epoch));
                }
                channel.ended(tag.epoch, entry, apply)?;
            }
            _ => channel.on_write(tag.epoch, n, apply)?,
        }
        for _ in 0..channel.credits() {
            self.send_tag(rank, Kind::Credit, tag.channel, 0);
        }
        Ok(())
    }

    /// Sends a tag without data.
    pub(super) fn send_tag(&mut self, rank: usize, kind: Kind, channel: u8, epoch: u8) {
        match self.post_tag(rank, kind, channel, epoch) {
            None => {}
            Some(Ok(handle)) => {
                self.peers[rank].requests += 1;
                let posted =
                    PostedRequest { handle, fifo: None, first: 0, commands: 0, wakes: false };
                self.track(rank, posted);
            }
            Some(Err(error)) => self.lose(rank, ProxyError::Engine(error)),
        }
    }

    /// As [`Executor::send_tag`], without a look at what becomes of it; `None` for an absent rank.
    pub(super) fn post_tag(
        &self,
        rank: usize,
        kind: Kind,
        channel: u8,
        epoch: u8,
    ) -> Option<EngineResult<Handle>> {
        let tag = self.tag(kind, channel, epoch);
        let op = Op::Write {
            src: Local { region: &self.control, offset: 0 },
            dst: Remote { region: self.peers[rank].control.as_ref()?, offset: 0 },
            len: 0,
            imm: Some(tag.imm()),
        };
        Some(self.post(&[op]))
    }

    pub(super) fn tag(&self, kind: Kind, channel: u8, epoch: u8) -> Tag {
        let (source, incarnation) =
            (self.config.rank as u16, crate::peer::tag_incarnation(self.config.incarnation));
        Tag { source, incarnation, kind, channel, epoch }
    }
}
