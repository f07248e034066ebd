//! Apertures between simulated nodes, as between processes of one host; the simulated network is
//! not involved.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::{node::Port, wire::World};
use crate::{
    api::{EngineId, RegionKey},
    domain::{Aperture, Completion, Held, RegionRelease},
};

/// An aperture of engine `by` into a region.
struct OpenAperture {
    by: EngineId,
    owner: Port,
    index: u32,
    aperture: Arc<Aperture>,
}

/// All apertures of a network.
#[derive(Default)]
pub(crate) struct Apertures {
    open: Vec<OpenAperture>,
    /// Deregistered regions whose stays have not all ended.
    deregistered: Vec<(Port, u32)>,
}

impl World {
    /// Opens an aperture into a region of another node.
    pub fn open_aperture(
        &mut self,
        (by, owner): (Port, Port),
        key: RegionKey,
        world: Weak<Mutex<World>>,
    ) -> Result<Arc<Aperture>, String> {
        if !self.config.apertures {
            return Err("this network has no apertures".into());
        }
        let node = self.nodes.get(&owner).ok_or("the region's node has ended")?;
        let region = node.book.lookup_for(Some(by.engine), key).map_err(|e| e.to_string())?;
        let (base, len, held) = (region.base, region.len, Arc::clone(region) as Held);
        let left = move || {
            if let Some(world) = world.upgrade() {
                world.lock().report_ended_stays();
            }
        };
        let aperture = Aperture::new(base, len, held, left);
        let (by, index) = (by.engine, key.index);
        self.apertures.open.push(OpenAperture {
            by,
            owner,
            index,
            aperture: Arc::clone(&aperture),
        });
        Ok(aperture)
    }

    /// A region is deregistered: no further stay begins (MR-1).
    pub fn deregister(&mut self, owner: Port, index: u32) -> RegionRelease {
        let of_region = |s: &&OpenAperture| s.owner == owner && s.index == index;
        self.apertures
            .open
            .iter()
            .filter(of_region)
            .for_each(|s| s.aperture.shut("its owner has revoked it"));
        match self.apertures.has_stays(owner, index) {
            true => {
                self.apertures.deregistered.push((owner, index));
                RegionRelease::Later
            }
            false => RegionRelease::Now,
        }
    }

    /// Closes the apertures of an engine that has ended.
    pub fn end_apertures_of(&mut self, engine: EngineId) {
        let open = &mut self.apertures.open;
        open.iter().filter(|s| s.by == engine).for_each(|s| s.aperture.shut("this node has ended"));
        open.retain(|s| s.by != engine);
        self.report_ended_stays();
    }

    /// Reports regions whose last stay has ended.
    fn report_ended_stays(&mut self) {
        let deregistered = std::mem::take(&mut self.apertures.deregistered);
        let (still, over) = deregistered
            .into_iter()
            .partition(|(owner, index)| self.apertures.has_stays(*owner, *index));
        self.apertures.deregistered = still;
        for (owner, index) in over {
            if let Some(node) = self.nodes.get_mut(&owner) {
                node.inbox.push_back(Completion::RegionReleased { index });
                self.stirred.insert(owner.engine);
            }
        }
        self.apertures.open.retain(|s| s.aperture.is_open() || s.aperture.stays() > 0);
    }
}

impl Apertures {
    fn has_stays(&self, owner: Port, index: u32) -> bool {
        let of_region = |s: &&OpenAperture| s.owner == owner && s.index == index;
        self.open.iter().filter(of_region).any(|s| s.aperture.stays() > 0)
    }
}
