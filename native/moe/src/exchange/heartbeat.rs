//! Detects stalled ranks, as opposed to ranks that wait for a stalled one.
//!
//! A rank that stalls holds up all others, including those that need nothing of it: they wait for
//! ranks that wait for it. So a waiting rank repeatedly signals all others by a count. A rank is
//! given up when neither awaited data nor this signal has come for the timeout. So only the rank
//! that stalled is given up.
//!
//! Time is counted in beats of this heartbeat.

use std::{sync::Arc, time::Duration};

use fabric_engine::{EngineError, Result};

use super::{
    act::{Act, Load, Piece},
    device::Device,
    link::{Link, Stage},
    state::State,
    waits::Until,
    Inner,
};
use crate::phase::Phase;

/// Beats in a timeout, at least.
const BEATS: u32 = 4;
/// Beats are no further apart.
const SLOWEST: Duration = Duration::from_secs(1);
/// Upper bound of any wait in timeouts, whatever signals a rank sends (RS-4): less than a device's
/// own.
const MOST: u32 = 12;

/// The activity of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerActivity {
    /// Its waiting signals so far.
    words: u64,
    /// Awaited data has come since the last beat.
    pub came: bool,
    /// The last activity was a waiting signal.
    pub waits: bool,
    /// Beats since its last activity, while this rank waited for it.
    silent: u32,
    /// This rank's own signal is on its way there.
    pub telling: bool,
}

impl State {
    /// The pulse beats from now on, while there is something to wait for.
    pub fn start_pulse(&mut self, acts: &mut Vec<Act>) {
        if !self.beating && !self.is_over() {
            self.beating = true;
            acts.push(Act::Beat);
        }
    }

    /// One beat, `every` long: gives up ranks without activity for the `timeout`, and signals other
    /// ranks that this rank waits.
    pub fn beat(&mut self, timeout: Duration, every: Duration, acts: &mut Vec<Act>) {
        self.beating = false;
        if self.is_over() {
            return;
        }
        let most = timeout.as_nanos().div_ceil(every.as_nanos().max(1)) as u32;
        let mut silent = Vec::new();
        for rank in self.others() {
            let awaited = self.awaits(rank);
            let Some(link) = self.link(rank) else { continue };
            let words = link.wire.ours.counters[Stage::Waits as usize].arrived();
            let activity = &mut link.activity;
            let came = std::mem::take(&mut activity.came);
            let word = std::mem::replace(&mut activity.words, words) != words;
            let sign = came || word;
            activity.waits = if sign { word } else { activity.waits };
            activity.silent = if sign || awaited.is_none() { 0 } else { activity.silent + 1 };
            // The first beat came at any time after the wait had begun.
            silent.extend(awaited.filter(|_| activity.silent > most).map(|stage| (rank, stage)));
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

    /// Why a rank is given up.
    pub fn why(&self, rank: u32, error: &EngineError) -> String {
        let link = self.links.get(rank as usize).and_then(Option::as_ref);
        match error {
            EngineError::Timeout { .. } if link.is_some_and(|l| l.activity.waits) => format!(
                "{error}; it said that it waits as well, so ranks may wait for one another in a circle: have all make \
                 the same calls"
            ),
            _ => error.to_string(),
        }
    }

    /// Signals each rank that this one waits, unless it waits for that rank alone.
    fn tell_others(&mut self, acts: &mut Vec<Act>) {
        let holds_up = |l: &Link| l.flying > 0 || self.awaits(l.wire.rank).is_some();
        let by: Vec<u32> = self.here().filter(|l| holds_up(l)).map(|l| l.wire.rank).collect();
        let lost = self.hangs_on_lost();
        for link in self.links.iter_mut().flatten() {
            let waits = lost || by.iter().any(|rank| *rank != link.wire.rank);
            if waits && !std::mem::replace(&mut link.activity.telling, waits) {
                let piece = Piece::count(Stage::Waits);
                acts.push(Act::Write { wire: link.wire.clone(), piece, load: Load::Word });
            }
        }
    }

    /// What this rank awaits from another before it can continue, if anything. It waits for no rank
    /// while the caller or the device has the next step.
    fn awaits(&self, rank: u32) -> Option<Stage> {
        let link = self.links.get(rank as usize)?.as_ref()?;
        let (out, inward) = (&link.out, &link.inward);
        if self.phase == Phase::Dispatched {
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
            _ if self.phase == Phase::Answered && out.rows > 0 && !out.answered => {
                Some(Stage::Answers)
            }
            _ => None,
        }
    }

    /// Whether the caller, in a call, or the device hangs on ranks that were given up: on memory
    /// that they may write, or on writes to them that aren't over.
    pub fn hangs_on_lost(&self) -> bool {
        let to_others = self.here().map(|l| l.flying + l.out.answers.len() as u32).sum();
        let writes = self.rows_out + self.answers_out > to_others;
        let hangs = |until| match writes {
            true => self.needs_quiet(until) && !self.holds(until),
            false => self.hangs_on_quiet(until),
        };
        self.awaited.is_some_and(hangs) || self.device_hangs()
    }

    fn is_under_way(&self) -> bool {
        let awaits = |l: &Link| l.flying > 0 || self.awaits(l.wire.rank).is_some();
        match self.phase {
            Phase::Idle | Phase::Collected => {
                self.awaited.is_some() || self.device_hangs() || self.here().any(awaits)
            }
            Phase::Dispatched | Phase::Answering | Phase::Answered => true,
        }
    }

    /// The exchange has no caller and no device any more.
    fn is_over(&self) -> bool {
        if self.lingers.is_some() || self.awaited == Some(Until::NothingOwed) {
            return false;
        }
        self.left || self.device.as_ref().is_some_and(Device::has_failed)
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
        let Ok(handle) = self.pulse.alarm(self.between_beats()) else {
            self.state.lock().beating = false;
            return;
        };
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
        self.follow(state, acts);
    }
}

#[cfg(test)]
mod tests {
    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig, Time};

    use super::*;
    use crate::{kernels::Part, shape::Shape, AllToAll};

    const T: Duration = Duration::from_millis(20);

    /// Two ranks of three that know one another.
    fn pair() -> (SimNet, Vec<AllToAll>) {
        let mut net = SimNet::new(SimConfig::default());
        let shape = Shape::small(3);
        let mut open = |rank| {
            let all =
                AllToAll::new(net.engine(EngineConfig::default()).unwrap(), shape, rank).unwrap();
            all.set_timeout(T);
            all
        };
        let all = vec![open(0), open(1)];
        let descriptors: Vec<_> = all.iter().map(|a| a.descriptor(None).unwrap()).collect();
        all[0].admit(&descriptors[1]).unwrap();
        all[1].admit(&descriptors[0]).unwrap();
        (net, all)
    }

    fn send(all: &AllToAll) -> Result<()> {
        all.dispatch_send(&[Part { bytes: &[], stride: 16, width: 16 }], &[])
    }

    /// What a beat says to the other rank.
    fn words(all: &AllToAll) -> usize {
        let (mut acts, mut state) = (Vec::new(), all.inner.state.lock());
        state.beat(T, T / BEATS, &mut acts);
        state.links.iter_mut().flatten().for_each(|l| l.activity.telling = false);
        acts.iter().filter(|a| matches!(a, Act::Write { load: Load::Word, .. })).count()
    }

    fn go(net: &mut SimNet, timeouts: u32) {
        let end = net.now().after(T * timeouts);
        net.run_until(end);
    }

    #[test]
    fn rs_4_who_hangs_on_a_lost_rank_says_so_only_while_a_call_does() {
        let (mut net, all) = pair();
        // The first dispatch is what takes the newcomers in.
        all.iter().for_each(|a| send(a).unwrap());
        go(&mut net, 1);
        for a in &all {
            assert!(a.collect(&mut []).is_err() && a.lost().is_empty());
            let mut state = a.inner.state.lock();
            assert!(state.all_routes());
            let mut acts = Vec::new();
            state.collected(&mut acts);
            drop(state);
            a.inner.run(acts);
        }
        go(&mut net, 1);
        all[0].inner.state.lock().revoking.push(2);
        assert_eq!(words(&all[0]), 0);
        all[0].inner.state.lock().awaited = Some(Until::MayDispatch);
        assert_eq!(words(&all[0]), 1);
        all[0].inner.state.lock().awaited = None;
        // A call that has failed says nothing any more, though the memory never comes back.
        assert!(matches!(send(&all[0]), Err(EngineError::NotQuiesced { .. })));
        assert_eq!(words(&all[0]), 0);
        assert!(!all[0].inner.state.lock().beating);
        // Nor does who has left.
        all[0].inner.state.lock().awaited = Some(Until::MayDispatch);
        all[0].leave();
        assert_eq!(words(&all[0]), 0);
    }

    #[test]
    fn a_rank_that_waits_for_quiesced_memory_signals_that_it_waits() {
        let (mut net, all) = pair();
        all[0].inner.state.lock().revoking.push(2);
        assert!(send(&all[0]).is_err() && all[0].inner.state.lock().beating);
        go(&mut net, 3);
        assert!(!all[0].inner.state.lock().beating);
    }

    #[test]
    fn beats_leave_no_records() {
        let (mut net, all) = pair();
        send(&all[0]).unwrap();
        let begun = net.now();
        while all[0].lost().is_empty() && net.step() {}
        assert!(net.now() > Time(0).after(T) && net.now() > begun);
        let records = all[0].inner.engine.records(Default::default()).unwrap();
        assert!(records.expectations.iter().all(|e| e.counts == 1), "{:?}", records.expectations);
    }
}
