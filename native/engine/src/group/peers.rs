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

/// Unused peers are looked for when there are so many, or half as many again as were left.
const FEW: usize = 64;

enum Slot {
    /// Most slots may be names: they don't take a route's room.
    Known(Box<Route>),
    /// Forgotten, but for the flight records that name it by its place.
    Named(EngineId, String),
}

#[derive(Default)]
pub(super) struct Peers {
    slots: Slab<Slot>,
    by_id: HashMap<EngineId, PeerKey>,
    /// Those that were left when forgettable ones were last looked for.
    left: usize,
}

impl Peers {
    pub fn key_of(&self, id: EngineId) -> Option<PeerKey> {
        self.by_id.get(&id).copied()
    }

    pub fn insert(&mut self, route: Route) -> PeerKey {
        let id = route.address.id;
        let key = self.slots.insert(Slot::Known(Box::new(route))) as PeerKey;
        self.by_id.insert(id, key);
        key
    }

    pub fn get(&self, key: usize) -> Option<&Route> {
        self.slots.get(key).and_then(Slot::route)
    }

    pub fn iter(&self) -> impl Iterator<Item = (usize, &Route)> {
        self.slots.iter().filter_map(|(key, slot)| Some((key, slot.route()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Route)> {
        self.slots.iter_mut().filter_map(|(key, slot)| match slot {
            Slot::Known(route) => Some((key, &mut **route)),
            Slot::Named(..) => None,
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
                Slot::Known(route) => (route.address.id, route.address.name.clone()),
                Slot::Named(id, name) => (*id, name.clone()),
            };
        }
        names
    }

    fn are_many(&self) -> bool {
        self.by_id.len() >= FEW.max(self.left + self.left / 2)
    }

    /// Forgets those that `may_go`, and returns them. The names of those that are `recorded` are kept.
    fn forget(
        &mut self,
        may_go: impl Fn(PeerKey, &Route) -> bool,
        recorded: impl Fn(PeerKey) -> bool,
    ) -> HashSet<PeerKey> {
        let mut gone = HashSet::new();
        for (key, slot) in &mut self.slots {
            let Slot::Known(route) = slot else { continue };
            if may_go(key as PeerKey, route) {
                gone.insert(key as PeerKey);
                self.by_id.remove(&route.address.id);
                *slot = Slot::Named(route.address.id, std::mem::take(&mut route.address.name));
            }
        }
        self.slots.retain(|key, slot| slot.route().is_some() || recorded(key as PeerKey));
        // The highest key is looked up with each move, from the end on.
        self.slots.shrink_to_fit();
        self.left = self.by_id.len();
        gone
    }
}

impl Slot {
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
            Slot::Known(route) => route,
            Slot::Named(..) => unreachable!("who is referred to isn't forgotten"),
        }
    }
}

impl IndexMut<usize> for Peers {
    #[inline]
    fn index_mut(&mut self, key: usize) -> &mut Route {
        match &mut self.slots[key] {
            Slot::Known(route) => route,
            Slot::Named(..) => unreachable!("who is referred to isn't forgotten"),
        }
    }
}

impl Group {
    /// The peer with this address; made known if it wasn't.
    pub(super) fn peer(&mut self, address: &EngineAddress) -> PeerKey {
        if let Some(key) = self.peers.key_of(address.id) {
            return key;
        }
        if self.peers.are_many() {
            self.forget();
        }
        self.peers.insert(Route::new(self.recorder.now, address.clone(), self.policy))
    }

    /// The same, for the layer above.
    pub fn name(&mut self, now: Time, address: &EngineAddress) -> (PeerKey, PeerHold) {
        self.recorder.tell(now);
        let key = self.peer(address);
        (key, self.peers[key as usize].hold())
    }

    /// Forgets peers that are gone, or were never met, for good: that no caller can name, that nothing here
    /// refers to, and whose links ended too long ago for questions about them of who is as patient as we are.
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
        self.probe_times.retain(|(_, peer)| !gone.contains(peer));
        self.resolve_deadlines.retain(|(_, peer)| !gone.contains(peer));
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
    fn places_behind_the_last_peer_are_given_up_and_others_used_again() {
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
