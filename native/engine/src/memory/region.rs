use std::{
    any::Any,
    sync::{atomic::AtomicU32, Arc, OnceLock},
};

use parking_lot::Mutex;

use super::{device::Location, Allocation, RegionIndex};
use crate::{
    api::{EngineId, RailKeys, RegionKey},
    error::DomainError,
    time::Time,
};

/// Whatever must live as long as the memory does: a tensor, a buffer, nothing.
pub type Keep = Option<Box<dyn Any + Send + Sync>>;

/// Whose memory it is.
#[derive(Debug)]
pub enum Backing {
    /// Part of an allocation of the engine; peers on this host can map it.
    Owned { allocation: Arc<Allocation>, offset: u64 },
    /// Memory of another owner; reached by the kernel (process_vm_writev) or a NIC only.
    Foreign,
}

/// A registered stretch of memory. Domains hold it by reference count while a peer may reach it.
pub struct RegionMemory {
    pub key: RegionKey,
    pub base: usize,
    /// Bytes.
    pub len: u64,
    pub backing: Backing,
    /// Whether processors reach it, or only a GPU.
    pub location: Location,
    pub keep: Keep,
    /// What peers must show to NICs; set when all domains have registered it.
    pub rail_keys: OnceLock<RailKeys>,
    /// Requests under way that use it as their local side.
    pub users: AtomicU32,
    /// The one peer that may reach it, if not all; refused by the domain that sees the peer.
    pub only: Option<EngineId>,
    /// What it was granted from, whose memory it keeps.
    pub grantor: Option<Arc<RegionMemory>>,
    /// When the grant ends by itself.
    pub until: Time,
    /// Grants from it, and from those, that are not over.
    pub grants: AtomicU32,
    /// Gives the key's index back when the last holder drops this.
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

    /// The same, with the index that its key names.
    pub(crate) fn numbered(self, index: RegionIndex) -> Self {
        debug_assert_eq!(index.get(), self.key.index);
        Self { _index: Some(index), ..self }
    }

    /// The same, elsewhere than on the host.
    pub fn at(self, location: Location) -> Self {
        Self { location, ..self }
    }

    /// The same, as a grant from `grantor` for one peer or for all.
    pub fn granted(self, grantor: Arc<Self>, only: Option<EngineId>) -> Self {
        Self { grantor: Some(grantor), only, ..self }
    }

    /// The same, to end by itself.
    pub fn until(self, until: Time) -> Self {
        Self { until, ..self }
    }

    /// What it was granted from, what that was granted from, and so on.
    pub fn grantors(&self) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(self.grantor.as_ref(), |from| from.grantor.as_ref())
    }

    /// Whether a peer may reach it: what was granted to one is refused to all others (MR-3).
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

/// Indices from here on are transports' own regions, which users never see.
pub(crate) const HIDDEN: u32 = 1 << 31;

/// The regions that one domain exposes: the receiver's half of MR-3.
#[derive(Debug, Default)]
pub(crate) struct RegionBook {
    slots: Vec<Option<Arc<RegionMemory>>>,
    hidden: Vec<Option<Arc<RegionMemory>>>,
}

impl RegionBook {
    /// MR-1: that nothing can land there any more can't be shown, so the memory is never given back. It stays in sight: a
    /// leak checker tells what was kept from what was lost.
    pub fn keep_for_good(self) {
        static KEPT: Mutex<Vec<RegionBook>> = Mutex::new(Vec::new());
        KEPT.lock().push(self);
    }

    pub fn insert(&mut self, region: &Arc<RegionMemory>) {
        let index = region.key.index;
        let slots = if index & HIDDEN == 0 { &mut self.slots } else { &mut self.hidden };
        let i = (index & !HIDDEN) as usize;
        if slots.len() <= i {
            slots.resize(i + 1, None);
        }
        slots[i] = Some(Arc::clone(region));
    }

    pub fn remove(&mut self, index: u32) -> Option<Arc<RegionMemory>> {
        let slots = if index & HIDDEN == 0 { &mut self.slots } else { &mut self.hidden };
        slots.get_mut((index & !HIDDEN) as usize)?.take()
    }

    #[inline]
    pub fn get(&self, index: u32) -> Option<&Arc<RegionMemory>> {
        let slots = if index & HIDDEN == 0 { &self.slots } else { &self.hidden };
        slots.get((index & !HIDDEN) as usize)?.as_ref()
    }

    /// Whether nothing was ever registered.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The region behind a key that a peer has shown, or why not: an earlier one's is stale (MR-2).
    pub fn lookup(&self, key: RegionKey) -> Result<&Arc<RegionMemory>, DomainError> {
        match self.get(key.index) {
            Some(r) if r.key.rkey == key.rkey => Ok(r),
            _ => Err(DomainError::Stale(format!(
                "region {} is not registered under this key any more",
                key.index
            ))),
        }
    }

    /// The same for a peer that has proven who it is, which may not be the one it was granted to.
    #[inline]
    pub fn lookup_for(
        &self,
        peer: Option<EngineId>,
        key: RegionKey,
    ) -> Result<&Arc<RegionMemory>, DomainError> {
        let region = self.lookup(key)?;
        region.check_peer(peer).map(|()| region)
    }

    /// The address of `len` bytes at `offset` of a region that a peer names, if they lie inside it (MR-3).
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
