//! Unsafe code of the verbs transport, part 1: the library's objects. Each holds the objects it was
//! created from, so they are destroyed in order.

use std::{
    ffi::CStr,
    os::fd::{BorrowedFd, RawFd},
    ptr::NonNull,
    sync::Arc,
};

use fabric_sys::ibverbs::{self as sys, Ibverbs};
use rustix::io::Errno;

use crate::domain::DomainError;

/// The library, or why it is missing.
pub(super) fn library() -> Result<&'static Ibverbs, DomainError> {
    Ibverbs::get().map_err(|e| {
        DomainError::Unavailable(format!("{e}; install libibverbs1 and ibverbs-providers"))
    })
}

fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn check(call: &'static str, rc: i32) -> Result<(), DomainError> {
    match rc {
        0 => Ok(()),
        // Most calls return the error; some set errno.
        rc if rc > 0 => Err(DomainError::Io { call, errno: Errno::from_raw_os_error(rc) }),
        _ => Err(DomainError::Io { call, errno: errno() }),
    }
}

fn made<T>(call: &'static str, raw: *mut T) -> Result<NonNull<T>, DomainError> {
    NonNull::new(raw).ok_or_else(|| DomainError::Io { call, errno: errno() })
}

/// An opened device.
#[derive(Debug)]
pub(super) struct Context {
    pub lib: &'static Ibverbs,
    raw: NonNull<sys::Context>,
}

// SAFETY: libibverbs' objects may be used by any thread, and by several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// An asynchronous event of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Port { port: u32, kind: u32 },
    Queue { number: u32, kind: u32 },
    Device(u32),
}

impl Context {
    pub fn open(name: &str) -> Result<Arc<Self>, DomainError> {
        let lib = library()?;
        let mut n = 0;
        // SAFETY: `n` outlives the call.
        let list = made("ibv_get_device_list", unsafe { (lib.get_device_list)(&mut n) })?;
        // SAFETY: the list has `n` entries, and a device's name is a C string.
        let found = (0..n as usize).map(|i| unsafe { *list.as_ptr().add(i) }).find(|d| unsafe {
            CStr::from_ptr((lib.get_device_name)(*d)).to_bytes() == name.as_bytes()
        });
        // SAFETY: the device is from the list, which is freed later.
        let raw = found.map(|d| unsafe { (lib.open_device)(d) });
        let error = errno();
        // SAFETY: the list is not used any more.
        unsafe { (lib.free_device_list)(list.as_ptr()) };
        match raw.map(NonNull::new) {
            Some(Some(raw)) => Ok(Arc::new(Self { lib, raw })),
            Some(None) => Err(DomainError::Unavailable(format!(
                "{name} can't be opened: {error}; /dev/infiniband/uverbs* must be readable and \
                 writable"
            ))),
            None => Err(DomainError::Unavailable(format!(
                "{name} is unknown to libibverbs; install its provider (ibverbs-providers)"
            ))),
        }
    }

    fn ptr(&self) -> *mut sys::Context {
        self.raw.as_ptr()
    }

    pub fn device_attr(&self) -> Result<sys::DeviceAttr, DomainError> {
        // SAFETY: plain numbers, for which all zero is valid.
        let mut attr: sys::DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; `attr` has the library's layout and room to spare.
        check("ibv_query_device", unsafe { (self.lib.query_device)(self.ptr(), &mut attr) })?;
        Ok(attr)
    }

    pub fn port_attr(&self, port: u8) -> Result<sys::PortAttr, DomainError> {
        // SAFETY: plain numbers, for which all zero is valid.
        let mut attr: sys::PortAttr = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        check("ibv_query_port", unsafe { (self.lib.query_port)(self.ptr(), port, &mut attr) })?;
        Ok(attr)
    }

    pub fn pkey(&self, port: u8, index: u16) -> Result<u16, DomainError> {
        let mut pkey = 0;
        // SAFETY: the context is open; `pkey` outlives the call.
        let rc = unsafe { (self.lib.query_pkey)(self.ptr(), port, index.into(), &mut pkey) };
        check("ibv_query_pkey", rc).map(|()| u16::from_be(pkey))
    }

    pub fn async_fd(&self) -> RawFd {
        // SAFETY: the context is open.
        unsafe { (*self.ptr()).async_fd }
    }

    /// The next event, if any. The descriptor must be non-blocking.
    pub fn next_event(&self) -> Option<Event> {
        let mut e =
            sys::AsyncEvent { element: sys::EventElement { port_num: 0 }, event_type: u32::MAX };
        // SAFETY: the context is open; `e` outlives the call.
        if unsafe { (self.lib.get_async_event)(self.ptr(), &mut e) } != 0 {
            return None;
        }
        let event = match e.event_type {
            kind @ (sys::EVENT_QP_FATAL | sys::EVENT_QP_REQ_ERR | sys::EVENT_QP_ACCESS_ERR) => {
                // SAFETY: these kinds carry a queue pair, which can't be destroyed before its
                // events are acknowledged.
                Event::Queue { number: unsafe { (*e.element.qp).qp_num }, kind }
            }
            kind @ sys::EVENT_PORT_ERR => {
                // SAFETY: this kind carries a port.
                Event::Port { port: unsafe { e.element.port_num } as u32, kind }
            }
            kind => Event::Device(kind),
        };
        // SAFETY: the library filled `e` in.
        unsafe { (self.lib.ack_async_event)(&mut e) };
        Some(event)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: objects created from it hold it, so none is left.
        unsafe { (self.lib.close_device)(self.ptr()) };
    }
}

/// Makes a descriptor of the library non-blocking.
pub(super) fn unblock(fd: RawFd) -> Result<(), DomainError> {
    // SAFETY: the descriptor belongs to an open object of the caller.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd).map_err(DomainError::io("fcntl"))?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)
        .map_err(DomainError::io("fcntl"))
}

/// Adds a descriptor of the library to `epoll`. Its object closes it.
pub(super) fn watch(epoll: &std::os::fd::OwnedFd, fd: RawFd, tag: u64) -> Result<(), DomainError> {
    use rustix::event::epoll;
    // SAFETY: the descriptor belongs to an open object; epoll drops it when it is closed.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    epoll::add(epoll, fd, epoll::EventData::new_u64(tag), epoll::EventFlags::IN)
        .map_err(DomainError::io("epoll_ctl"))
}

/// An object of the library with its destructor.
macro_rules! owned {
    ($(#[$doc:meta])* $name:ident($raw:ty) { $($field:ident: $ty:ty),* } by $destroy:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $name {
            raw: NonNull<$raw>,
            $(pub $field: $ty,)*
        }

        // SAFETY: libibverbs' objects may be used by any thread, and by several at once.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: created by the library and destroyed once. The objects it was created
                // from exist, and the objects created from it hold it.
                let rc = unsafe { (self.lib().$destroy)(self.raw.as_ptr()) };
                if rc != 0 {
                    tracing::error!(object = stringify!($name), rc, "can't destroy an object of libibverbs");
                }
            }
        }
    };
}

owned! {
    /// A protection domain.
    Pd(sys::Pd) { context: Arc<Context> } by dealloc_pd
}

impl Pd {
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, DomainError> {
        // SAFETY: the context is open.
        let raw = made("ibv_alloc_pd", unsafe { (context.lib.alloc_pd)(context.ptr()) })?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }

    fn lib(&self) -> &'static Ibverbs {
        self.context.lib
    }

    pub(super) fn ptr(&self) -> *mut sys::Pd {
        self.raw.as_ptr()
    }
}

owned! {
    /// Reports completions by a descriptor.
    Channel(sys::CompChannel) { context: Arc<Context> } by destroy_comp_channel
}

impl Channel {
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, DomainError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.lib.create_comp_channel)(context.ptr()) };
        let raw = made("ibv_create_comp_channel", raw)?;
        let this = Self { raw, context: Arc::clone(context) };
        unblock(this.fd())?;
        Ok(Arc::new(this))
    }

    fn lib(&self) -> &'static Ibverbs {
        self.context.lib
    }

    pub fn fd(&self) -> RawFd {
        // SAFETY: the channel exists.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// Takes and acknowledges pending events of the descriptor.
    pub fn drain(&self) {
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the out parameters outlive the call; a queue whose event is not acknowledged
        // can't be destroyed.
        unsafe {
            while (self.lib().get_cq_event)(self.raw.as_ptr(), &mut cq, &mut context) == 0 {
                (self.lib().ack_cq_events)(cq, 1);
            }
        }
    }
}

owned! {
    /// A completion queue.
    Cq(sys::Cq) { channel: Arc<Channel> } by destroy_cq
}

impl Cq {
    pub fn new(channel: &Arc<Channel>, entries: u32) -> Result<Arc<Self>, DomainError> {
        let context = &channel.context;
        // SAFETY: context and channel exist, and the queue holds both.
        let raw = unsafe {
            (context.lib.create_cq)(
                context.ptr(),
                entries as i32,
                std::ptr::null_mut(),
                channel.raw.as_ptr(),
                0,
            )
        };
        Ok(Arc::new(Self { raw: made("ibv_create_cq", raw)?, channel: Arc::clone(channel) }))
    }

    fn lib(&self) -> &'static Ibverbs {
        self.channel.lib()
    }

    /// Completions that the queue can hold.
    pub fn capacity(&self) -> u32 {
        // SAFETY: the queue exists.
        unsafe { (*self.raw.as_ptr()).cqe.max(0) as u32 }
    }

    /// Takes completions; returns their number.
    #[inline]
    pub fn poll(&self, into: &mut [sys::Wc]) -> usize {
        let cq = self.raw.as_ptr();
        // SAFETY: the queue and its context exist; the length passed is that of `into`.
        let n = unsafe { ((*(*cq).context).ops.poll_cq)(cq, into.len() as i32, into.as_mut_ptr()) };
        n.max(0) as usize
    }

    /// The next completion makes the channel's descriptor readable.
    pub fn notify(&self) {
        let cq = self.raw.as_ptr();
        // SAFETY: the queue and its context exist.
        unsafe { ((*(*cq).context).ops.req_notify_cq)(cq, 0) };
    }
}

owned! {
    /// A queue pair. After it is dropped, the NIC touches no memory on its behalf (MR-1).
    Qp(sys::Qp) { pd: Arc<Pd>, _cq: Arc<Cq> } by destroy_qp
}

impl Qp {
    pub fn new(
        pd: &Arc<Pd>,
        cq: &Arc<Cq>,
        kind: u32,
        mut cap: sys::QpCap,
    ) -> Result<(Self, sys::QpCap), DomainError> {
        let queue = cq.raw.as_ptr();
        let mut attr = sys::QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: queue,
            recv_cq: queue,
            srq: std::ptr::null_mut(),
            cap,
            qp_type: kind,
            sq_sig_all: 0,
        };
        // SAFETY: all that `attr` points to exists, and the pair holds it.
        let raw = unsafe { (pd.lib().create_qp)(pd.ptr(), &mut attr) };
        let raw = made("ibv_create_qp", raw)?;
        cap = attr.cap;
        Ok((Self { raw, pd: Arc::clone(pd), _cq: Arc::clone(cq) }, cap))
    }

    fn lib(&self) -> &'static Ibverbs {
        self.pd.lib()
    }

    pub(super) fn ptr(&self) -> *mut sys::Qp {
        self.raw.as_ptr()
    }

    pub fn number(&self) -> u32 {
        // SAFETY: the pair exists.
        unsafe { (*self.ptr()).qp_num }
    }

    /// Puts the queue pair into the error state; requests under way complete as failed.
    pub fn stop(&self) -> Result<(), DomainError> {
        let attr = sys::QpAttr { qp_state: sys::QPS_ERR, ..Default::default() };
        self.modify(attr, sys::qp_mask::STATE)
    }

    pub fn modify(&self, mut attr: sys::QpAttr, mask: i32) -> Result<(), DomainError> {
        // SAFETY: the pair exists; `attr` outlives the call.
        check("ibv_modify_qp", unsafe { (self.lib().modify_qp)(self.ptr(), &mut attr, mask) })
    }
}

owned! {
    /// A datagram destination.
    Ah(sys::Ah) { pd: Arc<Pd> } by destroy_ah
}

impl Ah {
    pub fn new(pd: &Arc<Pd>, mut attr: sys::AhAttr) -> Result<Arc<Self>, DomainError> {
        // SAFETY: the protection domain exists; `attr` outlives the call.
        let raw = made("ibv_create_ah", unsafe { (pd.lib().create_ah)(pd.ptr(), &mut attr) })?;
        Ok(Arc::new(Self { raw, pd: Arc::clone(pd) }))
    }

    fn lib(&self) -> &'static Ibverbs {
        self.pd.lib()
    }

    pub(super) fn ptr(&self) -> *mut sys::Ah {
        self.raw.as_ptr()
    }
}
