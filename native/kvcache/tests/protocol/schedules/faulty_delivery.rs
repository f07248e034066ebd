//! Messages on their way from an engine to its end of the protocol: some come twice, late, changed
//! or not at all.

use std::{
    collections::BTreeMap,
    panic::{catch_unwind, AssertUnwindSafe},
    sync::Arc,
};

use fabric_engine::{api::EngineId, locks::Mutex, TransferEngine};

use super::judge::Judge;

/// One message in so many; 0: none.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultOdds {
    pub twice: u32,
    pub late: u32,
    pub lost: u32,
}

/// Takes a message: an end of the protocol that may be gone.
pub type MessageHandler = Arc<dyn Fn(EngineId, &[u8]) + Send + Sync>;

struct DelayedMessage {
    to: MessageHandler,
    from: EngineId,
    bytes: Vec<u8>,
}

pub struct FaultyDelivery {
    judge: Arc<Judge>,
    odds: FaultOdds,
    /// Whose messages are changed on their way.
    liar: Mutex<Option<EngineId>>,
    inner: Mutex<Inner>,
}

struct Inner {
    rng: fastrand::Rng,
    delayed: BTreeMap<(u64, u64), DelayedMessage>,
    next: u64,
}

impl FaultyDelivery {
    pub fn new(judge: &Arc<Judge>, odds: FaultOdds, seed: u64) -> Arc<Self> {
        let inner =
            Inner { rng: fastrand::Rng::with_seed(seed), delayed: BTreeMap::new(), next: 0 };
        let (judge, inner) = (Arc::clone(judge), Mutex::new(inner));
        Arc::new(Self { judge, odds, liar: Mutex::default(), inner })
    }

    pub fn distrust(&self, engine: EngineId) {
        *self.liar.lock() = Some(engine);
    }

    /// Stands between an engine and the end that opened its pool.
    pub fn between(self: &Arc<Self>, engine: &TransferEngine, handler: MessageHandler) {
        let this = Arc::clone(self);
        let pool = engine.receive(1 << 20, 64, move |delivery| {
            this.came(&handler, delivery.from(), delivery.message());
        });
        pool.unwrap();
    }

    fn came(&self, to: &MessageHandler, from: EngineId, bytes: &[u8]) {
        let mut bytes = bytes.to_vec();
        let now = {
            let mut inner = self.inner.lock();
            let mut one_in = |n: u32| n > 0 && inner.rng.u32(..n) == 0;
            let (lost, twice, late) =
                (one_in(self.odds.lost), one_in(self.odds.twice), one_in(self.odds.late));
            if lost {
                return;
            }
            if *self.liar.lock() == Some(from) && inner.rng.bool() {
                for _ in 0..=inner.rng.u32(..3) {
                    let at = inner.rng.usize(..bytes.len());
                    bytes[at] = match inner.rng.u8(..4) {
                        0 => inner.rng.u8(..),
                        1 => bytes[at].wrapping_add(1),
                        2 => bytes[at].wrapping_sub(1),
                        _ => bytes[at] ^ 1 << inner.rng.u8(..8),
                    };
                }
            }
            for _ in 0..u8::from(twice) + u8::from(late) {
                // A moment, or after all is over.
                let scale = 10u64.pow(inner.rng.u32(4..10));
                let at = self.judge.now() + inner.rng.u64(..3 * scale);
                inner.next += 1;
                let key = (at, inner.next);
                inner
                    .delayed
                    .insert(key, DelayedMessage { to: Arc::clone(to), from, bytes: bytes.clone() });
            }
            !late
        };
        if now {
            self.give(to, from, &bytes);
        }
    }

    fn give(&self, to: &MessageHandler, from: EngineId, bytes: &[u8]) {
        if catch_unwind(AssertUnwindSafe(|| to(from, bytes))).is_err() {
            self.judge.wrong("panic", "a message made an end panic");
        }
    }

    /// When the next message comes that was delayed.
    pub fn next(&self) -> Option<u64> {
        self.inner.lock().delayed.first_key_value().map(|((at, _), _)| *at)
    }

    /// Gives what is due.
    pub fn due(&self) {
        loop {
            let delayed = {
                let mut inner = self.inner.lock();
                let first = inner.delayed.first_entry().filter(|e| e.key().0 <= self.judge.now());
                first.map(|e| e.remove())
            };
            let Some(delayed) = delayed else { return };
            self.give(&delayed.to, delayed.from, &delayed.bytes);
        }
    }
}
