//! Signals between ranks beside tokens: that a rank is in a call, and which ranks it has given up.
//! Signals have their own FIFO and command channel, so they do not wait behind tokens for a slow
//! rank.

use std::{
    sync::{
        atomic::Ordering::{AcqRel, Acquire},
        Arc, Weak,
    },
    time::Duration,
};

use fabric_engine::{api::EngineId, Time};
use fabric_proxy::{
    command::{Add, Command, CHANNELS},
    fifo::Pusher,
    raw::AtomicWords,
};

use super::{commands::Commands, context::Context, membership::Member};
use crate::waiting_signals::{SignalCount, WaitingSignals};

/// Bits that count ranks, of which there are less than 2^10.
const REPORTER_BITS: u32 = 10;
/// Incarnations of a rank that its word distinguishes.
const INCARNATIONS: u32 = u64::BITS / REPORTER_BITS;
/// Future incarnations whose ends are noticed. Late signals of earlier ones use other bits of the
/// word.
const FUTURE_INCARNATIONS: u32 = INCARNATIONS / 2;
const CHANNEL: u8 = CHANNELS as u8 - 1;
/// Signals per timeout while a rank is in a call.
pub const BEATS: u32 = 4;
/// Maximum interval of these signals, for ranks with shorter timeouts.
const BEAT: Duration = Duration::from_millis(250);

/// The word at which a rank counts its in-call signals.
#[derive(Debug)]
struct InCallCount {
    words: AtomicWords,
    slot: u64,
}

impl InCallCount {
    fn new(ctx: &Context, rank: u32) -> Self {
        Self { words: ctx.words.clone(), slot: ctx.layout.beat(rank) }
    }
}

impl SignalCount for InCallCount {
    fn signals(&self) -> u64 {
        self.words[self.slot as usize].load(Acquire)
    }
}

/// The last signal of a rank.
#[derive(Debug, Default)]
struct LastSignal {
    /// Its in-call signals here.
    beats: u64,
    /// Its signals in all exchanges, with where it counts them here; none in a simulator.
    elsewhere: Option<(Arc<WaitingSignals>, Arc<InCallCount>)>,
    /// Their number when this rank last signalled.
    waiting: u64,
    /// When one of the two last changed.
    at: Time,
}

#[derive(Debug)]
pub struct Signals {
    pub commands: Commands,
    /// Time of this rank's last in-call signal.
    sent_at: Option<Time>,
    /// The drain after which all others know which ranks this rank has given up.
    losses_drain: Option<u64>,
    /// Ranks that this rank has given up, and who has yet to be told because it had not admitted this
    /// rank.
    untold: Vec<(u32, Member)>,
    /// By rank: the bits of incarnations before this one are clear in its word.
    ready: Vec<u32>,
    /// By rank.
    last: Vec<LastSignal>,
}

impl Signals {
    pub fn new(pusher: Pusher, ranks: u32) -> Self {
        let last = (0..ranks).map(|_| LastSignal::default()).collect();
        let ready = vec![INCARNATIONS; ranks as usize];
        let commands = Commands::new(pusher);
        Self { commands, sent_at: None, losses_drain: None, untold: Vec::new(), last, ready }
    }

    /// From now on counts a rank's signals in the other exchanges of the two engines, and its
    /// in-call signals there.
    pub fn share(&mut self, ctx: &Context, rank: u32, engines: (EngineId, EngineId)) {
        let here = Arc::new(InCallCount::new(ctx, rank));
        let count: Weak<InCallCount> = Arc::downgrade(&here);
        self.last[rank as usize].elsewhere = Some((WaitingSignals::of(engines, count), here));
    }

    /// Sends the in-call signal if it is due, and reads those of others.
    pub fn beat(&mut self, ctx: &Context, now: Time, timeout: Duration) {
        let due = self.sent_at.is_none_or(|at| now.since(at) >= BEAT.min(timeout / BEATS));
        for (rank, last) in self.last.iter_mut().enumerate() {
            let beats = ctx.words[ctx.layout.beat(rank as u32) as usize].load(Acquire);
            let mut came = beats != std::mem::replace(&mut last.beats, beats);
            if let Some((elsewhere, _)) = last.elsewhere.as_ref().filter(|_| due) {
                let waiting = elsewhere.count();
                // Fewer, when an exchange has ended.
                came |= waiting > std::mem::replace(&mut last.waiting, waiting);
            }
            if came {
                last.at = now;
            }
        }
        if due && self.commands.is_flushed() {
            self.sent_at = Some(now);
            self.tell_all(ctx, ctx.layout.beat(ctx.grid.rank), 1);
        }
    }

    /// Whether a rank was in no call for `timeout`, nor waited in another exchange. Its last signal
    /// may be one beat older than the end of its last call.
    pub fn is_silent(&self, rank: u32, now: Time, timeout: Duration) -> bool {
        now.since(self.last[rank as usize].at) >= timeout + timeout / BEATS
    }

    /// Tells all others which incarnation of a rank this rank has given up, so that all do the same
    /// (RS-4). Those that have yet to admit this rank are told then. Returns the drain after which
    /// those that have are told.
    pub fn give_up(&mut self, ctx: &Context, member: Member) -> u64 {
        self.untold.retain(|(to, _)| *to != member.rank);
        self.tell_all(ctx, ctx.layout.given_up(member.rank), 1 << shift_of(member.incarnation));
        let later = (0..ctx.grid.ranks).filter(|r| {
            *r != ctx.grid.rank && ctx.here[*r as usize] && !ctx.has_joined[*r as usize]
        });
        self.untold.extend(later.map(|rank| (rank, member)));
        let drain = self.commands.drain();
        self.losses_drain = Some(drain);
        drain
    }

    /// Tells a rank that has admitted this one what it was not told before.
    pub fn tell_late(&mut self, ctx: &Context, rank: u32) {
        let untold = std::mem::take(&mut self.untold);
        let (now, later): (Vec<_>, Vec<_>) = untold.into_iter().partition(|(to, _)| *to == rank);
        self.untold = later;
        for (_, member) in now {
            self.tell(rank, ctx.layout.given_up(member.rank), 1 << shift_of(member.incarnation));
        }
        self.losses_drain = Some(self.commands.drain());
    }

    /// Whether all others have got this rank's signals of losses; true if the proxy is closed.
    pub fn has_told(&mut self) -> bool {
        let told = self.losses_drain.is_none_or(|drain| self.commands.is_complete(drain));
        told && self.untold.is_empty() || self.commands.flush().is_err()
    }

    /// Whether other ranks have given up an incarnation of a rank.
    pub fn is_given_up(ctx: &Context, member: Member) -> bool {
        let word = ctx.words[ctx.layout.given_up(member.rank) as usize].load(Acquire);
        reporters(word, member.incarnation) > 0
    }

    /// The latest future incarnation of a rank that others have given up.
    pub fn passed_by(&self, ctx: &Context, rank: u32, next: u32) -> Option<Member> {
        let members =
            (next..self.ready[rank as usize]).rev().map(|incarnation| Member { rank, incarnation });
        members.into_iter().find(|member| Self::is_given_up(ctx, *member))
    }

    /// Clears the bits of a rank's next incarnations in its word.
    pub fn make_ready(&mut self, ctx: &Context, Member { rank, incarnation }: Member) {
        let (ready, to) = (&mut self.ready[rank as usize], incarnation + FUTURE_INCARNATIONS);
        let word = &ctx.words[ctx.layout.given_up(rank) as usize];
        for incarnation in (*ready).max(to.saturating_sub(INCARNATIONS))..to {
            word.fetch_sub(
                reporters(word.load(Acquire), incarnation) << shift_of(incarnation),
                AcqRel,
            );
        }
        *ready = to.max(*ready);
    }

    /// Tells those that have admitted this rank: nothing of its last incarnation can land there any
    /// more (MR-1).
    fn tell_all(&mut self, ctx: &Context, slot: u64, value: i64) {
        for other in (0..ctx.grid.ranks).filter(|r| ctx.has_joined[*r as usize]) {
            self.tell(other, slot, value);
        }
    }

    fn tell(&mut self, rank: u32, slot: u64, value: i64) {
        let add = Add { slot: slot as u16, value, ordered: false };
        self.commands.push(Command::Atomic { rank: rank as u16, channel: CHANNEL, add });
    }
}

/// The number of ranks that have given up an incarnation, from the word of its rank.
fn reporters(word: u64, incarnation: u32) -> u64 {
    word >> shift_of(incarnation) & ((1 << REPORTER_BITS) - 1)
}

fn shift_of(incarnation: u32) -> u32 {
    incarnation % INCARNATIONS * REPORTER_BITS
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fabric_proxy::{fifo::fifo, Parker};

    use super::*;

    #[test]
    fn rs_4_the_last_beat_may_be_older_than_the_end_of_the_call() {
        let (pusher, _popper) = fifo(1, Arc::new(Parker::default())).unwrap();
        let signals = Signals::new(pusher, 2);
        let timeout = Duration::from_secs(1);
        // Its last beat was at 0, and it left its call just before the next.
        let after = |ms: u64| signals.is_silent(1, Time(ms * 1_000_000), timeout);
        assert!(!after(1_000));
        assert!(!after(1_249));
        assert!(after(1_250));
    }
}
