//! When lost rails are probed, while other rails reach the peer.
//!
//! Each pair of NICs has a breaker. A lost link opens it, an attempt to connect is its probe, and a
//! link that is up closes it. So a repaired rail is used again soon, and a flapping rail rests
//! longer each time.

use smallvec::SmallVec;

use super::{
    attempts::RailPair,
    policy::breaker::{Breaker, Permit},
};
use crate::time::Time;

/// A rail without a link.
#[derive(Debug)]
struct LostRail {
    pair: RailPair,
    /// The permit of the attempt under way.
    probe: Option<Permit>,
    again_at: Time,
}

/// The lost rails of one peer, and the breakers of all its rails.
#[derive(Debug, Default)]
pub(super) struct RailProbes {
    lost: SmallVec<[LostRail; 1]>,
    health: SmallVec<[(RailPair, Breaker); 1]>,
}

impl RailProbes {
    /// Stops all probes; breakers keep their state.
    pub fn clear(&mut self) {
        self.lost.clear();
    }

    /// Records a lost link or a failed probe; returns when to probe next.
    pub fn on_lost(&mut self, now: Time, pair: RailPair) -> Time {
        let at = self.lost.iter().position(|m| m.pair == pair);
        let probe = at.and_then(|at| self.lost[at].probe.take());
        let breaker = self.breaker(now, pair);
        if let Some(permit) = probe.or_else(|| breaker.permit(now)) {
            breaker.report(now, permit, false);
        }
        let again_at = breaker.opens();
        match at {
            Some(at) => self.lost[at].again_at = again_at,
            None => self.lost.push(LostRail { pair, probe: None, again_at }),
        }
        again_at
    }

    /// Records that a link is up.
    pub fn on_up(&mut self, now: Time, pair: RailPair) {
        let Some(at) = self.lost.iter().position(|m| m.pair == pair) else { return };
        let rail = self.lost.swap_remove(at);
        let breaker = self.breaker(now, pair);
        // The peer may have connected before this side's probe.
        if let Some(permit) = rail.probe.or_else(|| breaker.permit(now)) {
            breaker.report(now, permit, true);
        }
    }

    /// Lost rails to probe now. `on_lost` or `on_up` follows for each.
    pub fn due(&mut self, now: Time) -> SmallVec<[RailPair; 1]> {
        let mut pairs = SmallVec::new();
        for i in 0..self.lost.len() {
            if self.lost[i].again_at > now {
                continue;
            }
            let pair = self.lost[i].pair;
            let probe = self.breaker(now, pair).permit(now);
            self.lost[i].probe = probe;
            self.lost[i].again_at = Time::NEVER;
            pairs.push(pair);
        }
        pairs
    }

    fn breaker(&mut self, now: Time, pair: RailPair) -> &mut Breaker {
        let at = match self.health.iter().position(|(p, _)| *p == pair) {
            Some(at) => at,
            None => {
                self.health.push((pair, Breaker::new(now)));
                self.health.len() - 1
            }
        };
        &mut self.health[at].1
    }
}
