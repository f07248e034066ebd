//! libibverbs: the calls that it exports, and the types of its header.
//!
//! Posting and polling are inline functions of the header that call through the context's table;
//! see [`types::ContextOps`].

mod types;

use std::{ffi::c_char, sync::OnceLock};

use libc::{c_int, c_void};
pub use types::*;

use crate::{Library, OpenError, PerProcess};

macro_rules! table {
    ($(fn $name:ident = $symbol:literal ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?;)*
     optional $(fn $oname:ident = $osymbol:literal
        ($($oarg:ident: $oty:ty),* $(,)?) $(-> $oret:ty)?;)*) => {
        /// The functions of the library, by their names without `ibv_`.
        #[derive(Clone, Copy, Debug)]
        pub struct Ibverbs {
            $(pub $name: unsafe extern "C" fn($($arg: $ty),*) $(-> $ret)?,)*
            $(pub $oname: Option<unsafe extern "C" fn($($oarg: $oty),*) $(-> $oret)?>,)*
        }

        impl Ibverbs {
            fn load(library: Library) -> Result<Self, OpenError> {
                // SAFETY: the types are those of the header's declarations.
                unsafe {
                    Ok(Self {
                        $($name: library.get($symbol)?,)*
                        $($oname: library.get_optional($osymbol),)*
                    })
                }
            }
        }
    };
}

table! {
    fn get_device_list = "ibv_get_device_list"(n: *mut c_int) -> *mut *mut Device;
    fn free_device_list = "ibv_free_device_list"(list: *mut *mut Device);
    fn get_device_name = "ibv_get_device_name"(device: *mut Device) -> *const c_char;
    fn open_device = "ibv_open_device"(device: *mut Device) -> *mut Context;
    fn close_device = "ibv_close_device"(context: *mut Context) -> c_int;
    fn query_device = "ibv_query_device"(context: *mut Context, attr: *mut DeviceAttr) -> c_int;
    fn query_port = "ibv_query_port"(context: *mut Context, port: u8, attr: *mut PortAttr) -> c_int;
    fn query_pkey = "ibv_query_pkey"(
        context: *mut Context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
    fn get_async_event = "ibv_get_async_event"(
        context: *mut Context, event: *mut AsyncEvent) -> c_int;
    fn ack_async_event = "ibv_ack_async_event"(event: *mut AsyncEvent);
    fn alloc_pd = "ibv_alloc_pd"(context: *mut Context) -> *mut Pd;
    fn dealloc_pd = "ibv_dealloc_pd"(pd: *mut Pd) -> c_int;
    fn reg_mr = "ibv_reg_mr"(
        pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr;
    fn dereg_mr = "ibv_dereg_mr"(mr: *mut Mr) -> c_int;
    fn create_comp_channel = "ibv_create_comp_channel"(context: *mut Context) -> *mut CompChannel;
    fn destroy_comp_channel = "ibv_destroy_comp_channel"(channel: *mut CompChannel) -> c_int;
    fn create_cq = "ibv_create_cq"(
        context: *mut Context, cqe: c_int, cq_context: *mut c_void, channel: *mut CompChannel,
        comp_vector: c_int) -> *mut Cq;
    fn destroy_cq = "ibv_destroy_cq"(cq: *mut Cq) -> c_int;
    fn get_cq_event = "ibv_get_cq_event"(
        channel: *mut CompChannel, cq: *mut *mut Cq, cq_context: *mut *mut c_void) -> c_int;
    fn ack_cq_events = "ibv_ack_cq_events"(cq: *mut Cq, n: libc::c_uint);
    fn create_qp = "ibv_create_qp"(pd: *mut Pd, attr: *mut QpInitAttr) -> *mut Qp;
    fn modify_qp = "ibv_modify_qp"(qp: *mut Qp, attr: *mut QpAttr, mask: c_int) -> c_int;
    fn destroy_qp = "ibv_destroy_qp"(qp: *mut Qp) -> c_int;
    fn create_ah = "ibv_create_ah"(pd: *mut Pd, attr: *mut AhAttr) -> *mut Ah;
    fn destroy_ah = "ibv_destroy_ah"(ah: *mut Ah) -> c_int;
    optional
    fn reg_mr_iova2 = "ibv_reg_mr_iova2"(
        pd: *mut Pd, addr: *mut c_void, length: usize, iova: u64, access: libc::c_uint) -> *mut Mr;
    fn reg_dmabuf_mr = "ibv_reg_dmabuf_mr"(
        pd: *mut Pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int) -> *mut Mr;
    fn fork_init = "ibv_fork_init"() -> c_int;
    fn is_fork_initialized = "ibv_is_fork_initialized"() -> c_int;
}

/// `IBV_FORK_DISABLED`: neither the kernel nor the library protects registered pages across a fork.
const FORK_DISABLED: c_int = 0;

impl Ibverbs {
    /// The library, opened at the first call, or why it can't be opened.
    pub fn get() -> Result<&'static Self, OpenError> {
        static OPENED: PerProcess<OnceLock<Result<Ibverbs, OpenError>>> = PerProcess::empty();
        OPENED
            .get_or_default()
            .get_or_init(|| {
                let library = Library::open(&["libibverbs.so.1", "libibverbs.so"])?;
                Self::load(library).inspect(Self::survive_forks)
            })
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Makes the library keep registered pages out of forked children. Before Linux 5.12 a fork
    /// would leave the child with the pages that the NIC uses, and the parent with copies. Call it
    /// before any registration.
    fn survive_forks(&self) {
        // SAFETY: returns a number; may be called at any time.
        let state = self.is_fork_initialized.map(|ask| unsafe { ask() });
        if let (FORK_DISABLED, Some(init)) = (state.unwrap_or(FORK_DISABLED), self.fork_init) {
            // SAFETY: takes no arguments; if it fails, forks behave as before.
            unsafe { init() };
        }
    }
}
