//! Unsafe code of the verbs transport, part 3: posting requests.
//!
//! Requests are built in templates, four per doorbell; only addresses, lengths, keys and immediates
//! change between them.

use fabric_sys::ibverbs as sys;

use super::raw::{Ah, Qp};
use crate::domain::DomainError;

/// Requests per doorbell.
pub(super) const LENGTH: usize = 4;

/// One request. The caller guarantees that the memory behind `local` stays registered until the
/// completion is seen or the queue pair is destroyed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wr {
    pub id: u64,
    pub opcode: u32,
    pub flags: u32,
    pub local: sys::Sge,
    pub remote: u64,
    pub rkey: u32,
    pub imm: u32,
}

/// Request templates of one queue pair.
#[derive(Debug)]
pub(super) struct Chain {
    wrs: Box<[sys::SendWr; LENGTH]>,
    sges: Box<[sys::Sge; LENGTH]>,
    n: usize,
}

// SAFETY: the pointers inside lead to its own boxes.
unsafe impl Send for Chain {}

impl Chain {
    pub fn new() -> Self {
        // SAFETY: numbers and pointers, for which all zero is valid.
        let wrs: Box<[sys::SendWr; LENGTH]> = Box::new(unsafe { std::mem::zeroed() });
        let mut this = Self { wrs, sges: Box::default(), n: 0 };
        for i in 0..LENGTH {
            this.wrs[i].sg_list = &mut this.sges[i];
            if i + 1 < LENGTH {
                this.wrs[i].next = &mut this.wrs[i + 1];
            }
        }
        this
    }

    /// Adds a request; a full chain is posted at once.
    #[inline]
    pub fn push(&mut self, qp: &Qp, wr: &Wr) -> Result<(), DomainError> {
        let to = &mut self.wrs[self.n];
        to.wr_id = wr.id;
        to.opcode = wr.opcode;
        to.send_flags = wr.flags;
        to.imm_data = wr.imm.to_be();
        to.num_sge = i32::from(wr.local.length > 0);
        to.wr.rdma = sys::Rdma { remote_addr: wr.remote, rkey: wr.rkey };
        self.sges[self.n] = wr.local;
        self.n += 1;
        match self.n == LENGTH {
            true => self.submit(qp),
            false => Ok(()),
        }
    }

    /// Posts the requests of the chain.
    #[inline]
    pub fn submit(&mut self, qp: &Qp) -> Result<(), DomainError> {
        let n = std::mem::take(&mut self.n);
        if n == 0 {
            return Ok(());
        }
        // Derived again each time, so that no use in between can invalidate the pointers.
        let wrs = self.wrs.as_mut_ptr();
        let sges = self.sges.as_mut_ptr();
        // SAFETY: `n` requests of this chain, linked to each other; their memory is valid by `Wr`'s
        // contract. The NIC has copied the requests when the call returns.
        unsafe {
            for i in 0..n {
                (*wrs.add(i)).sg_list = sges.add(i);
                (*wrs.add(i)).next = if i + 1 < n { wrs.add(i + 1) } else { std::ptr::null_mut() };
            }
            post_send(qp, wrs)
        }
    }
}

/// # Safety
/// `first` is a valid list of requests whose memory stays registered.
unsafe fn post_send(qp: &Qp, first: *mut sys::SendWr) -> Result<(), DomainError> {
    let (qp, mut bad) = (qp.ptr(), std::ptr::null_mut());
    // SAFETY: the pair and its context exist; the list is valid by this function's contract.
    let rc = unsafe { ((*(*qp).context).ops.post_send)(qp, first, &mut bad) };
    posted("ibv_post_send", rc)
}

fn posted(call: &'static str, rc: i32) -> Result<(), DomainError> {
    match rc {
        0 => Ok(()),
        rc => Err(DomainError::Io { call, errno: rustix::io::Errno::from_raw_os_error(rc.abs()) }),
    }
}

/// Sends one datagram.
pub(super) fn datagram(
    qp: &Qp,
    id: u64,
    mut local: sys::Sge,
    ah: &Ah,
    (remote_qpn, remote_qkey): (u32, u32),
) -> Result<(), DomainError> {
    // SAFETY: numbers and pointers, for which all zero is valid.
    let mut wr: sys::SendWr = unsafe { std::mem::zeroed() };
    wr.wr_id = id;
    wr.sg_list = &mut local;
    wr.num_sge = 1;
    wr.opcode = sys::WR_SEND;
    wr.send_flags = sys::SEND_SIGNALED;
    wr.wr.ud = sys::Ud { ah: ah.ptr(), remote_qpn, remote_qkey };
    // SAFETY: one request; its slot and address handle are kept until its completion.
    unsafe { post_send(qp, &mut wr) }
}

/// Posts a receive request for one frame.
pub(super) fn receive(qp: &Qp, id: u64, mut local: sys::Sge) -> Result<(), DomainError> {
    let mut wr =
        sys::RecvWr { wr_id: id, next: std::ptr::null_mut(), sg_list: &mut local, num_sge: 1 };
    // SAFETY: one request; its slot is kept until the pair has been destroyed.
    unsafe { post_receive(qp, &mut wr) }
}

/// Posts receive requests for `n` immediates, which need no memory.
pub(super) fn receive_imms(qp: &Qp, id: u64, n: u32) -> Result<(), DomainError> {
    const MAX_CHAIN: usize = 32;
    let blank = sys::RecvWr {
        wr_id: id,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
    };
    let mut left = n as usize;
    while left > 0 {
        let mut wrs = [blank; MAX_CHAIN];
        let n = left.min(MAX_CHAIN);
        let first = wrs.as_mut_ptr();
        // SAFETY: `n` requests of the array, linked to each other; they use no memory.
        unsafe {
            for i in 1..n {
                (*first.add(i - 1)).next = first.add(i);
            }
            post_receive(qp, first)?;
        }
        left -= n;
    }
    Ok(())
}

/// # Safety
/// `first` is a valid list of requests whose memory stays registered.
unsafe fn post_receive(qp: &Qp, first: *mut sys::RecvWr) -> Result<(), DomainError> {
    let (qp, mut bad) = (qp.ptr(), std::ptr::null_mut());
    // SAFETY: the pair and its context exist; the list is valid by this function's contract.
    let rc = unsafe { ((*(*qp).context).ops.post_recv)(qp, first, &mut bad) };
    posted("ibv_post_recv", rc)
}
