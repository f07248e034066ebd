//! One copy between local memory and an imported region: by CPU, kernel or copy engine, in chunks.

use rustix::io::Errno;

use super::{
    imports::{Import, RegionAccess},
    raw::{io_range, process_vm_copy, Direction, IoRange},
};
use crate::{
    domain::{Data, DomainError},
    memory::{device, Copier},
};

/// Bytes that one thread copies per chunk: some hundred microseconds.
const CHUNK: u64 = 1 << 20;
/// Ranges per system call; IOV_MAX is 1024.
const MAX_RANGES: u32 = 512;
/// Shortest copy before which page tables are filled, bytes.
pub(super) const POPULATED: u64 = 512;
/// Bytes and ranges per call of a copy engine.
const DEVICE_CHUNK: u64 = 64 << 20;
const MAX_DEVICE_RANGES: u32 = 4096;
/// Bytes per transfer between a GPU and another process's memory, through a bounce buffer.
const BOUNCE: u64 = 8 << 20;

/// The operation on the bytes of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Copy(Direction),
    /// Fill page tables, so that a later copy has no page faults.
    Populate,
}

/// A copy between local memory and an imported region.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyTask<'a> {
    pub data: &'a Data,
    pub import: &'a Import,
    pub operation: Operation,
    /// The GPU that holds the local memory.
    pub device: Option<i32>,
}

impl CopyTask<'_> {
    /// The GPU whose copy engine copies, if CPUs can't.
    fn copy_engine(&self) -> Option<i32> {
        match self.import.reach {
            RegionAccess::Device(device, _) => Some(self.device.unwrap_or(device)),
            RegionAccess::Mapped(_) | RegionAccess::Process(_) => self.device,
        }
    }

    /// Largest part of a page in one chunk, bytes, and largest number of pages.
    fn chunk(&self) -> (u64, u32) {
        match self.copy_engine() {
            Some(_) => (DEVICE_CHUNK, MAX_DEVICE_RANGES),
            None => (CHUNK, MAX_RANGES),
        }
    }

    /// Number of chunks, pages per chunk, and bytes per page of a chunk.
    pub fn cut(&self) -> (u32, u32, u64) {
        let Data { page_len, pages, .. } = *self.data;
        let (chunk, pieces) = self.chunk();
        if page_len > chunk {
            return ((page_len.div_ceil(chunk) as u32).saturating_mul(pages), 1, chunk);
        }
        let per_chunk = ((chunk / page_len.max(1)) as u32).clamp(1, pieces);
        (pages.div_ceil(per_chunk), per_chunk, page_len)
    }

    /// Copies everything on this thread.
    #[inline]
    pub fn run(&self, copier: &Copier) -> Result<(), DomainError> {
        if self.data.pages == 1 && self.data.page_len <= CHUNK {
            return self.copy_ranges(0..1, 0, self.data.page_len, copier);
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
            return self.copy_ranges(page..page + 1, from, bytes.min(page_len - from), copier);
        }
        let first = chunk * per_chunk;
        self.copy_ranges(first..(first + per_chunk).min(pages), 0, page_len, copier)
    }

    /// Copies `len` bytes from byte `from` of each page.
    #[inline]
    fn copy_ranges(
        &self,
        pages: std::ops::Range<u32>,
        from: u64,
        len: u64,
        copier: &Copier,
    ) -> Result<(), DomainError> {
        let Data { local, local_seq, remote_seq, .. } = self.data;
        let local_at = |i: u32| local.0 + (local_seq.nth(i) + from) as usize;
        let remote_at = |i: u32| self.import.base + (remote_seq.nth(i) + from) as usize;
        if let Some(device) = self.copy_engine() {
            return self.copy_by_engine(device, pages, len, (&local_at, &remote_at));
        }
        let (pid, direction) = match (&self.import.reach, self.operation) {
            (RegionAccess::Device(..), _) => return Ok(()),
            (RegionAccess::Mapped(mapping), Operation::Populate) => {
                pages.for_each(|i| mapping.populate(remote_at(i), len as usize));
                return Ok(());
            }
            (RegionAccess::Process(_), Operation::Populate) => return Ok(()),
            (RegionAccess::Mapped(mapping), Operation::Copy(direction)) => {
                let at = |i: u32| {
                    let (l, r) = (local_at(pages.start + i), remote_at(pages.start + i));
                    if len >= POPULATED {
                        mapping.populate(r, len as usize);
                    }
                    match direction {
                        Direction::Out => (r, l),
                        Direction::In => (l, r),
                    }
                };
                // SAFETY: the remote ranges were checked against the import's length when this copy
                // was made, and the import keeps its mapping. The local ranges lie in a region that
                // the request keeps registered. The mappings are different.
                unsafe { copier.copy_pages(pages.len() as u32, len as usize, at) };
                return Ok(());
            }
            (RegionAccess::Process(pid), Operation::Copy(direction)) => (*pid, direction),
        };
        let cut = |at: &dyn Fn(u32) -> usize| -> Vec<IoRange> {
            pages.clone().map(|i| io_range(at(i), len as usize)).collect()
        };
        let (mut l, mut r) = (cut(&local_at), cut(&remote_at));
        // SAFETY: the local ranges lie in a region that the request keeps registered.
        unsafe { process_vm_copy(pid, direction, &mut l, &mut r) }.map_err(memory_error)
    }
}

impl CopyTask<'_> {
    /// Copies by a GPU's copy engine. The copies have ended when this returns, so the count follows
    /// them (IC-2).
    fn copy_by_engine(
        &self,
        device: i32,
        pages: std::ops::Range<u32>,
        len: u64,
        (local_at, remote_at): (&dyn Fn(u32) -> usize, &dyn Fn(u32) -> usize),
    ) -> Result<(), DomainError> {
        let (direction, pid) = match (self.operation, &self.import.reach) {
            (Operation::Populate, _) => return Ok(()),
            (Operation::Copy(direction), RegionAccess::Process(pid)) => (direction, Some(*pid)),
            (Operation::Copy(direction), _) => (direction, None),
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
                let (mut l, mut r) = ([io_range(middle, n)], [io_range(there, n)]);
                // SAFETY: the local range lies in a region that the request keeps registered; the
                // buffer holds `n` bytes and belongs to this function.
                unsafe {
                    match direction {
                        Direction::Out => {
                            let out = device::CopyRange { to: middle, from: local, len: n };
                            device::copy_now(device, &[out]).map_err(failed)?;
                            process_vm_copy(pid, direction, &mut l, &mut r)
                                .map_err(memory_error)?;
                        }
                        Direction::In => {
                            process_vm_copy(pid, direction, &mut l, &mut r)
                                .map_err(memory_error)?;
                            let inward = device::CopyRange { to: local, from: middle, len: n };
                            device::copy_now(device, &[inward]).map_err(failed)?;
                        }
                    }
                }
            }
            return Ok(());
        }
        let pieces: Vec<device::CopyRange> = pages
            .map(|i| {
                let (to, from) = match direction {
                    Direction::Out => (remote_at(i), local_at(i)),
                    Direction::In => (local_at(i), remote_at(i)),
                };
                device::CopyRange { to, from, len: len as usize }
            })
            .collect();
        if let RegionAccess::Device(owner, _) = self.import.reach {
            let driver = device::Driver::open().map_err(failed)?;
            driver.access_peer(device, owner).map_err(failed)?;
        }
        // SAFETY: the local ranges lie in a region that the request keeps registered; the remote
        // ones in an import whose bounds were checked and that keeps its mapping.
        unsafe { device::copy_now(device, &pieces) }.map_err(failed)
    }
}

/// The error of a failed access to another process's memory.
fn memory_error(e: Errno) -> DomainError {
    match e {
        Errno::SRCH => DomainError::LinkDown("the peer's process has ended".into()),
        Errno::FAULT => DomainError::Refused(
            "the memory behind the region is unmapped; the owner must deregister before it frees"
                .into(),
        ),
        errno => DomainError::Io { call: "process_vm_writev", errno },
    }
}
