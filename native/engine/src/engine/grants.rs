//! Parts of a region for one peer, or for a while: registrations of their own, which end by themselves.

use std::{
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
use crate::{api::EngineId, memory::Backing, time::Time, EngineError, Result};

/// To whom something is granted, and for how long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// The one engine that may use it; any that has the descriptor if not named. Software that sees who
    /// writes holds to it (shm, tcp, staging); a NIC knows keys only.
    pub peer: Option<EngineId>,
    /// After this long it ends by itself, as by [`Region::revoke`].
    pub ttl: Option<Duration>,
}

impl Region {
    /// Registers `len` bytes from `offset` of this region once more, under a key of their own: what lies
    /// beside them is out of that key's reach for whoever places the bytes, NICs included (MR-3).
    ///
    /// It ends when its last clone is dropped, when it or this region is revoked, or by itself; from then on its
    /// descriptor is stale (MR-2). Revoking this region is over when all grants from it are (MR-1). Dropping
    /// this region leaves them as they are: a grant keeps the memory.
    ///
    /// # Errors
    /// [`EngineError::OutOfBounds`]; [`EngineError::Stale`] if the region has ended;
    /// [`EngineError::Invalid`] for no bytes, no time, or a region of a file.
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
            grant: Some((Arc::clone(grantor), terms.peer)),
        })?;
        {
            let mut grants = self.inner.grants.lock();
            // A revocation that has begun doesn't look again: this grant must not outlive it.
            self.check_open()?;
            grants.retain(|g| g.strong_count() > 0);
            grants.push(Arc::downgrade(&granted.inner));
        }
        if let Some(ttl) = terms.ttl {
            let until = shared.now().after(ttl);
            shared.leases.add(until, &granted.inner);
            shared.cell.set_alarm(until);
        }
        Ok(granted)
    }
}

/// The grants of one engine that end by themselves.
pub(crate) struct Leases {
    list: Mutex<Vec<(Time, Weak<RegionInner>)>>,
    /// When the first of them ends; looked at without the lock.
    next: AtomicU64,
}

impl Default for Leases {
    fn default() -> Self {
        Self { list: Mutex::default(), next: AtomicU64::new(Time::NEVER.0) }
    }
}

impl Leases {
    fn add(&self, until: Time, grant: &Arc<RegionInner>) {
        let mut list = self.list.lock();
        if list.len() % 64 == 63 {
            list.retain(|(_, g)| g.strong_count() > 0);
        }
        list.push((until, Arc::downgrade(grant)));
        self.next.fetch_min(until.0, SeqCst);
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
            list.retain(|(until, grant)| {
                let lives = *until > now;
                if !lives {
                    over.extend(grant.upgrade());
                }
                lives
            });
            let first = list.iter().map(|(until, _)| *until).min();
            self.next.store(first.unwrap_or(Time::NEVER).0, SeqCst);
        }
        for grant in &over {
            drop(grant.revoke());
        }
        !over.is_empty()
    }
}
