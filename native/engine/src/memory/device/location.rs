//! The location of memory, as CUDA reports it.

use std::{os::fd::OwnedFd, sync::Arc};

use fabric_sys::cuda::{self as sys, pointer};

use super::driver::Driver;
use crate::{error::DomainError, memory::file::FileMemory, EngineError, Result};

/// Location of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Location {
    #[default]
    Host,
    /// On the host or wherever it was used last; processors reach it like any other.
    Managed,
    Cuda(CudaRange),
    /// In a file: what stands for an address is the offset in it.
    File(Arc<FileMemory>),
}

/// A part of a GPU's memory, and the allocation that it is a part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaRange {
    /// The device's number in this process.
    pub device: i32,
    /// PCI address of the GPU.
    pub pci: String,
    /// Start of the allocation; for memory mapped piecewise, of the range itself.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    pub kind: CudaKind,
}

/// Allocation method of device memory, which decides which processes can map it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaKind {
    /// cudaMalloc, as torch's allocator does by default: other processes can map it.
    Malloc,
    /// The same, which this process can't export: another process has exported it to this one, or
    /// the driver has no IPC.
    Private,
    /// cudaMallocAsync.
    Pool,
    /// Mapped piecewise (cuMemMap), as torch's expandable segments are.
    Mapped,
}

/// A dma-buf and where the range begins in it.
#[derive(Debug)]
pub struct Dmabuf {
    pub fd: OwnedFd,
    pub offset: u64,
}

/// The location of `len` bytes at `addr`. It costs nothing in a process that doesn't use CUDA.
pub fn locate(addr: usize, len: u64) -> Result<Location> {
    let Some(driver) = Driver::in_use() else { return Ok(Location::Host) };
    locate_by(driver, addr as u64, len)
}

fn locate_by(driver: &'static Driver, addr: u64, len: u64) -> Result<Location> {
    let failed = |e: DomainError| EngineError::Resource {
        call: "register",
        cause: e.to_string(),
        hint: "CUDA must be usable in this process".into(),
    };
    let [kind, device, managed, legacy, base, size] = driver
        .attributes(
            [
                pointer::MEMORY_TYPE,
                pointer::DEVICE_ORDINAL,
                pointer::IS_MANAGED,
                pointer::IS_LEGACY_CUDA_IPC_CAPABLE,
                pointer::RANGE_START_ADDR,
                pointer::RANGE_SIZE,
            ],
            addr,
        )
        .map_err(failed)?;
    if managed as u32 != 0 {
        return Ok(Location::Managed);
    }
    if kind as u32 != sys::MEMORYTYPE_DEVICE {
        return Ok(Location::Host);
    }
    let device = device as u32 as i32;
    // Drivers before 11.3 don't know pools.
    let pool = driver.attributes([pointer::MEMPOOL_HANDLE], addr).is_ok_and(|[h]| h != 0);
    // The attribute is that of the allocation, whichever process made it.
    let exports = || driver.export(device, base).is_ok();
    let kind = match (legacy as u32 != 0, pool) {
        (true, _) if exports() => CudaKind::Malloc,
        (true, _) => CudaKind::Private,
        (_, true) => CudaKind::Pool,
        _ => CudaKind::Mapped,
    };
    let last = driver.attributes([pointer::MEMORY_TYPE, pointer::DEVICE_ORDINAL], addr + len - 1);
    let [last_kind, last_device] = last.map_err(failed)?;
    let inside = match kind {
        CudaKind::Malloc | CudaKind::Private => contains((base, size), (addr, len)),
        // Neighbouring pieces are as good as one, as long as the device is the same.
        _ => (last_kind as u32, last_device as u32 as i32) == (sys::MEMORYTYPE_DEVICE, device),
    };
    if !inside {
        return Err(EngineError::Invalid(format!(
            "{len} bytes at {addr:#x} pass the end of their allocation on cuda:{device}"
        )));
    }
    let (base, len) = match kind {
        CudaKind::Malloc | CudaKind::Private => (base, size),
        CudaKind::Pool | CudaKind::Mapped => (addr, len),
    };
    let pci = driver.device(device).map_err(failed)?.pci.clone();
    Ok(Location::Cuda(CudaRange { device, pci, base, len, kind }))
}

fn contains((base, size): (u64, u64), (addr, len): (u64, u64)) -> bool {
    let from = addr.checked_sub(base);
    from.and_then(|from| from.checked_add(len)).is_some_and(|end| end <= size)
}

impl Location {
    /// The device range, unless processors reach the memory.
    pub fn cuda(&self) -> Option<&CudaRange> {
        match self {
            Self::Cuda(range) => Some(range),
            Self::Host | Self::Managed | Self::File(_) => None,
        }
    }

    /// The file, if it lies in one.
    pub fn file(&self) -> Option<&Arc<FileMemory>> {
        match self {
            Self::File(file) => Some(file),
            Self::Host | Self::Managed | Self::Cuda(_) => None,
        }
    }

    /// Whether processors reach it by an address.
    pub fn is_host(&self) -> bool {
        matches!(self, Self::Host | Self::Managed)
    }

    /// Whether other processes of this host can map it by CUDA's IPC.
    pub fn is_exportable(&self) -> bool {
        self.cuda().is_some_and(|r| r.kind == CudaKind::Malloc)
    }
}

impl CudaRange {
    /// What can be exported: the whole allocation, in whole pages; a range of its own where the
    /// allocation's end isn't known.
    pub fn segment(&self) -> (u64, u64) {
        pages(self.base, self.len)
    }

    /// The segment as a dma-buf, and where `addr` lies in it.
    pub fn dmabuf(&self, addr: u64) -> std::result::Result<Dmabuf, DomainError> {
        let driver = Driver::open()?;
        // Also for drivers that use peermem instead of a dma-buf.
        if matches!(self.kind, CudaKind::Malloc | CudaKind::Private) {
            driver.sync_memops(self.device, self.base)?;
        }
        if !driver.device_attribute(self.device, sys::DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? {
            return Err(DomainError::Unavailable(format!(
                "the kernel driver of {} exports no dma-buf (it needs Linux 5.12 and NVIDIA's open \
                 kernel modules); load the nvidia-peermem module instead",
                self.pci
            )));
        }
        let (base, len) = self.segment();
        let fd = driver.dmabuf(self.device, base, len).map_err(|e| self.explained(&e))?;
        Ok(Dmabuf { fd, offset: addr - base })
    }

    /// Why this memory in particular can't be handed out, and what to change.
    fn explained(&self, e: &DomainError) -> DomainError {
        let remedy = match self.kind {
            CudaKind::Malloc | CudaKind::Private => "",
            CudaKind::Pool => {
                "; the memory comes from cudaMallocAsync: take `backend:cudaMallocAsync` out of \
                 PYTORCH_CUDA_ALLOC_CONF"
            }
            CudaKind::Mapped => {
                "; the memory is mapped piecewise: set `expandable_segments:False` in \
                 PYTORCH_CUDA_ALLOC_CONF"
            }
        };
        DomainError::Unavailable(format!("{e}{remedy}"))
    }
}

/// The range widened to whole pages.
fn pages(base: u64, len: u64) -> (u64, u64) {
    let page = rustix::param::page_size() as u64;
    let from = base / page * page;
    (from, (base + len).next_multiple_of(page) - from)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn without_cuda_everything_is_host_memory() {
        if Driver::in_use().is_none() {
            let word = 7u64;
            let addr = std::ptr::from_ref(&word) as usize;
            assert_eq!(locate(addr, 8).unwrap(), Location::Host);
        }
    }

    #[test]
    fn memory_that_cannot_be_handed_out_names_the_setting() {
        for (kind, setting) in
            [(CudaKind::Pool, "cudaMallocAsync"), (CudaKind::Mapped, "expandable_segments:False")]
        {
            let range = CudaRange { device: 0, pci: String::new(), base: 0, len: 1, kind };
            let e = range.explained(&DomainError::Unavailable("no".into())).to_string();
            assert!(e.contains(setting) && e.contains("PYTORCH_CUDA_ALLOC_CONF"), "{e}");
            assert!(!Location::Cuda(range).is_exportable());
        }
    }

    proptest! {
        #[test]
        fn widened_ranges_hold_the_range_and_begin_and_end_at_pages(
            base in 0u64..1 << 47,
            len in 1u64..1 << 40,
        ) {
            let page = rustix::param::page_size() as u64;
            let (from, n) = pages(base, len);
            prop_assert!(from % page == 0 && n % page == 0);
            prop_assert!(contains((from, n), (base, len)));
            prop_assert!(n < len + 2 * page);
        }

        #[test]
        fn nothing_outside_an_allocation_is_inside(
            base in any::<u64>(), size in any::<u64>(), addr in any::<u64>(), len in 1u64..,
        ) {
            let wide = |n: u64| u128::from(n);
            let truly = addr >= base && wide(addr) + wide(len) <= wide(base) + wide(size);
            prop_assert_eq!(contains((base, size), (addr, len)), truly);
        }
    }
}
