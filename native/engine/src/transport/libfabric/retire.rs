//! Regions: registered for remote access, and let go of only when nothing can touch them (MR-1).
//!
//! Where the NIC itself places bytes, the end of a registration is the end of all access; peers that
//! ask first are still told, for what the NIC refuses breaks their connection. Providers that move
//! bytes by software check a key when a transfer begins and may go on after the
//! registration has ended. There, each peer is asked to tell when nothing that it began before is
//! under way any more (a fence). A peer that is lost can't tell: what was registered before is kept
//! until the same engine is back and tells, or the endpoint is closed.

use std::{collections::HashMap, sync::Arc};

use smallvec::{smallvec, SmallVec};

use super::{
    gpu,
    info::Offer,
    ops::NO_REGION,
    raw::{Mr, Nic},
    LibfabricDomain, Slot,
};
use crate::{
    api::{EngineId, RailKey, RegionKey},
    domain::{Completion, DomainError, LinkId, NicKeys, Quiet},
    memory::{device::Driver, RegionMemory},
};
use fabric_sys::libfabric::mr_mode;

struct Region {
    // Ends before the memory may go.
    mr: Option<Mr>,
    /// Keeps the memory.
    memory: Arc<RegionMemory>,
    /// The GPU to be flushed before what was written to it counts.
    flushed: Option<i32>,
    /// Pieces of ours in the library's hands that use its bytes.
    uses: u32,
    /// Losses of peers before it was registered.
    since: u64,
    retiring: bool,
    /// Fences that are not answered yet: the link, and the fence's number.
    awaits: Vec<(LinkId, u32)>,
    /// Fences were asked for, or are not needed.
    fenced: bool,
}

pub(super) struct Regions {
    all: Vec<Option<Region>>,
    /// Whether NICs place bytes by themselves.
    pub by_nic: bool,
    /// A registration ends only when no peer uses it any more, for its refusal would not be heard.
    late: bool,
    /// Peers lost so far, and those whose transfers may still be under way: which loss it was.
    losses: u64,
    lost: HashMap<EngineId, u64>,
    retiring: usize,
    /// GPUs that must be flushed; also when their memory is no longer registered, for what was written
    /// before may be told of after.
    gpus: SmallVec<[i32; 1]>,
    /// Memory of a GPU was to be registered, which the provider doesn't take.
    pub leaves_gpus_out: bool,
}

/// The key to ask for where the provider leaves that to us: unguessable, as far as it is long.
pub(super) fn wished_key(offer: &Offer) -> u64 {
    if offer.mr_mode & mr_mode::PROV_KEY != 0 {
        return 0;
    }
    let bits = 8 * offer.key_bytes.clamp(1, 8) as u32;
    super::random() >> (64 - bits)
}

impl Regions {
    pub fn new(by_nic: bool, late: bool) -> Self {
        Self {
            all: Vec::new(),
            by_nic,
            late,
            losses: 0,
            lost: HashMap::new(),
            retiring: 0,
            gpus: SmallVec::new(),
            leaves_gpus_out: false,
        }
    }

    fn get(&mut self, index: u32) -> Option<&mut Region> {
        self.all.get_mut(index as usize)?.as_mut()
    }

    /// What local operations on a region must show; none once it is deregistered.
    pub fn desc(&mut self, index: u32) -> Option<*mut std::ffi::c_void> {
        let region = self.get(index).filter(|r| !r.retiring)?;
        region.mr.as_ref().map(Mr::desc)
    }

    #[inline]
    pub fn used(&mut self, index: u32) {
        if let Some(r) = self.get(index) {
            r.uses += 1;
        }
    }

    /// The region behind a key that a peer has shown, or why it was refused.
    pub fn verdict(
        &self,
        peer: EngineId,
        key: RegionKey,
        (offset, len): (u64, u64),
    ) -> Result<(), DomainError> {
        let region = self.all.get(key.index as usize).and_then(Option::as_ref);
        match region.filter(|r| !r.retiring && r.memory.key.rkey == key.rkey) {
            None => Err(DomainError::Stale(format!(
                "region {} is not registered under this key any more",
                key.index
            ))),
            Some(r) if offset.checked_add(len).is_none_or(|end| end > r.memory.len) => {
                Err(DomainError::Refused(format!(
                    "bytes {offset}+{len} lie outside region {} of {} bytes",
                    key.index, r.memory.len
                )))
            }
            Some(r) => r.memory.check_peer(Some(peer)),
        }
    }

    /// A peer is gone, and what it began may still be on its way into memory.
    pub fn lost_peer(&mut self, peer: EngineId) {
        if !self.by_nic {
            self.losses += 1;
            self.lost.insert(peer, self.losses);
        }
    }

    /// A peer has told that nothing from before the loss `losses` is under way.
    pub fn vouched_for(&mut self, peer: EngineId, losses: u64) {
        if self.lost.get(&peer).is_some_and(|loss| *loss <= losses) {
            self.lost.remove(&peer);
        }
    }

    /// Whether somebody who is lost may still write to what was registered after the loss `since`.
    fn is_haunted(&self, since: u64) -> bool {
        self.lost.values().any(|loss| *loss > since)
    }

    #[inline]
    pub fn has_gpus(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// Whether it lies on a GPU that must be flushed.
    pub fn is_flushed(&self, index: u32) -> bool {
        let region = self.all.get(index as usize).and_then(Option::as_ref);
        region.is_some_and(|r| r.flushed.is_some())
    }

    /// Waits until what NICs have written to GPU memory is visible to the GPUs.
    pub fn flush_gpus(&self) -> Result<(), DomainError> {
        let Some(driver) = Driver::in_use() else { return Ok(()) };
        self.gpus.iter().try_for_each(|gpu| driver.flush_rdma_writes(*gpu))
    }

    /// Ends the registrations, and keeps the memory.
    pub fn unregister(&mut self) {
        self.all.iter_mut().flatten().for_each(|r| r.mr = None);
    }

    /// Ends all registrations; the endpoint is closed.
    pub fn clear(&mut self) -> Vec<u32> {
        self.retiring = 0;
        let all = std::mem::take(&mut self.all);
        let retiring = all.into_iter().flatten().filter(|r| r.retiring);
        retiring.map(|r| r.memory.key.index).collect()
    }
}

impl LibfabricDomain {
    pub(super) fn register_region(
        &mut self,
        region: &Arc<RegionMemory>,
    ) -> Result<NicKeys, DomainError> {
        let nic = self.nic.as_ref().ok_or_else(super::closed)?;
        if region.location.cuda().is_some() && !self.offer.hmem {
            // Such a provider would take its address for the host's. Without a key nobody reaches it
            // here, while other transports do.
            self.regions.leaves_gpus_out = true;
            return Ok(NicKeys::new());
        }
        let (mr, flush) = register(nic, &self.offer, region)?;
        let flushed = region.location.cuda().filter(|_| flush).map(|range| range.device);
        let index = region.key.index as usize;
        let base = if self.virtual_addresses() { region.base as u64 } else { 0 };
        // A NIC's key is of use only together with the region's own.
        let key = RailKey { rail: 0, offset: 0, base, key: mr.key ^ region.key.rkey };
        let all = &mut self.regions.all;
        if all.len() <= index {
            all.resize_with(index + 1, || None);
        }
        all[index] = Some(Region {
            memory: Arc::clone(region),
            mr: Some(mr),
            flushed,
            uses: 0,
            since: self.regions.losses,
            retiring: false,
            awaits: Vec::new(),
            fenced: self.regions.by_nic && !self.regions.late,
        });
        if let Some(gpu) = flushed.filter(|gpu| !self.regions.gpus.contains(gpu)) {
            self.regions.gpus.push(gpu);
        }
        Ok(smallvec![key])
    }

    pub(super) fn deregister_region(&mut self, index: u32) -> Quiet {
        let Some(region) = self.regions.get(index).filter(|r| !r.retiring) else {
            return Quiet::Now;
        };
        region.retiring = true;
        self.regions.retiring += 1;
        match self.retire(index) {
            true => Quiet::Now,
            false => Quiet::Later,
        }
    }

    /// What a retiring region waits for, in words.
    pub(super) fn region_waits_for(&self, index: u32) -> Option<String> {
        let region = self.regions.all.get(index as usize)?.as_ref().filter(|r| r.retiring)?;
        if region.uses > 0 {
            return Some(format!("{} pieces of writes or reads of ours use it", region.uses));
        }
        let label = |link: &LinkId| match self.links.get(Self::slot(*link)) {
            Some(Slot::Up(l)) if l.id == *link => l.peer.address.label(),
            _ => "a peer that is gone".into(),
        };
        if !region.awaits.is_empty() {
            let mut peers: Vec<String> = region.awaits.iter().map(|(l, _)| label(l)).collect();
            peers.dedup();
            let peers = peers.join(", ");
            return Some(format!("{peers} has not said that nothing it began is under way"));
        }
        self.regions.is_haunted(region.since).then(|| {
            let n = self.regions.lost.len();
            format!("{n} peers were lost while it was registered, whose writes may still land")
        })
    }

    /// A piece of ours that used a region's bytes is over.
    pub(super) fn unused(&mut self, index: u32) {
        if index == NO_REGION {
            return;
        }
        let Some(region) = self.regions.get(index) else { return };
        region.uses -= 1;
        if region.retiring && region.uses == 0 {
            self.report_quiet(index);
        }
    }

    /// A link has answered a fence, or is over.
    pub(super) fn fences_passed(&mut self, link: LinkId, number: u32) {
        if self.regions.retiring == 0 {
            return;
        }
        let mut ready = Vec::new();
        for (i, region) in self.regions.all.iter_mut().enumerate() {
            let Some(region) = region.as_mut().filter(|r| !r.awaits.is_empty()) else { continue };
            region.awaits.retain(|(l, n)| *l != link || *n > number);
            if region.awaits.is_empty() {
                ready.push(i as u32);
            }
        }
        ready.into_iter().for_each(|index| self.report_quiet(index));
    }

    /// Somebody who was lost has told: what was kept for that reason alone may go.
    pub(super) fn laid_to_rest(&mut self) {
        if self.regions.retiring == 0 {
            return;
        }
        let waits = |r: &Region| r.retiring && r.fenced && r.awaits.is_empty();
        let all = self.regions.all.iter().enumerate();
        let ready: Vec<u32> =
            all.filter(|(_, r)| r.as_ref().is_some_and(waits)).map(|(i, _)| i as u32).collect();
        ready.into_iter().for_each(|index| self.report_quiet(index));
    }

    fn report_quiet(&mut self, index: u32) {
        if self.retire(index) {
            self.news.push(Completion::RegionQuiet { index });
        }
    }

    /// Takes a retiring region as far as it goes; true if nothing can touch it any more.
    fn retire(&mut self, index: u32) -> bool {
        let late = self.regions.late;
        let Some(region) = self.regions.get(index).filter(|r| r.uses == 0) else { return false };
        if !late {
            region.mr = None;
        }
        if !region.fenced {
            region.fenced = true;
            let mut awaits = Vec::new();
            for id in self.link_ids() {
                awaits.extend(self.want_fence(id).map(|number| (id, number)));
            }
            if let Some(region) = self.regions.get(index) {
                region.awaits = awaits;
            }
        }
        let Some(region) = self.regions.get(index) else { return true };
        if !region.awaits.is_empty() {
            return false;
        }
        region.mr = None;
        let since = region.since;
        if self.regions.is_haunted(since) {
            tracing::warn!(
                region = index,
                provider = %self.offer.provider,
                "a peer was lost while this was registered, and this provider can't show that none \
                 of its bytes land any more: the memory is kept until that peer is back, or this \
                 engine is closed"
            );
            return false;
        }
        self.regions.all[index as usize] = None;
        self.regions.retiring -= 1;
        true
    }
}

impl LibfabricDomain {
    /// Has a link's peer asked to tell when nothing from before now is under way; the fence to wait
    /// for. It goes out at once: nobody may be polling when a region is dropped, and until the peer
    /// has heard it, it goes on with what it was told before (MR-2).
    fn want_fence(&mut self, id: LinkId) -> Option<u32> {
        let fences = &mut self.link(id)?.fences;
        fences.wanted = fences.sent.wrapping_add(1);
        let number = fences.wanted;
        self.send_fence(id);
        self.pump(id);
        // Sending may have shown that the link is down: then nobody will answer.
        self.link(id).map(|_| number)
    }

    /// Sends the fence that is wanted, unless one is on its way.
    pub(super) fn send_fence(&mut self, id: LinkId) {
        let losses = self.regions.losses;
        let Some(link) = self.link(id) else { return };
        let fences = &mut link.fences;
        if fences.wanted != fences.sent && fences.sent == fences.done {
            fences.sent = fences.wanted;
            fences.losses = losses;
            link.channel.fence(fences.sent);
        }
    }

    /// A peer that is back may vouch for what it began before it was lost.
    pub(super) fn fence_newcomer(&mut self, id: LinkId) {
        let Some(peer) = self.link(id).map(|l| l.peer.id()) else { return };
        if self.regions.retiring == 0 || !self.regions.lost.contains_key(&peer) {
            return;
        }
        let Some(number) = self.want_fence(id) else { return };
        for region in self.regions.all.iter_mut().flatten() {
            if region.retiring && region.fenced {
                region.awaits.push((id, number));
            }
        }
    }
}

/// Registers a region; also tells whether its GPU must be flushed.
fn register(
    nic: &Nic,
    offer: &Offer,
    region: &Arc<RegionMemory>,
) -> Result<(Mr, bool), DomainError> {
    let mut result = Err(super::closed());
    // A key that we chose may be taken.
    for _ in 0..3 {
        // SAFETY: `Region` keeps the memory by reference count until its registration is dropped,
        // and the library's pieces until they are over.
        result = unsafe {
            match region.location.cuda() {
                Some(range) => gpu::register(nic, region, range, &|| wished_key(offer)),
                None => {
                    let mr = nic.register(region.base, region.len, wished_key(offer));
                    mr.map(|mr| (mr, false))
                }
            }
        };
        if result.is_ok() || offer.mr_mode & mr_mode::PROV_KEY != 0 {
            break;
        }
    }
    // Of GPU memory the error has told the remedy.
    let remedy = match region.location.cuda() {
        None => ": check the locked-memory limit (ulimit -l)",
        Some(_) => "",
    };
    result.map_err(|e| {
        let nic = &offer.domain;
        DomainError::Unavailable(format!("{e}; {nic} can't register this memory{remedy}"))
    })
}
