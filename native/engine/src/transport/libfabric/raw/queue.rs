//! The completion queue: reading entries, and its wait descriptor.

use std::{
    ffi::{c_int, c_void},
    os::fd::RawFd,
    ptr::null_mut,
};

use fabric_sys::libfabric::{self as fi, CqDataEntry, CqErrEntry};

use super::{opened, Nic, EAGAIN};
use crate::{domain::DomainError, transport::libfabric::library::Api};

/// `FI_EAVAIL`: an error entry is available.
const EAVAIL: i64 = -259;

/// An operation that failed, and the error text.
#[derive(Debug, Clone)]
pub(in super::super) struct Failure {
    pub context: *mut c_void,
    pub text: String,
}

/// Result of reading the completion queue.
pub(in super::super) enum Polled {
    Entries(usize),
    Failed(Failure),
    Nothing,
}

impl Nic {
    /// Reads completions; this also makes many providers progress.
    pub fn poll(&self, into: &mut [CqDataEntry]) -> Result<Polled, DomainError> {
        let cq = self.cq.fid.cast::<fi::FidCq>();
        // SAFETY: `into` has room for as many entries as are read.
        let n = unsafe { ((*(*cq).ops).read)(cq, into.as_mut_ptr().cast(), into.len()) } as i64;
        match n {
            EAGAIN | 0 => Ok(Polled::Nothing),
            EAVAIL => self.failure(),
            n if n < 0 => Err(self.api.fail("fi_cq_read", n)),
            n => Ok(Polled::Entries(n as usize)),
        }
    }

    fn failure(&self) -> Result<Polled, DomainError> {
        let cq = self.cq.fid.cast::<fi::FidCq>();
        // SAFETY: zeros are valid; the library writes one entry, and there is room for newer
        // versions' longer entry. Provider data is read before the next call.
        unsafe {
            let mut e: CqErrEntry = std::mem::zeroed();
            let n = ((*(*cq).ops).readerr)(cq, &mut e, 0) as i64;
            if n == EAGAIN {
                return Ok(Polled::Nothing);
            }
            if n < 0 {
                return Err(self.api.fail("fi_cq_readerr", n));
            }
            let mut text = self.api.strerror(e.err.into());
            let mut buffer = [0; 128];
            let more = ((*(*cq).ops).strerror)(
                cq,
                e.prov_errno,
                e.err_data,
                buffer.as_mut_ptr(),
                buffer.len(),
            );
            if !more.is_null() && e.prov_errno != 0 {
                let more = std::ffi::CStr::from_ptr(more).to_string_lossy();
                text = format!("{text} (provider: {more}, code {})", e.prov_errno);
            }
            Ok(Polled::Failed(Failure { context: e.op_context, text }))
        }
    }

    /// Whether a thread may sleep on `wait_fd` now.
    pub fn may_sleep(&self) -> bool {
        let fabric = self.fabric.fid.cast::<fi::FidFabric>();
        let mut fids = [self.cq.fid];
        // SAFETY: the array has one object, which belongs to this fabric.
        unsafe { ((*(*fabric).ops).trywait)(fabric, fids.as_mut_ptr(), 1) == 0 }
    }
}

/// Opens a queue with a wait descriptor if the provider supports it, else one that is polled.
///
/// # Safety
/// `domain` is open, and stays open until the queue is closed.
pub(super) unsafe fn open_cq(
    api: &Api,
    domain: *mut fi::FidDomain,
    entries: usize,
) -> Result<(*mut fi::FidCq, bool), DomainError> {
    let open = |size, wait_obj| {
        // SAFETY: zeros are valid for plain numbers and null pointers; the domain is open.
        unsafe {
            let mut attr: fi::CqAttr = std::mem::zeroed();
            attr.size = size;
            attr.format = fi::CQ_FORMAT_DATA;
            attr.wait_obj = wait_obj;
            opened(api, "fi_cq_open", |out| {
                ((*(*domain).ops).cq_open)(domain, &mut attr, out, null_mut())
            })
        }
    };
    if let Ok(cq) = open(entries, fi::WAIT_FD) {
        return Ok((cq, true));
    }
    // The size is a hint: a provider that can't hold so many entries uses its default.
    let cq = open(entries, fi::WAIT_NONE).or_else(|_| open(0, fi::WAIT_NONE))?;
    Ok((cq, false))
}

/// The wait descriptor of a completion queue.
///
/// # Safety
/// `cq` is an open completion queue with `FI_WAIT_FD`.
pub(super) unsafe fn wait_fd(cq: *mut fi::Fid) -> Option<RawFd> {
    let mut fd: c_int = -1;
    // SAFETY: for queues opened with FI_WAIT_FD the result is one descriptor.
    let code = unsafe { ((*(*cq).ops).control)(cq, fi::GETWAIT, (&raw mut fd).cast()) };
    (code == 0 && fd >= 0).then_some(fd)
}
