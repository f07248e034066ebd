//! The library's objects as Rust values that close themselves, and the calls on them.
//!
//! An object holds its parents by reference count, so it is closed before them. One thread calls at
//! a time (`FI_THREAD_DOMAIN`); the group's lock guarantees it.

mod contexts;
mod queue;

use std::{
    ffi::{c_int, c_void},
    os::fd::RawFd,
    ptr::null_mut,
    sync::Arc,
};

use fabric_sys::libfabric::{self as fi, flag, FiAddr};

pub(super) use contexts::Contexts;
pub(super) use queue::{Failure, Polled};

use super::{
    info::OwnedInfo,
    library::{self, Api},
};
use crate::domain::DomainError;

/// The library's code for "try again".
pub(super) const EAGAIN: i64 = -(libc::EAGAIN as i64);

/// `FI_OPT_EFA_EMULATED_WRITE`; versions without it return an error.
const EFA_EMULATED_WRITE: c_int = -(0xefa << 16) + 2;

/// An object of the library; closed when dropped.
struct Object {
    fid: *mut fi::Fid,
    _parents: Vec<Arc<Object>>,
}

// SAFETY: libfabric's objects are not bound to threads; calls are serialised by the group's lock.
unsafe impl Send for Object {}
// SAFETY: as above; shared references are used only under the lock.
unsafe impl Sync for Object {}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: the object was opened and is closed once, here, before its parents.
        let code = unsafe { ((*(*self.fid).ops).close)(self.fid) };
        if code != 0 {
            tracing::warn!(code, "can't close an object of libfabric");
        }
    }
}

fn object(fid: *mut fi::Fid, parents: &[&Arc<Object>]) -> Arc<Object> {
    Arc::new(Object { fid, _parents: parents.iter().map(|p| Arc::clone(p)).collect() })
}

/// A registration; ends when dropped.
pub(super) struct Mr {
    object: Arc<Object>,
    pub key: u64,
}

impl Mr {
    /// The descriptor for local operations.
    pub fn desc(&self) -> *mut c_void {
        // SAFETY: a `fid_mr` begins with its `fid`, and lives as long as `object`.
        unsafe { (*self.object.fid.cast::<fi::FidMr>()).desc }
    }
}

/// One NIC: its domain, endpoint, addresses and completions.
pub(super) struct Nic {
    api: Api,
    // Field order is drop order.
    ep: Arc<Object>,
    cq: Arc<Object>,
    av: Arc<Object>,
    domain: Arc<Object>,
    fabric: Arc<Object>,
    info: OwnedInfo,
    /// Readable when there is work; `None` if the NIC must be polled.
    pub wait_fd: Option<RawFd>,
}

/// Memory to register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub base: usize,
    pub len: u64,
    /// The CUDA index of the GPU that holds it.
    pub gpu: Option<i32>,
    /// A dma-buf, and the offset of the memory in it.
    pub dmabuf: Option<(RawFd, u64)>,
}

impl Extent {
    /// `iface`, `device` and the flags of `fi_mr_regattr`.
    fn kind(&self) -> (c_int, u64, u64) {
        let Some(gpu) = self.gpu else { return (fi::HMEM_SYSTEM, 0, 0) };
        let mut device = [0; 8];
        device[..4].copy_from_slice(&gpu.to_ne_bytes());
        let flags = self.dmabuf.map_or(0, |_| flag::MR_DMABUF);
        (fi::HMEM_CUDA, u64::from_ne_bytes(device), flags)
    }
}

/// Local and remote position of a transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub local: usize,
    pub desc: *mut c_void,
    pub len: u64,
    pub remote: u64,
    pub key: u64,
}

/// Opens an object by a call that stores a pointer to it.
fn opened<T>(
    api: &Api,
    call: &str,
    open: impl FnOnce(*mut *mut T) -> c_int,
) -> Result<*mut T, DomainError> {
    let mut out = null_mut();
    match open(&mut out) {
        0 => Ok(out),
        code => Err(api.fail(call, code.into())),
    }
}

impl Nic {
    pub fn open(api: Api, info: OwnedInfo, cq_entries: usize) -> Result<Self, DomainError> {
        let raw = info.raw();
        // SAFETY: `info` was allocated by the library; each object is opened from an open one, and
        // bound before the endpoint is enabled, as fi_endpoint(3) requires.
        unsafe {
            let fabric = opened(&api, "fi_fabric", |out| {
                (api.fns.fabric)((*raw).fabric_attr, out, null_mut())
            })?;
            let fabric_object = object(fabric.cast(), &[]);
            let domain = opened(&api, "fi_domain", |out| {
                ((*(*fabric).ops).domain)(fabric, raw, out, null_mut())
            })?;
            let domain_object = object(domain.cast(), &[&fabric_object]);
            let mut attr: fi::AvAttr = std::mem::zeroed();
            attr.kind = fi::AV_TABLE;
            let av = opened(&api, "fi_av_open", |out| {
                ((*(*domain).ops).av_open)(domain, &mut attr, out, null_mut())
            })?;
            let av_object = object(av.cast(), &[&domain_object]);
            let (cq, waits) = queue::open_cq(&api, domain, cq_entries)?;
            let cq_object = object(cq.cast(), &[&domain_object]);
            let ep = opened(&api, "fi_endpoint", |out| {
                ((*(*domain).ops).endpoint)(domain, raw, out, null_mut())
            })?;
            let ep_object = object(ep.cast(), &[&domain_object, &av_object, &cq_object]);
            let ops = (*ep_object.fid).ops;
            let check = |call, code: c_int| match code {
                0 => Ok(()),
                code => Err(api.fail(call, code.into())),
            };
            check("fi_ep_bind", ((*ops).bind)(ep_object.fid, av_object.fid, 0))?;
            let both = flag::SEND | flag::RECV;
            check("fi_ep_bind", ((*ops).bind)(ep_object.fid, cq_object.fid, both))?;
            check("fi_enable", ((*ops).control)(ep_object.fid, fi::ENABLE, null_mut()))?;
            let wait_fd = waits.then(|| queue::wait_fd(cq_object.fid)).flatten();
            Ok(Self {
                api,
                ep: ep_object,
                cq: cq_object,
                av: av_object,
                domain: domain_object,
                fabric: fabric_object,
                info,
                wait_fd,
            })
        }
    }

    fn ep(&self) -> *mut fi::FidEp {
        self.ep.fid.cast()
    }

    /// The endpoint's address for peers.
    pub fn name(&self) -> Result<Vec<u8>, DomainError> {
        let mut name = vec![0u8; 512];
        let mut len = name.len();
        // SAFETY: the endpoint is enabled; `len` is the size of `name`.
        let code = unsafe {
            let cm = (*self.ep()).cm;
            ((*cm).getname)(self.ep.fid, name.as_mut_ptr().cast(), &mut len)
        };
        if code != 0 || len > name.len() {
            return Err(self.api.fail("fi_getname", code.into()));
        }
        name.truncate(len);
        Ok(name)
    }

    /// Whether peers in this process access the endpoint's memory directly.
    pub fn shares_queues(&self) -> bool {
        self.info.offer.provider.split(';').any(|p| p == "shm")
    }

    /// Unlinks the shared memory by which peers on this host find the endpoint.
    pub fn unlink(&self) {
        let name = self.name().ok().and_then(|n| String::from_utf8(n).ok()).unwrap_or_default();
        let name = name.trim_end_matches('\0').rsplit("://").next().unwrap_or_default();
        if let Ok(name) = std::ffi::CString::new(name) {
            // SAFETY: the string lives through the call.
            unsafe { libc::shm_unlink(name.as_ptr()) };
        }
    }

    /// Whether the provider fails transfers to an address that is removed: it closes the connection
    /// (see [`super::library`]).
    pub fn aborts_on_remove(&self) -> bool {
        self.info.offer.provider.split(';').next() == Some("tcp") && library::cleanup_enabled()
    }

    /// Whether connections can be closed while the bytes of a read arrive. The tcp provider before
    /// 1.18 then ends the read twice, the second time from freed memory.
    pub fn closes_during_reads(&self) -> bool {
        let is_tcp = self.info.offer.provider.split(';').any(|p| p == "tcp");
        !is_tcp || self.api.found >= library::TCP_ENDS_READS_ONCE
    }

    /// Whether an address must never be removed: the shm provider (1.17 to 1.22 at least) keeps what
    /// it knew of the peer under the entry's number, and gives the number to the next address. A
    /// message to that one goes by the old peer's word, or through a null pointer if it is gone.
    pub fn keeps_addresses(&self) -> bool {
        self.shares_queues()
    }

    /// An error if registrations can't use a dma-buf.
    pub fn supports_dmabuf(&self) -> Result<(), DomainError> {
        match self.api.supports_dmabuf() {
            true => Ok(()),
            false => Err(DomainError::Unavailable(format!(
                "libfabric {} has no dma-buf support; use 1.20 or later",
                library::dotted(self.api.found)
            ))),
        }
    }

    /// Whether `efa` emulates writes in software. If so, the end of a registration does not end
    /// transfers under way.
    pub fn emulates_writes(&self) -> bool {
        if !self.info.offer.is_efa() {
            return false;
        }
        let (mut value, mut len) = (true, size_of::<bool>());
        // SAFETY: the option is a `bool`; `len` is its size.
        let code = unsafe {
            let ops = (*self.ep()).ops;
            ((*ops).getopt)(self.ep.fid, 0, EFA_EMULATED_WRITE, (&raw mut value).cast(), &mut len)
        };
        code != 0 || value
    }

    /// Adds a peer's address. Its length is bounded; its content is unchecked, and the library
    /// takes it for an address of its own format.
    pub fn insert(&self, address: &[u8]) -> Result<FiAddr, DomainError> {
        let mut addr = fi::ADDR_UNSPEC;
        let av = self.av.fid.cast::<fi::FidAv>();
        // Providers read as many bytes as the format has: pad with zeros.
        let mut padded = address.to_vec();
        padded.resize(address.len() + 256, 0);
        // SAFETY: the library reads one address from `padded` and writes one number to `addr`.
        let n = unsafe {
            ((*(*av).ops).insert)(av, padded.as_ptr().cast(), 1, &mut addr, 0, null_mut())
        };
        match n {
            1 if addr != fi::ADDR_UNSPEC => Ok(addr),
            n => {
                let why = if n < 0 { self.api.strerror(n.into()) } else { "not accepted".into() };
                Err(DomainError::LinkDown(format!("the peer's address can't be used: {why}")))
            }
        }
    }

    pub fn remove(&self, addr: FiAddr) {
        let mut addr = addr;
        let av = self.av.fid.cast::<fi::FidAv>();
        // SAFETY: the address was inserted and no local operation uses it any more.
        let code = unsafe { ((*(*av).ops).remove)(av, &mut addr, 1, 0) };
        if code != 0 {
            tracing::debug!(code, "can't remove an address");
        }
    }

    /// Registers host memory for local and remote access.
    ///
    /// # Safety
    /// The bytes must stay mapped until the registration is dropped.
    pub unsafe fn register(&self, base: usize, len: u64, key: u64) -> Result<Mr, DomainError> {
        let extent = Extent { base, len, gpu: None, dmabuf: None };
        // SAFETY: by this function's contract.
        unsafe { self.register_extent(&extent, key) }
    }

    /// Registers host or GPU memory.
    ///
    /// # Safety
    /// The extent must stay allocated until the registration is dropped.
    pub unsafe fn register_extent(&self, extent: &Extent, key: u64) -> Result<Mr, DomainError> {
        let (base, len) = (extent.base as *mut c_void, extent.len as usize);
        let iov = libc::iovec { iov_base: base, iov_len: len };
        let (iface, device, flags) = extent.kind();
        let (fd, offset) = extent.dmabuf.unwrap_or((-1, 0));
        let base_addr = base.wrapping_byte_sub(offset as usize);
        let dmabuf = fi::MrDmabuf { fd, offset, len, base_addr };
        // SAFETY: zeros are valid for plain numbers and null pointers.
        let mut attr: fi::MrAttr = unsafe { std::mem::zeroed() };
        attr.mr_iov = match flags & flag::MR_DMABUF {
            0 => &iov,
            _ => (&raw const dmabuf).cast(),
        };
        attr.iov_count = 1;
        attr.access = flag::SEND
            | flag::RECV
            | flag::READ
            | flag::WRITE
            | flag::REMOTE_READ
            | flag::REMOTE_WRITE;
        attr.requested_key = key;
        (attr.iface, attr.device) = (iface, device);
        let domain = self.domain.fid.cast::<fi::FidDomain>();
        // SAFETY: the attributes live until the call returns; the bytes stay by this function's
        // contract. With FI_MR_ENDPOINT the registration is bound and enabled before its key is
        // read.
        unsafe {
            let mr = opened(&self.api, "fi_mr_regattr", |out| {
                ((*(*domain).mr).regattr)(self.domain.fid, &attr, flags, out)
            })?;
            let per_endpoint = self.info.offer.mr_mode & fi::mr_mode::ENDPOINT != 0;
            let parent = if per_endpoint { &self.ep } else { &self.domain };
            let object = object(mr.cast(), &[parent]);
            if per_endpoint {
                let ops = (*object.fid).ops;
                let code = ((*ops).bind)(object.fid, self.ep.fid, 0);
                let code = if code == 0 {
                    ((*ops).control)(object.fid, fi::ENABLE, null_mut())
                } else {
                    code
                };
                if code != 0 {
                    return Err(self.api.fail("fi_mr_enable", code.into()));
                }
            }
            Ok(Mr { key: (*mr).key, object })
        }
    }

    /// Posts a write, optionally with an immediate. False if the provider has no room.
    ///
    /// # Safety
    /// The local bytes, their registration and `context` must stay until the completion.
    pub unsafe fn write(
        &self,
        to: FiAddr,
        span: &Span,
        imm: Option<u32>,
        context: *mut c_void,
    ) -> Result<bool, DomainError> {
        let mut flags = flag::COMPLETION | flag::DELIVERY_COMPLETE;
        if imm.is_some() {
            flags |= flag::REMOTE_CQ_DATA;
        }
        // SAFETY: by this function's contract.
        unsafe { self.rma(to, span, imm.unwrap_or(0), context, flags, true) }
    }

    /// Posts a read. False if the provider has no room.
    ///
    /// # Safety
    /// As for [`Nic::write`].
    pub unsafe fn read(
        &self,
        from: FiAddr,
        span: &Span,
        context: *mut c_void,
    ) -> Result<bool, DomainError> {
        // Without this flag the shm provider copies by itself and skips the key check.
        let flags = flag::COMPLETION | flag::DELIVERY_COMPLETE;
        // SAFETY: by this function's contract.
        unsafe { self.rma(from, span, 0, context, flags, false) }
    }

    /// Posts a write or a read with a completion.
    ///
    /// # Safety
    /// As for [`Nic::write`].
    unsafe fn rma(
        &self,
        addr: FiAddr,
        span: &Span,
        data: u32,
        context: *mut c_void,
        flags: u64,
        write: bool,
    ) -> Result<bool, DomainError> {
        let iov = libc::iovec { iov_base: span.local as *mut c_void, iov_len: span.len as usize };
        let remote = fi::RmaIov { addr: span.remote, len: span.len as usize, key: span.key };
        let mut desc = span.desc;
        let msg = fi::MsgRma {
            iov: &iov,
            desc: &mut desc,
            iov_count: 1,
            addr,
            rma_iov: &remote,
            rma_iov_count: 1,
            context,
            data: data.into(),
        };
        // SAFETY: the message is read during the call; the rest holds by this function's contract.
        let code = unsafe {
            let ops = (*self.ep()).rma;
            match write {
                true => ((*ops).writemsg)(self.ep(), &msg, flags),
                false => ((*ops).readmsg)(self.ep(), &msg, flags),
            }
        };
        self.posted(if write { "fi_writemsg" } else { "fi_readmsg" }, code as i64)
    }

    /// Posts a send. False if the provider has no room.
    ///
    /// # Safety
    /// The bytes, their registration and `context` must stay until the completion.
    pub unsafe fn send(
        &self,
        to: FiAddr,
        bytes: usize,
        len: usize,
        desc: *mut c_void,
        context: *mut c_void,
    ) -> Result<bool, DomainError> {
        let iov = libc::iovec { iov_base: bytes as *mut c_void, iov_len: len };
        let mut desc = desc;
        let msg = fi::Msg { iov: &iov, desc: &mut desc, iov_count: 1, addr: to, context, data: 0 };
        // Delivery completion, because providers that reconnect lose messages that were only sent.
        let flags = flag::COMPLETION | flag::DELIVERY_COMPLETE;
        // SAFETY: as for `rma`.
        let code = unsafe { ((*(*self.ep()).msg).sendmsg)(self.ep(), &msg, flags) };
        self.posted("fi_sendmsg", code as i64)
    }

    /// Posts a receive slot. False if the provider has no room.
    ///
    /// # Safety
    /// As for [`Nic::send`]; the bytes must not be accessed until then.
    pub unsafe fn receive(
        &self,
        bytes: usize,
        len: usize,
        desc: *mut c_void,
        context: *mut c_void,
    ) -> Result<bool, DomainError> {
        let iov = libc::iovec { iov_base: bytes as *mut c_void, iov_len: len };
        let mut desc = desc;
        let addr = fi::ADDR_UNSPEC;
        let msg = fi::Msg { iov: &iov, desc: &mut desc, iov_count: 1, addr, context, data: 0 };
        // SAFETY: as for `rma`.
        let code = unsafe { ((*(*self.ep()).msg).recvmsg)(self.ep(), &msg, flag::COMPLETION) };
        self.posted("fi_recvmsg", code as i64)
    }

    fn posted(&self, call: &str, code: i64) -> Result<bool, DomainError> {
        match code {
            0 => Ok(true),
            EAGAIN => Ok(false),
            code => Err(self.api.fail(call, code)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_memory_is_registered_by_device_and_dmabuf() {
        let host = Extent { base: 4096, len: 64, gpu: None, dmabuf: None };
        assert_eq!(host.kind(), (fi::HMEM_SYSTEM, 0, 0));
        let gpu = Extent { gpu: Some(3), ..host };
        let (iface, device, flags) = gpu.kind();
        assert_eq!((iface, flags), (fi::HMEM_CUDA, 0));
        // The union's `int`.
        assert_eq!(device.to_ne_bytes()[..4], 3i32.to_ne_bytes());
        let (_, _, flags) = Extent { dmabuf: Some((5, 0)), ..gpu }.kind();
        assert_eq!(flags, flag::MR_DMABUF);
    }
}
