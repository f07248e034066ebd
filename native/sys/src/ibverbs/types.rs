//! The used declarations of `infiniband/verbs.h`, field by field. Enumerations are plain integers,
//! because a newer library may know more values.

use libc::{c_int, c_uint, c_void};

/// Opaque: only ever behind a pointer.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque! {
    /// `struct ibv_device`
    Device,
    /// `struct ibv_pd`
    Pd,
    /// `struct ibv_srq`
    Srq,
    /// `struct ibv_ah`
    Ah,
}

/// `struct ibv_context`, up to the used fields: only ever behind a pointer.
#[repr(C)]
#[derive(Debug)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
}

type Unused = *mut c_void;

/// `struct ibv_context_ops`: the calls that the header inlines.
#[repr(C)]
#[derive(Debug)]
pub struct ContextOps {
    before_poll: [Unused; 11],
    pub poll_cq: unsafe extern "C" fn(cq: *mut Cq, n: c_int, wc: *mut Wc) -> c_int,
    pub req_notify_cq: unsafe extern "C" fn(cq: *mut Cq, solicited_only: c_int) -> c_int,
    before_post: [Unused; 12],
    pub post_send:
        unsafe extern "C" fn(qp: *mut Qp, wr: *mut SendWr, bad: *mut *mut SendWr) -> c_int,
    pub post_recv:
        unsafe extern "C" fn(qp: *mut Qp, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> c_int,
    after_post: [Unused; 5],
}

/// `struct ibv_comp_channel`
#[repr(C)]
#[derive(Debug)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
}

/// `struct ibv_cq`, up to the used fields.
#[repr(C)]
#[derive(Debug)]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}

/// `struct ibv_qp`, up to the used fields.
#[repr(C)]
#[derive(Debug)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub handle: u32,
    pub qp_num: u32,
}

/// `struct ibv_mr`
#[repr(C)]
#[derive(Debug)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_device_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttr {
    pub fw_ver: [u8; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_uint,
    pub unused: [c_int; 14],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
    /// Newer libraries may write beyond this header.
    pub spare: [u64; 8],
}

/// `struct ibv_port_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PortAttr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    /// Newer libraries may write beyond this header.
    pub spare: [u64; 8],
}

pub const PORT_ACTIVE: c_uint = 4;
pub const LINK_LAYER_ETHERNET: u8 = 2;

/// `struct ibv_wc`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Wc {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// In network byte order.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

pub const WC_SUCCESS: c_uint = 0;
pub const WC_WR_FLUSH_ERR: c_uint = 5;
pub const WC_REM_INV_REQ_ERR: c_uint = 9;
pub const WC_REM_ACCESS_ERR: c_uint = 10;
pub const WC_RETRY_EXC_ERR: c_uint = 12;
pub const WC_RECV_RDMA_WITH_IMM: c_uint = (1 << 7) + 1;
pub const WC_GRH: c_uint = 1;
pub const WC_WITH_IMM: c_uint = 2;

/// `struct ibv_sge`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// The part of `struct ibv_send_wr` that depends on the operation: RDMA or datagram.
#[repr(C)]
#[derive(Clone, Copy)]
pub union WrTarget {
    pub rdma: Rdma,
    pub ud: Ud,
    /// The largest variant (atomics).
    size: [u64; 4],
}

impl std::fmt::Debug for WrTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WrTarget")
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ud {
    pub ah: *mut Ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// `struct ibv_send_wr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    /// In network byte order.
    pub imm_data: u32,
    pub wr: WrTarget,
    /// XRC, memory windows, segmentation: not used.
    pub rest: [u64; 7],
}

pub const WR_RDMA_WRITE: c_uint = 0;
pub const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub const WR_SEND: c_uint = 2;
pub const WR_RDMA_READ: c_uint = 4;

pub const SEND_SIGNALED: c_uint = 1 << 1;
pub const SEND_INLINE: c_uint = 1 << 3;

/// `struct ibv_recv_wr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_qp_cap`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

pub const QPT_RC: c_uint = 2;
pub const QPT_UD: c_uint = 4;

/// `struct ibv_global_route`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(8))]
pub struct GlobalRoute {
    pub dgid: [u8; 16],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QpAttr {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

pub const QPS_INIT: c_uint = 1;
pub const QPS_RTR: c_uint = 2;
pub const QPS_RTS: c_uint = 3;
pub const QPS_ERR: c_uint = 6;

/// `enum ibv_qp_attr_mask`
pub mod qp_mask {
    use libc::c_int;

    pub const STATE: c_int = 1 << 0;
    pub const ACCESS_FLAGS: c_int = 1 << 3;
    pub const PKEY_INDEX: c_int = 1 << 4;
    pub const PORT: c_int = 1 << 5;
    pub const QKEY: c_int = 1 << 6;
    pub const AV: c_int = 1 << 7;
    pub const PATH_MTU: c_int = 1 << 8;
    pub const TIMEOUT: c_int = 1 << 9;
    pub const RETRY_CNT: c_int = 1 << 10;
    pub const RNR_RETRY: c_int = 1 << 11;
    pub const RQ_PSN: c_int = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub const MIN_RNR_TIMER: c_int = 1 << 15;
    pub const SQ_PSN: c_int = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub const DEST_QPN: c_int = 1 << 20;
}

pub const ACCESS_LOCAL_WRITE: c_int = 1;
pub const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
pub const ACCESS_REMOTE_READ: c_int = 1 << 2;
pub const ACCESS_RELAXED_ORDERING: c_int = 1 << 20;

/// `struct ibv_async_event`; its type determines the member of `element`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AsyncEvent {
    pub element: EventElement,
    pub event_type: c_uint,
}

impl std::fmt::Debug for AsyncEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AsyncEvent({})", self.event_type)
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union EventElement {
    pub cq: *mut Cq,
    pub qp: *mut Qp,
    pub port_num: c_int,
}

impl std::fmt::Debug for EventElement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventElement")
    }
}

pub const EVENT_CQ_ERR: c_uint = 0;
pub const EVENT_QP_FATAL: c_uint = 1;
pub const EVENT_QP_REQ_ERR: c_uint = 2;
pub const EVENT_QP_ACCESS_ERR: c_uint = 3;
pub const EVENT_DEVICE_FATAL: c_uint = 8;
pub const EVENT_PORT_ERR: c_uint = 10;

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// Sizes and offsets that a C compiler reports for rdma-core's header on 64-bit Linux.
    #[test]
    fn types_lie_as_in_the_header() {
        let spare = size_of::<[u64; 8]>();
        let sizes = [
            (size_of::<DeviceAttr>() - spare, 232),
            // The spare words are aligned to 8 bytes.
            (size_of::<PortAttr>() - spare, 52 + 4),
            (size_of::<Wc>(), 48),
            (size_of::<SendWr>(), 128),
            (size_of::<RecvWr>(), 32),
            (size_of::<Sge>(), 16),
            (size_of::<QpAttr>(), 144),
            (size_of::<QpInitAttr>(), 64),
            (size_of::<AhAttr>(), 32),
            (size_of::<AsyncEvent>(), 16),
        ];
        let offsets = [
            (offset_of!(DeviceAttr, max_mr_size), 80),
            (offset_of!(DeviceAttr, max_qp_wr), 112),
            (offset_of!(DeviceAttr, max_cqe), 132),
            (offset_of!(DeviceAttr, max_qp_rd_atom), 144),
            (offset_of!(DeviceAttr, max_qp_init_rd_atom), 156),
            (offset_of!(DeviceAttr, phys_port_cnt), 227),
            (offset_of!(PortAttr, max_msg_sz), 20),
            (offset_of!(PortAttr, lid), 34),
            (offset_of!(PortAttr, link_layer), 46),
            (offset_of!(Wc, imm_data), 24),
            (offset_of!(Wc, qp_num), 28),
            (offset_of!(Wc, wc_flags), 36),
            (offset_of!(SendWr, send_flags), 32),
            (offset_of!(SendWr, imm_data), 36),
            (offset_of!(SendWr, wr), 40),
            (offset_of!(Rdma, rkey), 8),
            (offset_of!(Ud, remote_qpn), 8),
            (offset_of!(QpAttr, ah_attr), 56),
            (offset_of!(QpAttr, pkey_index), 120),
            (offset_of!(QpAttr, timeout), 130),
            (offset_of!(QpAttr, rate_limit), 136),
            (offset_of!(QpInitAttr, cap), 32),
            (offset_of!(QpInitAttr, qp_type), 52),
            (offset_of!(AhAttr, dlid), 24),
            (offset_of!(AhAttr, port_num), 30),
            (offset_of!(Qp, qp_num), 52),
            (offset_of!(Cq, cqe), 28),
            (offset_of!(Mr, lkey), 36),
            (offset_of!(Mr, rkey), 40),
            (offset_of!(Context, ops) + offset_of!(ContextOps, poll_cq), 96),
            (offset_of!(Context, ops) + offset_of!(ContextOps, req_notify_cq), 104),
            (offset_of!(Context, ops) + offset_of!(ContextOps, post_send), 208),
            (offset_of!(Context, ops) + offset_of!(ContextOps, post_recv), 216),
            (offset_of!(Context, cmd_fd), 264),
            (offset_of!(Context, async_fd), 268),
            (offset_of!(CompChannel, fd), 8),
            (offset_of!(AsyncEvent, event_type), 8),
        ];
        for (i, (ours, theirs)) in sizes.into_iter().chain(offsets).enumerate() {
            assert_eq!(ours, theirs, "number {i}");
        }
    }
}
