//! Unsafe code of the verbs transport, part 2: registered memory.

use std::{os::fd::RawFd, ptr::NonNull, sync::Arc};

use fabric_sys::ibverbs as sys;
use rustix::io::Errno;

use super::raw::Pd;
use crate::domain::DomainError;

/// Access rights of memory that peers write and read.
pub(super) const PEER_ACCESS: i32 =
    sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE | sys::ACCESS_REMOTE_READ;

/// A registration. After a drop without an error, the NIC can't reach the memory.
#[derive(Debug)]
pub(super) struct Mr {
    raw: Option<NonNull<sys::Mr>>,
    pd: Arc<Pd>,
    pub lkey: u32,
    pub rkey: u32,
    /// The NIC's address of the first byte.
    pub iova: u64,
}

// SAFETY: libibverbs' objects may be used by any thread, and by several at once.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `len` bytes at `addr`, which stay allocated until [`Mr::release`]. The NIC may
    /// reorder its writes where it can: the completion of an immediate is an ordered write, which
    /// does not pass earlier ones on PCIe (PCIe 2.4.1, table 2-40, A2a).
    ///
    /// The NIC addresses the first byte by `iova` if the library supports it, else by its address.
    pub fn new(
        pd: &Arc<Pd>,
        addr: usize,
        len: u64,
        (iova, access): (u64, i32),
    ) -> Result<Self, DomainError> {
        let (at, n, lib) = (addr as *mut libc::c_void, len as usize, pd.context.lib);
        let named = lib.reg_mr_iova2.filter(|_| access != sys::ACCESS_LOCAL_WRITE);
        // SAFETY: registering pins pages and touches no byte; an unmapped address is an error. The
        // caller guarantees that the memory stays allocated.
        let raw = unsafe {
            match named {
                Some(reg) => {
                    let access = (access | sys::ACCESS_RELAXED_ORDERING) as u32;
                    reg(pd.ptr(), at, n, iova, access)
                }
                None => (lib.reg_mr)(pd.ptr(), at, n, access),
            }
        };
        Self::made(pd, raw, (named.map_or(addr as u64, |_| iova), len))
    }

    /// Registers `len` bytes from `offset` of a dma-buf; the NIC addresses them by `iova`.
    pub fn of_dmabuf(
        pd: &Arc<Pd>,
        (fd, offset): (RawFd, u64),
        iova: u64,
        len: u64,
    ) -> Result<Self, DomainError> {
        let Some(reg) = pd.context.lib.reg_dmabuf_mr else {
            return Err(DomainError::Unavailable(
                "this libibverbs has no ibv_reg_dmabuf_mr; rdma-core 34 or later does".into(),
            ));
        };
        // SAFETY: the kernel checks descriptor and range; the call uses no address of this process.
        let raw = unsafe { reg(pd.ptr(), offset, len as usize, iova, fd, PEER_ACCESS) };
        Self::made(pd, raw, (iova, len))
    }

    fn made(pd: &Arc<Pd>, raw: *mut sys::Mr, (iova, len): (u64, u64)) -> Result<Self, DomainError> {
        let Some(raw) = NonNull::new(raw) else {
            let error = std::io::Error::last_os_error();
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            return Err(registration_error(errno, len));
        };
        // SAFETY: the registration was made.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Self { raw: Some(raw), pd: Arc::clone(pd), lkey, rkey, iova })
    }

    /// Ends the registration. On an error the NIC may still reach the memory, which must be kept
    /// (MR-1).
    pub fn release(&mut self) -> Result<(), DomainError> {
        let Some(raw) = self.raw else { return Ok(()) };
        // SAFETY: the registration exists.
        match unsafe { (self.pd.context.lib.dereg_mr)(raw.as_ptr()) } {
            0 => {
                self.raw = None;
                Ok(())
            }
            rc => Err(DomainError::Io {
                call: "ibv_dereg_mr",
                errno: Errno::from_raw_os_error(rc.abs()),
            }),
        }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::error!(%error, "can't end a registration");
        }
    }
}

/// Why memory can't be registered, and a remedy.
pub(super) fn registration_error(errno: Errno, len: u64) -> DomainError {
    let hint = match errno {
        Errno::NOMEM | Errno::PERM => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or("unlimited".to_owned(), |n| format!("{n} bytes"));
            format!(
                "locked memory (RLIMIT_MEMLOCK) is limited to {limit}; raise it with `ulimit -l \
                 unlimited`, in /etc/security/limits.conf, or with --ulimit memlock=-1 for a \
                 container"
            )
        }
        Errno::FAULT | Errno::INVAL => {
            "the range is not ordinary mapped memory; device memory needs a dma-buf or the \
             nvidia-peermem module"
                .into()
        }
        Errno::OPNOTSUPP => "this NIC's driver can't take it".into(),
        _ => "see dmesg".into(),
    };
    DomainError::Unavailable(format!("the NIC can't register {len} bytes: {errno}; {hint}"))
}

/// Registered buffers of the transport itself, all of one size.
pub(super) struct Slots {
    // Dropped first: the registration ends before the memory is freed.
    mr: Mr,
    base: NonNull<u8>,
    layout: std::alloc::Layout,
    each: usize,
    n: usize,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Slots {}

impl std::fmt::Debug for Slots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slots({} of {} bytes)", self.n, self.each)
    }
}

impl Slots {
    pub fn new(pd: &Arc<Pd>, n: usize, each: usize) -> Result<Self, DomainError> {
        let len = (n * each).max(1).next_multiple_of(4096);
        let layout = std::alloc::Layout::from_size_align(len, 4096)
            .map_err(|e| DomainError::Unavailable(e.to_string()))?;
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
            .ok_or_else(|| DomainError::Unavailable(format!("no memory for {len} bytes")))?;
        let mr = Mr::new(pd, base.as_ptr() as usize, len as u64, (0, sys::ACCESS_LOCAL_WRITE));
        match mr {
            Ok(mr) => Ok(Self { mr, base, layout, each, n }),
            Err(e) => {
                // SAFETY: allocated above with this layout.
                unsafe { std::alloc::dealloc(base.as_ptr(), layout) };
                Err(e)
            }
        }
    }

    pub fn sge(&self, i: usize, len: usize) -> sys::Sge {
        assert!(i < self.n && len <= self.each);
        let addr = self.base.as_ptr() as u64 + (i * self.each) as u64;
        sys::Sge { addr, length: len as u32, lkey: self.mr.lkey }
    }

    /// The whole slot, for a receive request.
    pub fn whole(&self, i: usize) -> sys::Sge {
        self.sge(i, self.each)
    }

    /// The bytes of a slot. The caller has seen the completion, so the NIC is not writing to it.
    pub fn read(&self, i: usize, len: usize) -> &[u8] {
        assert!(i < self.n && len <= self.each);
        // SAFETY: inside the allocation, as asserted; the caller has seen that the NIC is done
        // writing.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(i * self.each), len) }
    }

    /// A slot to fill. The caller has seen the completion, so the NIC is not reading it.
    pub fn fill(&mut self, i: usize) -> &mut [u8] {
        assert!(i < self.n);
        // SAFETY: inside the allocation, as asserted, and borrowed from `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(i * self.each), self.each) }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // Memory that the NIC may still write to is leaked.
        if self.mr.release().is_ok() {
            // SAFETY: allocated with this layout; the NIC can't reach it.
            unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
        }
    }
}
