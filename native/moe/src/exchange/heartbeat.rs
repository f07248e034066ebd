//! Detects stalled ranks, as opposed to ranks that wait for a stalled one.
//!
//! A rank that stalls blocks all others, including those that need nothing from it: they wait for
//! ranks that wait for it. So a waiting rank repeatedly signals all others by a count. A rank is
//! given up when neither awaited data nor this signal has arrived for the timeout. So only the rank
//! that stalled is given up.
//!
//! A rank makes calls of several exchanges in turn, and waits in one of them. So its signals in all
//! exchanges of its engine count, of the high-throughput mode too ([`WaitingSignals`]).
//!
//! Silence is counted in heartbeats.

use std::{sync::Arc, time::Duration};

use fabric_engine::{EngineError, Result};

use super::{
    actions::{Action, RemoteWrite, WritePurpose},
    conditions::Condition,
    device::Device,
    link::{MessageKind, PeerLink},
    state::ExchangeState,
    Inner,
};
use crate::{phase::Phase, waiting_signals::WaitingSignals};

/// Minimum number of heartbeats per timeout.
const HEARTBEATS_PER_TIMEOUT: u32 = 4;
/// Maximum interval of heartbeats.
const MAX_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Upper bound of any wait, in timeouts, whatever signals a rank sends (RS-4). A device's own bound
/// is larger.
const MAX_WAIT_TIMEOUTS: u32 = 12;

/// The activity of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerActivity {
    /// Number of its waiting signals, in all exchanges that there were at the last heartbeat.
    waiting_signals: u64,
    /// Awaited data has arrived since the last heartbeat.
    pub data_arrived: bool,
    /// Whether the last activity was a waiting signal.
    pub waits: bool,
    /// Heartbeats since its last activity, while this rank waited for it.
    silent_heartbeats: u32,
    /// This rank's waiting signal to it is in flight.
    pub signal_in_flight: bool,
}

impl PeerActivity {
    /// That of a peer that has done nothing since.
    pub fn after(signals: &WaitingSignals) -> Self {
        Self { waiting_signals: signals.count(), ..Self::default() }
    }
}

impl ExchangeState {
    /// Schedules heartbeats while there is something to wait for.
    pub fn start_heartbeat(&mut self, actions: &mut Vec<Action>) {
        if !self.heartbeat_scheduled && !self.is_over() {
            self.heartbeat_scheduled = true;
            actions.push(Action::ScheduleHeartbeat);
        }
    }

    /// Ends one interval: gives up ranks without activity for the `timeout`, and signals other
    /// ranks that this rank waits.
    pub fn on_heartbeat(
        &mut self,
        timeout: Duration,
        interval: Duration,
        actions: &mut Vec<Action>,
    ) {
        self.heartbeat_scheduled = false;
        if self.is_over() {
            return;
        }
        let most = timeout.as_nanos().div_ceil(interval.as_nanos().max(1));
        let most = most.min(u128::from(u32::MAX - 1)) as u32;
        let mut silent = Vec::new();
        for rank in self.others() {
            let (awaited, told) = (self.awaits(rank), self.was_given_up_by(rank));
            let Some(link) = self.link(rank) else { continue };
            let signals = link.endpoint.waiting.count();
            let activity = &mut link.activity;
            let came = std::mem::take(&mut activity.data_arrived);
            let signaled = std::mem::replace(&mut activity.waiting_signals, signals) < signals;
            let sign = came || signaled && !told;
            activity.waits = if sign { signaled } else { activity.waits };
            activity.silent_heartbeats =
                if sign || awaited.is_none() { 0 } else { activity.silent_heartbeats + 1 };
            // The first interval may have begun before the wait. What a rank sent before it gave
            // this one up may still be on its way.
            let most = if told { 1 } else { most };
            silent.extend(
                awaited
                    .filter(|_| activity.silent_heartbeats > most)
                    .map(|kind| (rank, kind, told)),
            );
        }
        for (rank, kind, told) in silent {
            let cause = match told {
                true => "it has given this rank up".to_owned(),
                false => format!(
                    "nothing of it has come for {timeout:?}, nor a signal that it waits for another rank"
                ),
            };
            self.give_up(rank, kind, cause, actions);
        }
        self.signal_waiting(actions);
        if self.is_under_way() {
            self.start_heartbeat(actions);
        }
    }

    /// The cause of the loss of a rank.
    pub fn loss_cause(&self, rank: u32, error: &EngineError) -> String {
        let link = self.links.get(rank as usize).and_then(Option::as_ref);
        match error {
            EngineError::Timeout { .. } if link.is_some_and(|l| l.activity.waits) => format!(
                "{error}; it signals that it waits as well, so ranks may wait for each other in a cycle: have all \
                 make the same calls"
            ),
            _ => error.to_string(),
        }
    }

    /// Signals each rank that this one waits, unless it waits for that rank alone. A rank that
    /// makes no further call does not signal: what others wait for never comes.
    fn signal_waiting(&mut self, actions: &mut Vec<Action>) {
        if self.departures_expected {
            return;
        }
        let holds_up =
            |l: &PeerLink| l.data_in_flight > 0 || self.awaits(l.endpoint.rank).is_some();
        let by: Vec<u32> = self.here().filter(|l| holds_up(l)).map(|l| l.endpoint.rank).collect();
        let lost = self.blocked_by_lost_ranks();
        for link in self.links.iter_mut().flatten() {
            let waits = lost || by.iter().any(|rank| *rank != link.endpoint.rank);
            if waits && !std::mem::replace(&mut link.activity.signal_in_flight, waits) {
                let write = RemoteWrite::count(MessageKind::Waiting);
                actions.push(Action::Write {
                    endpoint: link.endpoint.clone(),
                    write,
                    purpose: WritePurpose::Signal,
                });
            }
        }
    }

    /// The message of a rank that this rank waits for, if any. It waits for no rank while its
    /// caller or device has the next step.
    fn awaits(&self, rank: u32) -> Option<MessageKind> {
        let link = self.links.get(rank as usize)?.as_ref()?;
        let (outbound, inbound) = (&link.outbound, &link.inbound);
        if self.phase == Phase::Dispatched {
            let packs = self.here().any(|l| !l.outbound.packed);
            let hands_out = self.device.as_ref().is_some_and(Device::hands_out);
            let collects = self.device.is_none() && self.here().any(PeerLink::has_rows);
            return match self.all_routes() {
                _ if packs => None,
                false => inbound.counts.is_none().then_some(MessageKind::Routes),
                true if hands_out || collects => None,
                true => (inbound.due > 0).then_some(MessageKind::Rows),
            };
        }
        match (outbound.routed, link.open) {
            (false, _) => Some(MessageKind::Fence),
            _ if outbound.sent < outbound.rows => Some(MessageKind::SlotOffer),
            (_, false) if !outbound.answers.is_empty() => Some(MessageKind::Fence),
            _ if self.phase == Phase::Answered && outbound.rows > 0 && !outbound.answered => {
                Some(MessageKind::Answers)
            }
            _ => None,
        }
    }

    /// Whether a call or the device waits for lost ranks: for memory that they may write, or for
    /// writes to them that have not ended.
    pub fn blocked_by_lost_ranks(&self) -> bool {
        let to_others =
            self.here().map(|l| l.data_in_flight + l.outbound.answers.len() as u32).sum();
        let writes = self.rows_out + self.answers_out > to_others;
        let blocked = |condition| match writes {
            true => self.needs_quiesce(condition) && !self.holds(condition),
            false => self.blocked_on_quiesce(condition),
        };
        self.awaited.iter().copied().any(blocked) || self.device_blocked()
    }

    fn is_under_way(&self) -> bool {
        let awaits = |l: &PeerLink| l.data_in_flight > 0 || self.awaits(l.endpoint.rank).is_some();
        match self.phase {
            Phase::Idle | Phase::Collected => {
                !self.awaited.is_empty() || self.device_blocked() || self.here().any(awaits)
            }
            Phase::Dispatched | Phase::Answering | Phase::Answered => true,
        }
    }

    /// Whether the exchange has no caller and no device any more.
    fn is_over(&self) -> bool {
        if self.keep_alive.is_some() || self.awaited.contains(&Condition::AllDelivered) {
            return false;
        }
        self.left || self.device.as_ref().is_some_and(Device::has_failed)
    }
}

impl Inner {
    /// Maximum time of an expectation.
    pub(super) fn max_wait(&self) -> Duration {
        self.timeout().saturating_mul(MAX_WAIT_TIMEOUTS)
    }

    fn heartbeat_interval(&self) -> Duration {
        (self.timeout() / HEARTBEATS_PER_TIMEOUT).min(MAX_HEARTBEAT_INTERVAL)
    }

    pub(super) fn schedule_heartbeat(self: &Arc<Self>) {
        let Ok(handle) = self.heartbeat_counter.alarm(self.heartbeat_interval()) else {
            self.state.lock().heartbeat_scheduled = false;
            return;
        };
        let weak = Arc::downgrade(self);
        handle.on_done(move |end| {
            if let Some(inner) = weak.upgrade() {
                inner.on_heartbeat(end);
            }
        });
    }

    fn on_heartbeat(self: &Arc<Self>, end: Result<()>) {
        // A closed engine has ended all other operations as well.
        if !matches!(end, Err(EngineError::Timeout { .. })) {
            return;
        }
        let mut actions = Vec::new();
        let mut state = self.state.lock();
        state.on_heartbeat(self.timeout(), self.heartbeat_interval(), &mut actions);
        self.apply(state, actions);
    }
}

#[cfg(test)]
mod tests {
    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig, Time};

    use super::*;
    use crate::{kernels::Part, shape::Shape, AllToAll};

    const T: Duration = Duration::from_millis(20);

    /// Two ranks of three; the third one never joins.
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

    /// Number of waiting signals that a heartbeat sends.
    fn signals(all: &AllToAll) -> usize {
        let (mut actions, mut state) = (Vec::new(), all.inner.state.lock());
        state.on_heartbeat(T, T / HEARTBEATS_PER_TIMEOUT, &mut actions);
        state.links.iter_mut().flatten().for_each(|l| l.activity.signal_in_flight = false);
        actions
            .iter()
            .filter(|a| matches!(a, Action::Write { purpose: WritePurpose::Signal, .. }))
            .count()
    }

    fn go(net: &mut SimNet, timeouts: u32) {
        let end = net.now().after(T * timeouts);
        net.run_until(end);
    }

    #[test]
    fn rs_4_a_rank_that_is_blocked_by_a_lost_rank_signals_only_during_a_call() {
        let (mut net, all) = pair();
        // Newcomers take part from the first dispatch on.
        all.iter().for_each(|a| send(a).unwrap());
        go(&mut net, 1);
        for a in &all {
            assert!(a.collect(&mut []).is_err() && a.lost().is_empty());
            let mut state = a.inner.state.lock();
            assert!(state.all_routes());
            let mut actions = Vec::new();
            state.collected(&mut actions);
            drop(state);
            a.inner.run(actions);
        }
        go(&mut net, 1);
        all[0].inner.state.lock().revoking.push(2);
        assert_eq!(signals(&all[0]), 0);
        all[0].inner.state.lock().awaited.push(Condition::MayDispatch);
        assert_eq!(signals(&all[0]), 1);
        all[0].inner.state.lock().awaited.clear();
        // A failed call does not signal, though the memory is never quiesced.
        assert!(matches!(send(&all[0]), Err(EngineError::NotQuiesced { .. })));
        assert_eq!(signals(&all[0]), 0);
        assert!(!all[0].inner.state.lock().heartbeat_scheduled);
        // Neither does a rank that makes no further call, nor one that has left.
        all[0].inner.state.lock().awaited.push(Condition::MayDispatch);
        assert_eq!(signals(&all[0]), 1);
        all[0].expect_departures();
        assert_eq!(signals(&all[0]), 0);
        all[0].inner.state.lock().departures_expected = false;
        all[0].leave();
        assert_eq!(signals(&all[0]), 0);
    }

    #[test]
    fn a_rank_that_waits_for_quiesced_memory_signals_that_it_waits() {
        let (mut net, all) = pair();
        all[0].inner.state.lock().revoking.push(2);
        assert!(send(&all[0]).is_err() && all[0].inner.state.lock().heartbeat_scheduled);
        go(&mut net, 3);
        assert!(!all[0].inner.state.lock().heartbeat_scheduled);
    }

    #[test]
    fn a_timeout_of_many_intervals_ends_no_rank_early() {
        let (_net, all) = pair();
        send(&all[0]).unwrap();
        let mut state = all[0].inner.state.lock();
        let interval = Duration::from_millis(1);
        for timeout in [interval * (1 << 31) * 2, Duration::MAX] {
            for _ in 0..3 {
                state.on_heartbeat(timeout, interval, &mut Vec::new());
            }
            assert!(state.awaits(1).is_some());
        }
        drop(state);
        assert!(all[0].lost().is_empty());
    }

    #[test]
    fn a_rank_that_has_given_this_one_up_is_not_awaited_for_the_timeout() {
        let (mut net, all) = pair();
        // Its routes have left, so that no write of its own fails.
        send(&all[1]).unwrap();
        let end = net.now().after(T / 8);
        net.run_until(end);
        all[0].mask(1, "by the test").unwrap();
        let end = net.now().after(T * 7 / 8);
        net.run_until(end);
        let lost = all[1].lost();
        assert!(lost.len() == 1 && lost[0].cause == "it has given this rank up", "{lost:?}");
    }

    #[test]
    fn heartbeats_leave_no_records() {
        let (mut net, all) = pair();
        send(&all[0]).unwrap();
        let begun = net.now();
        while all[0].lost().is_empty() && net.step() {}
        assert!(net.now() > Time(0).after(T) && net.now() > begun);
        let records = all[0].inner.engine.records(Default::default()).unwrap();
        assert!(records.expectations.iter().all(|e| e.counts == 1), "{:?}", records.expectations);
    }
}
