//! One NIC: its limits, and the creation of queue pairs.

use std::{sync::Arc, time::Duration};

use fabric_sys::ibverbs::{self as sys, qp_mask};

use super::{
    address::{address_attr, NicAddress, QpSetup, Route},
    chain,
    discover::ChosenPort,
    memory::Slots,
    raw::{Channel, Context, Cq, Pd, Qp},
    work_id, CompletionKind,
};
use crate::{
    api::NicConfig,
    domain::{DomainError, LinkId},
    transport::nic::message_channel::{ReceiveLimits, SPARE},
};

/// Requests under way on one queue pair.
const SEND_DEPTH: u32 = 256;
/// Immediates that may arrive before credits are returned.
const IMMS: u32 = 512;
/// Receive slots for fragments, and bytes of each.
const SLOTS: u32 = 24;
const SLOT_BYTES: u32 = 4096;
/// Frames under way to a peer.
pub(super) const FRAME_DEPTH: u32 = 32;
/// Bytes up to which a write carries its data inline.
const INLINE: u32 = 220;
/// Vendor of hfi1 and qib, whose driver (`rdmavt`) looks up local memory by its virtual address
/// even if it was registered with an iova.
const RDMAVT: u32 = 0x1175;
/// Vendor id of soft-RoCE (`rdma_rxe`).
const SOFT_ROCE: u32 = 0xFF_FFFF;
/// Longest message of soft-RoCE: tens of milliseconds on slow processors, during which no heartbeat
/// leaves.
const SOFT_MESSAGE: u64 = 1 << 20;
/// Retries of a packet. Their interval follows from the peer timeout.
const RETRIES: u32 = 7;

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub max_message: u64,
    pub max_mr: u64,
    pub send_depth: u32,
    pub reads_in: u8,
    pub reads_out: u8,
    pub max_cqe: u32,
    /// Whether memory can be registered with an iova; see `regions`.
    pub has_iova: bool,
    /// Whether the driver has no hardware and carries out requests within the call.
    pub software: bool,
}

#[derive(Debug)]
pub(super) struct Device {
    pub chosen: ChosenPort,
    pub context: Arc<Context>,
    pub pd: Arc<Pd>,
    pub channel: Arc<Channel>,
    pub limits: Limits,
    pub own: ReceiveLimits,
    pub route: Route,
    pub mtu: u8,
    /// The partition key and its index in the port's table.
    pub pkey: u16,
    pkey_index: u16,
    timeout: u8,
}

/// A limit that tests lower to reach code behind large limits.
fn lowered_for_tests(name: &str, limit: u64) -> u64 {
    let wanted = std::env::var(name).ok().and_then(|v| v.parse().ok());
    wanted.map_or(limit, |w: u64| w.clamp(4096, limit))
}

impl Device {
    pub fn open(
        chosen: ChosenPort,
        nics: &NicConfig,
        peer_timeout: Duration,
    ) -> Result<Self, DomainError> {
        let context = Context::open(&chosen.device)?;
        let attr = context.device_attr()?;
        let port = context.port_attr(chosen.port)?;
        if port.state != sys::PORT_ACTIVE {
            let port = format!("{} port {}", chosen.device, chosen.port);
            return Err(DomainError::Unavailable(format!("{port} is not active")));
        }
        let pkey = context.pkey(chosen.port, nics.pkey_index).unwrap_or(0);
        if pkey & 0x7FFF == 0 {
            return Err(DomainError::Unavailable(format!(
                "{} has no partition key at index {}: see /sys/class/infiniband/{}/ports/{}/pkeys",
                chosen.device, nics.pkey_index, chosen.device, chosen.port
            )));
        }
        let positive = |n: i32| n.max(1) as u32;
        let small = |n: i32| n.clamp(1, 16) as u8;
        let max_wr = positive(attr.max_qp_wr);
        let software = attr.vendor_id == SOFT_ROCE;
        let longest = if software { SOFT_MESSAGE } else { 1 << 30 };
        let limits = Limits {
            max_message: lowered_for_tests(
                "FABRIC_TEST_MAX_MSG",
                u64::from(port.max_msg_sz).min(longest),
            ),
            has_iova: attr.vendor_id != RDMAVT,
            software,
            max_mr: lowered_for_tests("FABRIC_TEST_MAX_MR", attr.max_mr_size) & !4095,
            send_depth: SEND_DEPTH.min(max_wr),
            reads_in: small(attr.max_qp_rd_atom),
            reads_out: small(attr.max_qp_init_rd_atom),
            max_cqe: positive(attr.max_cqe),
        };
        let own = ReceiveLimits { slot_bytes: SLOT_BYTES, slots: SLOTS, imms: IMMS.min(max_wr) };
        if max_wr < SLOTS + SPARE {
            return Err(DomainError::Unavailable(format!(
                "{} allows {max_wr} requests on a queue pair, {} are needed",
                chosen.device,
                SLOTS + SPARE
            )));
        }
        let route = Route {
            gid_index: chosen.gid_index,
            service_level: nics.service_level,
            traffic_class: nics.traffic_class,
        };
        Ok(Self {
            pd: Pd::new(&context)?,
            channel: Channel::new(&context)?,
            context,
            limits,
            own,
            route,
            mtu: port.active_mtu.clamp(1, 5) as u8,
            pkey,
            pkey_index: nics.pkey_index,
            timeout: ack_timeout(peer_timeout),
            chosen,
        })
    }

    /// Completions that one link can have outstanding.
    pub fn completions_per_link(&self) -> u32 {
        self.limits.send_depth + self.own.imms + FRAME_DEPTH + SLOTS + SPARE
    }

    pub fn label(&self) -> String {
        format!("{} port {}", self.chosen.device, self.chosen.port)
    }

    fn init(&self, qp: &Qp, access: i32) -> Result<(), DomainError> {
        let attr = sys::QpAttr {
            qp_state: sys::QPS_INIT,
            pkey_index: self.pkey_index,
            port_num: self.chosen.port,
            qp_access_flags: access as u32,
            ..Default::default()
        };
        use qp_mask::{ACCESS_FLAGS, PKEY_INDEX, PORT, STATE};
        qp.modify(attr, STATE | PKEY_INDEX | PORT | ACCESS_FLAGS)
    }

    /// Creates the queue pair for datagrams, ready to send and receive.
    pub fn datagram_pair(&self, cq: &Arc<Cq>, depth: u32, qkey: u32) -> Result<Qp, DomainError> {
        use qp_mask::{PKEY_INDEX, PORT, QKEY, SQ_PSN, STATE};
        let cap = sys::QpCap {
            max_send_wr: depth,
            max_recv_wr: depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let (qp, _) = Qp::new(&self.pd, cq, sys::QPT_UD, cap)?;
        let mut attr = sys::QpAttr {
            qp_state: sys::QPS_INIT,
            pkey_index: self.pkey_index,
            port_num: self.chosen.port,
            qkey,
            ..Default::default()
        };
        qp.modify(attr, STATE | PKEY_INDEX | PORT | QKEY)?;
        attr.qp_state = sys::QPS_RTR;
        qp.modify(attr, STATE)?;
        attr.qp_state = sys::QPS_RTS;
        qp.modify(attr, STATE | SQ_PSN)?;
        Ok(qp)
    }
}

/// The exponent n such that all retries, 4.096 us x 2^n each, end within 3/5 of `peer_timeout`.
pub(super) fn ack_timeout(peer_timeout: Duration) -> u8 {
    let budget = peer_timeout.as_nanos() * 3 / 5;
    let total = |n: u8| u128::from(RETRIES + 1) * (4096u128 << n);
    (8..=20).rev().find(|n| total(*n) <= budget).unwrap_or(8)
}

/// The queue pairs of one link, and its frame buffers. Created by a helper thread.
#[derive(Debug)]
pub(super) struct Pair {
    pub data: Qp,
    pub messages: Qp,
    /// Receive slots, then send slots.
    pub slots: Slots,
    pub inline: u32,
    data_psn: u32,
    message_psn: u32,
}

impl Pair {
    /// Creates two unconnected queue pairs.
    pub fn build(device: &Device, cq: &Arc<Cq>, link: LinkId) -> Result<Self, DomainError> {
        let cap = |send, recv, inline| sys::QpCap {
            max_send_wr: send,
            max_recv_wr: recv,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: inline,
        };
        let recv = device.own.slots + SPARE;
        // Some devices support less inline data, or none.
        let made = [INLINE, 64, 0].into_iter().map(|inline| {
            let cap = cap(device.limits.send_depth, device.own.imms, inline);
            Qp::new(&device.pd, cq, sys::QPT_RC, cap)
        });
        let mut error = None;
        let made = made.map(|r| r.map_err(|e| error = Some(e)).ok()).find_map(|r| r);
        let Some((data, given)) = made else {
            return Err(error.unwrap_or_else(|| DomainError::Unavailable("no queue pair".into())));
        };
        let (messages, _) = Qp::new(&device.pd, cq, sys::QPT_RC, cap(FRAME_DEPTH, recv, 0))?;
        let slots =
            Slots::new(&device.pd, (recv + FRAME_DEPTH) as usize, device.own.slot_bytes as usize)?;
        device.init(&data, super::memory::PEER_ACCESS)?;
        device.init(&messages, sys::ACCESS_LOCAL_WRITE)?;
        chain::receive_imms(&data, work_id(CompletionKind::Imm, 0, link), device.own.imms)?;
        for i in 0..recv {
            let id = work_id(CompletionKind::FrameReceived, i, link);
            chain::receive(&messages, id, slots.whole(i as usize))?;
        }
        let mut psns = [0; 8];
        getrandom::fill(&mut psns)
            .map_err(|e| DomainError::Unavailable(format!("getrandom: {e}")))?;
        let psn = |i: usize| u32::from_le_bytes([psns[i], psns[i + 1], psns[i + 2], 0]);
        let (data_psn, message_psn) = (psn(0), psn(4));
        Ok(Self { data, messages, slots, inline: given.max_inline_data, data_psn, message_psn })
    }

    /// The queue pair's data that the peer needs to connect.
    pub fn setup(&self, device: &Device) -> QpSetup {
        QpSetup {
            data_qpn: self.data.number(),
            message_qpn: self.messages.number(),
            data_psn: self.data_psn,
            message_psn: self.message_psn,
            mtu: device.mtu,
            reads: device.limits.reads_in,
            receive_limits: device.own,
        }
    }

    /// Connects the queue pairs. Call it only for a proven peer: from here on its keys work.
    pub fn join(
        &self,
        device: &Device,
        (here, remote): (&NicAddress, &NicAddress),
        remote_setup: &QpSetup,
    ) -> Result<(), DomainError> {
        use qp_mask::*;
        let flow =
            remote_setup.data_qpn.rotate_left(8) ^ self.data.number().wrapping_mul(0x9E37_79B1);
        let ends = [
            (&self.data, remote_setup.data_qpn, remote_setup.data_psn, self.data_psn, flow),
            (
                &self.messages,
                remote_setup.message_qpn,
                remote_setup.message_psn,
                self.message_psn,
                flow ^ 1,
            ),
        ];
        for (qp, dest, rq_psn, sq_psn, flow) in ends {
            let mut attr = sys::QpAttr {
                qp_state: sys::QPS_RTR,
                path_mtu: device.mtu.min(remote_setup.mtu).into(),
                dest_qp_num: dest,
                rq_psn,
                max_dest_rd_atomic: device.limits.reads_in,
                min_rnr_timer: 12,
                ah_attr: address_attr(here, remote, &device.route, flow),
                ..Default::default()
            };
            let rtr =
                STATE | AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER;
            qp.modify(attr, rtr).map_err(|e| unreachable_error(&e, here, remote))?;
            attr.qp_state = sys::QPS_RTS;
            attr.sq_psn = sq_psn;
            attr.timeout = device.timeout;
            attr.retry_cnt = RETRIES as u8;
            attr.rnr_retry = 6;
            attr.max_rd_atomic = device.limits.reads_out.min(remote_setup.reads.max(1));
            let rts = STATE | TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC;
            qp.modify(attr, rts)?;
        }
        Ok(())
    }
}

/// The error if a peer's address can't be resolved or connected.
pub(super) fn unreachable_error(
    e: &DomainError,
    here: &NicAddress,
    remote: &NicAddress,
) -> DomainError {
    use rustix::io::Errno;
    let why = match e {
        DomainError::Io {
            errno: Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH, ..
        } => "its address does not answer: it is in another subnet, or its link is down".to_owned(),
        e => e.to_string(),
    };
    DomainError::LinkDown(format!("from {} to {}: {why}", here.label(), remote.label()))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn rs_4_retries_end_before_the_peer_timeout() {
        for millis in [200u64, 2_000, 10_000] {
            let limit = Duration::from_millis(millis);
            let one = Duration::from_nanos(4096 << ack_timeout(limit));
            assert!(one * (RETRIES + 1) < limit, "{one:?} for {limit:?}");
        }
        assert_eq!(ack_timeout(Duration::from_secs(2)), 15);
    }
}
