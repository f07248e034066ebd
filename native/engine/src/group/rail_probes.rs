//! Rails that were lost while others went on: when they are tried again.
//!
//! Each pair of NICs has a breaker. A link that is lost opens it, an attempt to connect is its probe,
//! and one that is up again closes it. So a dead rail is back soon after it lives, and one that flaps
//! rests ever longer.

use smallvec::SmallVec;

use super::{
    policy::breaker::{Breaker, Permit},
    route::RailPair,
};
use crate::time::Time;

#[derive(Debug)]
struct LostRail {
    pair: RailPair,
    /// Leave for the attempt that is under way.
    probe: Option<Permit>,
    again_at: Time,
}

#[derive(Debug, Default)]
pub(super) struct RailProbes {
    lost: SmallVec<[LostRail; 1]>,
    health: SmallVec<[(RailPair, Breaker); 1]>,
}

impl RailProbes {
    /// Lost rails are no longer probed; what is known of their health stays.
    pub fn clear(&mut self) {
        self.lost.clear();
    }

    /// A link was lost, or an attempt to bring it back has failed. When to try again.
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

    /// The link is up.
    pub fn on_up(&mut self, now: Time, pair: RailPair) {
        let Some(at) = self.lost.iter().position(|m| m.pair == pair) else { return };
        let rail = self.lost.swap_remove(at);
        let breaker = self.breaker(now, pair);
        // The peer may have been quicker than our own probe.
        if let Some(permit) = rail.probe.or_else(|| breaker.permit(now)) {
            breaker.report(now, permit, true);
        }
    }

    /// Lost rails that may be tried now; they come back by `on_lost` or leave by `on_up`.
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
