//! Membership calls: descriptors, ranks that join, and ranks that are given up.

use std::{
    sync::{Arc, OnceLock},
    time::Instant,
};

use fabric_engine::{locks::MutexGuard, EngineError, Result};

use super::{
    conditions::Condition,
    link::{ExportedRegions, MessageKind, PeerEndpoint, PeerLink, MESSAGE_KINDS},
    state::{ExchangeState, LostPeer},
    AllToAll, Inner,
};
use crate::{
    checks::check_peer,
    rank_descriptor::{PeerExport, RankDescriptor},
    waiting_signals::WaitingSignals,
};

impl AllToAll {
    /// This rank's descriptor, for all absent ranks or for one.
    ///
    /// Each rank gets registrations of its own, which can be revoked alone (MR-2). The descriptor
    /// has none for a rank whose access is being revoked: two processes could write to its slots
    /// (MR-1). Nor has it one for a rank whose rows the device is handing out: its next process
    /// could overwrite them (RS-1).
    ///
    /// # Errors
    /// Errors of a registration; [`EngineError::Invalid`] for a rank that is present;
    /// [`EngineError::NotQuiesced`] if the last process of that rank may still access this rank's
    /// memory, or the device still hands out its rows, after the timeout.
    pub fn descriptor(&self, only: Option<u32>) -> Result<Vec<u8>> {
        let inner = &self.inner;
        let mut state = inner.state.lock();
        let ranks = inner.shape.ranks;
        if let Some(rank) = only {
            inner.check_other(rank)?;
            if state.is_known(rank) {
                let text = format!("rank {rank} is present; mask it before it joins again");
                return Err(EngineError::Invalid(text));
            }
        }
        let wanted = |rank: u32| rank != inner.rank && only.is_none_or(|only| only == rank);
        let mut actions = Vec::new();
        let mut renewed = Vec::new();
        for rank in (0..ranks).filter(|rank| wanted(*rank)) {
            // Registrations that an earlier descriptor exported are not given to another process.
            if let Some(old) = state.exported[rank as usize].take() {
                state.revoke(rank, &old, &mut actions);
                renewed.push(rank);
            }
        }
        MutexGuard::unlocked(&mut state, || inner.run(actions));
        renewed.extend(only);
        let held = inner.wait_for_slots(&mut state, &renewed);
        if let Some(rank) = only.filter(|rank| held.contains(rank)) {
            let cause = match state.revoking.contains(&rank) {
                true => "its last process may still write there; end that process first",
                false => "the device still hands out its rows; complete that dispatch first",
            };
            return Err(EngineError::NotQuiesced {
                what: format!("memory that was exported to rank {rank}"),
                after: inner.timeout(),
                cause: cause.into(),
            });
        }
        // Another thread may have exported memory meanwhile.
        let free = |state: &ExchangeState, rank| {
            let exported = state.exported[rank as usize].is_some();
            wanted(rank) && !state.is_known(rank) && !exported && !state.slots_in_use(rank)
        };
        let exports = (0..ranks)
            .map(|rank| free(&state, rank).then(|| inner.export(&mut state, rank)).transpose());
        let exports = exports.collect::<Result<_>>()?;
        drop(state);
        let address = inner.engine.address().clone();
        Ok(RankDescriptor { rank: inner.rank, shape: inner.shape, address, exports }.to_bytes())
    }

    /// Admits a rank by its descriptor, from the next dispatch on. The rank must have this rank's
    /// descriptor, too.
    ///
    /// # Errors
    /// [`EngineError::Handshake`] for another shape; [`EngineError::Invalid`] if the rank is
    /// present, or this rank has made no descriptor for it; [`EngineError::NotQuiesced`] if its
    /// last process may still access this rank's memory.
    pub fn admit(&self, descriptor: &[u8]) -> Result<u32> {
        let inner = &self.inner;
        let descriptor = RankDescriptor::from_bytes(descriptor)?;
        let rank = descriptor.rank;
        inner.check_other(rank)?;
        inner.check_shape(&descriptor)?;
        let unlike =
            |cause: String| EngineError::Handshake { peer: descriptor.address.name.clone(), cause };
        let export =
            descriptor.exports.get(inner.rank as usize).and_then(Option::as_ref).ok_or_else(
                || {
                    unlike(format!(
                        "its descriptor has no memory for rank {}; have it call descriptor() again",
                        inner.rank
                    ))
                },
            )?;
        let owner = descriptor.address.id;
        if [&export.control, &export.rows].iter().any(|memory| memory.owner != descriptor.address)
            || export.control.len != inner.memory.control_nbytes()
            || export.rows.len != inner.memory.rows_nbytes()
            || export.counters.iter().any(|c| c.owner != owner)
        {
            return Err(unlike("its memory and counters don't belong to its engine".into()));
        }
        let control = inner.engine.import(&export.control)?;
        let rows = inner.engine.import(&export.rows)?;
        let peer = rows.peer().clone();
        inner.engine.connect(&peer)?;
        let mut state = inner.state.lock();
        if state.is_known(rank) {
            return Err(EngineError::Invalid(format!("rank {rank} is present already")));
        }
        // Its slots are those of its last process, which must not write there any more (MR-1).
        if state.revoking.contains(&rank) {
            inner.wait(&mut state, Condition::Quiesced)?;
        }
        let Some(exported) = state.exported[rank as usize].take() else {
            return Err(EngineError::Invalid(format!(
                "this rank has made no descriptor for rank {rank}; call descriptor() and give the result to that rank"
            )));
        };
        let link_id = state.new_link_id();
        let engines = (inner.engine.id(), peer.id());
        let counters = Arc::downgrade(&exported.counters);
        let waiting = WaitingSignals::of(engines, counters);
        let endpoint = PeerEndpoint {
            rank,
            link_id,
            peer,
            control,
            rows,
            counters: export.counters,
            exported,
            waiting,
            stores: OnceLock::new(),
        };
        state.lost.retain(|l| l.rank != rank);
        state.lost_counters[rank as usize] = None;
        let link = PeerLink::new(endpoint);
        let endpoint = Arc::clone(&link.endpoint);
        state.newcomers[rank as usize] = Some(link);
        drop(state);
        inner.probe_direct_stores(endpoint);
        Ok(rank)
    }

    /// Gives a rank up: its tokens and answers are not awaited, and its access is revoked.
    pub fn mask(&self, rank: u32, cause: &str) -> Result<()> {
        self.inner.check_other(rank)?;
        let mut actions = Vec::new();
        let mut state = self.inner.state.lock();
        state.give_up(rank, MessageKind::Routes, cause.to_owned(), &mut actions);
        self.inner.apply(state, actions);
        Ok(())
    }

    /// Lets go of all other ranks between two exchanges, so that all ranks can connect again with
    /// new descriptors. Ranks may have made different numbers of exchanges until then; each of them
    /// calls this before any descriptor is made. Nothing is reported as lost.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] within an exchange, or when this rank has left;
    /// [`EngineError::NotQuiesced`] if a rank may still access this rank's memory after the
    /// timeout.
    pub fn disconnect(&self) -> Result<()> {
        let _caller = self.alone()?;
        let inner = &self.inner;
        let mut actions = Vec::new();
        let mut state = inner.state.lock();
        if !state.between_exchanges() {
            return Err(match state.left {
                true => EngineError::Invalid("the exchange was closed; make another one".into()),
                false => state.phase.refuse("disconnect"),
            });
        }
        for rank in 0..inner.shape.ranks {
            state.lost_counters[rank as usize] = None;
            if let Some(link) = state.take_link(rank) {
                state.revoke(rank, &link.endpoint.exported, &mut actions);
            }
        }
        state.departures_expected = false;
        state.go_on(&mut actions);
        inner.apply(state, actions);
        inner.wait(&mut inner.state.lock(), Condition::Quiesced)
    }

    /// Whether [`AllToAll::disconnect`] may be called.
    pub fn between_exchanges(&self) -> bool {
        self.inner.state.lock().between_exchanges()
    }

    /// Ranks that have told that they have given this one up, until they are admitted again.
    pub fn given_up_by(&self) -> Vec<u32> {
        let state = self.inner.state.lock();
        state.others().filter(|rank| state.was_given_up_by(*rank)).collect()
    }

    /// Whether no rank was lost, and none has given this one up.
    pub fn is_whole(&self) -> bool {
        let state = self.inner.state.lock();
        state.lost.is_empty() && !state.others().any(|rank| state.was_given_up_by(rank))
    }

    /// Ranks that were given up and haven't joined again, in order of loss.
    pub fn lost(&self) -> Vec<LostPeer> {
        self.inner.state.lock().lost.clone()
    }

    /// Whether each rank is present, this one included.
    pub fn present(&self) -> Vec<bool> {
        let state = self.inner.state.lock();
        let me = self.inner.rank;
        (0..self.inner.shape.ranks).map(|rank| rank == me || state.is_known(rank)).collect()
    }
}

impl Inner {
    fn check_other(&self, rank: u32) -> Result<()> {
        check_peer(rank, self.rank, self.shape.ranks)
    }

    fn check_shape(&self, descriptor: &RankDescriptor) -> Result<()> {
        if descriptor.shape == self.shape {
            return Ok(());
        }
        Err(EngineError::Handshake {
            peer: descriptor.address.name.clone(),
            cause: format!(
                "rank {} has the shape {:?}, expected {:?}; use the same on all ranks",
                descriptor.rank, descriptor.shape, self.shape
            ),
        })
    }

    /// Waits until the slots of these ranks are not in use; returns the ranks whose slots still
    /// are after the timeout.
    fn wait_for_slots(&self, state: &mut MutexGuard<'_, ExchangeState>, ranks: &[u32]) -> Vec<u32> {
        let (deadline, mut timed_out) = (Instant::now() + self.timeout(), false);
        loop {
            let held = ranks.iter().copied().filter(|rank| state.slots_in_use(*rank));
            let held: Vec<u32> = held.collect();
            if held.is_empty() || timed_out {
                return held;
            }
            timed_out = self.changed.wait_until(state, deadline).timed_out();
        }
    }

    /// Registers memory and counters for one rank.
    fn export(&self, state: &mut ExchangeState, rank: u32) -> Result<PeerExport> {
        let control = self.engine.register_again(&self.control)?;
        let rows = self.engine.register_again(&self.rows)?;
        let counters = (0..MessageKind::ALL.len()).map(|_| self.engine.counter());
        let counters = counters.collect::<Result<Vec<_>>>()?;
        let counters = <[_; MESSAGE_KINDS]>::try_from(counters).map_err(|_| EngineError::Closed)?;
        let references = counters.each_ref().map(fabric_engine::Counter::reference);
        let counters = Arc::new(counters);
        let export = PeerExport {
            control: control.descriptor(),
            rows: rows.descriptor(),
            counters: references,
        };
        state.exported[rank as usize] = Some(ExportedRegions { control, rows, counters });
        Ok(export)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread, time::Duration};

    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig};

    use super::*;
    use crate::{kernels::Part, routes::Order, shape::Shape};

    /// The timeout of each rank.
    const TIMEOUT: Duration = Duration::from_secs(20);
    /// Bound of a wait that ends by an event.
    const SOON: Duration = Duration::from_secs(5);

    /// Ranks 0 and 1 of three, and the descriptor of rank 2.
    fn two_and_a_newcomer() -> (SimNet, Vec<AllToAll>, Vec<u8>) {
        let mut net = SimNet::new(SimConfig::default());
        let shape = Shape::small(3);
        let mut open = |rank| {
            let all =
                AllToAll::new(net.engine(EngineConfig::default()).unwrap(), shape, rank).unwrap();
            all.set_timeout(TIMEOUT);
            all
        };
        let mut all = vec![open(0), open(1), open(2)];
        let descriptors: Vec<_> = all.iter().map(|a| a.descriptor(None).unwrap()).collect();
        all[0].admit(&descriptors[1]).unwrap();
        all[1].admit(&descriptors[0]).unwrap();
        all.truncate(2);
        (net, all, descriptors[2].clone())
    }

    fn send(all: &AllToAll) {
        all.dispatch_send(&[Part { bytes: &[], stride: 16, width: 16 }], &[]).unwrap();
    }

    fn wait_for(what: impl Fn() -> bool) {
        let deadline = Instant::now() + SOON;
        while !what() {
            assert!(Instant::now() < deadline);
            thread::yield_now();
        }
    }

    /// What a call of another thread returns.
    fn beside<'s, T: Send + 's>(
        threads: &'s thread::Scope<'s, '_>,
        call: impl FnOnce() -> T + Send + 's,
    ) -> mpsc::Receiver<T> {
        let (sender, receiver) = mpsc::channel();
        threads.spawn(move || sender.send(call()).unwrap());
        receiver
    }

    fn arriving(all: &AllToAll) -> Result<()> {
        all.wait_arriving(Order::Packed { multiple: 1 }).map(|_| ())
    }

    #[test]
    fn rs_1_a_rank_that_was_given_up_is_told_and_connects_again() {
        let (mut net, all, _) = two_and_a_newcomer();
        let mut settle = || {
            let end = net.now().after(Duration::from_secs(1));
            net.run_until(end);
        };
        // Newcomers take part from the first dispatch on.
        all.iter().for_each(send);
        settle();
        all[0].mask(1, "by the test").unwrap();
        settle();
        assert_eq!((all[1].given_up_by(), all[1].is_whole()), (vec![0], false));
        // In turn; the first one to give the other up is not told.
        all[1].mask(0, "by the test").unwrap();
        settle();
        assert_eq!((all[1].given_up_by(), all[0].given_up_by()), (vec![0], vec![]));
        // Within an exchange no rank lets go.
        assert!(matches!(all[0].disconnect(), Err(EngineError::Invalid(_))));
        for a in &all {
            a.inner.state.lock().collected(&mut Vec::new());
        }
        let mut on_each = |call: &(dyn Fn(&AllToAll) -> Vec<u8> + Sync)| {
            let one = |a| {
                thread::scope(|threads| {
                    let end = beside(threads, move || call(a));
                    loop {
                        settle();
                        if let Ok(result) = end.try_recv() {
                            break result;
                        }
                    }
                })
            };
            all.iter().map(one).collect::<Vec<_>>()
        };
        on_each(&|a| {
            a.disconnect().unwrap();
            Vec::new()
        });
        let descriptors = on_each(&|a| a.descriptor(None).unwrap());
        all[0].admit(&descriptors[1]).unwrap();
        all[1].admit(&descriptors[0]).unwrap();
        // What was exported before, to the third rank too, is revoked.
        settle();
        all.iter().for_each(send);
        settle();
        for a in &all {
            assert!(a.is_whole() && a.given_up_by().is_empty());
            assert!(a.inner.state.lock().all_routes());
        }
    }

    #[test]
    fn rs_4_a_call_ends_promptly_while_another_thread_admits_a_rank() {
        for admits_first in [false, true] {
            let (mut net, all, newcomer) = two_and_a_newcomer();
            all.iter().for_each(send);
            let (receiver, inner) = (&all[0], &all[0].inner);
            // The last process of rank 2 may still write.
            inner.state.lock().revoking.push(2);
            let waits = |n| move || inner.state.lock().awaited.len() == n;
            thread::scope(|threads| {
                let admit = || beside(threads, || receiver.admit(&newcomer));
                let early = admits_first.then(admit);
                wait_for(waits(usize::from(admits_first)));
                let arrived = beside(threads, || arriving(receiver));
                wait_for(waits(1 + usize::from(admits_first)));
                let admission = early.unwrap_or_else(admit);
                wait_for(waits(2));
                let mut deliver = || while !inner.state.lock().all_routes() && net.step() {};
                // One call ends while the other waits, which then ends, too.
                if admits_first {
                    inner.on_revoked(2, Ok(()));
                    assert_eq!(admission.recv_timeout(SOON), Ok(Ok(2)));
                    deliver();
                    assert_eq!(arrived.recv_timeout(SOON), Ok(Ok(())));
                } else {
                    deliver();
                    assert_eq!(arrived.recv_timeout(SOON), Ok(Ok(())));
                    inner.on_revoked(2, Ok(()));
                    assert_eq!(admission.recv_timeout(SOON), Ok(Ok(2)));
                }
            });
            assert!(inner.state.lock().awaited.is_empty());
        }
    }
}
