//! Membership calls: descriptors, ranks that join, ranks that are given up.

use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use fabric_engine::{api::EngineId, EngineError, Result, Time};
use fabric_proxy::RankDescriptor as ProxyDescriptor;

use super::{
    context::Io,
    engine_error,
    machine::{LostRank, Machine},
    membership::Member,
    rank_descriptor::RankDescriptor,
    Throughput,
};
use crate::checks::{check_peer, nanos};

impl Throughput {
    /// Makes this one of the exchanges of an engine, before any descriptor is made: a rank that
    /// waits in one of them is not given up in another.
    #[must_use]
    pub fn of_engine(mut self, engine: EngineId) -> Self {
        self.engine = engine;
        self
    }

    /// This rank's descriptor, with its knowledge of other ranks.
    pub fn descriptor(&self) -> Vec<u8> {
        let proxy = self.proxy.descriptor().to_bytes();
        let events = self.machine.lock().events().to_vec();
        let (spec, incarnation, engine) = (self.spec, self.member.incarnation, self.engine);
        RankDescriptor { spec, incarnation, events, engine, proxy }.to_bytes()
    }

    /// Admits a rank by its descriptor; returns its number. All ranks are admitted before the first
    /// dispatch. All ranks admit a replacement between the same two exchanges, and the replacement
    /// admits all others.
    ///
    /// # Errors
    /// [`EngineError::Handshake`] if it is of another shape; [`EngineError::Invalid`] if it is here
    /// already, or comes in an incarnation that has ended, or while an exchange is under way;
    /// [`EngineError::PeerLost`] if others go on without this rank; [`EngineError::NotQuiesced`] if
    /// the one before it may still write to this rank's memory, after the timeout.
    pub fn admit(&self, descriptor: &[u8]) -> Result<u32> {
        let descriptor = RankDescriptor::from_bytes(descriptor)?;
        let proxy = ProxyDescriptor::from_bytes(&descriptor.proxy).map_err(engine_error)?;
        let (spec, rank) = (self.spec, u32::from(proxy.rank));
        let unlike = |cause: String| EngineError::Handshake { peer: format!("rank {rank}"), cause };
        if descriptor.spec != spec {
            return Err(unlike(format!(
                "it is of another shape: {:?}, and this one's is {spec:?}; give all ranks the same",
                descriptor.spec
            )));
        }
        let ranks = spec.shape.ranks;
        if rank >= ranks {
            return Err(unlike(format!("it is none of {ranks} ranks")));
        }
        let can_be = descriptor.events.len() == ranks as usize
            && descriptor.events.iter().chain([&descriptor.incarnation]).all(|n| *n < 1 << 13)
            && descriptor.incarnation.checked_add(1) == Some(proxy.incarnation)
            && proxy.threads.len() == spec.threads as usize;
        if !can_be {
            return Err(unlike("its descriptor contradicts itself".into()));
        }
        let (_caller, mut machine) = self.enter()?;
        self.take_events(&mut machine);
        self.follow_masks(&mut machine);
        machine.note_losses();
        machine.check_goes_on()?;
        machine.check_between(rank)?;
        machine.give_up_gone(rank);
        self.wait_for_end(&mut machine, rank)?;
        machine.admit(Member { rank, incarnation: descriptor.incarnation }, &descriptor.events)?;
        machine.share_signals(rank, (self.engine, descriptor.engine));
        self.publish_membership(&machine);
        self.proxy.join(&proxy).map_err(engine_error)?;
        Ok(rank)
    }

    /// Waits until nothing of a rank's last incarnation can land here any more (MR-1).
    fn wait_for_end(&self, machine: &mut Machine, rank: u32) -> Result<()> {
        let end = Instant::now() + self.timeout();
        loop {
            self.take_events(machine);
            // Meanwhile other ranks may wait for this rank, or give up a rank.
            machine.note_losses();
            machine.check_goes_on()?;
            machine.beat(Time::now(), self.timeout());
            machine.flush()?;
            self.mask_lost(machine);
            let quiet = machine.finish_jobs(&mut Io::Nothing) && machine.is_quiet();
            if machine.here()[rank as usize] || machine.has_ended(rank) && quiet {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(EngineError::NotQuiesced {
                    what: format!("memory that rank {rank} writes to"),
                    after: self.timeout(),
                    cause: "the process before it is connected, or its loss has yet to be seen to; end it first".into(),
                });
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Marks a rank that has yet to join as absent: no rank waits for it.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: it is this rank, or none, or here.
    pub fn leave_out(&self, rank: u32) -> Result<()> {
        self.check_other(rank)?;
        let (_caller, mut machine) = self.enter()?;
        if machine.here()[rank as usize] {
            return Err(EngineError::Invalid(format!("rank {rank} is here; mask it")));
        }
        machine.fail(rank, String::new());
        Ok(())
    }

    /// Gives a rank up, and ends the current call of this rank. Each rank's next call reports the
    /// loss once, and names all losses known by then; after that all ranks continue without them.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: it is this rank, or none.
    pub fn mask(&self, rank: u32, cause: &str) -> Result<()> {
        self.check_other(rank)?;
        let incarnation = self.incarnations.lock()[rank as usize];
        self.masked.lock().push((Member { rank, incarnation }, cause.to_owned()));
        // A call that is under way finds it there, and ends.
        let mut machine = self.machine.lock();
        self.take_events(&mut machine);
        self.follow_masks(&mut machine);
        self.announce_losses(&mut machine);
        self.publish_membership(&machine);
        Ok(())
    }

    fn check_other(&self, rank: u32) -> Result<()> {
        check_peer(rank, self.member.rank, self.spec.shape.ranks)
    }

    /// Why the exchange has ended for good, for this rank: others go on without it.
    pub fn broken(&self) -> Option<LostRank> {
        self.losses.ended().cloned()
    }

    /// Ranks that were given up and haven't joined again, in order of loss.
    pub fn lost(&self) -> Vec<LostRank> {
        self.losses.lost()
    }

    /// Whether each rank is here, as the last call left it.
    pub fn present(&self) -> Vec<bool> {
        self.here.lock().clone()
    }

    /// Ranks whose answers are missing in the last sums.
    pub fn left_out(&self) -> Vec<u32> {
        self.left_out.lock().clone()
    }

    /// The longest time that an awaited rank may be in no call. Give all ranks the same: a rank
    /// with a much longer timeout sends its signals too rarely for the others.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(nanos(timeout), Relaxed);
    }
}

/// # Errors
/// [`EngineError::Invalid`]: a rank is neither here nor left out.
pub(super) fn check_all_here(machine: &Machine) -> Result<()> {
    match machine.awaited() {
        None => Ok(()),
        Some(rank) => {
            let text = format!("rank {rank} is not connected; admit its descriptor first");
            Err(EngineError::Invalid(text))
        }
    }
}
