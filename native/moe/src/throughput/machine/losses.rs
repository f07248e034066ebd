//! Lost ranks, and ranks that replace them.
//!
//! A forwarding rank can't be left out of a running exchange. So a loss ends the current exchange
//! of every rank with an error that names the lost rank, once per rank. The next exchange runs
//! among the others. No rank waits until then: a slot carries its era, and slots of earlier eras
//! are skipped.

use std::{
    sync::{atomic::Ordering::Relaxed, Arc, OnceLock},
    time::Duration,
};

use fabric_engine::{api::EngineId, locks::Mutex, EngineError, Result, Time};

use super::{Channel, Machine, Member, Phase, Signals};
use crate::throughput::{
    context::{Arrivals, Io},
    signals::BEATS,
};

/// Why a rank is lost, or why the exchange has ended for this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostRank {
    /// The lost rank.
    pub rank: u32,
    pub cause: String,
}

/// The ranks that this rank has given up; readable during a call.
#[derive(Debug, Default)]
pub struct Losses {
    ended: OnceLock<LostRank>,
    lost: Mutex<Vec<LostRank>>,
}

impl Losses {
    /// Why the exchange has ended for good, for this rank.
    pub fn ended(&self) -> Option<&LostRank> {
        self.ended.get()
    }

    /// Ranks that were given up and haven't come again, in order of loss.
    pub fn lost(&self) -> Vec<LostRank> {
        self.lost.lock().clone()
    }
}

/// A rank that the proxy will drop.
#[derive(Debug)]
pub(super) struct PendingMask {
    rank: u32,
    /// The drain after which all ranks know of the loss.
    drain: u64,
    /// When the drain was first awaited.
    since: Option<Time>,
}

/// The last incarnation of a rank that took part here.
#[derive(Debug)]
pub(super) struct LastIncarnation {
    incarnation: u32,
    /// Threads of the proxy that have said that nothing of it can come to them any more.
    gone: u32,
}

impl Machine {
    /// # Errors
    /// [`EngineError::PeerLost`]: names all lost ranks that no call has reported, or says that
    /// others continue without this rank, for good.
    pub fn check(&mut self) -> Result<()> {
        self.check_goes_on()?;
        if self.unreported_losses.is_empty() {
            return Ok(());
        }
        self.reported_losses = std::mem::take(&mut self.unreported_losses);
        let then = "begin again with dispatch_send, without it, where all others do";
        match &self.reported_losses[..] {
            [one] => Err(lost(format!("rank {}", one.rank), &one.cause, then)),
            all => {
                let name = |b: &LostRank| format!("rank {}", b.rank);
                let cause = |b: &LostRank| format!("rank {}: {}", b.rank, b.cause);
                let names: Vec<_> = all.iter().map(name).collect();
                let causes: Vec<_> = all.iter().map(cause).collect();
                let then = then.replace("without it", "without them");
                Err(lost(names.join(", "), &causes.join("; "), &then))
            }
        }
    }

    /// # Errors
    /// [`EngineError::PeerLost`]: others go on without this rank.
    pub fn check_goes_on(&self) -> Result<()> {
        match self.losses.ended() {
            None => Ok(()),
            Some(LostRank { rank, cause }) => {
                Err(lost(format!("rank {rank}"), cause, "have it come anew"))
            }
        }
    }

    /// Takes the losses that the last call reported: they are reported again if ranks are lost
    /// again.
    pub fn report_again(&mut self) {
        self.unreported_losses.splice(..0, self.reported_losses.drain(..));
    }

    /// Whether the running exchange was abandoned.
    pub fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    /// Advances abandoned jobs; true once all have ended.
    pub fn finish_jobs(&mut self, io: &mut Io<'_, '_>) -> bool {
        if self.is_abandoned {
            self.jobs.discard(io);
        }
        !self.jobs.are_under_way()
    }

    /// The ranks that this rank has given up, for readers during a call.
    pub fn losses(&self) -> Arc<Losses> {
        Arc::clone(&self.losses)
    }

    /// The state of each rank, for a rank that joins again.
    pub fn events(&self) -> &[u32] {
        self.membership.events()
    }

    /// The latest incarnation of each rank.
    pub fn incarnations(&self) -> Vec<u32> {
        (0..self.spec.shape.ranks).map(|rank| self.membership.incarnation(rank)).collect()
    }

    /// Per rank, whether it is present.
    pub fn here(&self) -> Vec<bool> {
        self.membership.here()
    }

    /// A rank whose descriptor is missing and that is not known to be absent.
    pub fn awaited(&self) -> Option<u32> {
        self.membership.awaited()
    }

    /// Gives up a rank. The running exchange ends here and at all others, which get a signal. The
    /// rank itself, which may live, hears of it from the proxy that masks it. If it is this rank,
    /// its exchange ends for good.
    pub fn fail(&mut self, rank: u32, cause: String) {
        if rank == self.member.rank {
            if self.losses.ended.set(LostRank { rank, cause: cause.clone() }).is_ok() {
                tracing::warn!(rank, cause, "this rank gives itself up");
                self.jobs.abort();
                self.signals.give_up(&self.ctx, self.member);
                let _ = self.signals.commands.flush();
            }
            return;
        }
        if !self.membership.is_here(rank) {
            // No rank waits for one that has yet to join.
            self.membership.lose(rank);
            return;
        }
        tracing::warn!(rank, cause, "a rank was given up");
        self.membership.lose(rank);
        self.ctx.here[rank as usize] = false;
        self.ctx.has_joined[rank as usize] = false;
        self.gone.retain(|(gone, _)| *gone != rank);
        let member = Member { rank, incarnation: self.membership.incarnation(rank) };
        let drain = self.signals.give_up(&self.ctx, member);
        // If the signal can't be sent, the others notice the loss themselves.
        let _ = self.signals.commands.flush();
        self.to_mask.push(PendingMask { rank, drain, since: None });
        let broken = LostRank { rank, cause };
        self.losses.lost.lock().push(broken.clone());
        self.unreported_losses.push(broken);
        self.abandon();
    }

    /// Others have admitted an incarnation of an absent rank and lost it again. They count both
    /// events, so this rank does, and ends its exchange as they do.
    fn pass_over(&mut self, member: Member) {
        self.membership.pass_over(member);
        self.signals.give_up(&self.ctx, member);
        self.make_ready();
        let cause = format!(
            "another rank gave up incarnation {} of it before it came here",
            member.incarnation
        );
        let broken = LostRank { rank: member.rank, cause };
        tracing::warn!(rank = member.rank, cause = broken.cause, "a rank was given up");
        let mut lost = self.losses.lost.lock();
        if lost.iter().all(|lost| lost.rank != member.rank) {
            lost.push(broken.clone());
        }
        drop(lost);
        self.unreported_losses.push(broken);
        self.abandon();
    }

    /// Whether all others have got the signals of losses.
    pub fn has_told(&mut self) -> bool {
        self.signals.has_told()
    }

    /// Abandons the running exchange. Begun jobs and pushed commands end by themselves.
    fn abandon(&mut self) {
        self.phase = Phase::Idle;
        self.overtaken_by = None;
        self.arrivals = Arrivals::default();
        if !self.is_abandoned {
            self.is_abandoned = true;
            self.channels.iter_mut().for_each(Channel::abandon);
        }
    }

    /// Ranks that the proxy must drop now: all others have the signal. Commands for others wait behind it, so the wait is bounded.
    pub fn take_masked(&mut self, now: Time, timeout: Duration) -> Vec<u32> {
        let mut masked = Vec::new();
        self.to_mask.retain_mut(|one| {
            let since = *one.since.get_or_insert(now);
            let over =
                self.signals.commands.is_complete(one.drain) || now.since(since) >= timeout / BEATS;
            masked.extend(over.then_some(one.rank));
            !over
        });
        masked
    }

    /// The proxy has lost a rank. The exchange ends once it waits for that rank.
    pub fn lose(&mut self, rank: u32, cause: String) {
        if self.membership.is_here(rank) {
            self.gone.push((rank, cause));
        }
    }

    /// Makes room for the next incarnation of a rank that left after it had done its part.
    pub fn give_up_gone(&mut self, rank: u32) {
        if let Some(at) = self.gone.iter().position(|(gone, _)| *gone == rank) {
            let (rank, cause) = self.gone.remove(at);
            self.fail(rank, cause);
        }
    }

    /// An incarnation of a rank has admitted this rank, and gets the signals that wait for that.
    pub fn joined_by(&mut self, member: Member) {
        let Member { rank, incarnation } = member;
        if self.membership.is_here(rank) && self.membership.incarnation(rank) == incarnation {
            self.ctx.has_joined[rank as usize] = true;
            self.signals.tell_late(&self.ctx, rank);
        }
    }

    /// An incarnation of a rank has given up this one, whose calls raise (RS-4).
    pub fn masked_by(&mut self, Member { rank, incarnation }: Member) {
        if self.membership.is_here(rank) && self.membership.incarnation(rank) == incarnation {
            self.fail(self.member.rank, format!("rank {rank} gave it up"));
        }
    }

    /// One of the proxy's threads can get nothing of a rank's incarnation any more. Each thread
    /// reports this once.
    pub fn end(&mut self, Member { rank, incarnation }: Member) {
        if let Some(last) =
            self.last[rank as usize].as_mut().filter(|last| last.incarnation == incarnation)
        {
            last.gone += 1;
        }
    }

    /// Whether nothing of a rank's last incarnation here can arrive any more.
    pub fn has_ended(&self, rank: u32) -> bool {
        let is_over = |last: &LastIncarnation| last.gone >= self.spec.threads;
        !self.membership.is_out(rank) || self.last[rank as usize].as_ref().is_none_or(is_over)
    }

    /// Reads the signals of losses from other ranks.
    ///
    /// # Errors
    /// As [`Machine::check`].
    pub fn process_signals(&mut self) -> Result<()> {
        self.note_losses();
        self.check()
    }

    /// As [`Machine::process_signals`], but leaves the report to the next call.
    pub fn note_losses(&mut self) {
        for rank in 0..self.ctx.grid.ranks {
            if !self.ctx.here[rank as usize] {
                let next = self.membership.next_incarnation(rank);
                if let Some(member) = self.signals.passed_by(&self.ctx, rank, next) {
                    self.pass_over(member);
                }
                continue;
            }
            let member = Member { rank, incarnation: self.membership.incarnation(rank) };
            if Signals::is_given_up(&self.ctx, member) {
                self.fail(rank, "another rank gave it up".into());
            }
        }
    }

    /// Signals that this rank is in a call.
    pub fn beat(&mut self, now: Time, timeout: Duration) {
        self.signals.beat(&self.ctx, now, timeout);
    }

    /// # Errors
    /// [`EngineError::Invalid`]: an exchange is under way, and this rank comes.
    pub fn check_between(&self, rank: u32) -> Result<()> {
        match self.phase {
            Phase::Idle | Phase::Collected => Ok(()),
            _ => Err(EngineError::Invalid(format!(
                "rank {rank} comes while an exchange is under way; admit it between two"
            ))),
        }
    }

    /// Admits a rank, from the next exchange on. `events` are the states of the others as it knows
    /// them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: it is here, or that incarnation of it has ended; it isn't the
    /// time.
    pub fn admit(&mut self, member: Member, events: &[u32]) -> Result<()> {
        self.check_between(member.rank)?;
        let mut membership = self.membership.clone();
        membership.learn(events);
        membership.check_newcomer(member)?;
        membership.admit(member);
        self.membership = membership;
        self.make_ready();
        self.abandon();
        self.reset_rings(member);
        self.ctx.here[member.rank as usize] = true;
        self.ctx.has_joined[member.rank as usize] = false;
        self.last[member.rank as usize] =
            Some(LastIncarnation { incarnation: member.incarnation, gone: 0 });
        self.losses.lost.lock().retain(|lost| lost.rank != member.rank);
        Ok(())
    }

    /// Counts a rank's signals in other exchanges of this rank's engine and the rank's, and those
    /// here in the others.
    pub fn share_signals(&mut self, rank: u32, engines: (EngineId, EngineId)) {
        self.signals.share(&self.ctx, rank, engines);
    }

    /// Rings with a rank begin with nothing, as it sees them.
    fn reset_rings(&mut self, member: Member) {
        let ctx = &self.ctx;
        self.channels.iter_mut().for_each(|channel| channel.forget(ctx, member.rank));
        for ring in ctx.grid.rings_with(member.rank) {
            for channel in 0..self.spec.channels {
                for back in [false, true] {
                    let number = ctx.layout.number(channel, back, ring);
                    for word in [ctx.layout.tail(number), ctx.layout.head(number)] {
                        ctx.words[word as usize].store(0, Relaxed);
                    }
                }
            }
        }
    }

    /// Separates reports about later incarnations from reports about earlier ones.
    fn make_ready(&mut self) {
        for rank in 0..self.ctx.grid.ranks {
            let incarnation = self.membership.next_incarnation(rank);
            self.signals.make_ready(&self.ctx, Member { rank, incarnation });
        }
    }
}

fn lost(peer: String, cause: &str, then: &str) -> EngineError {
    EngineError::PeerLost {
        peer,
        transport: "the high-throughput exchange".into(),
        nic: String::new(),
        cause: format!("{cause}; {then}"),
        link: Box::default(),
    }
}
