//! One copy between local memory and an imported region: which way, by whom, in which chunks.

use rustix::io::Errno;

use super::{
    imports::{Import, Reach},
    raw::{across, piece, Direction, Piece},
};
use crate::{
    domain::{Data, DomainError},
    memory::{device, Copier},
};

/// What one thread copies before it looks around: some hundred microseconds of work.
const CHUNK: u64 = 1 << 20;
/// Pieces in one kernel call; IOV_MAX is 1024.
const PIECES: u32 = 512;
/// What a copy engine is given before a thread waits for it.
const DEVICE_CHUNK: u64 = 64 << 20;
const DEVICE_PIECES: u32 = 4096;
/// Bytes that cross to another process's ordinary memory in one go.
const BOUNCE: u64 = 8 << 20;

/// What is done with the bytes of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Motion {
    Copy(Direction),
    /// Page tables are filled, so that a later copy meets no page fault.
    Touch,
}

/// A copy between local memory and an imported region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy<'a> {
    pub data: &'a Data,
    pub import: &'a Import,
    pub motion: Motion,
    /// The GPU whose memory the local side is.
    pub device: Option<i32>,
}

impl Copy<'_> {
    /// The GPU that copies, if processors can't.
    fn engine(&self) -> Option<i32> {
        match self.import.reach {
            Reach::Device(device, _) => Some(self.device.unwrap_or(device)),
            Reach::Mapped(_) | Reach::Process(_) => self.device,
        }
    }

    /// Bytes of a page that one chunk takes at most, and how many pages.
    fn chunk(&self) -> (u64, u32) {
        match self.engine() {
            Some(_) => (DEVICE_CHUNK, DEVICE_PIECES),
            None => (CHUNK, PIECES),
        }
    }

    /// How many chunks it is cut into, pages per chunk and bytes per chunk of a page.
    pub fn cut(&self) -> (u32, u32, u64) {
        let Data { page_len, pages, .. } = *self.data;
        let (chunk, pieces) = self.chunk();
        if page_len > chunk {
            return ((page_len.div_ceil(chunk) as u32).saturating_mul(pages), 1, chunk);
        }
        let per_chunk = ((chunk / page_len.max(1)) as u32).clamp(1, pieces);
        (pages.div_ceil(per_chunk), per_chunk, page_len)
    }

    /// All of it, on this thread.
    #[inline]
    pub fn run(&self, copier: &Copier) -> Result<(), DomainError> {
        if self.data.pages == 1 && self.data.page_len <= CHUNK {
            return self.pieces(0..1, 0, self.data.page_len, copier);
        }
        let (chunks, ..) = self.cut();
        (0..chunks).try_for_each(|c| self.run_chunk(c, copier))
    }

    pub fn run_chunk(&self, chunk: u32, copier: &Copier) -> Result<(), DomainError> {
        let Data { page_len, pages, .. } = *self.data;
        let (_, per_chunk, bytes) = self.cut();
        let (limit, _) = self.chunk();
        if page_len > limit {
            let per_page = page_len.div_ceil(limit) as u32;
            let (page, part) = (chunk / per_page, u64::from(chunk % per_page));
            let from = part * bytes;
            return self.pieces(page..page + 1, from, bytes.min(page_len - from), copier);
        }
        let first = chunk * per_chunk;
        self.pieces(first..(first + per_chunk).min(pages), 0, page_len, copier)
    }

    /// Copies `len` bytes from byte `from` of each of some pages.
    #[inline]
    fn pieces(
        &self,
        pages: std::ops::Range<u32>,
        from: u64,
        len: u64,
        copier: &Copier,
    ) -> Result<(), DomainError> {
        let Data { local, local_seq, remote_seq, .. } = self.data;
        let local_at = |i: u32| local.0 + (local_seq.nth(i) + from) as usize;
        let remote_at = |i: u32| self.import.base + (remote_seq.nth(i) + from) as usize;
        if let Some(device) = self.engine() {
            return self.by_engine(device, pages, len, (&local_at, &remote_at));
        }
        let (pid, direction) = match (&self.import.reach, self.motion) {
            (Reach::Device(..), _) => return Ok(()),
            (Reach::Mapped(mapping), Motion::Touch) => {
                pages.for_each(|i| mapping.populate(remote_at(i), len as usize));
                return Ok(());
            }
            (Reach::Process(_), Motion::Touch) => return Ok(()),
            (Reach::Mapped(mapping), Motion::Copy(direction)) => {
                let at = |i: u32| {
                    let (l, r) = (local_at(pages.start + i), remote_at(pages.start + i));
                    if len >= 512 {
                        mapping.populate(r, len as usize);
                    }
                    match direction {
                        Direction::Out => (r, l),
                        Direction::In => (l, r),
                    }
                };
                // SAFETY: the remote ranges were checked against the import's length when this copy
                // was made, and the import keeps its mapping; the local ranges lie in a region that
                // the request keeps registered; they are different mappings.
                unsafe { copier.copy_pages(pages.len() as u32, len as usize, at) };
                return Ok(());
            }
            (Reach::Process(pid), Motion::Copy(direction)) => (*pid, direction),
        };
        let cut = |at: &dyn Fn(u32) -> usize| -> Vec<Piece> {
            pages.clone().map(|i| piece(at(i), len as usize)).collect()
        };
        let (mut l, mut r) = (cut(&local_at), cut(&remote_at));
        // SAFETY: the local ranges lie in a region that the request keeps registered.
        unsafe { across(pid, direction, &mut l, &mut r) }.map_err(no_longer)
    }
}

impl Copy<'_> {
    /// By the copy engine of a GPU. The copies have ended when this returns, so that the count comes
    /// after them (IC-2).
    fn by_engine(
        &self,
        device: i32,
        pages: std::ops::Range<u32>,
        len: u64,
        (local_at, remote_at): (&dyn Fn(u32) -> usize, &dyn Fn(u32) -> usize),
    ) -> Result<(), DomainError> {
        let (direction, pid) = match (self.motion, &self.import.reach) {
            (Motion::Touch, _) => return Ok(()),
            (Motion::Copy(direction), Reach::Process(pid)) => (direction, Some(*pid)),
            (Motion::Copy(direction), _) => (direction, None),
        };
        let failed = |e: DomainError| DomainError::Refused(e.to_string());
        if let Some(pid) = pid {
            let mut buffer = vec![0u8; len.min(BOUNCE) as usize];
            let parts = len.div_ceil(BOUNCE);
            for (page, part) in pages.flat_map(|page| (0..parts).map(move |part| (page, part))) {
                let from = (part * BOUNCE) as usize;
                let n = BOUNCE.min(len - part * BOUNCE) as usize;
                let (local, there) = (local_at(page) + from, remote_at(page) + from);
                let middle = buffer.as_mut_ptr() as usize;
                let (mut l, mut r) = ([piece(middle, n)], [piece(there, n)]);
                // SAFETY: the local range lies in a region that the request keeps registered; the
                // buffer holds `n` bytes and is ours.
                unsafe {
                    match direction {
                        Direction::Out => {
                            let out = device::Piece { to: middle, from: local, len: n };
                            device::copy_now(device, &[out]).map_err(failed)?;
                            across(pid, direction, &mut l, &mut r).map_err(no_longer)?;
                        }
                        Direction::In => {
                            across(pid, direction, &mut l, &mut r).map_err(no_longer)?;
                            let inward = device::Piece { to: local, from: middle, len: n };
                            device::copy_now(device, &[inward]).map_err(failed)?;
                        }
                    }
                }
            }
            return Ok(());
        }
        let pieces: Vec<device::Piece> = pages
            .map(|i| {
                let (to, from) = match direction {
                    Direction::Out => (remote_at(i), local_at(i)),
                    Direction::In => (local_at(i), remote_at(i)),
                };
                device::Piece { to, from, len: len as usize }
            })
            .collect();
        // SAFETY: the local ranges lie in a region that the request keeps registered, the remote ones
        // in an import that was checked against the owner's word and keeps its mapping.
        unsafe { device::copy_now(device, &pieces) }.map_err(failed)
    }
}

/// What the kernel says of another process's memory.
fn no_longer(e: Errno) -> DomainError {
    match e {
        Errno::SRCH => DomainError::LinkDown("its process has ended".into()),
        Errno::FAULT => DomainError::Refused(
            "the memory behind the region is not there any more; its owner must deregister before \
             it frees"
                .into(),
        ),
        errno => DomainError::Io { call: "process_vm_writev", errno },
    }
}
