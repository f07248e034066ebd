//! The waiting signals of a peer, in all exchanges of one engine.
//!
//! A rank makes calls of several exchanges in turn. One that waits in an exchange signals there,
//! while a peer that needs nothing more of that one waits in the next: the peer looks in all.

use std::sync::{Arc, Weak};

use fabric_engine::{api::EngineId, locks::Mutex, PerProcess};

use super::link::{Counters, MessageKind};

/// The counters that a peer counts at.
#[derive(Debug, Default)]
pub struct WaitingSignals(Mutex<Vec<Weak<Counters>>>);

/// This rank's engine, and the peer's.
type Engines = (EngineId, EngineId);
type Peers = Vec<(Engines, Weak<WaitingSignals>)>;

static PEERS: PerProcess<Mutex<Peers>> = PerProcess::empty();

impl WaitingSignals {
    /// Those of a peer, which counts at `counters` from now on as well.
    pub fn of(engines: Engines, counters: &Arc<Counters>) -> Arc<Self> {
        let mut peers = PEERS.get_or_default().lock();
        peers.retain(|(_, signals)| signals.strong_count() > 0);
        let known = peers.iter().find(|(known, _)| *known == engines);
        let signals = known.and_then(|(_, signals)| signals.upgrade()).unwrap_or_else(|| {
            let signals = Arc::new(Self::default());
            peers.push((engines, Arc::downgrade(&signals)));
            signals
        });
        drop(peers);
        let mut all = signals.0.lock();
        all.retain(|counters| counters.strong_count() > 0);
        all.push(Arc::downgrade(counters));
        drop(all);
        signals
    }

    /// Their number in exchanges that there still are.
    pub fn count(&self) -> u64 {
        let all: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().map(|counters| counters[MessageKind::Waiting as usize].arrived()).sum()
    }
}
