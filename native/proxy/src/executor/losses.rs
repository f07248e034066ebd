//! Ranks that come and go.

use std::time::Duration;

use fabric_engine::Time;

use super::{Event, Executor, RING};
use crate::{
    descriptor::ThreadDescriptor, inbox::News, peer::State, symmetric::check_rank, ProxyError,
    Result,
};

impl Executor {
    /// A rank is lost, for a reason that is told once.
    pub(super) fn lose(&mut self, rank: usize, error: ProxyError) {
        if self.peers[rank].state != State::Alive || rank == self.config.rank {
            // Nothing that is sent to this rank itself is lost but when the engine is closed.
            return self.give_up(rank);
        }
        let incarnation = self.peers[rank].incarnation;
        if self.common.alive.end(rank, incarnation) {
            tracing::warn!(rank, %error, "a rank is lost");
            self.common.alive.lost(rank, incarnation, error);
        }
        self.give_up(rank);
    }

    /// A rank is given up because somebody says so.
    pub(super) fn mask(&mut self, rank: usize) {
        if rank < self.peers.len() && rank != self.config.rank {
            let incarnation = self.peers[rank].incarnation;
            self.common.alive.end(rank, incarnation);
            self.give_up(rank);
        }
    }

    /// What other threads have given up is given up here, too. True if something had come meanwhile.
    pub(super) fn follow_masks(&mut self, now: Time) -> bool {
        let changes = self.common.alive.changes();
        if self.changes == changes {
            return false;
        }
        self.changes = changes;
        // Another thread may be the first to see that a rank left; what it sent here before still counts.
        let _ = self.engine.poll();
        let moved = self.take_arrivals(now);
        for rank in 0..self.peers.len() {
            let peer = &self.peers[rank];
            if peer.state == State::Alive && self.common.alive.has_ended(rank, peer.incarnation) {
                self.give_up(rank);
            }
        }
        moved
    }

    /// Ends all that is under way to a rank; nothing is sent to it any more, and nothing of it counts.
    fn give_up(&mut self, rank: usize) {
        let peer = &mut self.peers[rank];
        let (was, incarnation) =
            (std::mem::replace(&mut peer.state, State::Masked), peer.incarnation);
        peer.outstanding = 0;
        peer.waits_since = None;
        peer.control = None;
        for posted in peer.posted.drain(..) {
            posted.handle.cancel();
            if let Some(fifo) = posted.fifo {
                self.sources[fifo].outstanding -= posted.commands;
            }
        }
        self.active.retain(|r| *r != rank);
        self.memory.clear(rank);
        if was == State::Alive {
            self.tell_given_up(rank, incarnation);
        }
    }

    /// A rank is there, in a life of its own.
    pub(super) fn join(&mut self, rank: usize, incarnation: u32, theirs: &ThreadDescriptor) {
        let Err(error) = self.try_join(rank, incarnation, theirs) else { return };
        let Some(peer) = self.peers.get(rank) else {
            return (self.on_event)(Event::Lost { rank, incarnation, error });
        };
        let (alive, joined) = (&self.common.alive, peer.incarnation >= incarnation);
        alive.end(rank, incarnation);
        if let ProxyError::OldLife { .. } = error {
            return (self.on_event)(Event::Lost { rank, incarnation, error });
        }
        // What is wrong is told even if the rank never was there, and when the other threads have given it up as well.
        alive.lost(rank, incarnation, error);
        match joined {
            true => self.give_up(rank),
            false => self.tell_given_up(rank, incarnation),
        }
    }

    /// This thread has given a life up.
    fn tell_given_up(&self, rank: usize, incarnation: u32) {
        if let Some(error) = self.common.alive.given_up(rank, incarnation) {
            (self.on_event)(Event::Lost { rank, incarnation, error });
        }
    }

    fn try_join(&mut self, rank: usize, incarnation: u32, theirs: &ThreadDescriptor) -> Result<()> {
        check_rank(rank, self.peers.len())?;
        let had = self.peers[rank].incarnation;
        if incarnation <= had {
            return Err(ProxyError::OldLife { rank, given: incarnation, had });
        }
        let needed = 2 * RING * self.config.ranks as u64;
        if theirs.control.len < needed || theirs.control.owner.id != theirs.memory.owner.id {
            return Err(ProxyError::Invalid(format!(
                "rank {rank} comes with {} bytes for atomics, {needed} are needed, of the engine of its memory",
                theirs.control.len
            )));
        }
        self.common.alive.begin(rank, incarnation);
        self.give_up(rank);
        let control = self.engine.import(&theirs.control)?;
        let peer = self.memory.set(&self.engine, rank, &theirs.memory)?.clone();
        self.peers[rank].reborn(incarnation, control);
        self.rounds.values_mut().for_each(|r| r.join(rank));
        if rank != self.config.rank {
            // Of somebody who has nothing to send: it ends when he does.
            let watch = self.engine.counter()?.expect(1, &[peer], Duration::MAX)?;
            let inbox = self.inbox.clone();
            watch.on_done(move |end| {
                if let Err(error) = end {
                    inbox.news(News::Lost { rank, incarnation, error });
                }
            });
            self.peers[rank].watch = Some(watch);
        }
        self.take_early(rank);
        Ok(())
    }
}
