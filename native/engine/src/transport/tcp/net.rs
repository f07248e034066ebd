//! Addresses and sockets: where an engine listens, what it tells others, how a stream is opened.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
};

use rustix::{
    io::Errno,
    net::{self, sockopt, AddressFamily, SocketFlags, SocketType},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    api::{EngineConfig, Envelope},
    domain::DomainError,
};

const ENVELOPE: Envelope = Envelope::new(*b"FRte", "a tcp endpoint", 2048);

/// Where an engine can be reached over tcp. Never holds a loopback address: to a remote host it
/// would mean itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Where {
    pub addrs: Vec<SocketAddr>,
    /// The port on loopback, for those whose `host` is the same.
    pub loopback_port: Option<u16>,
    /// Differs between hosts, and between network namespaces of a host.
    pub host: [u8; 16],
}

impl Where {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        ENVELOPE.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))
    }

    /// The addresses to try from here, best first.
    pub fn candidates(&self, here: &[u8; 16]) -> Vec<SocketAddr> {
        let loopback = self
            .loopback_port
            .filter(|_| self.host == *here)
            .map(|port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
        // What a peer says is not to be trusted to be remote.
        let others = self.addrs.iter().copied().filter(|a| !a.ip().is_loopback());
        loopback.into_iter().chain(others).take(8).collect()
    }
}

/// Tells network namespaces apart: only within one does a loopback address mean the same.
pub(super) fn host_identity() -> [u8; 16] {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hash = Sha256::new();
    hash.update(boot.trim());
    hash.update(namespace.to_string_lossy().as_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&hash.finalize()[..16]);
    id
}

/// Listening sockets and what to tell others of them.
pub(super) fn listen(config: &EngineConfig) -> Result<(Vec<OwnedFd>, Where), DomainError> {
    let host = host_identity();
    let mut place = Where { host, ..Where::default() };
    let mut sockets = Vec::new();
    let wanted: Vec<IpAddr> = match (config.bind.as_slice(), &config.token) {
        ([], None) => vec![Ipv4Addr::LOCALHOST.into()],
        ([], Some(_)) => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
        (some, _) => some.to_vec(),
    };
    let any = |ip: &IpAddr| ip.is_unspecified();
    for ip in &wanted {
        // One socket for both families where the system has it.
        if any(ip) && sockets.len() == 1 && wanted.len() == 2 && config.bind.is_empty() {
            break;
        }
        let (socket, port) = match listen_on(*ip) {
            Ok(s) => s,
            Err(_) if any(ip) && ip.is_ipv6() && config.bind.is_empty() => continue,
            Err(e) => return Err(e),
        };
        sockets.push(socket);
        match ip {
            ip if any(ip) => {
                place.addrs.extend(own_addresses(ip.is_ipv6(), port));
                place.loopback_port = Some(port);
            }
            ip if ip.is_loopback() => place.loopback_port = Some(port),
            ip => place.addrs.push(SocketAddr::new(*ip, port)),
        }
    }
    place.addrs.truncate(16);
    Ok((sockets, place))
}

fn listen_on(ip: IpAddr) -> Result<(OwnedFd, u16), DomainError> {
    let fail = |call: &'static str| DomainError::io(call);
    let socket = new_socket(&SocketAddr::new(ip, 0))?;
    if ip == IpAddr::from(Ipv6Addr::UNSPECIFIED) {
        sockopt::set_ipv6_v6only(&socket, false).map_err(fail("setsockopt(IPV6_V6ONLY)"))?;
    }
    net::bind(&socket, &SocketAddr::new(ip, 0)).map_err(|errno| match errno {
        Errno::ADDRNOTAVAIL => DomainError::Unavailable(format!(
            "no interface of this machine has the address {ip}; see `ip addr`"
        )),
        errno => DomainError::Io { call: "bind", errno },
    })?;
    net::listen(&socket, 4096).map_err(fail("listen"))?;
    let bound = net::getsockname(&socket).map_err(fail("getsockname"))?;
    let bound = SocketAddr::try_from(bound).map_err(fail("getsockname"))?;
    Ok((socket, bound.port()))
}

/// The addresses of this machine's interfaces that others may reach, IPv4 first.
fn own_addresses(v6_too: bool, port: u16) -> Vec<SocketAddr> {
    let mut ips: Vec<IpAddr> = if_addrs::get_if_addrs()
        .unwrap_or_default()
        .into_iter()
        .filter(|i| !i.is_loopback() && !i.is_link_local())
        .map(|i| i.ip())
        .filter(|ip| ip.is_ipv4() || v6_too)
        .collect();
    ips.sort_by_key(|ip| ip.is_ipv6());
    ips.dedup();
    ips.into_iter().map(|ip| SocketAddr::new(ip, port)).collect()
}

fn new_socket(addr: &SocketAddr) -> Result<OwnedFd, DomainError> {
    let family = match addr {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(family, SocketType::STREAM, flags, None).map_err(DomainError::io("socket"))
}

/// Begins to connect.
pub(super) fn connect(addr: &SocketAddr) -> Result<OwnedFd, DomainError> {
    let socket = new_socket(addr)?;
    tune(&socket);
    match net::connect(&socket, addr) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(e) => Err(DomainError::LinkDown(format!("connect to {addr}: {e}"))),
    }
}

/// The outcome of a connect that was in progress.
pub(super) fn connect_result(socket: &impl std::os::fd::AsFd) -> Result<(), Errno> {
    sockopt::socket_error(socket).and_then(|r| r)
}

pub(super) fn tune(socket: &OwnedFd) {
    // Without it a small frame would wait for the acknowledgement of the one before.
    let _ = sockopt::set_tcp_nodelay(socket, true);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(addrs: &[&str], loopback_port: Option<u16>, host: u8) -> Where {
        let addrs = addrs.iter().map(|a| a.parse().unwrap()).collect();
        Where { addrs, loopback_port, host: [host; 16] }
    }

    #[test]
    fn loopback_is_for_the_same_host_only() {
        let p = place(&["10.0.0.1:7", "127.0.0.1:7", "[::1]:7", "[fd00::1]:7"], Some(9), 1);
        let shown = |here| -> Vec<String> {
            p.candidates(&[here; 16]).iter().map(|a| a.to_string()).collect()
        };
        assert_eq!(shown(1), ["127.0.0.1:9", "10.0.0.1:7", "[fd00::1]:7"]);
        assert_eq!(shown(2), ["10.0.0.1:7", "[fd00::1]:7"]);
        assert!(place(&[], Some(9), 1).candidates(&[2; 16]).is_empty());
    }

    #[test]
    fn without_a_token_only_loopback_listens() {
        let (sockets, place) = listen(&EngineConfig::default()).unwrap();
        assert_eq!((sockets.len(), place.addrs.len()), (1, 0));
        assert!(place.loopback_port.is_some());
        let config = EngineConfig { token: Some(vec![1]), ..Default::default() };
        let (_, place) = listen(&config).unwrap();
        assert!(place.addrs.iter().all(|a| !a.ip().is_loopback()));
        assert_eq!(Where::decode(&place.encode()).unwrap(), place);
    }

    #[test]
    fn an_address_that_is_not_ours_is_refused_in_words() {
        let config =
            EngineConfig { bind: vec!["192.0.2.1".parse().unwrap()], ..Default::default() };
        let e = listen(&config).unwrap_err().to_string();
        assert!(e.contains("192.0.2.1"), "{e}");
    }
}
