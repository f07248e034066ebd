//! Ranks that join, leave and are lost.

use std::time::Duration;

use fabric_engine::Time;

use super::{Event, Executor, RING};
use crate::{
    descriptor::ThreadDescriptor,
    inbox::MembershipChange,
    peer::RankState,
    symmetric::check_rank,
    tag::{Kind, Notice},
    ProxyError, Result,
};

impl Executor {
    /// Drops a rank as lost; the cause is reported once.
    pub(super) fn lose(&mut self, rank: usize, error: ProxyError) {
        if self.peers[rank].state != RankState::Alive || rank == self.config.rank {
            // The rank itself is lost only when its engine is closed.
            return self.drop_rank(rank);
        }
        let incarnation = self.peers[rank].incarnation;
        if self.common.alive.end(rank, incarnation) {
            match self.common.alive.expects_departures() {
                true => tracing::debug!(rank, %error, "a rank has left"),
                false => tracing::warn!(rank, %error, "a rank is lost"),
            }
            self.common.alive.lost(rank, incarnation, error);
        }
        self.drop_rank(rank);
    }

    /// Drops a rank because the caller excludes it. The rank may live, and hears of it even if it
    /// has yet to join this one.
    pub(super) fn mask(&mut self, rank: usize) {
        if rank < self.peers.len() && rank != self.config.rank {
            if self.peers[rank].state == RankState::Alive {
                let _ = self.post_tag(rank, Kind::Notice, 0, Notice::Masked.epoch());
            }
            let incarnation = self.peers[rank].incarnation;
            self.common.alive.end(rank, incarnation);
            self.drop_rank(rank);
        }
    }

    /// Drops ranks that other threads have dropped. Returns whether anything arrived meanwhile.
    pub(super) fn follow_masks(&mut self, now: Time) -> bool {
        let changes = self.common.alive.changes();
        if self.changes == changes {
            return false;
        }
        self.changes = changes;
        // Another thread may see first that a rank left. Its earlier data to this thread still
        // counts.
        let _ = self.engine.poll();
        let moved = self.take_arrivals(now);
        for rank in 0..self.peers.len() {
            let peer = &self.peers[rank];
            if peer.state == RankState::Alive && self.common.alive.has_ended(rank, peer.incarnation)
            {
                self.drop_rank(rank);
            }
        }
        moved
    }

    /// Ends all requests to a rank, sends it nothing more and ignores what it sends.
    fn drop_rank(&mut self, rank: usize) {
        let peer = &mut self.peers[rank];
        let (was, incarnation) =
            (std::mem::replace(&mut peer.state, RankState::Masked), peer.incarnation);
        peer.outstanding = 0;
        peer.waiting_since = None;
        peer.control = None;
        for posted in peer.posted.drain(..) {
            posted.handle.cancel();
            if let Some(fifo) = posted.fifo {
                self.sources[fifo].outstanding -= posted.commands;
            }
        }
        self.active.retain(|r| *r != rank);
        self.memory.clear(rank);
        if was == RankState::Alive {
            self.on_dropped(rank, incarnation);
        }
    }

    /// Adds a rank with a new incarnation.
    pub(super) fn join(&mut self, rank: usize, incarnation: u32, descriptor: &ThreadDescriptor) {
        let Err(error) = self.try_join(rank, incarnation, descriptor) else { return };
        let Some(peer) = self.peers.get(rank) else {
            return (self.on_event)(Event::Lost { rank, incarnation, error });
        };
        let (alive, joined) = (&self.common.alive, peer.incarnation >= incarnation);
        alive.end(rank, incarnation);
        if let ProxyError::StaleIncarnation { .. } = error {
            return (self.on_event)(Event::Lost { rank, incarnation, error });
        }
        // Errors are reported even if the rank never took part or other threads dropped it too.
        alive.lost(rank, incarnation, error);
        match joined {
            true => self.drop_rank(rank),
            false => self.on_dropped(rank, incarnation),
        }
    }

    /// Records that this thread has dropped an incarnation.
    fn on_dropped(&self, rank: usize, incarnation: u32) {
        if let Some(error) = self.common.alive.thread_dropped(rank, incarnation) {
            (self.on_event)(Event::Lost { rank, incarnation, error });
        }
    }

    fn try_join(
        &mut self,
        rank: usize,
        incarnation: u32,
        descriptor: &ThreadDescriptor,
    ) -> Result<()> {
        check_rank(rank, self.peers.len())?;
        let had = self.peers[rank].incarnation;
        if incarnation <= had {
            return Err(ProxyError::StaleIncarnation { rank, given: incarnation, had });
        }
        let needed = 2 * RING * self.config.ranks as u64;
        if descriptor.control.len < needed
            || descriptor.control.owner.id != descriptor.memory.owner.id
        {
            return Err(ProxyError::Invalid(format!(
                "rank {rank} has {} bytes for atomics; expected {needed}, in the engine of its memory",
                descriptor.control.len
            )));
        }
        self.common.alive.begin(rank, incarnation);
        self.drop_rank(rank);
        let control = self.engine.import(&descriptor.control)?;
        let peer = self.memory.set(&self.engine, rank, &descriptor.memory)?.clone();
        self.peers[rank].restart(incarnation, control);
        self.rounds.values_mut().for_each(|r| r.join(rank));
        if rank != self.config.rank {
            // The expectation never completes; it fails when the peer is lost.
            let watch = self.engine.counter()?.expect(1, &[peer], Duration::MAX)?;
            let inbox = self.inbox.clone();
            watch.on_done(move |end| {
                if let Err(error) = end {
                    inbox.push(MembershipChange::Lost { rank, incarnation, error });
                }
            });
            self.peers[rank].watch = Some(watch);
            self.send_tag(rank, Kind::Notice, 0, Notice::Joined.epoch());
        }
        self.apply_early(rank);
        Ok(())
    }
}
