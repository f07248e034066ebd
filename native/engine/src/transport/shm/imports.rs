//! Peers' regions as this process reaches them.

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
    domain::DomainError,
    memory::{self, device::Driver},
};

/// Page tables are filled in steps of this many bytes, just before the first large copy there.
const STEP: usize = 2 << 20;

/// A peer's allocation, mapped here.
#[derive(Debug)]
pub(super) struct Mapping {
    map: Map,
    populated: Box<[AtomicBool]>,
}

impl Mapping {
    fn new(fd: OwnedFd, len: u64) -> Result<Self, DomainError> {
        let len = usize::try_from(len)
            .map_err(|_| DomainError::Refused("its memory is too large to be mapped".into()))?;
        let map = Map::import(fd.as_fd(), len)?;
        let populated = (0..len.div_ceil(STEP)).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { map, populated })
    }

    /// Fills the page tables for a range: one call instead of a fault for every page.
    pub fn populate(&self, addr: usize, len: usize) {
        let from = (addr - self.map.base()) / STEP;
        let to = (addr - self.map.base() + len).div_ceil(STEP);
        for step in from..to {
            if self.populated[step].load(Relaxed) || self.populated[step].swap(true, Relaxed) {
                continue;
            }
            let at = step * STEP;
            let n = STEP.min(self.map.len() - at);
            // If it fails, pages are filled by faults: slower, nothing else.
            let _ = memory::populate(self.map.base() + at, n);
        }
    }
}

/// How the bytes of a region are reached.
#[derive(Debug)]
pub(super) enum Reach {
    Mapped(Arc<Mapping>),
    /// By the kernel, in this process.
    Process(i32),
    /// By the copy engine of this device.
    Device(i32, #[allow(dead_code)] Option<Arc<DeviceMapping>>),
}

/// A peer's GPU allocation, mapped here.
#[derive(Debug)]
pub(super) struct DeviceMapping {
    driver: &'static Driver,
    device: i32,
    base: u64,
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        if let Err(error) = self.driver.forget(self.device, self.base) {
            tracing::warn!(%error, "a peer's GPU memory stays mapped");
        }
    }
}

/// A peer's region, resolved. Copy jobs hold it by reference count: while one does, it is in use.
#[derive(Debug)]
pub(super) struct Import {
    pub key: RegionKey,
    pub len: u64,
    /// Address of its first byte: here if mapped, in the peer's process otherwise.
    pub base: usize,
    pub reach: Reach,
}

/// All that one link has resolved.
#[derive(Debug, Default)]
pub(super) struct Imports {
    regions: HashMap<u32, Arc<Import>>,
    mappings: HashMap<u64, Weak<Mapping>>,
    device_mappings: HashMap<[u8; 64], Weak<DeviceMapping>>,
    /// The last one looked up: most writes go where the last one went.
    last: Option<Arc<Import>>,
    /// Revoked by the owner, still used by a copy under way.
    leaving: Vec<Arc<Import>>,
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
            return Err(DomainError::Handshake("a region outside its own memory".into()));
        }
        let known = self.mappings.get(&allocation).and_then(Weak::upgrade);
        let mapping = match known {
            Some(m) if m.map.len() as u64 == allocation_len => m,
            _ => Arc::new(Mapping::new(fd, allocation_len)?),
        };
        self.mappings.insert(allocation, Arc::downgrade(&mapping));
        let base = mapping.map.base() + offset as usize;
        self.add(Import { key, len, base, reach: Reach::Mapped(mapping) });
        Ok(())
    }

    pub fn add_foreign(&mut self, key: RegionKey, len: u64, base: usize, pid: i32) {
        self.add(Import { key, len, base, reach: Reach::Process(pid) });
    }

    /// `here` if the peer is this very process, whose own handles CUDA doesn't map.
    pub fn add_device(
        &mut self,
        key: RegionKey,
        len: u64,
        handle: &[u8],
        (uuid, offset, base): ([u8; 16], u64, u64),
        here: bool,
    ) -> Result<(), DomainError> {
        let driver = Driver::open()?;
        // From CUDA 10.1 on, devices that this process doesn't see can be mapped as well.
        let device = driver.ordinal_of(&uuid).unwrap_or(0);
        if here {
            let base = (base + offset) as usize;
            self.add(Import { key, len, base, reach: Reach::Device(device, None) });
            return Ok(());
        }
        let handle: [u8; 64] = handle
            .try_into()
            .map_err(|_| DomainError::Handshake("a GPU handle of a wrong length".into()))?;
        let known = self.device_mappings.get(&handle).and_then(Weak::upgrade);
        let mapping = match known {
            Some(mapping) => mapping,
            None => {
                let base = driver.import(device, handle).map_err(|e| {
                    DomainError::Unavailable(format!(
                        "its GPU memory can't be mapped here: {e}; leave cuda_ipc out of the \
                         transports, and shm stages through host memory"
                    ))
                })?;
                Arc::new(DeviceMapping { driver, device, base })
            }
        };
        let (_, size) = driver.allocation(device, mapping.base)?;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(DomainError::Handshake("a region outside its own allocation".into()));
        }
        self.device_mappings.insert(handle, Arc::downgrade(&mapping));
        let base = (mapping.base + offset) as usize;
        self.add(Import { key, len, base, reach: Reach::Device(device, Some(mapping)) });
        Ok(())
    }

    fn add(&mut self, import: Import) {
        self.regions.insert(import.key.index, Arc::new(import));
    }

    /// Forgets a region; true if nothing uses it any more, else `left` will say so later (MR-1).
    pub fn revoke(&mut self, index: u32) -> bool {
        self.last = None;
        let Some(import) = self.regions.remove(&index) else { return true };
        self.mappings.retain(|_, m| m.strong_count() > 0);
        self.device_mappings.retain(|_, m| m.strong_count() > 0);
        if Arc::strong_count(&import) == 1 {
            return true;
        }
        self.leaving.push(import);
        false
    }

    /// Revoked regions whose last copy has ended since.
    pub fn left(&mut self) -> Vec<u32> {
        let mut left = Vec::new();
        self.leaving.retain(|i| match Arc::strong_count(i) {
            1 => {
                left.push(i.key.index);
                false
            }
            _ => true,
        });
        left
    }

    pub fn is_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }
}
