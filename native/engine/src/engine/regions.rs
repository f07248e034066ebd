use std::{
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        Arc, Weak,
    },
    time::Duration,
};

use super::{grants::Family, handle::HandleRef, peers::Peer, Handle, Shared};
use crate::{
    api::{RailKeys, RegionDescriptor, RegionKey},
    locks::Mutex,
    memory::{
        device::{copy_now, CopyRange, Location},
        Backing, RegionMemory,
    },
    EngineError, Result,
};

pub(crate) struct RegionInner {
    pub memory: Arc<RegionMemory>,
    pub closed: AtomicBool,
    /// Ends when the registration has ended; all callers of `revoke` share it.
    pub retirement: Mutex<Option<HandleRef>>,
    /// Grants from it, and grants of those; they end with it.
    pub family: Arc<Family>,
    pub shared: Arc<Shared>,
}

impl RegionInner {
    /// Ends the registration and all grants from it, once.
    pub fn revoke(&self) -> HandleRef {
        let mut retirement = self.retirement.lock();
        if let Some(pending) = &*retirement {
            return Arc::clone(pending);
        }
        let pending = super::handle::HandleState::new(&self.shared);
        *retirement = Some(Arc::clone(&pending));
        self.closed.store(true, SeqCst);
        self.shared.revocations.fetch_add(1, SeqCst);
        drop(retirement);
        self.family.of(&self.memory).iter().for_each(|grant| drop(grant.revoke()));
        self.shared.retire(&self.memory, Some(Arc::clone(&pending)));
        pending
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        // Transfers hold clones, so none uses it now. This may run under the group's lock: `retire`
        // queues a command and does not lock.
        if !self.closed.swap(true, SeqCst) {
            self.shared.retire(&self.memory, None);
        }
    }
}

/// A use of a region's memory by a thread of this process.
struct LocalUse<'a>(&'a RegionInner);

impl Drop for LocalUse<'_> {
    fn drop(&mut self) {
        self.0.memory.users.fetch_sub(1, SeqCst);
        // Either this thread sees the revocation, or that one sees no user.
        if self.0.closed.load(SeqCst) {
            self.0.shared.reap();
        }
    }
}

/// A registered memory region of this engine. Cheap to clone; dropping the last clone deregisters.
///
/// The memory itself is released when no peer can reach it any more (MR-1), which may be a moment
/// after the drop.
#[derive(Clone)]
pub struct Region {
    pub(crate) inner: Arc<RegionInner>,
    /// This view's part of the registration.
    offset: u64,
    len: u64,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.location().file() {
            Some(file) => write!(f, "Region({} bytes of file {})", self.len, file.name()),
            None => write!(f, "Region({} bytes at {:#x})", self.len, self.addr()),
        }
    }
}

impl Region {
    pub(crate) fn new(memory: Arc<RegionMemory>, family: Arc<Family>, shared: Arc<Shared>) -> Self {
        let len = memory.len;
        let inner = RegionInner {
            memory,
            closed: AtomicBool::new(false),
            retirement: Mutex::default(),
            family,
            shared,
        };
        Self { inner: Arc::new(inner), offset: 0, len }
    }

    /// A view of the whole registration.
    pub(super) fn whole(inner: Arc<RegionInner>) -> Self {
        let len = inner.memory.len;
        Self { inner, offset: 0, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of this view's first byte in this process; for a file region, its offset in the
    /// file.
    pub fn addr(&self) -> usize {
        self.inner.memory.base + self.offset as usize
    }

    /// Whether peers on this host can map it (memory from [`TransferEngine::alloc`]).
    ///
    /// [`TransferEngine::alloc`]: super::TransferEngine::alloc
    pub fn is_mappable(&self) -> bool {
        matches!(self.inner.memory.backing, Backing::Owned { .. })
    }

    /// A view of `len` bytes from `offset`, of the same registration.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self> {
        crate::api::check_range("region", offset, len, self.len)?;
        Ok(Self { inner: Arc::clone(&self.inner), offset: self.offset + offset, len })
    }

    /// The descriptor that a peer needs to reach this view.
    pub fn descriptor(&self) -> RegionDescriptor {
        RegionDescriptor {
            owner: self.inner.shared.address.clone(),
            key: self.inner.memory.key,
            offset: self.offset,
            len: self.len,
            rail_keys: self.inner.memory.rail_keys.get().cloned().unwrap_or_default(),
        }
    }

    /// Ends the registration for all clones and views, and waits until no peer can reach the
    /// memory (MR-1). New uses fail with [`EngineError::Stale`].
    ///
    /// # Errors
    /// [`EngineError::NotQuiesced`] if a peer can still reach the memory after `timeout`; the
    /// engine then keeps it.
    pub fn deregister(&self, timeout: Duration) -> Result<()> {
        self.revoke()?.wait(timeout).unwrap_or_else(|| {
            Err(EngineError::NotQuiesced {
                what: format!("{self:?}"),
                after: timeout,
                cause: self.inner.shared.waits_for(&self.inner.memory),
            })
        })
    }

    /// Ends the registration for all clones and views, without waiting. The handle is done when no
    /// peer can reach the memory and no local transfer uses it (MR-1). New uses fail with
    /// [`EngineError::Stale`] from now on, here and at peers. Later calls return the same handle.
    pub fn revoke(&self) -> Result<Handle> {
        self.inner.shared.driver()?;
        Ok(Handle::pending("revocation", self.inner.revoke()))
    }

    /// Copies `bytes` to `offset` of this view; for tests and small headers.
    pub fn put(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        crate::api::check_range("region", offset, bytes.len() as u64, self.len)?;
        let _use = self.begin_use()?;
        self.check_host()?;
        // SAFETY: in bounds of memory that no revocation gives back during the use.
        unsafe {
            let to = (self.addr() + offset as usize) as *mut u8;
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        Ok(())
    }

    /// The `len` bytes from `offset` of this view.
    pub fn get(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        self.with_bytes(offset, len, <[u8]>::to_vec)
    }

    /// Calls `f` with the `len` bytes from `offset` of this view. If a peer writes there at the
    /// same time, the bytes are unspecified. A revocation ends after `f`.
    pub fn with_bytes<T>(&self, offset: u64, len: u64, f: impl FnOnce(&[u8]) -> T) -> Result<T> {
        crate::api::check_range("region", offset, len, self.len)?;
        let _use = self.begin_use()?;
        self.check_host()?;
        let from = (self.addr() + offset as usize) as *const u8;
        // SAFETY: in bounds of memory that no revocation gives back during the use.
        Ok(f(unsafe { std::slice::from_raw_parts(from, len as usize) }))
    }

    /// Calls `f` with the number and the bytes of each range of this view, `(offset, length)`, in
    /// order. Ranges of GPU memory are copied to the host first, all at once.
    pub fn with_ranges(
        &self,
        ranges: &[(u64, u64)],
        mut f: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let Some(device) = self.location().cuda().map(|range| range.device) else {
            let mut each = ranges.iter().enumerate();
            return each.try_for_each(|(i, &(offset, len))| {
                self.with_bytes(offset, len, |bytes| f(i, bytes))
            });
        };
        let _use = self.begin_use()?;
        for &(offset, len) in ranges {
            crate::api::check_range("region", offset, len, self.len)?;
        }
        let total: u64 = ranges.iter().map(|(_, len)| len).sum();
        let mut host = vec![0u8; total as usize];
        let (mut pieces, mut at) = (Vec::<CopyRange>::new(), host.as_mut_ptr() as usize);
        for &(offset, len) in ranges {
            let (from, len) = (self.addr() + offset as usize, len as usize);
            match pieces.last_mut() {
                Some(last) if last.from + last.len == from => last.len += len,
                _ => pieces.push(CopyRange { to: at, from, len }),
            }
            at += len;
        }
        // SAFETY: in bounds of memory that no revocation gives back during the use, and of `host`,
        // which nothing touches before this returns.
        unsafe { copy_now(device, &pieces) }.map_err(|e| EngineError::Resource {
            call: "read",
            cause: e.to_string(),
            hint: format!("the memory of cuda:{device} couldn't be copied to the host"),
        })?;
        let mut rest = &host[..];
        for (i, &(_, len)) in ranges.iter().enumerate() {
            let (bytes, after) = rest.split_at(len as usize);
            rest = after;
            f(i, bytes);
        }
        Ok(())
    }

    /// Location of the memory.
    pub fn location(&self) -> &Location {
        &self.inner.memory.location
    }

    /// Begins a use of the memory by this thread. Revocations from now on end after it (MR-1).
    fn begin_use(&self) -> Result<LocalUse<'_>> {
        self.inner.memory.users.fetch_add(1, SeqCst);
        let local_use = LocalUse(&self.inner);
        self.check_open()?;
        Ok(local_use)
    }

    fn check_host(&self) -> Result<()> {
        let what = match self.location() {
            Location::Host | Location::Managed => return Ok(()),
            Location::Cuda(range) => format!(
                "in memory of cuda:{}, which this process can't read itself; copy it to the host \
                 first",
                range.device
            ),
            Location::File(file) => format!(
                "in the file {}, which has no address; read it into memory first, with a read from \
                 this engine's own address",
                file.name()
            ),
        };
        Err(EngineError::Invalid(format!("the region lies {what}")))
    }

    /// Waits until everything written to a file region is on its disk; returns at once for memory.
    pub fn sync(&self) -> Result<()> {
        self.check_open()?;
        self.location().file().map_or(Ok(()), |file| file.sync())
    }

    #[inline]
    pub(crate) fn check_open(&self) -> Result<()> {
        self.inner.shared.driver()?;
        match self.inner.closed.load(SeqCst) {
            false => Ok(()),
            true => Err(self.stale()),
        }
    }

    #[cold]
    fn stale(&self) -> EngineError {
        EngineError::Stale {
            what: "the local region".into(),
            cause: match self.inner.memory.grantor {
                None => "it was deregistered".into(),
                Some(_) => "its grant has ended".into(),
            },
            remedy: "register the memory again",
        }
    }
}

/// A peer's region, for use in requests.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    pub(crate) peer: Peer,
    pub(crate) key: RegionKey,
    pub(crate) rail_keys: RailKeys,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// The memory, if the region is this engine's own.
    pub(crate) own: Option<Weak<RegionMemory>>,
}

impl RemoteRegion {
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A view of `len` bytes from `offset`.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self> {
        crate::api::check_range("remote region", offset, len, self.len)?;
        Ok(Self { offset: self.offset + offset, len, ..self.clone() })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{
        api::{EngineAddress, EngineConfig, EngineId, TransportKind},
        domain::{
            Admit, Completion, Data, Domain, LocalAddr, MessageRoom, Seq, Token, WorkRequest,
        },
        time::Time,
        transport::shm::ShmDomain,
        wake::Waker,
        Quiescence, TransferEngine,
    };

    struct NoMessages;

    impl MessageRoom for NoMessages {
        fn admit(&self, _: usize) -> Admit {
            Admit::Wait
        }
    }

    #[test]
    fn mr_1_a_revocation_is_not_over_because_its_engine_closes() {
        let config = EngineConfig { transports: vec![TransportKind::Shm], ..Default::default() };
        let engine = TransferEngine::open(config).unwrap();
        let region = engine.alloc(4096).unwrap();
        let id = EngineId::random().unwrap();
        let mut peer =
            ShmDomain::open(TransportKind::Shm, id, &EngineConfig::default(), &Waker::default())
                .unwrap();
        let endpoints = vec![peer.endpoint()];
        peer.announce(&EngineAddress { id, name: String::new(), endpoints });
        let link = peer.connect(Time(1), engine.address(), 0).unwrap();
        let (mut now, mut out) = (Time(1), Vec::new());
        let mut poll = |peer: &mut ShmDomain| {
            now = now.after(Duration::from_millis(1));
            peer.poll(now, &NoMessages, &mut out);
            std::thread::yield_now();
            out.iter().any(|c| matches!(c, Completion::LinkUp { .. }))
        };
        while !poll(&mut peer) {}
        let descriptor = region.descriptor();
        let data = Data {
            local: LocalAddr(0),
            local_region: 0,
            local_seq: Seq::at(0),
            remote: descriptor.key,
            remote_keys: RailKeys::default(),
            remote_seq: Seq::at(0),
            page_len: 16,
            pages: 1,
        };
        peer.post(link, Token::default(), &WorkRequest::Prepare { data }).unwrap();
        while peer.map_peer_region(link, descriptor.key, None).is_err() {
            poll(&mut peer);
        }
        // From here on the peer is stopped.
        let revoked = region.revoke().unwrap();
        engine.close();
        let result = revoked.poll().expect("an engine that is closed ends all handles");
        assert!(matches!(result, Err(EngineError::NotQuiesced { .. })), "{result:?}");
        assert_eq!(revoked.quiescence(), Quiescence::Unknown);
    }
}
