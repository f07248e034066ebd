//! Who is waited for in vain, and who merely waits as well.
//!
//! A rank that stalls holds up all others, also those who want nothing of it: they wait for ranks that wait for it. So
//! whoever is held up by somebody says so, again and again, to all others by a count, and a rank is given up when it has given
//! no sign for the timeout: nothing that was waited for has come, and not that word either. That is the rank at the root.
//!
//! Time is the pulse's: the state counts its beats.

use std::{sync::Arc, time::Duration};

use fabric_engine::{EngineError, Result};

use super::{
    act::{Act, Load, Piece},
    device::Device,
    link::{Link, Stage},
    state::{State, Step},
    waits::Until,
    Inner,
};

/// Beats in a timeout, at least.
const BEATS: u32 = 4;
/// Beats are no further apart.
const SLOWEST: Duration = Duration::from_secs(1);
/// How many timeouts any wait lasts at most, whatever signs a rank gives (RS-4): less than a device's own.
const MOST: u32 = 12;
/// No expectation ends by so many counts.
const NEVER: u32 = u32::MAX;

/// What a rank has shown of itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Signs {
    /// Its words that it waits for another, so far.
    words: u64,
    /// Something that was waited for has come since the last beat.
    pub came: bool,
    /// Beats since it last gave a sign, while this rank waited for it.
    silent: u32,
    /// This rank's own word is on its way there.
    pub telling: bool,
}

impl State {
    /// The pulse beats from now on, while there is something to wait for.
    pub fn start_pulse(&mut self, acts: &mut Vec<Act>) {
        if !self.beating {
            self.beating = true;
            acts.push(Act::Beat);
        }
    }

    /// A beat: ranks that have given no sign for the `timeout`, beats being `every` so long, are given up; others are told
    /// that this rank waits.
    pub fn beat(&mut self, timeout: Duration, every: Duration, acts: &mut Vec<Act>) {
        self.beating = false;
        let most = timeout.as_nanos().div_ceil(every.as_nanos().max(1)) as u32;
        let mut silent = Vec::new();
        for rank in self.others() {
            let awaited = self.awaits(rank);
            let Some(link) = self.link(rank) else { continue };
            let words = link.wire.ours.counters[Stage::Waits as usize].arrived();
            let signs = &mut link.signs;
            let sign = std::mem::take(&mut signs.came) || words != signs.words;
            signs.words = words;
            signs.silent = if sign || awaited.is_none() { 0 } else { signs.silent + 1 };
            // The first beat came at any time after the wait had begun.
            silent.extend(awaited.filter(|_| signs.silent > most).map(|stage| (rank, stage)));
        }
        for (rank, stage) in silent {
            let cause = format!(
                "nothing of it has come for {timeout:?}, nor its word that it waits for another rank"
            );
            self.lose(rank, stage, cause, acts);
        }
        self.tell_others(acts);
        if self.is_under_way() {
            self.start_pulse(acts);
        }
    }

    /// Tells each rank that this one waits, unless for that rank alone.
    fn tell_others(&mut self, acts: &mut Vec<Act>) {
        let holds_up = |l: &Link| l.flying > 0 || self.awaits(l.wire.rank).is_some();
        let by: Vec<u32> = self.here().filter(|l| holds_up(l)).map(|l| l.wire.rank).collect();
        let lost = !self.holds(Until::Quiet) && self.needs_quiet();
        for link in self.links.iter_mut().flatten() {
            let waits = lost || by.iter().any(|rank| *rank != link.wire.rank);
            if waits && !std::mem::replace(&mut link.signs.telling, waits) {
                let piece = Piece::count(Stage::Waits);
                acts.push(Act::Write { wire: link.wire.clone(), piece, load: Load::Word });
            }
        }
    }

    /// What this rank waits for from another before it can go on, if anything. While it is the caller's turn, or the
    /// device's, it waits for nobody.
    fn awaits(&self, rank: u32) -> Option<Stage> {
        let link = self.links.get(rank as usize)?.as_ref()?;
        let (out, inward) = (&link.out, &link.inward);
        if self.step == Step::Dispatched {
            let packs = self.here().any(|l| !l.out.packed);
            let hands_out = self.device.as_ref().is_some_and(Device::hands_out);
            let collects = self.device.is_none() && self.here().any(Link::has_rows);
            return match self.all_routes() {
                _ if packs => None,
                false => inward.counts.is_none().then_some(Stage::Routes),
                true if hands_out || collects => None,
                true => (inward.due > 0).then_some(Stage::Rows),
            };
        }
        match (out.routed, link.open) {
            (false, _) => Some(Stage::Fence),
            _ if out.sent < out.rows => Some(Stage::Grant),
            (_, false) if !out.answers.is_empty() => Some(Stage::Fence),
            _ if self.step == Step::Answered && out.rows > 0 && !out.answered => {
                Some(Stage::Answers)
            }
            _ => None,
        }
    }

    /// Whether what comes next takes memory that lost ranks may hold on to.
    fn needs_quiet(&self) -> bool {
        match self.step {
            Step::Dispatched => !self.waiting.is_empty(),
            Step::Answered => false,
            Step::Idle | Step::Collected | Step::Answering => true,
        }
    }

    fn is_under_way(&self) -> bool {
        match self.step {
            Step::Idle | Step::Collected => !self.holds(Until::MayDispatch),
            Step::Dispatched | Step::Answering | Step::Answered => true,
        }
    }
}

impl Inner {
    /// How long an expectation lasts at most.
    pub(super) fn patience(&self) -> Duration {
        self.timeout().saturating_mul(MOST)
    }

    fn between_beats(&self) -> Duration {
        (self.timeout() / BEATS).min(SLOWEST)
    }

    pub(super) fn start_beat(self: &Arc<Self>) {
        let Ok(handle) = self.pulse.expect(NEVER, &[], self.between_beats()) else { return };
        let weak = Arc::downgrade(self);
        handle.on_done(move |end| {
            if let Some(inner) = weak.upgrade() {
                inner.beat(end);
            }
        });
    }

    fn beat(self: &Arc<Self>, end: Result<()>) {
        // An engine that is closed has ended all else as well.
        if !matches!(end, Err(EngineError::Timeout { .. })) {
            return;
        }
        let mut acts = Vec::new();
        let mut state = self.state.lock();
        state.beat(self.timeout(), self.between_beats(), &mut acts);
        self.wake(&mut state, &mut acts);
        drop(state);
        self.run(acts);
    }
}
