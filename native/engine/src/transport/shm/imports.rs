//! Peers' regions as this process accesses them.

use std::{
    collections::HashMap,
    os::fd::{AsFd, OwnedFd},
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        Arc, Weak,
    },
};

use super::raw::Map;
use crate::{
    api::RegionKey,
    domain::{DomainError, KeepAlive, PeerMapping},
    memory::{self, device::Driver},
};

/// Bytes per step in which page tables are filled, just before the first large copy there.
const POPULATE_STEP: usize = 2 << 20;

/// A peer's allocation, mapped into this process.
#[derive(Debug)]
pub(super) struct Mapping {
    map: Map,
    populated: Box<[AtomicBool]>,
}

impl Mapping {
    fn new(fd: OwnedFd, len: u64) -> Result<Self, DomainError> {
        let len = usize::try_from(len)
            .map_err(|_| DomainError::Refused("the peer's memory is too large to map".into()))?;
        let map = Map::import(fd.as_fd(), len)?;
        let populated = (0..len.div_ceil(POPULATE_STEP)).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { map, populated })
    }

    /// Fills the page tables for a range: one call instead of a fault per page.
    pub fn populate(&self, addr: usize, len: usize) {
        let from = (addr - self.map.base()) / POPULATE_STEP;
        let to = (addr - self.map.base() + len).div_ceil(POPULATE_STEP);
        for step in from..to {
            if self.populated[step].load(Relaxed) || self.populated[step].swap(true, Relaxed) {
                continue;
            }
            let at = step * POPULATE_STEP;
            let n = POPULATE_STEP.min(self.map.len() - at);
            // If it fails, faults fill the pages: slower, but correct.
            let _ = memory::populate(self.map.base() + at, n);
        }
    }
}

/// Access to the bytes of a region.
#[derive(Debug)]
pub(super) enum RegionAccess {
    Mapped(Arc<Mapping>),
    /// By the kernel, in the process with this id.
    Process(i32),
    /// By the copy engine of this device.
    Device(i32, Option<Arc<DeviceMapping>>),
}

/// A peer's GPU allocation, mapped into this process.
#[derive(Debug)]
pub(super) struct DeviceMapping {
    driver: &'static Driver,
    device: i32,
    base: u64,
    handle: [u8; 64],
}

impl DeviceMapping {
    fn new(device: i32, handle: [u8; 64]) -> Result<Self, DomainError> {
        let driver = Driver::open()?;
        let base = driver.import(device, handle)?;
        Ok(Self { driver, device, base, handle })
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        if let Err(error) = self.driver.forget(self.device, self.base) {
            tracing::warn!(%error, "can't unmap a peer's GPU memory");
        }
    }
}

/// A resolved region of a peer. Copy jobs hold a reference while they use it.
#[derive(Debug)]
pub(super) struct Import {
    pub key: RegionKey,
    pub len: u64,
    /// Address of the first byte: in this process if mapped, else in the peer's.
    pub base: usize,
    pub reach: RegionAccess,
}

/// The resolved regions of one link.
#[derive(Debug, Default)]
pub(super) struct Imports {
    regions: HashMap<u32, Arc<Import>>,
    mappings: HashMap<u64, Weak<Mapping>>,
    device_mappings: HashMap<[u8; 64], Weak<DeviceMapping>>,
    /// The last region looked up: most writes go to the same region as the one before.
    last: Option<Arc<Import>>,
    /// Regions that devices store to by themselves.
    peer_mappings: Vec<(u32, Arc<PeerMapping>)>,
    /// Regions that the owner has revoked and that a copy or a device still uses.
    revoked: Vec<(Arc<Import>, Vec<Arc<PeerMapping>>)>,
}

impl Imports {
    #[inline]
    pub fn get(&mut self, key: RegionKey) -> Option<&Arc<Import>> {
        if self.last.as_ref().is_none_or(|i| i.key != key) {
            let found = self.regions.get(&key.index).filter(|i| i.key == key)?;
            self.last = Some(Arc::clone(found));
        }
        self.last.as_ref()
    }

    pub fn add_mapped(
        &mut self,
        key: RegionKey,
        len: u64,
        (allocation, allocation_len, offset): (u64, u64, u64),
        fd: OwnedFd,
    ) -> Result<(), DomainError> {
        if offset.checked_add(len).is_none_or(|end| end > allocation_len) {
            return Err(DomainError::Handshake("a region lies outside its memory".into()));
        }
        let known = self.mappings.get(&allocation).and_then(Weak::upgrade);
        let mapping = match known {
            Some(m) if m.map.len() as u64 == allocation_len => m,
            _ => Arc::new(Mapping::new(fd, allocation_len)?),
        };
        self.mappings.insert(allocation, Arc::downgrade(&mapping));
        let base = mapping.map.base() + offset as usize;
        self.add(Import { key, len, base, reach: RegionAccess::Mapped(mapping) });
        Ok(())
    }

    pub fn add_foreign(&mut self, key: RegionKey, len: u64, base: usize, pid: i32) {
        self.add(Import { key, len, base, reach: RegionAccess::Process(pid) });
    }

    /// `same_process`: CUDA does not map handles that the same process exported.
    pub fn add_device(
        &mut self,
        key: RegionKey,
        len: u64,
        handle: &[u8],
        (uuid, offset, base): ([u8; 16], u64, u64),
        same_process: bool,
    ) -> Result<(), DomainError> {
        let driver = Driver::open()?;
        // From CUDA 10.1 on, devices that this process does not see can be mapped too.
        let device = driver.ordinal_of(&uuid).unwrap_or_else(|| driver.device_in_use());
        if same_process {
            let base = (base + offset) as usize;
            self.add(Import { key, len, base, reach: RegionAccess::Device(device, None) });
            return Ok(());
        }
        let handle: [u8; 64] = handle
            .try_into()
            .map_err(|_| DomainError::Handshake("a GPU handle has the wrong length".into()))?;
        let known = self.device_mappings.get(&handle).and_then(Weak::upgrade);
        let mapping = match known {
            Some(mapping) => mapping,
            None => Arc::new(DeviceMapping::new(device, handle).map_err(|e| {
                DomainError::Unavailable(format!(
                    "the peer's GPU memory can't be mapped: {e}; remove cuda_ipc from the \
                    transports, so that shm stages through host memory"
                ))
            })?),
        };
        let (_, size) = driver.allocation(device, mapping.base)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(DomainError::Handshake("a region lies outside its allocation".into()));
        }
        self.device_mappings.insert(handle, Arc::downgrade(&mapping));
        let base = (mapping.base + offset) as usize;
        self.add(Import { key, len, base, reach: RegionAccess::Device(device, Some(mapping)) });
        Ok(())
    }

    fn add(&mut self, import: Import) {
        self.regions.insert(import.key.index, Arc::new(import));
    }

    /// A mapping through which a GPU, or the CPUs, store to a resolved region. `left` is called
    /// when a store ends.
    pub fn map_peer_region(
        &mut self,
        key: RegionKey,
        by: Option<i32>,
        left: impl Fn() + Send + Sync + 'static,
    ) -> Result<Arc<PeerMapping>, String> {
        let import = self
            .get(key)
            .cloned()
            .ok_or("the region is not resolved, or its owner has revoked it")?;
        let (base, to_wake): (usize, KeepAlive) = match (&import.reach, by) {
            (RegionAccess::Mapped(_), None) => (import.base, Arc::clone(&import) as KeepAlive),
            (RegionAccess::Device(owner, _), Some(device)) if *owner == device => {
                (import.base, Arc::clone(&import) as KeepAlive)
            }
            (RegionAccess::Device(_, Some(mapping)), Some(device)) => {
                // Another GPU needs a mapping of its own.
                let own = DeviceMapping::new(device, mapping.handle).map_err(|e| e.to_string())?;
                let offset = import.base - mapping.base as usize;
                (own.base as usize + offset, Arc::new((own, Arc::clone(&import))) as KeepAlive)
            }
            (RegionAccess::Device(_, None), Some(device)) => {
                return Err(format!(
                    "the memory belongs to another GPU of this process than cuda:{device}"
                ))
            }
            (RegionAccess::Device(..), None) => return Err("CPUs can't store to GPU memory".into()),
            (RegionAccess::Mapped(_), Some(device)) => {
                return Err(format!("cuda:{device} can't store to host memory"))
            }
            (RegionAccess::Process(_), _) => {
                let why = "the owner's process can't share the memory; allocate it with alloc()";
                return Err(why.into());
            }
        };
        let peer_mapping = PeerMapping::new(base, import.len, to_wake, left);
        self.peer_mappings.push((key.index, Arc::clone(&peer_mapping)));
        Ok(peer_mapping)
    }

    /// Lets no device begin to store any more.
    pub fn close_peer_mappings(&mut self, cause: &str) {
        self.peer_mappings.iter().for_each(|(_, peer_mapping)| peer_mapping.close(cause));
    }

    /// Whether a device may be storing.
    pub fn has_stores(&self) -> bool {
        self.peer_mappings_in_use().next().is_some()
    }

    /// PeerMappings through which a device may be storing.
    pub fn peer_mappings_in_use(&self) -> impl Iterator<Item = &Arc<PeerMapping>> {
        let revoked = self.revoked.iter().flat_map(|(_, peer_mappings)| peer_mappings);
        let known = self.peer_mappings.iter().map(|(_, peer_mapping)| peer_mapping);
        known.chain(revoked).filter(|peer_mapping| peer_mapping.active_stores() > 0)
    }

    /// Removes a region; true if it is not in use, else `left` returns it later (MR-1).
    pub fn revoke(&mut self, index: u32) -> bool {
        self.last = None;
        let of_region = self.peer_mappings.extract_if(.., |(of, _)| *of == index);
        let peer_mappings: Vec<Arc<PeerMapping>> =
            of_region.map(|(_, peer_mapping)| peer_mapping).collect();
        peer_mappings
            .iter()
            .for_each(|peer_mapping| peer_mapping.close("its owner has revoked it"));
        let Some(import) = self.regions.remove(&index) else { return true };
        self.mappings.retain(|_, m| m.strong_count() > 0);
        self.device_mappings.retain(|_, m| m.strong_count() > 0);
        if Arc::strong_count(&import) == 1 {
            return true;
        }
        self.revoked.push((import, peer_mappings));
        false
    }

    /// Revoked regions whose last use has ended since the last call.
    pub fn take_released(&mut self) -> Vec<u32> {
        let mut left = Vec::new();
        self.revoked.retain(|(import, _)| match Arc::strong_count(import) {
            1 => {
                left.push(import.key.index);
                false
            }
            _ => true,
        });
        left
    }

    /// Whether a revoked region needs polling. A device's end is signalled.
    pub fn has_releasable(&self) -> bool {
        let peer_mappings_in_use = |peer_mappings: &[Arc<PeerMapping>]| {
            peer_mappings.iter().any(|a| a.active_stores() > 0)
        };
        self.revoked.iter().any(|(_, peer_mappings)| !peer_mappings_in_use(peer_mappings))
    }
}
