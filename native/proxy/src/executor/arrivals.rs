//! What peers have sent: data and atomics that may be applied, credits, entries into barriers.

use std::sync::atomic::Ordering::AcqRel;

use fabric_engine::{Local, Op, Remote, Time};

use super::{place, Event, Executor};
use crate::{
    inbox::News,
    order::{Entry, OrderError, ENTRY},
    peer::{Posted, State},
    rounds::Rounds,
    tag::{Kind, Tag},
    ProxyError,
};

impl Executor {
    pub(super) fn take_arrivals(&mut self, now: Time) -> bool {
        let mut tags = std::mem::take(&mut self.tags);
        let news = self.inbox.take(&mut tags);
        let any = !tags.is_empty() || !news.is_empty();
        for (value, n) in tags.drain(..) {
            if let Some(peer) = self.peers.get_mut(usize::from(Tag::of(value).source)) {
                peer.heard = now;
            }
            self.sort(value, n);
        }
        self.tags = tags;
        for item in news {
            match item {
                News::Lost { rank, incarnation, error } => {
                    if self.peers[rank].incarnation == incarnation {
                        self.lose(rank, ProxyError::Engine(error));
                        (self.on_event)(Event::Gone { rank, incarnation });
                    }
                }
                News::Mask { rank } => self.mask(rank),
                News::Join { rank, incarnation, descriptor } => {
                    self.join(rank, incarnation, &descriptor);
                }
            }
        }
        any
    }

    /// By the life that it is of: taken in now, kept until that life is announced, or nothing (IC-6).
    fn sort(&mut self, value: u32, n: u32) {
        let tag = Tag::of(value);
        let Some(peer) = self.peers.get_mut(usize::from(tag.source)) else { return };
        if peer.incarnation != 0 && tag.life == peer.life() {
            if peer.state == State::Alive {
                self.arrive(tag, n);
            }
        } else if peer.is_ahead(tag.life) {
            *peer.early.entry(value).or_default() += n;
        }
    }

    /// What a life that was announced now has sent before.
    pub(super) fn take_early(&mut self, rank: usize) {
        for (value, n) in std::mem::take(&mut self.peers[rank].early) {
            self.sort(value, n);
        }
    }

    fn arrive(&mut self, tag: Tag, n: u32) {
        let rank = usize::from(tag.source);
        let result = match tag.kind {
            Kind::Data | Kind::Atomic => self.order(rank, tag, n),
            Kind::Credit => {
                self.peers[rank].waits_since = None;
                self.peers[rank].sending(tag.channel).credit(n)
            }
            Kind::Barrier => {
                let ranks = self.peers.len();
                let key = (tag.scope(), tag.channel);
                self.rounds.entry(key).or_insert_with(|| Rounds::new(ranks)).tell(rank, n);
                Ok(())
            }
        };
        if let Err(cause) = result {
            self.lose(rank, ProxyError::Protocol { rank, cause });
        }
    }

    fn order(&mut self, rank: usize, tag: Tag, n: u32) -> Result<(), OrderError> {
        let words = &self.common.words;
        // Whoever sees the sum sees the bytes of the writes that it stands for.
        let apply = |entry: Entry| {
            words[usize::from(entry.slot)].fetch_add(entry.value as u64, AcqRel);
        };
        let channel = self.peers[rank].receiving(tag.channel);
        match tag.kind {
            Kind::Atomic => {
                let at = place(rank, tag.channel, tag.epoch);
                let bytes = self.control.with_bytes(at, ENTRY, |b| b.try_into());
                let bytes = bytes.ok().and_then(Result::ok).ok_or(OrderError::Garbled)?;
                let entry = Entry::from_bytes(bytes)?;
                if usize::from(entry.slot) >= words.len() {
                    return Err(OrderError::Slot { slot: entry.slot, slots: words.len() });
                }
                if n != 1 {
                    return Err(OrderError::Twice(tag.epoch));
                }
                channel.ended(tag.epoch, entry, apply)?;
            }
            _ => channel.wrote(tag.epoch, n, apply)?,
        }
        for _ in 0..channel.credits() {
            self.tell(rank, Kind::Credit, tag.channel, 0);
        }
        Ok(())
    }

    /// A tag and nothing else.
    pub(super) fn tell(&mut self, rank: usize, kind: Kind, channel: u8, epoch: u8) {
        let tag = self.tag(kind, channel, epoch);
        let Some(control) = &self.peers[rank].control else { return };
        let op = Op::Write {
            src: Local { region: &self.control, offset: 0 },
            dst: Remote { region: control, offset: 0 },
            len: 0,
            imm: Some(tag.imm()),
        };
        match self.post(&[op]) {
            Ok(handle) => {
                self.peers[rank].requests += 1;
                let posted = Posted { handle, fifo: None, first: 0, commands: 0, told: false };
                self.keep(rank, posted);
            }
            Err(error) => self.lose(rank, ProxyError::Engine(error)),
        }
    }

    pub(super) fn tag(&self, kind: Kind, channel: u8, epoch: u8) -> Tag {
        let (source, life) = (self.config.rank as u16, crate::peer::life(self.config.incarnation));
        Tag { source, life, kind, channel, epoch }
    }
}
