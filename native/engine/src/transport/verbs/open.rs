//! Opens the domains of the chosen NICs.

use std::{collections::HashMap, sync::Arc};

use rustix::event::epoll;
use slab::Slab;

use super::{
    address::NicAddress,
    cq_pool::CqPool,
    datagrams::Datagrams,
    device::Device,
    discover::{summary, survey_machine, unmatched_patterns, ChosenPort},
    helper_threads::HelperThreads,
    raw,
    regions::Regions,
    side_channel::SideChannel,
    VerbsDomain, COMPLETIONS, EVENTS, HELPER_DONE, LISTENER,
};
use crate::{
    api::{EngineAddress, EngineConfig, EngineId},
    domain::{Attendance, Domain, DomainError},
    time::Time,
    transport::{
        handshake::{Credentials, Secret},
        log_limit::LogLimit,
        nics::AffinityGuard,
    },
};

/// Opens one domain for each chosen NIC.
pub(crate) fn open(
    id: EngineId,
    config: &EngineConfig,
) -> Result<Vec<Box<dyn Domain>>, DomainError> {
    let (reports, chosen) = survey_machine(&config.nics);
    if let Some(name) = unmatched_patterns(&reports, &config.nics.names).next() {
        let found: Vec<&str> = reports.iter().map(|r| r.device.as_str()).collect();
        return Err(DomainError::Unavailable(format!(
            "no RDMA device matches {name:?}; there are: {}",
            if found.is_empty() { "none".to_owned() } else { found.join(", ") }
        )));
    }
    if chosen.is_empty() {
        return Err(DomainError::Unavailable(summary(&reports)));
    }
    let own_gids: Vec<[u8; 16]> = reports
        .iter()
        .flat_map(|r| &r.gids)
        .filter_map(|g| g.address.parse().ok())
        .map(|ip: std::net::IpAddr| match ip {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(v6) => v6.octets(),
        })
        .collect();
    // Allocates queues on the NICs' NUMA node.
    let devices: Vec<String> = chosen.iter().map(|c| c.device.clone()).collect();
    let _near = AffinityGuard::near(&devices);
    let mut rails: Vec<Box<dyn Domain>> = Vec::new();
    let mut refused = Vec::new();
    for port in chosen {
        let name = port.device.clone();
        match VerbsDomain::open(id, config, port, own_gids.clone()) {
            Ok(domain) => rails.push(Box::new(domain)),
            Err(e @ DomainError::Ports(_)) => return Err(e),
            // A NIC named by the user must work; others may fail.
            Err(e) if !config.nics.names.is_empty() => return Err(e),
            Err(e) => refused.push(format!("{name}: {e}")),
        }
    }
    match rails.is_empty() {
        true => Err(DomainError::Unavailable(refused.join("; "))),
        false => Ok(rails),
    }
}

impl VerbsDomain {
    fn open(
        id: EngineId,
        config: &EngineConfig,
        chosen: ChosenPort,
        own_gids: Vec<[u8; 16]>,
    ) -> Result<Self, DomainError> {
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(DomainError::io("epoll_create"))?;
        let device = Device::open(chosen, &config.nics, config.peer_timeout)?;
        let side_channel = SideChannel::open(config, &device.chosen.gid, (&epoll, LISTENER))?;
        let datagrams = Datagrams::open(&device)?;
        let helper = HelperThreads::new()?;
        raw::unblock(device.context.async_fd())?;
        let watched = [(device.context.async_fd(), EVENTS), (device.channel.fd(), COMPLETIONS)];
        for (fd, tag) in watched {
            raw::watch(&epoll, fd, tag)?;
        }
        let (data, flags) = (epoll::EventData::new_u64(HELPER_DONE), epoll::EventFlags::IN);
        epoll::add(&epoll, &*helper.event, data, flags).map_err(DomainError::io("epoll_ctl"))?;
        let address = NicAddress {
            device: device.chosen.device.clone(),
            port: device.chosen.port,
            fabric: device.chosen.fabric,
            gid: device.chosen.gid,
            lid: device.chosen.lid,
            pkey: device.pkey,
            mtu: device.mtu,
            qpn: datagrams.number(),
            qkey: datagrams.qkey,
            side_channel: side_channel.addrs.clone(),
            loopback: side_channel.loopback,
        };
        Ok(Self {
            log: LogLimit::default(),
            credentials: Credentials::new(
                EngineAddress { id, name: String::new(), endpoints: Vec::new() },
                Secret::new(config.token.as_deref())?,
            ),
            own_endpoint: 0,
            address,
            own_gids,
            peer_timeout: config.peer_timeout,
            attendance: Attendance::default(),
            slots: Slab::new(),
            generation: 0,
            attempts: HashMap::new(),
            accepts: HashMap::new(),
            closing: Vec::new(),
            failing: Vec::new(),
            dirty: Vec::new(),
            awaiting_room: Vec::new(),
            completions: Vec::new(),
            helper,
            side_channel,
            epoll,
            regions: Regions::default(),
            cqs: CqPool::default(),
            datagrams,
            device: Arc::new(device),
            dead: None,
            posting_since: None,
            poll_fds_at: Time(0),
            tick_at: Time(0),
            now: Time(0),
        })
    }
}
