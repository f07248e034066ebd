//! The peers that a group knows, and which of them it forgets.

use std::{
    collections::{HashMap, HashSet},
    ops::{Index, IndexMut},
};

use slab::Slab;

use super::{
    route::{PeerHold, PeerKey, Route},
    Group,
};
use crate::{
    api::{EngineAddress, EngineId},
    time::Time,
};

/// Unused peers are forgotten at this number of peers, or at 1.5 times the number left last time.
const MIN_PURGE_SIZE: usize = 64;

/// An entry of the table of peers.
enum PeerEntry {
    /// Boxed, because most slots may be names.
    Known(Box<Route>),
    /// A forgotten peer that flight records still name by its key.
    Named(EngineId, String),
}

#[derive(Default)]
pub(super) struct Peers {
    slots: Slab<PeerEntry>,
    by_id: HashMap<EngineId, PeerKey>,
    /// Peers left when unused ones were last forgotten.
    left: usize,
}

impl Peers {
    pub fn key_of(&self, id: EngineId) -> Option<PeerKey> {
        self.by_id.get(&id).copied()
    }

    pub fn insert(&mut self, route: Route) -> PeerKey {
        let id = route.address.id;
        let key = self.slots.insert(PeerEntry::Known(Box::new(route))) as PeerKey;
        self.by_id.insert(id, key);
        key
    }

    pub fn get(&self, key: usize) -> Option<&Route> {
        self.slots.get(key).and_then(PeerEntry::route)
    }

    pub fn iter(&self) -> impl Iterator<Item = (usize, &Route)> {
        self.slots.iter().filter_map(|(key, slot)| Some((key, slot.route()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Route)> {
        self.slots.iter_mut().filter_map(|(key, slot)| match slot {
            PeerEntry::Known(route) => Some((key, &mut **route)),
            PeerEntry::Named(..) => None,
        })
    }

    /// One more than the highest key.
    pub fn ends_at(&self) -> usize {
        self.slots.iter().next_back().map_or(0, |(key, _)| key + 1)
    }

    /// The peer of every key, for flight records; no name and zeros for an unused key.
    pub fn names(&self) -> Vec<(EngineId, String)> {
        let mut names = vec![(EngineId([0; 16]), String::new()); self.ends_at()];
        for (key, slot) in &self.slots {
            names[key] = match slot {
                PeerEntry::Known(route) => (route.address.id, route.address.name.clone()),
                PeerEntry::Named(id, name) => (*id, name.clone()),
            };
        }
        names
    }

    fn are_many(&self) -> bool {
        self.by_id.len() >= MIN_PURGE_SIZE.max(self.left + self.left / 2)
    }

    /// Forgets the peers that `may_go` and returns them. The names of `recorded` ones are kept.
    fn forget(
        &mut self,
        may_go: impl Fn(PeerKey, &Route) -> bool,
        recorded: impl Fn(PeerKey) -> bool,
    ) -> HashSet<PeerKey> {
        let mut gone = HashSet::new();
        for (key, slot) in &mut self.slots {
            let PeerEntry::Known(route) = slot else { continue };
            if may_go(key as PeerKey, route) {
                gone.insert(key as PeerKey);
                self.by_id.remove(&route.address.id);
                *slot = PeerEntry::Named(route.address.id, std::mem::take(&mut route.address.name));
            }
        }
        self.slots.retain(|key, slot| slot.route().is_some() || recorded(key as PeerKey));
        // `ends_at` reads from the end of the slots.
        self.slots.shrink_to_fit();
        self.left = self.by_id.len();
        gone
    }
}

impl PeerEntry {
    fn route(&self) -> Option<&Route> {
        match self {
            Self::Known(route) => Some(route),
            Self::Named(..) => None,
        }
    }
}

impl Index<usize> for Peers {
    type Output = Route;

    #[inline]
    fn index(&self, key: usize) -> &Route {
        match &self.slots[key] {
            PeerEntry::Known(route) => route,
            PeerEntry::Named(..) => unreachable!("a peer in use is not forgotten"),
        }
    }
}

impl IndexMut<usize> for Peers {
    #[inline]
    fn index_mut(&mut self, key: usize) -> &mut Route {
        match &mut self.slots[key] {
            PeerEntry::Known(route) => route,
            PeerEntry::Named(..) => unreachable!("a peer in use is not forgotten"),
        }
    }
}

impl Group {
    /// The key of the peer with this address; adds the peer if it is unknown.
    pub(super) fn peer(&mut self, address: &EngineAddress) -> PeerKey {
        if let Some(key) = self.peers.key_of(address.id) {
            return key;
        }
        if self.peers.are_many() {
            self.forget();
        }
        self.peers.insert(Route::new(self.recorder.now, address.clone(), self.policy))
    }

    /// As `peer`, for the layer above, which holds the key with a [`PeerHold`].
    pub fn name(&mut self, now: Time, address: &EngineAddress) -> (PeerKey, PeerHold) {
        self.recorder.set_now(now);
        let key = self.peer(address);
        (key, self.peers[key as usize].hold())
    }

    /// Forgets peers that no caller and no state refers to, and whose links ended so long ago that
    /// no peer asks about them: after two peer timeouts.
    fn forget(&mut self) {
        let rest = self.policy.peer_timeout * 2;
        let now = self.recorder.now;
        let mut needed: HashSet<PeerKey> = self.links.values().copied().collect();
        self.transfers.iter().for_each(|(_, t)| needed.extend(t.peers()));
        needed.extend(self.ledger.peers());
        let recorded = self.recorder.peers(self.transfers.iter().map(|(_, t)| t));
        let gone = self.peers.forget(
            |key, route| route.may_be_forgotten(now, rest) && !needed.contains(&key),
            |key| recorded.contains(&key),
        );
        gone.iter().for_each(|key| self.credits.forget(*key));
        self.timers.forget(&gone);
        self.waiters.retain(|peer| !gone.contains(peer));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::group::Policy;

    fn met(n: u8) -> Route {
        let address =
            EngineAddress { id: EngineId([n; 16]), name: n.to_string(), endpoints: Vec::new() };
        Route::new(Time(0), address, Policy::default())
    }

    #[test]
    fn slots_behind_the_last_peer_are_freed_and_others_reused() {
        let mut peers = Peers::default();
        let keys: Vec<_> = (0..100).map(|n| peers.insert(met(n))).collect();
        peers.forget(|key, _| key != keys[2], |key| key == keys[1]);
        assert_eq!((peers.ends_at(), peers.slots.capacity()), (3, 3));
        let names = peers.names();
        assert_eq!(names[0], (EngineId([0; 16]), String::new()));
        assert_eq!((names[1].1.as_str(), names[2].1.as_str()), ("1", "2"));
        assert_eq!(peers.insert(met(200)), keys[0]);
        assert_eq!(peers.insert(met(201)), keys[3]);
    }
}
