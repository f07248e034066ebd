//! Attributes and messages, laid out as in the headers of version 1.17.

use std::ffi::{c_char, c_int, c_void};

use super::ops::{Fid, FidDomain, FidFabric, FidWait};

/// A peer's index in the address vector.
pub type FiAddr = u64;

pub const ADDR_UNSPEC: FiAddr = u64::MAX;

/// Capabilities, and flags of operations and completions: one number space.
pub mod flag {
    pub const MSG: u64 = 1 << 1;
    pub const RMA: u64 = 1 << 2;
    pub const READ: u64 = 1 << 8;
    pub const WRITE: u64 = 1 << 9;
    pub const RECV: u64 = 1 << 10;
    pub const SEND: u64 = 1 << 11;
    pub const REMOTE_READ: u64 = 1 << 12;
    pub const REMOTE_WRITE: u64 = 1 << 13;
    pub const REMOTE_CQ_DATA: u64 = 1 << 17;
    pub const COMPLETION: u64 = 1 << 24;
    pub const DELIVERY_COMPLETE: u64 = 1 << 28;
    /// Registration by a dma-buf, from 1.20 on.
    pub const MR_DMABUF: u64 = 1 << 40;
    pub const HMEM: u64 = 1 << 47;
    pub const LOCAL_COMM: u64 = 1 << 51;
    pub const REMOTE_COMM: u64 = 1 << 52;
}

/// Requirements of a provider for its user.
pub mod mode {
    pub const CONTEXT: u64 = 1 << 59;
    pub const MSG_PREFIX: u64 = 1 << 58;
    pub const RX_CQ_DATA: u64 = 1 << 56;
    pub const CONTEXT2: u64 = 1 << 52;
}

/// Requirements of a provider for registrations.
pub mod mr_mode {
    use std::ffi::c_int;

    pub const LOCAL: c_int = 1 << 2;
    pub const RAW: c_int = 1 << 3;
    pub const VIRT_ADDR: c_int = 1 << 4;
    pub const ALLOCATED: c_int = 1 << 5;
    pub const PROV_KEY: c_int = 1 << 6;
    pub const ENDPOINT: c_int = 1 << 9;
    pub const HMEM: c_int = 1 << 10;
}

pub const EP_RDM: c_int = 3;
pub const PROGRESS_AUTO: c_int = 1;
pub const PROGRESS_MANUAL: c_int = 2;
pub const THREAD_DOMAIN: c_int = 3;
pub const RM_ENABLED: c_int = 2;
pub const AV_TABLE: c_int = 2;
pub const WAIT_NONE: c_int = 0;
pub const WAIT_FD: c_int = 3;
pub const CQ_FORMAT_DATA: c_int = 3;
/// Commands of `control`.
pub const GETWAIT: c_int = 5;
pub const ENABLE: c_int = 6;

/// Address formats.
pub const SOCKADDR_IN: u32 = 2;
pub const SOCKADDR_IN6: u32 = 3;
pub const ADDR_STR: u32 = 9;
pub const ADDR_EFA: u32 = 12;

#[repr(C)]
#[derive(Debug)]
pub struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct RxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

#[repr(C)]
#[derive(Debug)]
pub struct EpAttr {
    pub kind: c_int,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
    pub max_order_raw_size: usize,
    pub max_order_war_size: usize,
    pub max_order_waw_size: usize,
    pub mem_tag_format: u64,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
}

#[repr(C)]
#[derive(Debug)]
pub struct DomainAttr {
    pub domain: *mut FidDomain,
    pub name: *mut c_char,
    pub threading: c_int,
    pub control_progress: c_int,
    pub data_progress: c_int,
    pub resource_mgmt: c_int,
    pub av_type: c_int,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
    pub ep_cnt: usize,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub max_ep_tx_ctx: usize,
    pub max_ep_rx_ctx: usize,
    pub max_ep_stx_ctx: usize,
    pub max_ep_srx_ctx: usize,
    pub cntr_cnt: usize,
    pub mr_iov_limit: usize,
    pub caps: u64,
    pub mode: u64,
    pub auth_key: *mut u8,
    pub auth_key_size: usize,
    pub max_err_data: usize,
    pub mr_cnt: usize,
    pub tclass: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct FabricAttr {
    pub fabric: *mut FidFabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut Fid,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut RxAttr,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    pub nic: *mut FidNic,
}

/// The device's attributes, if the provider knows them.
#[repr(C)]
#[derive(Debug)]
pub struct FidNic {
    pub fid: Fid,
    pub device_attr: *mut c_void,
    pub bus_attr: *mut BusAttr,
    pub link_attr: *mut LinkAttr,
    pub prov_attr: *mut c_void,
}

pub const BUS_PCI: c_int = 1;
pub const LINK_DOWN: c_int = 1;

#[repr(C)]
#[derive(Debug)]
pub struct BusAttr {
    pub kind: c_int,
    pub domain: u16,
    pub bus: u8,
    pub device: u8,
    pub function: u8,
}

#[repr(C)]
#[derive(Debug)]
pub struct LinkAttr {
    pub address: *mut c_char,
    pub mtu: usize,
    /// Bits per second.
    pub speed: usize,
    pub state: c_int,
    pub network_type: *mut c_char,
}

#[repr(C)]
#[derive(Debug)]
pub struct AvAttr {
    pub kind: c_int,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: c_int,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_cond: c_int,
    pub wait_set: *mut FidWait,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CqDataEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct CqErrEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
    /// Later versions write more than 1.17.
    pub later: [u64; 8],
}

#[repr(C)]
#[derive(Debug)]
pub struct MrAttr {
    /// With [`flag::MR_DMABUF`], a [`MrDmabuf`].
    pub mr_iov: *const libc::iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: c_int,
    /// A union: of CUDA, an `int` in its first bytes.
    pub device: u64,
    /// Later versions read more than 1.17: zeros.
    pub later: [u64; 8],
}

/// A part of a dma-buf: `len` bytes from `offset`. Peers address its first byte as `base_addr +
/// offset`.
#[repr(C)]
#[derive(Debug)]
pub struct MrDmabuf {
    pub fd: c_int,
    pub offset: u64,
    pub len: usize,
    pub base_addr: *mut c_void,
}

pub const HMEM_SYSTEM: c_int = 0;
pub const HMEM_CUDA: c_int = 1;

#[repr(C)]
#[derive(Debug)]
pub struct Msg {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: FiAddr,
    pub context: *mut c_void,
    pub data: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct RmaIov {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct MsgRma {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: FiAddr,
    pub rma_iov: *const RmaIov,
    pub rma_iov_count: usize,
    pub context: *mut c_void,
    pub data: u64,
}

/// Scratch space that a provider may ask for with each operation (`FI_CONTEXT2`).
#[repr(C)]
#[derive(Debug)]
pub struct Context2 {
    pub internal: [*mut c_void; 8],
}
