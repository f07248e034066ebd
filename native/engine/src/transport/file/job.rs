//! Work requests, cut into chunks. A chunk is one copy, or two if it passes through a slot.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::{
    domain::{Count, Data, DomainError, LinkId, Seq, Token},
    memory::{
        device::{AsyncCopier, CopyRange, Location, PendingCopy, Pinned},
        RegionMemory,
    },
};

/// Bytes of a chunk, and of a slot.
pub(super) const CHUNK: u64 = 1 << 20;
/// Ranges of a chunk.
const MAX_PAGES: u32 = 512;
const SLOTS: u8 = 8;

/// Host memory for copies that no CPU can make directly.
#[derive(Debug, Default)]
pub(super) struct Slots {
    memory: Option<Pinned>,
    free: Vec<u8>,
}

/// One slot of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    number: u8,
    addr: usize,
}

impl Slots {
    /// Takes a slot for a copy between two locations; `None` if all are in use.
    pub fn take(&mut self, between: [&Location; 2]) -> Result<Option<Slot>, DomainError> {
        let memory = match &mut self.memory {
            Some(memory) => memory,
            None => {
                self.free = (0..SLOTS).collect();
                self.memory.insert(Pinned::new(CHUNK * u64::from(SLOTS))?)
            }
        };
        between.into_iter().for_each(|location| memory.pin_for(location));
        let base = memory.base();
        let at = |number: u8| Slot { number, addr: base + usize::from(number) * CHUNK as usize };
        Ok(self.free.pop().map(at))
    }

    pub fn give_back(&mut self, slot: Option<Slot>) {
        self.free.extend(slot.map(|slot| slot.number));
    }

    pub fn is_free(&self) -> bool {
        self.memory.is_none() || !self.free.is_empty()
    }
}

/// One work request.
#[derive(Debug)]
pub(super) struct Job {
    pub link: LinkId,
    pub token: Token,
    pub count: Option<Count>,
    /// Kept until the job is done (MR-1).
    pub local: Arc<RegionMemory>,
    pub remote: Arc<RegionMemory>,
    data: Data,
    write: bool,
    /// The position up to which it is cut into chunks.
    page: u32,
    byte: u64,
    moving: u32,
    error: Option<DomainError>,
}

/// A chunk under way.
#[derive(Debug)]
pub(super) struct ActiveChunk {
    pub job: usize,
    pub copy: PendingCopy,
    pub slot: Option<Slot>,
    pub bytes: u64,
    /// The second copy, from the slot on.
    then: SmallVec<[CopyRange; 4]>,
}

impl Job {
    pub fn new(
        (link, token): (LinkId, Token),
        (data, count, write): (Data, Option<Count>, bool),
        (local, remote): (Arc<RegionMemory>, Arc<RegionMemory>),
    ) -> Result<Self, DomainError> {
        let last = match &data.remote_seq {
            Seq::Strided { .. } => Some(data.remote_seq.nth(data.pages.saturating_sub(1))),
            Seq::Indexed { list, offset, stride, .. } => {
                u64::from(list.max()).checked_mul(*stride).and_then(|n| n.checked_add(*offset))
            }
        };
        // MR-3: a descriptor may exceed its region.
        if last.and_then(|l| l.checked_add(data.page_len)).is_none_or(|end| end > remote.len) {
            return Err(DomainError::Refused(format!(
                "bytes outside region {} of {} bytes",
                remote.key.index, remote.len
            )));
        }
        let (page, byte, moving, error) = (0, 0, 0, None);
        Ok(Self { link, token, count, local, remote, data, write, page, byte, moving, error })
    }

    pub fn fail(&mut self, e: DomainError) {
        self.error.get_or_insert(e);
    }

    /// Whether all chunks have been started.
    pub fn has_begun(&self) -> bool {
        self.error.is_some() || self.page == self.data.pages
    }

    pub fn is_over(&self) -> bool {
        self.moving == 0 && self.has_begun()
    }

    pub fn result(&self) -> Result<(), DomainError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    pub fn uses(&self, index: u32) -> bool {
        self.local.key.index == index || self.remote.key.index == index
    }

    pub fn locations(&self) -> [&Location; 2] {
        [&self.local.location, &self.remote.location]
    }

    /// Whether neither end can be copied to or from the other directly.
    pub fn needs_slot(&self) -> bool {
        let [a, b] = self.locations();
        let gpus = a.cuda().is_some() && b.cuda().is_some();
        !a.is_host() && !b.is_host() && !gpus
    }

    /// The source region and the destination region.
    fn ends(&self) -> (&Arc<RegionMemory>, &Arc<RegionMemory>) {
        match self.write {
            true => (&self.local, &self.remote),
            false => (&self.remote, &self.local),
        }
    }

    /// The ranges of the next chunk at both ends, and its bytes.
    fn cut(&mut self) -> (SmallVec<[CopyRange; 4]>, u64) {
        let mut pieces: SmallVec<[CopyRange; 4]> = SmallVec::new();
        let (mut bytes, data) = (0, &self.data);
        for _ in 0..MAX_PAGES {
            if self.page == data.pages || bytes == CHUNK {
                break;
            }
            let whole = data.page_len - self.byte;
            // A page that fits a chunk stays whole.
            if bytes > 0 && whole > CHUNK - bytes && data.page_len <= CHUNK {
                break;
            }
            let len = whole.min(CHUNK - bytes);
            let local = data.local.0 + (data.local_seq.nth(self.page) + self.byte) as usize;
            let remote = self.remote.base + (data.remote_seq.nth(self.page) + self.byte) as usize;
            let (from, to) = if self.write { (local, remote) } else { (remote, local) };
            let len_here = len as usize;
            match pieces.last_mut() {
                Some(p) if p.to + p.len == to && p.from + p.len == from => p.len += len_here,
                _ => pieces.push(CopyRange { to, from, len: len_here }),
            }
            bytes += len;
            self.byte += len;
            if self.byte == data.page_len {
                (self.page, self.byte) = (self.page + 1, 0);
            }
        }
        (pieces, bytes)
    }

    /// Starts the next chunk.
    pub fn begin_chunk(
        &mut self,
        key: usize,
        slot: Option<Slot>,
        copier: &mut AsyncCopier,
    ) -> Result<ActiveChunk, DomainError> {
        let (pieces, bytes) = self.cut();
        let (from, to) = self.ends();
        let (first, then) = match slot {
            Some(slot) => adjacent_ranges(slot, &pieces),
            None => (pieces, SmallVec::new()),
        };
        // SAFETY: the ranges lie in regions that this job keeps, as was checked when it was
        // created, or in a slot that belongs to this chunk until it ends.
        let copy = unsafe {
            match slot.is_some() || to.location.is_host() {
                true => copier.start(&from.location, false, &first)?,
                false => copier.start(&to.location, true, &first)?,
            }
        };
        self.moving += 1;
        Ok(ActiveChunk { job: key, copy, slot, bytes, then })
    }

    /// The first copy of a chunk is done: starts the second, if there is one.
    pub fn next_half(
        &self,
        moving: &mut ActiveChunk,
        copier: &mut AsyncCopier,
    ) -> Result<bool, DomainError> {
        if moving.then.is_empty() || self.error.is_some() {
            return Ok(false);
        }
        let then = std::mem::take(&mut moving.then);
        let (_, to) = self.ends();
        // SAFETY: as for the first.
        moving.copy = unsafe { copier.start(&to.location, true, &then)? };
        Ok(true)
    }

    /// A chunk has ended.
    pub fn ended(&mut self, error: Option<DomainError>) {
        self.moving -= 1;
        if let Some(e) = error {
            self.fail(e);
        }
    }
}

/// The ranges of the copies to and from a slot, where they are adjacent.
fn adjacent_ranges(
    slot: Slot,
    pieces: &[CopyRange],
) -> (SmallVec<[CopyRange; 4]>, SmallVec<[CopyRange; 4]>) {
    let (mut to_slot, mut from_slot) = (SmallVec::new(), SmallVec::new());
    let mut at = slot.addr;
    for p in pieces {
        to_slot.push(CopyRange { to: at, from: p.from, len: p.len });
        from_slot.push(CopyRange { to: p.to, from: at, len: p.len });
        at += p.len;
    }
    (to_slot, from_slot)
}
