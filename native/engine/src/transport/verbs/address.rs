//! Messages of connection setup: NIC addresses, link requests and queue pairs.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use fabric_sys::ibverbs as sys;
use serde::{Deserialize, Serialize};

use crate::{
    api::{EngineAddress, Envelope, TransportKind},
    domain::DomainError,
    transport::nic::{frame::Exchange, message_channel::ReceiveLimits},
};

const ADDRESS: Envelope = Envelope::new(*b"FRve", "a verbs endpoint", 1024);
const LINK_REQUEST: Envelope = Envelope::new(*b"FRvi", "a link request", 128);
const QP_SETUP: Envelope = Envelope::new(*b"FRvs", "a link's queue pairs", 256);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Fabric {
    Infiniband,
    /// RDMA over Converged Ethernet, version 2.
    Roce,
    /// RoCE version 1. It is not routed, and used only if the configuration names its GID.
    RoceV1,
}

impl Fabric {
    pub fn name(self) -> &'static str {
        match self {
            Self::Infiniband => "InfiniBand",
            Self::Roce => "RoCE v2",
            Self::RoceV1 => "RoCE v1",
        }
    }
}

/// The address of a NIC; part of the engine's address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NicAddress {
    pub device: String,
    pub port: u8,
    pub fabric: Fabric,
    pub gid: [u8; 16],
    pub lid: u16,
    /// The partition key; its highest bit marks a full member.
    pub pkey: u16,
    /// MTU code of libibverbs: 256 << (n - 1) bytes.
    pub mtu: u8,
    /// The queue pair for datagrams.
    pub qpn: u32,
    pub qkey: u32,
    /// Addresses of the listeners of the TCP side channel.
    pub side_channel: Vec<SocketAddr>,
    /// Port of the side channel at 127.0.0.1, for peers on the same host.
    pub loopback: Option<u16>,
}

/// Bits of a partition key that name the partition.
const PARTITION: u16 = 0x7FFF;

pub(super) fn mtu_bytes(mtu: u8) -> usize {
    256 << usize::from(mtu.clamp(1, 5) - 1)
}

impl NicAddress {
    pub fn encode(&self) -> Vec<u8> {
        ADDRESS.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        let wrong = |what: &str| DomainError::Handshake(format!("a verbs endpoint with {what}"));
        let p: Self = ADDRESS.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))?;
        match () {
            () if !(1..=5).contains(&p.mtu) => Err(wrong("an impossible MTU")),
            () if p.qpn == 0 || p.qpn >= 1 << 24 => Err(wrong("an impossible queue pair")),
            () if p.device.len() > 64 || p.side_channel.len() > 8 => {
                Err(wrong("too many addresses"))
            }
            () => Ok(p),
        }
    }

    /// The address at one endpoint of a peer.
    pub fn of(peer: &EngineAddress, endpoint: usize) -> Result<Self, DomainError> {
        let e = peer.endpoints.get(endpoint).filter(|e| e.transport == TransportKind::Verbs);
        let e =
            e.ok_or_else(|| DomainError::Handshake("the endpoint is not a verbs endpoint".into()))?;
        Self::decode(&e.data)
    }

    /// The address in readable form.
    pub fn label(&self) -> String {
        let at = match self.fabric {
            Fabric::Infiniband => format!("LID {}", self.lid),
            _ => gid_text(&self.gid),
        };
        format!("{} port {} ({}, {at})", self.device, self.port, self.fabric.name())
    }

    /// Addresses of the side channel to try, best first. A remote peer's loopback addresses are
    /// left out.
    pub fn side_candidates(&self, same_host: bool) -> Vec<SocketAddr> {
        let loopback = self.loopback.filter(|_| same_host);
        let loopback = loopback.map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let others =
            self.side_channel.iter().copied().filter(|a| same_host || !a.ip().is_loopback());
        loopback.into_iter().chain(others).take(4).collect()
    }

    /// Why packets from `self` can't reach `remote`, judged by the addresses alone.
    pub fn unfit(&self, remote: &Self) -> Option<String> {
        if self.fabric != remote.fabric {
            let (local_fabric, remote) = (self.fabric.name(), remote.fabric.name());
            return Some(format!("{local_fabric} here can't reach {remote} at the peer"));
        }
        let both = (self.pkey, remote.pkey);
        if (both.0 ^ both.1) & PARTITION != 0 || (both.0 | both.1) & !PARTITION == 0 {
            return Some(format!(
                "partition key {:#06x} here and {:#06x} at the peer don't match: both must name one \
                 partition, and one of them a full member (0x8000); see pkey_index and the subnet \
                 manager's partitions",
                both.0, both.1
            ));
        }
        if self.fabric != Fabric::Infiniband && is_ipv4(&self.gid) != is_ipv4(&remote.gid) {
            return Some(format!(
                "{} here and {} there are of different IP versions; name a GID index of one \
                 version on both sides",
                gid_text(&self.gid),
                gid_text(&remote.gid)
            ));
        }
        None
    }

    /// Whether packets need the global routing header.
    pub fn is_global(&self, remote: &Self) -> bool {
        self.fabric != Fabric::Infiniband || self.gid[..8] != remote.gid[..8]
    }
}

pub(super) fn is_ipv4(gid: &[u8; 16]) -> bool {
    Ipv6Addr::from(*gid).to_ipv4_mapped().is_some()
}

pub(super) fn gid_ip(gid: &[u8; 16]) -> IpAddr {
    Ipv6Addr::from(*gid).to_canonical()
}

pub(super) fn gid_text(gid: &[u8; 16]) -> String {
    gid_ip(gid).to_string()
}

/// The link that the initiator requests; travels with its hello.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LinkRequest {
    pub exchange: Exchange,
    pub from_endpoint: u8,
}

impl LinkRequest {
    pub fn encode(&self) -> Vec<u8> {
        LINK_REQUEST.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        LINK_REQUEST.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))
    }
}

/// One side's queue pairs of a link, sealed by the handshake's session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct QpSetup {
    pub data_qpn: u32,
    pub message_qpn: u32,
    pub data_psn: u32,
    pub message_psn: u32,
    pub mtu: u8,
    /// Reads that this side serves at once.
    pub reads: u8,
    pub receive_limits: ReceiveLimits,
}

impl QpSetup {
    pub fn encode(&self) -> Vec<u8> {
        QP_SETUP.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        let s: Self = QP_SETUP.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))?;
        s.receive_limits.check()?;
        if s.receive_limits.imms < 32 {
            return Err(DomainError::Handshake(
                "the peer receives too few immediates at once: got fewer than 32".into(),
            ));
        }
        let small = |n: u32| n < 1 << 24;
        let sane = [s.data_qpn, s.message_qpn, s.data_psn, s.message_psn].into_iter().all(small);
        match sane && (1..=5).contains(&s.mtu) {
            true => Ok(s),
            false => Err(DomainError::Handshake("impossible queue pairs".into())),
        }
    }
}

/// Header fields of outgoing packets.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub gid_index: u8,
    pub service_level: u8,
    pub traffic_class: u8,
}

/// The address vector from `local` to `remote`. On RoCE v2 the flow label becomes the UDP source
/// port, by which switches spread links over equal paths, so `flow` differs between links.
pub(super) fn address_attr(
    local: &NicAddress,
    remote: &NicAddress,
    route: &Route,
    flow: u32,
) -> sys::AhAttr {
    let mut attr = sys::AhAttr {
        dlid: remote.lid,
        sl: route.service_level,
        port_num: local.port,
        ..Default::default()
    };
    if local.is_global(remote) {
        attr.is_global = 1;
        attr.grh = sys::GlobalRoute {
            dgid: remote.gid,
            flow_label: flow & 0xF_FFFF,
            sgid_index: route.gid_index,
            hop_limit: 64,
            traffic_class: route.traffic_class,
        };
    }
    attr
}

#[cfg(all(test, not(loom)))]
pub(super) mod tests {
    use super::*;

    pub fn sample_address(gid: &str) -> NicAddress {
        NicAddress {
            device: "mlx5_0".into(),
            port: 1,
            fabric: Fabric::Roce,
            gid: gid.parse::<Ipv6Addr>().unwrap().octets(),
            lid: 0,
            pkey: 0xFFFF,
            mtu: 3,
            qpn: 17,
            qkey: 99,
            side_channel: vec!["10.0.0.1:7000".parse().unwrap(), "127.0.0.1:7000".parse().unwrap()],
            loopback: Some(7001),
        }
    }

    #[test]
    fn an_address_survives_encoding_and_an_impossible_one_is_refused() {
        let p = sample_address("::ffff:10.0.0.1");
        assert_eq!(NicAddress::decode(&p.encode()), Ok(p.clone()));
        assert_eq!(p.label(), "mlx5_0 port 1 (RoCE v2, 10.0.0.1)");
        for bad in [
            NicAddress { mtu: 6, ..p.clone() },
            NicAddress { qpn: 0, ..p.clone() },
            NicAddress { qpn: 1 << 24, ..p.clone() },
            NicAddress { device: "x".repeat(65), ..p.clone() },
        ] {
            assert!(NicAddress::decode(&bad.encode()).is_err(), "{bad:?}");
        }
        let shown =
            |same_host| p.side_candidates(same_host).iter().map(|a| a.port()).collect::<Vec<_>>();
        assert_eq!((shown(true), shown(false)), (vec![7001, 7000, 7000], vec![7000]));
    }

    #[test]
    fn addresses_that_cannot_reach_each_other_name_the_reason() {
        let (a, b) = (sample_address("::ffff:10.0.0.1"), sample_address("::ffff:10.0.0.2"));
        assert_eq!(a.unfit(&b), None);
        assert!(a.is_global(&b));
        let ib = NicAddress { fabric: Fabric::Infiniband, lid: 5, ..a.clone() };
        assert!(a.unfit(&ib).unwrap().contains("InfiniBand"));
        assert!(a.unfit(&sample_address("fd00::1")).unwrap().contains("IP versions"));
        let of = |pkey| NicAddress { pkey, ..ib.clone() };
        assert!(of(0xFFFF).unfit(&of(0x8001)).unwrap().contains("0x8001"));
        assert!(of(0x0001).unfit(&of(0x0001)).unwrap().contains("full member"));
        assert_eq!(of(0x0001).unfit(&of(0x8001)), None);
        assert!(!ib.is_global(&ib));
        let route = Route { gid_index: 3, service_level: 2, traffic_class: 104 };
        let (global, local) =
            (address_attr(&a, &b, &route, u32::MAX), address_attr(&ib, &ib, &route, 1));
        assert_eq!(
            (global.is_global, global.grh.sgid_index, global.grh.flow_label),
            (1, 3, 0xF_FFFF)
        );
        assert_eq!((local.is_global, local.dlid, local.sl), (0, 5, 2));
    }

    #[test]
    fn impossible_queue_pairs_are_refused() {
        let receive_limits = ReceiveLimits { slot_bytes: 4096, slots: 24, imms: 128 };
        let s = QpSetup {
            data_qpn: 1,
            message_qpn: 2,
            data_psn: 3,
            message_psn: 4,
            mtu: 3,
            reads: 16,
            receive_limits,
        };
        assert_eq!(QpSetup::decode(&s.encode()), Ok(s.clone()));
        for bad in [
            QpSetup { data_psn: 1 << 24, ..s.clone() },
            QpSetup { mtu: 0, ..s.clone() },
            QpSetup { receive_limits: ReceiveLimits { slot_bytes: 10, ..receive_limits }, ..s },
        ] {
            assert!(QpSetup::decode(&bad.encode()).is_err());
        }
    }
}
