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
    domain::{Aperture, DomainError, Held},
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
    Device(i32, Option<Arc<DeviceMapping>>),
}

/// A peer's GPU allocation, mapped here.
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
    /// Those that devices store to by themselves.
    apertures: Vec<(u32, Arc<Aperture>)>,
    /// Revoked by the owner, still used by a copy under way, or by a device.
    leaving: Vec<(Arc<Import>, Vec<Arc<Aperture>>)>,
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
            None => Arc::new(DeviceMapping::new(device, handle).map_err(|e| {
                DomainError::Unavailable(format!(
                    "its GPU memory can't be mapped here: {e}; leave cuda_ipc out of the \
                     transports, and shm stages through host memory"
                ))
            })?),
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

    /// Where a GPU stores to a region that is known here, or the processors; `left` is called when one has ended.
    pub fn aperture(
        &mut self,
        key: RegionKey,
        by: Option<i32>,
        left: impl Fn() + Send + Sync + 'static,
    ) -> Result<Arc<Aperture>, String> {
        let import = self.get(key).cloned().ok_or("its owner has not shown it yet, or no more")?;
        let (base, held): (usize, Held) = match (&import.reach, by) {
            (Reach::Mapped(_), None) => (import.base, Arc::clone(&import) as Held),
            (Reach::Device(owner, _), Some(device)) if *owner == device => {
                (import.base, Arc::clone(&import) as Held)
            }
            (Reach::Device(_, Some(mapping)), Some(device)) => {
                // Another GPU reaches it by a mapping of its own.
                let own = DeviceMapping::new(device, mapping.handle).map_err(|e| e.to_string())?;
                let offset = import.base - mapping.base as usize;
                (own.base as usize + offset, Arc::new((own, Arc::clone(&import))) as Held)
            }
            (Reach::Device(_, None), Some(device)) => {
                return Err(format!("it is another GPU's of this process, and not cuda:{device}'s"))
            }
            (Reach::Device(..), None) => return Err("processors don't reach GPU memory".into()),
            (Reach::Mapped(_), Some(device)) => {
                return Err(format!("it is host memory, which cuda:{device} does not reach"))
            }
            (Reach::Process(_), _) => {
                let why = "it is memory that its process can't share; allocate it with alloc()";
                return Err(why.into());
            }
        };
        let aperture = Aperture::new(base, import.len, held, left);
        self.apertures.push((key.index, Arc::clone(&aperture)));
        Ok(aperture)
    }

    /// No device begins to store any more.
    pub fn shut(&mut self, cause: &str) {
        self.apertures.iter().for_each(|(_, aperture)| aperture.shut(cause));
    }

    /// Whether a device may be storing.
    pub fn is_entered(&self) -> bool {
        self.entered().next().is_some()
    }

    /// Where one may be.
    pub fn entered(&self) -> impl Iterator<Item = &Arc<Aperture>> {
        let leaving = self.leaving.iter().flat_map(|(_, apertures)| apertures);
        let known = self.apertures.iter().map(|(_, aperture)| aperture);
        known.chain(leaving).filter(|aperture| aperture.stays() > 0)
    }

    /// Forgets a region; true if nothing uses it any more, else `left` will say so later (MR-1).
    pub fn revoke(&mut self, index: u32) -> bool {
        self.last = None;
        let of_region = self.apertures.extract_if(.., |(of, _)| *of == index);
        let apertures: Vec<Arc<Aperture>> = of_region.map(|(_, aperture)| aperture).collect();
        apertures.iter().for_each(|aperture| aperture.shut("it has taken its memory back"));
        let Some(import) = self.regions.remove(&index) else { return true };
        self.mappings.retain(|_, m| m.strong_count() > 0);
        self.device_mappings.retain(|_, m| m.strong_count() > 0);
        if Arc::strong_count(&import) == 1 {
            return true;
        }
        self.leaving.push((import, apertures));
        false
    }

    /// Revoked regions whose last copy has ended since.
    pub fn left(&mut self) -> Vec<u32> {
        let mut left = Vec::new();
        self.leaving.retain(|(import, _)| match Arc::strong_count(import) {
            1 => {
                left.push(import.key.index);
                false
            }
            _ => true,
        });
        left
    }

    /// Whether there is something to look after before long: a device says when it has ended.
    pub fn is_leaving(&self) -> bool {
        let entered = |apertures: &[Arc<Aperture>]| apertures.iter().any(|a| a.stays() > 0);
        self.leaving.iter().any(|(_, apertures)| !entered(apertures))
    }
}
