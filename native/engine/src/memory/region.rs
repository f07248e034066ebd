use std::{
    any::Any,
    sync::{atomic::AtomicU32, Arc, OnceLock},
};

use super::{device::Location, Allocation, RegionIndex};
use crate::{
    api::{EngineId, RailKeys, RegionKey},
    error::DomainError,
    locks::Mutex,
    process::PerProcess,
    time::Time,
};

/// An object that must live as long as the memory, such as a tensor.
pub type Keep = Option<Box<dyn Any + Send + Sync>>;

/// The owner of a region's memory.
#[derive(Debug)]
pub enum Backing {
    /// Part of an allocation of the engine; peers on this host can map it.
    Owned { allocation: Arc<Allocation>, offset: u64 },
    /// Memory of another owner; reached by the kernel (process_vm_writev) or a NIC only.
    Foreign,
}

/// A registered range of memory. Domains hold a reference while a peer may reach it.
pub struct RegionMemory {
    pub key: RegionKey,
    pub base: usize,
    /// Bytes.
    pub len: u64,
    pub backing: Backing,
    /// Location: host, GPU or file.
    pub location: Location,
    pub keep: Keep,
    /// The keys of NICs; set once all domains have registered it.
    pub rail_keys: OnceLock<RailKeys>,
    /// Requests under way that use it as local memory.
    pub users: AtomicU32,
    /// The only peer that may reach it; `None` for all. Domains that know the peer enforce it.
    pub only: Option<EngineId>,
    /// The region from which it was granted; its memory is kept.
    pub grantor: Option<Arc<RegionMemory>>,
    /// When the grant expires.
    pub until: Time,
    /// Grants that come from it, directly or not, and are not over.
    pub grants: AtomicU32,
    /// Frees the index of the key when the last holder drops this.
    _index: Option<RegionIndex>,
}

impl RegionMemory {
    pub fn new(key: RegionKey, base: usize, len: u64, backing: Backing, keep: Keep) -> Self {
        Self {
            key,
            base,
            len,
            backing,
            location: Location::Host,
            keep,
            rail_keys: OnceLock::new(),
            users: AtomicU32::new(0),
            only: None,
            grantor: None,
            until: Time::NEVER,
            grants: AtomicU32::new(0),
            _index: None,
        }
    }

    /// Sets the index of its key.
    pub(crate) fn numbered(self, index: RegionIndex) -> Self {
        debug_assert_eq!(index.get(), self.key.index);
        Self { _index: Some(index), ..self }
    }

    /// Sets the location.
    pub fn at(self, location: Location) -> Self {
        Self { location, ..self }
    }

    /// Makes it a grant from `grantor`, for one peer or for all.
    pub fn granted(self, grantor: Arc<Self>, only: Option<EngineId>) -> Self {
        Self { grantor: Some(grantor), only, ..self }
    }

    /// Sets when the grant expires.
    pub fn until(self, until: Time) -> Self {
        Self { until, ..self }
    }

    /// The chain of grantors, nearest first.
    pub fn grantors(&self) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(self.grantor.as_ref(), |from| from.grantor.as_ref())
    }

    /// Checks that a peer may reach it: a grant for one peer is refused to all others (MR-3).
    #[inline]
    pub fn check_peer(&self, peer: Option<EngineId>) -> Result<(), DomainError> {
        if self.only.is_none() || self.only == peer {
            return Ok(());
        }
        Err(DomainError::Refused(format!(
            "region {} was granted to another engine; ask its owner for a grant",
            self.key.index
        )))
    }
}

impl std::fmt::Debug for RegionMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegionMemory({}, {} bytes at {:#x})", self.key.index, self.len, self.base)
    }
}

/// First index of the transports' own regions, which users never see.
pub(crate) const FIRST_INTERNAL_INDEX: u32 = 1 << 31;

/// The regions that one domain exposes: the receiver's half of MR-3.
#[derive(Debug, Default)]
pub(crate) struct RegionBook {
    slots: Vec<Option<Arc<RegionMemory>>>,
    hidden: Vec<Option<Arc<RegionMemory>>>,
}

impl RegionBook {
    /// Leaks all regions (MR-1): bytes may still land in them. They stay reachable, so that leak
    /// checkers don't report them.
    pub fn keep_for_good(self) {
        static KEPT: PerProcess<Mutex<Vec<RegionBook>>> = PerProcess::empty();
        KEPT.get_or_default().lock().push(self);
    }

    pub fn insert(&mut self, region: &Arc<RegionMemory>) {
        let index = region.key.index;
        let slots =
            if index & FIRST_INTERNAL_INDEX == 0 { &mut self.slots } else { &mut self.hidden };
        let i = (index & !FIRST_INTERNAL_INDEX) as usize;
        if slots.len() <= i {
            slots.resize(i + 1, None);
        }
        slots[i] = Some(Arc::clone(region));
    }

    pub fn remove(&mut self, index: u32) -> Option<Arc<RegionMemory>> {
        let slots =
            if index & FIRST_INTERNAL_INDEX == 0 { &mut self.slots } else { &mut self.hidden };
        slots.get_mut((index & !FIRST_INTERNAL_INDEX) as usize)?.take()
    }

    #[inline]
    pub fn get(&self, index: u32) -> Option<&Arc<RegionMemory>> {
        let slots = if index & FIRST_INTERNAL_INDEX == 0 { &self.slots } else { &self.hidden };
        slots.get((index & !FIRST_INTERNAL_INDEX) as usize)?.as_ref()
    }

    /// The region of a key that a peer has sent. The key of an earlier region is stale (MR-2).
    pub fn lookup(&self, key: RegionKey) -> Result<&Arc<RegionMemory>, DomainError> {
        match self.get(key.index) {
            Some(r) if r.key.rkey == key.rkey => Ok(r),
            _ => Err(DomainError::Stale(format!(
                "region {} is not registered under this key any more",
                key.index
            ))),
        }
    }

    /// As `lookup`, for an authenticated peer, which may lack the grant.
    #[inline]
    pub fn lookup_for(
        &self,
        peer: Option<EngineId>,
        key: RegionKey,
    ) -> Result<&Arc<RegionMemory>, DomainError> {
        let region = self.lookup(key)?;
        region.check_peer(peer).map(|()| region)
    }

    /// The address of `len` bytes at `offset` of a region that a peer names. They must lie inside
    /// (MR-3).
    pub fn resolve(
        &self,
        peer: EngineId,
        key: RegionKey,
        offset: u64,
        len: u64,
    ) -> Result<usize, DomainError> {
        let r = self.lookup_for(Some(peer), key)?;
        if offset.checked_add(len).is_some_and(|end| end <= r.len) {
            return Ok(r.base + offset as usize);
        }
        Err(DomainError::Refused(format!(
            "bytes {offset}+{len} lie outside region {} of {} bytes",
            key.index, r.len
        )))
    }
}
