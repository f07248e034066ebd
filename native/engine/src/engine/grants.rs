//! Grants: registrations of a part of a region, for one peer or a limited time.

use std::{
    collections::BTreeMap,
    sync::{
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
        Arc, Weak,
    },
    time::Duration,
};

use super::{
    regions::{Region, RegionInner},
    register::RegionSpec,
};
use crate::{
    api::EngineId,
    locks::Mutex,
    memory::{Backing, RegionMemory},
    time::Time,
    EngineError, Result,
};

/// Dropped grants are purged at this size, or at twice the size after the last purge.
const MIN_PURGE_SIZE: usize = 64;

/// The terms of a grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// The only engine that may use the grant; `None` allows any holder of the descriptor.
    /// Transports that see the writer enforce this (shm, tcp, staging); a NIC knows keys only.
    pub peer: Option<EngineId>,
    /// Lifetime; after it the grant is revoked, as by [`Region::revoke`].
    pub ttl: Option<Duration>,
}

/// The restrictions of a grant on its region.
pub(super) struct GrantScope {
    pub from: Arc<RegionMemory>,
    pub only: Option<EngineId>,
    pub until: Time,
    pub family: Arc<Family>,
}

/// All grants from one region, and grants of those grants. A dropped grant may have granted
/// further: a revocation finds those grants here too.
#[derive(Debug, Default)]
pub(crate) struct Family {
    members: Mutex<Members>,
}

#[derive(Debug, Default)]
struct Members {
    all: Vec<Weak<RegionInner>>,
    /// Size after the last purge.
    left: usize,
}

impl Family {
    /// Adds a grant. Fails if the grantor is being revoked, because a revocation reads the list
    /// once.
    fn add(&self, grantor: &Region, granted: &Region) -> Result<()> {
        let mut members = self.members.lock();
        grantor.check_open()?;
        if members.all.len() >= MIN_PURGE_SIZE.max(2 * members.left) {
            members.all.retain(|g| g.strong_count() > 0);
            members.left = members.all.len();
        }
        members.all.push(Arc::downgrade(&granted.inner));
        Ok(())
    }

    /// Grants that come from `memory`, directly or through other grants.
    pub fn of(&self, memory: &Arc<RegionMemory>) -> Vec<Arc<RegionInner>> {
        if memory.grants.load(SeqCst) == 0 {
            return Vec::new();
        }
        let mut theirs: Vec<Arc<RegionInner>> =
            self.members.lock().all.iter().filter_map(Weak::upgrade).collect();
        // Without the lock: the filter may drop the last clone of a region, which runs its
        // destructor.
        theirs.retain(|g| g.memory.grantors().any(|m| Arc::ptr_eq(m, memory)));
        theirs
    }
}

impl Region {
    /// Registers `len` bytes from `offset` of this region again, under a key of their own. That key
    /// gives no access to the bytes beside them, not even through a NIC (MR-3).
    ///
    /// A grant ends when its last clone is dropped, when it or this region is revoked, or after its
    /// `ttl`. Its descriptor is then stale (MR-2). A revocation of this region completes after all
    /// grants from it have ended (MR-1). Dropping this region does not end them: a grant keeps the
    /// memory.
    ///
    /// A grant of a grant has the same peer, if that has one, and ends with it at the latest. It
    /// also ends when any grant that it comes from is revoked, even if those between were dropped.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`]; [`EngineError::Stale`] if the region has ended;
    /// [`EngineError::Invalid`] for zero bytes, a zero `ttl`, a file's region, or a peer other than
    /// this grant's.
    pub fn grant(&self, offset: u64, len: u64, terms: Grant) -> Result<Region> {
        crate::api::check_range("region", offset, len, self.len())?;
        let invalid = |what: &str| Err(EngineError::Invalid(what.into()));
        if len == 0 {
            return invalid("a grant of zero bytes gives nothing; name at least one byte");
        }
        if terms.ttl == Some(Duration::ZERO) {
            return invalid("a grant for no time gives nothing; name a ttl above 0, or none");
        }
        if self.location().file().is_some() {
            return invalid(
                "a part of a file's region can't be granted; register that part of the file",
            );
        }
        self.check_open()?;
        let shared = &self.inner.shared;
        shared.check_open()?;
        let grantor = &self.inner.memory;
        if grantor.only.is_some() && terms.peer.is_some() && grantor.only != terms.peer {
            return invalid(
                "a grant for one peer can't be granted on to another; grant it from the region itself",
            );
        }
        let ends = terms.ttl.map_or(Time::NEVER, |ttl| shared.now().after(ttl));
        let until = ends.min(grantor.until);
        let base = self.addr() + offset as usize;
        let backing = match &grantor.backing {
            Backing::Owned { allocation, offset } => {
                let offset = offset + (base - grantor.base) as u64;
                Backing::Owned { allocation: Arc::clone(allocation), offset }
            }
            Backing::Foreign => Backing::Foreign,
        };
        let granted = shared.register(RegionSpec {
            location: self.location().clone(),
            base,
            len,
            backing,
            keep: None,
            memory_kind: grantor.key.memory_kind(),
            grant: Some(GrantScope {
                from: Arc::clone(grantor),
                only: grantor.only.or(terms.peer),
                until,
                family: Arc::clone(&self.inner.family),
            }),
        })?;
        self.inner.family.add(self, &granted)?;
        if until != Time::NEVER {
            shared.leases.add(until, &granted.inner);
            shared.set_alarm(until);
        }
        Ok(granted)
    }
}

/// The grants of one engine that have a `ttl`.
pub(crate) struct Leases {
    list: Mutex<LeaseList>,
    /// When the first one ends; read without the lock.
    next: AtomicU64,
}

#[derive(Default)]
struct LeaseList {
    /// By end time, then in the order of their creation.
    grants: BTreeMap<(Time, u64), Weak<RegionInner>>,
    came: u64,
    /// Size after the last purge.
    left: usize,
}

impl LeaseList {
    fn first_end(&self) -> Time {
        self.grants.first_key_value().map_or(Time::NEVER, |((until, _), _)| *until)
    }
}

impl Default for Leases {
    fn default() -> Self {
        Self { list: Mutex::default(), next: AtomicU64::new(Time::NEVER.0) }
    }
}

impl Leases {
    fn add(&self, until: Time, grant: &Arc<RegionInner>) {
        let mut list = self.list.lock();
        if list.grants.len() >= MIN_PURGE_SIZE.max(2 * list.left) {
            list.grants.retain(|_, g| g.strong_count() > 0);
            list.left = list.grants.len();
        }
        list.came += 1;
        let key = (until, list.came);
        list.grants.insert(key, Arc::downgrade(grant));
        self.next.store(list.first_end().0, SeqCst);
    }

    pub fn next_end(&self) -> Time {
        Time(self.next.load(Relaxed))
    }

    /// Revokes expired grants; true if there were any. May be called under the group's lock.
    pub fn end(&self, now: Time) -> bool {
        if now < self.next_end() {
            return false;
        }
        let mut over = Vec::new();
        {
            let mut list = self.list.lock();
            while let Some(first) = list.grants.first_entry().filter(|g| g.key().0 <= now) {
                over.extend(first.remove().upgrade());
            }
            self.next.store(list.first_end().0, SeqCst);
        }
        for grant in &over {
            drop(grant.revoke());
        }
        !over.is_empty()
    }
}
