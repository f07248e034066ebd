//! Parts of a region for one peer, or for a while: registrations of their own, which end by themselves.

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

use parking_lot::Mutex;

use super::{
    regions::{Region, RegionInner},
    register::Stretch,
};
use crate::{
    api::EngineId,
    memory::{Backing, RegionMemory},
    time::Time,
    EngineError, Result,
};

/// Grants that are gone are looked for when there are so many, or twice as many as were left.
const FEW: usize = 64;

/// To whom something is granted, and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// The one engine that may use it; any that has the descriptor if not named. Software that sees who
    /// writes holds to it (shm, tcp, staging); a NIC knows keys only.
    pub peer: Option<EngineId>,
    /// After this long it ends by itself, as by [`Region::revoke`].
    pub ttl: Option<Duration>,
}

/// What makes a registration a grant.
pub(super) struct Granted {
    pub from: Arc<RegionMemory>,
    pub only: Option<EngineId>,
    pub until: Time,
    pub family: Arc<Family>,
}

/// All grants from one region and from grants of it. A grant that is gone may have granted on: who ends its
/// grants finds those as well.
#[derive(Debug, Default)]
pub(crate) struct Family {
    members: Mutex<Members>,
}

#[derive(Debug, Default)]
struct Members {
    all: Vec<Weak<RegionInner>>,
    /// Those that were left when the gone ones were last looked for.
    left: usize,
}

impl Family {
    /// Takes a grant in, unless what it was granted from is being revoked, which doesn't look again.
    fn add(&self, grantor: &Region, granted: &Region) -> Result<()> {
        let mut members = self.members.lock();
        grantor.check_open()?;
        if members.all.len() >= FEW.max(2 * members.left) {
            members.all.retain(|g| g.strong_count() > 0);
            members.left = members.all.len();
        }
        members.all.push(Arc::downgrade(&granted.inner));
        Ok(())
    }

    /// Those that were granted from `memory`, at first or second hand or further on.
    pub fn of(&self, memory: &Arc<RegionMemory>) -> Vec<Arc<RegionInner>> {
        if memory.grants.load(SeqCst) == 0 {
            return Vec::new();
        }
        let mut theirs: Vec<Arc<RegionInner>> =
            self.members.lock().all.iter().filter_map(Weak::upgrade).collect();
        // Without the lock: those that are let go of here may be the last of their clones.
        theirs.retain(|g| g.memory.grantors().any(|m| Arc::ptr_eq(m, memory)));
        theirs
    }
}

impl Region {
    /// Registers `len` bytes from `offset` of this region once more, under a key of their own: what lies
    /// beside them is out of that key's reach for whoever places the bytes, NICs included (MR-3).
    ///
    /// It ends when its last clone is dropped, when it or this region is revoked, or by itself; from then on its
    /// descriptor is stale (MR-2). Revoking this region is over when all grants from it are (MR-1). Dropping
    /// this region leaves them as they are: a grant keeps the memory.
    ///
    /// A grant of a grant is for the same peer, if that is for one, and ends when it ends by itself at the
    /// latest. It ends with any that it comes from that is revoked, though those between may be dropped.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`]; [`EngineError::Stale`] if the region has ended;
    /// [`EngineError::Invalid`] for no bytes, no time, a region of a file, or another peer than this grant's.
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
        let granted = shared.register(Stretch {
            location: self.location().clone(),
            base,
            len,
            backing,
            keep: None,
            nature: grantor.key.nature(),
            grant: Some(Granted {
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

/// The grants of one engine that end by themselves.
pub(crate) struct Leases {
    list: Mutex<List>,
    /// When the first of them ends; looked at without the lock.
    next: AtomicU64,
}

#[derive(Default)]
struct List {
    /// By when they end, and in the order in which they came.
    grants: BTreeMap<(Time, u64), Weak<RegionInner>>,
    came: u64,
    /// Those that were left when the gone ones were last looked for.
    left: usize,
}

impl List {
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
        if list.grants.len() >= FEW.max(2 * list.left) {
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

    /// Revokes those whose time is over; true if there was one. May be called under the group's lock.
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
