//! PeerMappings between simulated nodes, as between processes of one host; the simulated network is
//! not involved.

use std::sync::{Arc, Weak};

use super::{node::Port, wire::World};
use crate::{
    api::{EngineId, RegionKey},
    domain::{Completion, KeepAlive, PeerMapping, RegionRelease},
    locks::Mutex,
};

/// A mapping of a region by engine `by`.
struct OpenPeerMapping {
    by: EngineId,
    owner: Port,
    index: u32,
    peer_mapping: Arc<PeerMapping>,
}

/// All mappings of a network.
#[derive(Default)]
pub(crate) struct PeerMappings {
    open: Vec<OpenPeerMapping>,
    /// Deregistered regions whose stores have not all ended.
    deregistered: Vec<(Port, u32)>,
}

impl World {
    /// Maps a region of another node.
    pub fn open_peer_mapping(
        &mut self,
        (by, owner): (Port, Port),
        key: RegionKey,
        world: Weak<Mutex<World>>,
    ) -> Result<Arc<PeerMapping>, String> {
        if !self.config.peer_mappings {
            return Err("this network has no mappings of peers' memory".into());
        }
        let node = self.nodes.get(&owner).ok_or("the region's node has ended")?;
        let region = node.book.lookup_for(Some(by.engine), key).map_err(|e| e.to_string())?;
        let (base, len, held) = (region.base, region.len, Arc::clone(region) as KeepAlive);
        let left = move || {
            if let Some(world) = world.upgrade() {
                world.lock().report_ended_stores();
            }
        };
        let peer_mapping = PeerMapping::new(base, len, held, left);
        let (by, index) = (by.engine, key.index);
        self.peer_mappings.open.push(OpenPeerMapping {
            by,
            owner,
            index,
            peer_mapping: Arc::clone(&peer_mapping),
        });
        Ok(peer_mapping)
    }

    /// A region is deregistered: no further store begins (MR-1).
    pub fn deregister(&mut self, owner: Port, index: u32) -> RegionRelease {
        let of_region = |s: &&OpenPeerMapping| s.owner == owner && s.index == index;
        self.peer_mappings
            .open
            .iter()
            .filter(of_region)
            .for_each(|s| s.peer_mapping.close("its owner has revoked it"));
        match self.peer_mappings.has_active_stores(owner, index) {
            true => {
                self.peer_mappings.deregistered.push((owner, index));
                RegionRelease::Later
            }
            false => RegionRelease::Now,
        }
    }

    /// Closes the mappings of an engine that has ended.
    pub fn close_peer_mappings_of(&mut self, engine: EngineId) {
        let open = &mut self.peer_mappings.open;
        open.iter()
            .filter(|s| s.by == engine)
            .for_each(|s| s.peer_mapping.close("this node has ended"));
        open.retain(|s| s.by != engine);
        self.report_ended_stores();
    }

    /// Reports regions whose last store has ended.
    fn report_ended_stores(&mut self) {
        let deregistered = std::mem::take(&mut self.peer_mappings.deregistered);
        let (still, over) = deregistered
            .into_iter()
            .partition(|(owner, index)| self.peer_mappings.has_active_stores(*owner, *index));
        self.peer_mappings.deregistered = still;
        for (owner, index) in over {
            if let Some(node) = self.nodes.get_mut(&owner) {
                node.inbox.push_back(Completion::RegionReleased { index });
                self.stirred.insert(owner.engine);
            }
        }
        self.peer_mappings
            .open
            .retain(|s| s.peer_mapping.is_open() || s.peer_mapping.active_stores() > 0);
    }
}

impl PeerMappings {
    fn has_active_stores(&self, owner: Port, index: u32) -> bool {
        let of_region = |s: &&OpenPeerMapping| s.owner == owner && s.index == index;
        self.open.iter().filter(of_region).any(|s| s.peer_mapping.active_stores() > 0)
    }
}
