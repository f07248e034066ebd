//! Registers memory, so that peers can reach it.

use std::{
    collections::{hash_map::Entry, HashMap},
    path::Path,
    sync::{atomic::Ordering::SeqCst, Arc, Weak},
};

use super::{
    grants::GrantScope,
    regions::{Region, RegionInner},
    Shared, TransferEngine,
};
use crate::{
    api::{RailKey, RegionKey},
    locks::Mutex,
    memory::{
        device::{self, Location, MemoryKind},
        file::{FileMemory, FileOptions},
        Allocation, Backing, Keep, RegionMemory,
    },
    EngineError, Result,
};

/// The registration of each segment, by first address and length, while a part of it is in use.
///
/// A part keeps its tensor, so the allocator can't free the segment while a part is registered.
/// Later the entry is dead, and another allocation at the same address is registered anew.
pub(super) type Segments = Mutex<HashMap<(usize, u64), Segment>>;

pub(super) struct Segment {
    region: Weak<RegionInner>,
    keeps: Weak<Mutex<Keeps>>,
}

/// The `keep` objects of the parts, by address and length.
type Keeps = HashMap<(usize, u64), Keep>;

impl Segment {
    /// The registration, if it is in use.
    fn region(&self) -> Option<Region> {
        let inner = self.region.upgrade().filter(|r| !r.closed.load(SeqCst))?;
        Some(Region::whole(inner))
    }
}

impl TransferEngine {
    /// Allocates memory that peers on this host can map: the fastest target and source for them.
    pub fn alloc(&self, len: u64) -> Result<Region> {
        let allocation = Arc::new(Allocation::new(len)?);
        let backing = Backing::Owned { allocation: Arc::clone(&allocation), offset: 0 };
        self.register_memory(allocation.base(), len.max(1), backing, None)
    }

    /// Registers `len` bytes at `addr`. `keep` keeps them alive; without it the caller must
    /// deregister before the memory is freed.
    ///
    /// Memory inside an allocation of this engine is recognised and stays mappable.
    ///
    /// # Safety
    /// The bytes must be readable and writable until the registration has ended; peers write to
    /// them at any time.
    pub unsafe fn register(&self, addr: usize, len: u64, keep: Keep) -> Result<Region> {
        if addr == 0 {
            return Err(EngineError::Invalid("address 0 can't be registered".into()));
        }
        if len == 0 {
            return Err(EngineError::Invalid("a region of zero bytes can't be registered".into()));
        }
        if (addr as u64).checked_add(len).is_none_or(|end| end > 1 << 56) {
            return Err(EngineError::Invalid(format!(
                "{len} bytes at {addr:#x} pass the end of the address space"
            )));
        }
        let backing = self.shared.backing_of(addr, len);
        self.register_memory(addr, len, backing, keep)
    }

    /// Registers a region's memory again under another key, which [`Region::revoke`] can revoke
    /// alone. The region may belong to another engine of this process. The memory lives as long as
    /// either registration.
    ///
    /// # Errors
    /// [`EngineError::Stale`] if the region was deregistered, [`EngineError::Invalid`] if it is one
    /// of a file.
    pub fn register_again(&self, region: &Region) -> Result<Region> {
        region.check_open()?;
        if region.location().file().is_some() {
            let what = "a file's region can't be registered again; register the file again";
            return Err(EngineError::Invalid(what.into()));
        }
        let memory = &region.inner.memory;
        let keep: Keep = Some(Box::new(Arc::clone(memory)));
        let backing = match &memory.backing {
            Backing::Owned { allocation, offset } => {
                let offset = offset + (region.addr() - memory.base) as u64;
                Backing::Owned { allocation: Arc::clone(allocation), offset }
            }
            Backing::Foreign => Backing::Foreign,
        };
        self.register_memory(region.addr(), region.len(), backing, keep)
    }

    /// As [`TransferEngine::register`], for the whole segment that the memory lies in. The segment
    /// is registered once, and its parts share the registration. `around` is the segment's first
    /// address and length; where CUDA knows the allocation, its range is used.
    ///
    /// The registration ends with the last part. Until then the memory of every part is kept, and a
    /// peer with one part's key can reach all of them.
    ///
    /// # Safety
    /// As for `register`, for the whole segment.
    pub unsafe fn register_segment(
        &self,
        addr: usize,
        len: u64,
        around: (usize, u64),
        keep: Keep,
    ) -> Result<Region> {
        self.shared.check_open()?;
        let around = match device::locate(addr, len)?.cuda() {
            Some(range) => (range.base as usize, range.len),
            None => around,
        };
        let offset = addr.checked_sub(around.0).map(|o| o as u64);
        let Some(offset) = offset.filter(|o| *o <= around.1 && len <= around.1 - o) else {
            return Err(EngineError::Invalid(format!(
                "{len} bytes at {addr:#x} don't lie in their segment of {} bytes at {:#x}",
                around.1, around.0
            )));
        };
        // Dropped after the locks, if a part that is registered again keeps its first object.
        let mut keep = keep;
        let mut segments = self.segments.lock();
        if let Some(known) = segments.get(&around) {
            if let (Some(region), Some(keeps)) = (known.region(), known.keeps.upgrade()) {
                if let Entry::Vacant(part) = keeps.lock().entry((addr, len)) {
                    part.insert(keep.take());
                }
                return region.slice(offset, len);
            }
        }
        segments.retain(|_, s| s.region.strong_count() > 0);
        let keeps = Arc::new(Mutex::new(Keeps::from([((addr, len), keep)])));
        let kept = Arc::downgrade(&keeps);
        // SAFETY: the caller's promise.
        let region = unsafe { self.register(around.0, around.1, Some(Box::new(keeps))) }?;
        let segment = Segment { region: Arc::downgrade(&region.inner), keeps: kept };
        segments.insert(around, segment);
        region.slice(offset, len)
    }

    fn register_memory(
        &self,
        base: usize,
        len: u64,
        backing: Backing,
        keep: Keep,
    ) -> Result<Region> {
        let location = match &backing {
            Backing::Owned { .. } => Location::Host,
            Backing::Foreign => device::locate(base, len)?,
        };
        self.register_at(location, (base, len), backing, keep)
    }

    /// Registers a file, or a part of one. The region has no address; requests read and write it by
    /// offset. To move bytes between the file and this engine's memory, send the requests to this
    /// engine's own address.
    ///
    /// # Errors
    /// See [`FileMemory::open`]; [`EngineError::Invalid`] if no transport of the engine takes
    /// files.
    pub fn register_file(&self, path: &Path, options: FileOptions) -> Result<Region> {
        self.shared.check_open()?;
        if !self.takes_files {
            return Err(EngineError::Invalid("a simulated engine has no files".into()));
        }
        let (file, len) = FileMemory::open(path, options)?;
        let location = Location::File(Arc::new(file));
        self.register_at(location, (options.offset as usize, len), Backing::Foreign, None)
    }

    fn register_at(
        &self,
        location: Location,
        (base, len): (usize, u64),
        backing: Backing,
        keep: Keep,
    ) -> Result<Region> {
        let memory_kind = MemoryKind::of(&location, &backing, self.stage_foreign);
        self.shared.register(RegionSpec {
            location,
            base,
            len,
            backing,
            keep,
            memory_kind,
            grant: None,
        })
    }
}

/// Memory to be registered.
pub(super) struct RegionSpec {
    pub location: Location,
    pub base: usize,
    pub len: u64,
    pub backing: Backing,
    pub keep: Keep,
    pub memory_kind: MemoryKind,
    /// The grant, if this is one.
    pub grant: Option<GrantScope>,
}

impl Shared {
    /// Registers memory with every domain, under a random key.
    pub(super) fn register(self: &Arc<Self>, spec: RegionSpec) -> Result<Region> {
        let driver = self.driver()?;
        let RegionSpec { location, base, len, backing, keep, memory_kind, grant } = spec;
        let mut rkey = [0; 8];
        getrandom::fill(&mut rkey).map_err(|e| EngineError::Resource {
            call: "getrandom",
            cause: e.to_string(),
            hint: "the system's random source must be readable".into(),
        })?;
        let in_file = location.file().is_some();
        let rkey = memory_kind.mark(u64::from_le_bytes(rkey));
        let index = self.take_region_index()?;
        let key = RegionKey { index: index.get(), rkey };
        let memory = RegionMemory::new(key, base, len, backing, keep).numbered(index).at(location);
        let (memory, family) = match grant {
            Some(grant) => {
                (memory.granted(grant.from, grant.only).until(grant.until), grant.family)
            }
            None => (memory, Arc::default()),
        };
        let memory = Arc::new(memory);
        let refused = |e| EngineError::Resource {
            call: "register",
            cause: format!("{len} bytes at {base:#x}: {e}"),
            hint: "see the cause; no transport has kept the registration".into(),
        };
        let pinners = driver.pinners().iter();
        let pinned: Vec<_> = pinners
            .map(|p| p.as_ref().filter(|_| !in_file).map(|p| p.pin(&memory)).transpose())
            .collect::<Result<_, _>>()
            .map_err(refused)?;
        let mut core = driver.lock(self);
        if core.closed {
            return Err(EngineError::Closed);
        }
        let mut keys = Vec::new();
        for (i, pinned) in pinned.into_iter().enumerate() {
            if in_file && !core.domains[i].takes_files() {
                continue;
            }
            match core.domains[i].register(&memory, pinned) {
                Ok(nic) => keys.extend(nic.iter().map(|k| RailKey { rail: i as u8, ..*k })),
                Err(e) => {
                    for d in &mut core.domains[..i] {
                        d.deregister(key.index);
                    }
                    return Err(refused(e));
                }
            }
        }
        let _ = memory.rail_keys.set(keys.into());
        drop(core);
        for grantor in memory.grantors() {
            grantor.grants.fetch_add(1, SeqCst);
        }
        self.remember(&memory);
        Ok(Region::new(memory, family, Arc::clone(self)))
    }
}
