//! Regions: registration for remote access, and release once nothing can touch them (MR-1).
//!
//! If the NIC places bytes, all access ends with the registration. Peers that query accesses first
//! (`queries_first`) are still notified, because a refusal by the NIC breaks their connection.
//! Providers that move bytes by software check a key when a transfer begins, and may go on after
//! the registration has ended. There a fence asks each peer to report when none of its earlier
//! operations is under way. A lost peer can't answer: memory registered before the loss is kept
//! until the same engine is back and answers, or until the endpoint is closed.

use std::{collections::HashMap, sync::Arc};

use smallvec::{smallvec, SmallVec};

use super::{
    gpu,
    info::Offer,
    ops::NO_REGION,
    raw::{Mr, Nic},
    LibfabricDomain, LinkEntry,
};
use crate::{
    api::{EngineId, RailKey, RegionKey},
    domain::{Completion, DomainError, LinkId, NicKeys, RegionRelease},
    memory::{device::Driver, RegionMemory},
};
use fabric_sys::libfabric::mr_mode;

struct Region {
    // Dropped before the memory.
    mr: Option<Mr>,
    /// Keeps the memory allocated.
    memory: Arc<RegionMemory>,
    /// The GPU to flush before writes to the region count.
    flush_gpu: Option<i32>,
    /// Local chunks under way that use its bytes.
    uses: u32,
    /// Number of lost peers when it was registered.
    since: u64,
    retiring: bool,
    /// Fences that are not answered yet: link, and fence number.
    pending_fences: Vec<(LinkId, u32)>,
    /// Whether fences were sent, or are not needed.
    fenced: bool,
}

pub(super) struct Regions {
    all: Vec<Option<Region>>,
    /// Whether the NIC places bytes.
    pub by_nic: bool,
    /// Whether a registration ends only after all peers stopped using it, because its refusals
    /// would break connections.
    ends_late: bool,
    /// Number of lost peers, and for each with transfers that may be under way, the number of its
    /// loss.
    losses: u64,
    lost: HashMap<EngineId, u64>,
    retiring: usize,
    /// GPUs that must be flushed. They stay listed after deregistration, because earlier writes may
    /// be reported later.
    gpus: SmallVec<[i32; 1]>,
    /// Whether GPU memory was offered that the provider does not support.
    pub skips_gpu_memory: bool,
}

/// The key to request where the provider lets the application choose: as random as its length
/// allows.
pub(super) fn requested_key(offer: &Offer) -> u64 {
    if offer.mr_mode & mr_mode::PROV_KEY != 0 {
        return 0;
    }
    let bits = 8 * offer.key_bytes.clamp(1, 8) as u32;
    super::random() >> (64 - bits)
}

impl Regions {
    pub fn new(by_nic: bool, ends_late: bool) -> Self {
        Self {
            all: Vec::new(),
            by_nic,
            ends_late,
            losses: 0,
            lost: HashMap::new(),
            retiring: 0,
            gpus: SmallVec::new(),
            skips_gpu_memory: false,
        }
    }

    fn get(&mut self, index: u32) -> Option<&mut Region> {
        self.all.get_mut(index as usize)?.as_mut()
    }

    /// The descriptor for local operations on a region; `None` once it is deregistered.
    pub fn desc(&mut self, index: u32) -> Option<*mut std::ffi::c_void> {
        let region = self.get(index).filter(|r| !r.retiring)?;
        region.mr.as_ref().map(Mr::desc)
    }

    #[inline]
    pub fn add_use(&mut self, index: u32) {
        if let Some(r) = self.get(index) {
            r.uses += 1;
        }
    }

    /// Checks a peer's access; the error says why the NIC refused it.
    pub fn check_access(
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

    /// A peer is lost, and its operations may still be under way.
    pub fn on_peer_lost(&mut self, peer: EngineId) {
        if !self.by_nic {
            self.losses += 1;
            self.lost.insert(peer, self.losses);
        }
    }

    /// A peer has reported that none of its operations from before loss `losses` is under way.
    pub fn on_peer_quiesced(&mut self, peer: EngineId, losses: u64) {
        if self.lost.get(&peer).is_some_and(|loss| *loss <= losses) {
            self.lost.remove(&peer);
        }
    }

    /// Whether a lost peer may still write to memory that was registered before its loss.
    fn may_be_written_by_lost_peer(&self, since: u64) -> bool {
        self.lost.values().any(|loss| *loss > since)
    }

    #[inline]
    pub fn has_gpus(&self) -> bool {
        !self.gpus.is_empty()
    }

    /// Whether a region lies on a GPU that must be flushed.
    pub fn is_flushed(&self, index: u32) -> bool {
        let region = self.all.get(index as usize).and_then(Option::as_ref);
        region.is_some_and(|r| r.flush_gpu.is_some())
    }

    /// Waits until the GPUs see what NICs have written to them.
    pub fn flush_gpus(&self) -> Result<(), DomainError> {
        let Some(driver) = Driver::in_use() else { return Ok(()) };
        self.gpus.iter().try_for_each(|gpu| driver.flush_rdma_writes(*gpu))
    }

    /// Ends the registrations; the memory stays.
    pub fn unregister(&mut self) {
        self.all.iter_mut().flatten().for_each(|r| r.mr = None);
    }

    /// Drops all regions after the endpoint is closed; returns those that were retiring.
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
            // The provider would take the address for host memory. Without a key for this NIC,
            // peers use other transports.
            self.regions.skips_gpu_memory = true;
            return Ok(NicKeys::new());
        }
        let (mr, flush) = register(nic, &self.offer, region)?;
        let flush_gpu = region.location.cuda().filter(|_| flush).map(|range| range.device);
        let index = region.key.index as usize;
        let base = if self.virtual_addresses() { region.base as u64 } else { 0 };
        // A NIC's key opens the region only together with the region's own key.
        let key = RailKey { rail: 0, offset: 0, base, key: mr.key ^ region.key.rkey };
        let all = &mut self.regions.all;
        if all.len() <= index {
            all.resize_with(index + 1, || None);
        }
        all[index] = Some(Region {
            memory: Arc::clone(region),
            mr: Some(mr),
            flush_gpu,
            uses: 0,
            since: self.regions.losses,
            retiring: false,
            pending_fences: Vec::new(),
            fenced: self.regions.by_nic && !self.regions.ends_late,
        });
        if let Some(gpu) = flush_gpu.filter(|gpu| !self.regions.gpus.contains(gpu)) {
            self.regions.gpus.push(gpu);
        }
        Ok(smallvec![key])
    }

    pub(super) fn deregister_region(&mut self, index: u32) -> RegionRelease {
        let Some(region) = self.regions.get(index).filter(|r| !r.retiring) else {
            return RegionRelease::Now;
        };
        region.retiring = true;
        self.regions.retiring += 1;
        match self.retire(index) {
            true => RegionRelease::Now,
            false => RegionRelease::Later,
        }
    }

    /// The reason why a retired region is not released.
    pub(super) fn region_waits_for(&self, index: u32) -> Option<String> {
        let region = self.regions.all.get(index as usize)?.as_ref().filter(|r| r.retiring)?;
        if region.uses > 0 {
            return Some(format!("{} local chunks of writes or reads use it", region.uses));
        }
        let label = |link: &LinkId| match self.links.get(Self::slot(*link)) {
            Some(LinkEntry::Up(l)) if l.id == *link => l.peer.address.label(),
            _ => "a closed link".into(),
        };
        if !region.pending_fences.is_empty() {
            let mut peers: Vec<String> =
                region.pending_fences.iter().map(|(l, _)| label(l)).collect();
            peers.dedup();
            let peers = peers.join(", ");
            return Some(format!("waiting for {peers} to report that no operation is under way"));
        }
        self.regions.may_be_written_by_lost_peer(region.since).then(|| {
            let n = self.regions.lost.len();
            format!("{n} peers were lost while it was registered, and their writes may still land")
        })
    }

    /// A local chunk that used a region is complete.
    pub(super) fn on_chunk_done(&mut self, index: u32) {
        if index == NO_REGION {
            return;
        }
        let Some(region) = self.regions.get(index) else { return };
        region.uses -= 1;
        if region.retiring && region.uses == 0 {
            self.report_quiet(index);
        }
    }

    /// A link has answered a fence, or has ended.
    pub(super) fn on_fence_answered(&mut self, link: LinkId, number: u32) {
        if self.regions.retiring == 0 {
            return;
        }
        let mut ready = Vec::new();
        for (i, region) in self.regions.all.iter_mut().enumerate() {
            let Some(region) = region.as_mut().filter(|r| !r.pending_fences.is_empty()) else {
                continue;
            };
            region.pending_fences.retain(|(l, n)| *l != link || *n > number);
            if region.pending_fences.is_empty() {
                ready.push(i as u32);
            }
        }
        ready.into_iter().for_each(|index| self.report_quiet(index));
    }

    /// A lost peer is back and has answered: releases regions that waited only for it.
    pub(super) fn release_quiesced(&mut self) {
        if self.regions.retiring == 0 {
            return;
        }
        let waits = |r: &Region| r.retiring && r.fenced && r.pending_fences.is_empty();
        let all = self.regions.all.iter().enumerate();
        let ready: Vec<u32> =
            all.filter(|(_, r)| r.as_ref().is_some_and(waits)).map(|(i, _)| i as u32).collect();
        ready.into_iter().for_each(|index| self.report_quiet(index));
    }

    fn report_quiet(&mut self, index: u32) {
        if self.retire(index) {
            self.completions.push(Completion::RegionReleased { index });
        }
    }

    /// Releases a retiring region as far as possible; true if nothing can touch it any more.
    fn retire(&mut self, index: u32) -> bool {
        let ends_late = self.regions.ends_late;
        let Some(region) = self.regions.get(index).filter(|r| r.uses == 0) else { return false };
        if !ends_late {
            region.mr = None;
        }
        if !region.fenced {
            region.fenced = true;
            let mut pending_fences = Vec::new();
            for id in self.link_ids() {
                pending_fences.extend(self.request_fence(id).map(|number| (id, number)));
            }
            if let Some(region) = self.regions.get(index) {
                region.pending_fences = pending_fences;
            }
        }
        let Some(region) = self.regions.get(index) else { return true };
        if !region.pending_fences.is_empty() {
            return false;
        }
        region.mr = None;
        let since = region.since;
        if self.regions.may_be_written_by_lost_peer(since) {
            tracing::warn!(
                region = index,
                provider = %self.offer.provider,
                "a peer was lost while a region was registered, and this provider can't end the \
                peer's transfers; the region's memory is kept until that peer is back or this \
                engine closes"
            );
            return false;
        }
        self.regions.all[index as usize] = None;
        self.regions.retiring -= 1;
        true
    }
}

impl LibfabricDomain {
    /// Requests a fence from a link's peer; returns its number. The fence is sent at once: no
    /// thread may be polling when a region is dropped, and until the fence arrives the peer relies
    /// on earlier access answers (MR-2).
    fn request_fence(&mut self, id: LinkId) -> Option<u32> {
        let fences = &mut self.link(id)?.fences;
        fences.requested = fences.sent.wrapping_add(1);
        let number = fences.requested;
        self.send_fence(id);
        self.send_frames(id);
        // If sending showed that the link is down, there will be no answer.
        self.link(id).map(|_| number)
    }

    /// Sends the requested fence, unless one is under way.
    pub(super) fn send_fence(&mut self, id: LinkId) {
        let losses = self.regions.losses;
        let Some(link) = self.link(id) else { return };
        let fences = &mut link.fences;
        if fences.requested != fences.sent && fences.sent == fences.answered {
            fences.sent = fences.requested;
            fences.losses = losses;
            link.channel.fence(fences.sent);
        }
    }

    /// Fences a peer that was lost before and is back.
    pub(super) fn fence_returning_peer(&mut self, id: LinkId) {
        let Some(peer) = self.link(id).map(|l| l.peer.id()) else { return };
        if self.regions.retiring == 0 || !self.regions.lost.contains_key(&peer) {
            return;
        }
        let Some(number) = self.request_fence(id) else { return };
        for region in self.regions.all.iter_mut().flatten() {
            if region.retiring && region.fenced {
                region.pending_fences.push((id, number));
            }
        }
    }
}

/// Registers a region; also returns whether its GPU must be flushed.
fn register(
    nic: &Nic,
    offer: &Offer,
    region: &Arc<RegionMemory>,
) -> Result<(Mr, bool), DomainError> {
    let mut result = Err(super::closed());
    // A key that this side chose may be in use.
    for _ in 0..3 {
        // SAFETY: `Region` keeps the memory by reference count until its registration is dropped
        // and no chunk uses it.
        result = unsafe {
            match region.location.cuda() {
                Some(range) => gpu::register(nic, region, range, &|| requested_key(offer)),
                None => {
                    let mr = nic.register(region.base, region.len, requested_key(offer));
                    mr.map(|mr| (mr, false))
                }
            }
        };
        if result.is_ok() || offer.mr_mode & mr_mode::PROV_KEY != 0 {
            break;
        }
    }
    // For GPU memory the error names the remedy itself.
    let remedy = match region.location.cuda() {
        None => ": check the locked-memory limit (ulimit -l)",
        Some(_) => "",
    };
    result.map_err(|e| {
        let nic = &offer.domain;
        DomainError::Unavailable(format!("{e}; {nic} can't register this memory{remedy}"))
    })
}
