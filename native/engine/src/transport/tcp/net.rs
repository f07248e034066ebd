//! Addresses and sockets: where an engine listens, and how a stream connects.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
};

use rustix::{
    io::Errno,
    net::{self, sockopt},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    api::{EngineConfig, Envelope},
    domain::DomainError,
    transport::sockets::{self, new_socket, AddressPolicy},
};

const ENVELOPE: Envelope = Envelope::new(*b"FRte", "a tcp endpoint", 2048);

/// Maximum of addresses that are listened on by default, sent to peers, or tried; plus loopback.
pub(super) const MAX_ADDRESSES: usize = 8;

/// The tcp address of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TcpEndpoint {
    /// Loopback addresses are valid only for peers with the same `host`.
    pub addrs: Vec<SocketAddr>,
    /// The port at 127.0.0.1, for peers with the same `host`.
    pub loopback_port: Option<u16>,
    /// Identifies a network namespace of a host.
    pub host: [u8; 16],
}

impl TcpEndpoint {
    pub fn encode(&self) -> Vec<u8> {
        ENVELOPE.encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, DomainError> {
        ENVELOPE.decode(bytes).map_err(|e| DomainError::Handshake(e.to_string()))
    }

    /// The addresses to try from `own_host`, best first.
    pub fn candidates(&self, own_host: &[u8; 16]) -> Vec<SocketAddr> {
        let same = self.host == *own_host;
        let loopback = self
            .loopback_port
            .filter(|_| same)
            .map(|port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
        // A remote peer's loopback addresses are left out.
        let others = self.addrs.iter().copied().filter(|a| same || !a.ip().is_loopback());
        loopback.into_iter().chain(limit_addresses(others.collect(), SocketAddr::is_ipv6)).collect()
    }
}

/// The first addresses; the last one is replaced if the other address family would be missing.
fn limit_addresses<T>(mut addrs: Vec<T>, is_v6: impl Fn(&T) -> bool) -> Vec<T> {
    if addrs.len() > MAX_ADDRESSES {
        let rest = addrs.split_off(MAX_ADDRESSES);
        let family = is_v6(&addrs[0]);
        if addrs.iter().all(|a| is_v6(a) == family) {
            if let Some(other) = rest.into_iter().find(|a| is_v6(a) != family) {
                addrs[MAX_ADDRESSES - 1] = other;
            }
        }
    }
    addrs
}

/// Identifies this network namespace: only within one do loopback addresses mean the same.
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

/// The listening sockets, and the endpoint to send to peers.
pub(super) fn listen(config: &EngineConfig) -> Result<(Vec<OwnedFd>, TcpEndpoint), DomainError> {
    let (ips, policy) = listen_addresses(config);
    let listening = sockets::listen(&ips, policy, config.ports)?;
    let port = listening.port;
    let mut own_endpoint = TcpEndpoint { host: host_identity(), ..TcpEndpoint::default() };
    for (ip, socket) in &listening.sockets {
        if ip.is_loopback() {
            // Accepted connections inherit it.
            use_unpaced(socket);
        }
        let reached = match ip.is_unspecified() {
            true => own_addresses(ip.is_ipv6()),
            false => vec![*ip],
        };
        if ip.is_unspecified() || *ip == Ipv4Addr::LOCALHOST {
            own_endpoint.loopback_port = Some(port);
        }
        let announced = reached.into_iter().filter(|ip| *ip != Ipv4Addr::LOCALHOST);
        own_endpoint.addrs.extend(announced.map(|ip| SocketAddr::new(ip, port)));
    }
    own_endpoint.addrs = limit_addresses(own_endpoint.addrs, SocketAddr::is_ipv6);
    Ok((listening.sockets.into_iter().map(|(_, socket)| socket).collect(), own_endpoint))
}

/// The addresses to listen on: the configured ones, or with a token those of the interfaces; plus
/// loopback.
fn listen_addresses(config: &EngineConfig) -> (Vec<IpAddr>, AddressPolicy) {
    let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
    match (config.bind.as_slice(), &config.token) {
        ([], None) => (vec![loopback], AddressPolicy::All),
        ([], Some(_)) => {
            let mut ips = limit_addresses(own_addresses(true), IpAddr::is_ipv6);
            ips.push(loopback);
            (ips, AddressPolicy::Found)
        }
        (named, _) => (without_covered(named), AddressPolicy::All),
    }
}

/// Addresses without those that a wildcard covers.
fn without_covered(named: &[IpAddr]) -> Vec<IpAddr> {
    let any_v6 = named.contains(&Ipv6Addr::UNSPECIFIED.into());
    let any_v4 = named.contains(&Ipv4Addr::UNSPECIFIED.into());
    let covered = |ip: &IpAddr| match ip {
        IpAddr::V6(ip) => any_v6 && !ip.is_unspecified(),
        IpAddr::V4(ip) => any_v6 || (any_v4 && !ip.is_unspecified()),
    };
    named.iter().copied().filter(|ip| !covered(ip)).collect()
}

/// Addresses of this machine's interfaces that peers may reach, IPv4 first.
fn own_addresses(v6_too: bool) -> Vec<IpAddr> {
    let mut ips: Vec<IpAddr> = if_addrs::get_if_addrs()
        .unwrap_or_default()
        .into_iter()
        .filter(|i| !i.is_loopback() && !i.is_link_local())
        .map(|i| i.ip())
        .filter(|ip| ip.is_ipv4() || v6_too)
        .collect();
    ips.sort_by_key(|ip| ip.is_ipv6());
    ips.dedup();
    ips
}

/// Starts to connect.
pub(super) fn connect(addr: &SocketAddr) -> Result<OwnedFd, DomainError> {
    let socket = new_socket(addr).map_err(DomainError::io("socket"))?;
    tune(&socket);
    if addr.ip().is_loopback() {
        use_unpaced(&socket);
    }
    match net::connect(&socket, addr) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(e) => Err(DomainError::LinkDown(format!("connect to {addr}: {e}"))),
    }
}

/// The result of a connect that was in progress.
pub(super) fn connect_result(socket: &impl std::os::fd::AsFd) -> Result<(), Errno> {
    sockopt::socket_error(socket).and_then(|r| r)
}

pub(super) fn tune(socket: &OwnedFd) {
    // Otherwise a small frame waits for the acknowledgement of the one before.
    let _ = sockopt::set_tcp_nodelay(socket, true);
}

/// The congestion control of loopback connections, which every kernel has and allows to all users.
const UNPACED: &str = "reno";

/// Before a loopback connection is made: nothing paces it. Where the host's default is `bbr`, a
/// timer would interrupt the sender some thousand times a second, on a path without a bottleneck.
fn use_unpaced(socket: &OwnedFd) {
    let _ = sockopt::set_tcp_congestion(socket, UNPACED);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_endpoint(addrs: &[&str], loopback_port: Option<u16>, host: u8) -> TcpEndpoint {
        let addrs = addrs.iter().map(|a| a.parse().unwrap()).collect();
        TcpEndpoint { addrs, loopback_port, host: [host; 16] }
    }

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }

    #[test]
    fn loopback_is_for_the_same_host_only() {
        let p = own_endpoint(&["10.0.0.1:7", "127.0.0.1:7", "[::1]:7", "[fd00::1]:7"], Some(9), 1);
        let shown = |own_host| -> Vec<String> {
            p.candidates(&[own_host; 16]).iter().map(|a| a.to_string()).collect()
        };
        let all = ["127.0.0.1:9", "10.0.0.1:7", "127.0.0.1:7", "[::1]:7", "[fd00::1]:7"];
        assert_eq!(shown(1), all);
        assert_eq!(shown(2), ["10.0.0.1:7", "[fd00::1]:7"]);
        assert!(own_endpoint(&["[::1]:7"], Some(9), 1).candidates(&[2; 16]).is_empty());
    }

    #[test]
    fn the_addresses_tried_are_limited_and_include_each_family() {
        let v4 = |i: u8| format!("10.0.0.{i}:7");
        let many: Vec<String> = (1..20).map(v4).chain(["[fd00::1]:7".into()]).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let all = own_endpoint(&many, Some(9), 1);
        let announced = limit_addresses(all.addrs.clone(), SocketAddr::is_ipv6);
        assert_eq!(announced.len(), MAX_ADDRESSES);
        let shown: Vec<String> = announced.iter().map(SocketAddr::to_string).collect();
        assert_eq!(shown[..MAX_ADDRESSES - 1], many[..MAX_ADDRESSES - 1]);
        assert_eq!(shown[MAX_ADDRESSES - 1], "[fd00::1]:7");
        // A peer that sends more addresses gets no more tried.
        assert_eq!(all.candidates(&[2; 16]), announced);
        assert_eq!(all.candidates(&[1; 16])[1..], announced);
    }

    #[test]
    fn without_a_token_only_loopback_listens() {
        let (sockets, own_endpoint) = listen(&EngineConfig::default()).unwrap();
        assert_eq!((sockets.len(), own_endpoint.addrs.len()), (1, 0));
        assert!(own_endpoint.loopback_port.is_some());
    }

    #[test]
    fn with_a_token_the_interfaces_and_loopback_listen() {
        let config = EngineConfig { token: Some(vec![1]), ..Default::default() };
        let (sockets, own_endpoint) = listen(&config).unwrap();
        let mut heard: Vec<SocketAddr> = sockets
            .iter()
            .map(|s| SocketAddr::try_from(net::getsockname(s).unwrap()).unwrap())
            .collect();
        let port = own_endpoint.loopback_port.unwrap();
        let loopback = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        let mut announced = own_endpoint.addrs.clone();
        assert!(announced.iter().all(|a| !a.ip().is_loopback() && a.port() == port));
        announced.push(loopback);
        heard.sort();
        announced.sort();
        assert_eq!(heard, announced);
        assert_eq!(TcpEndpoint::decode(&own_endpoint.encode()).unwrap(), own_endpoint);
    }

    #[test]
    fn configured_wildcards_listen_on_all_addresses() {
        let config = EngineConfig {
            token: Some(vec![1]),
            bind: ips(&["0.0.0.0", "127.0.0.1"]),
            ..Default::default()
        };
        let (sockets, own_endpoint) = listen(&config).unwrap();
        let bound = SocketAddr::try_from(net::getsockname(&sockets[0]).unwrap()).unwrap();
        assert_eq!((sockets.len(), bound.ip()), (1, Ipv4Addr::UNSPECIFIED.into()));
        assert_eq!(own_endpoint.loopback_port, Some(bound.port()));
        let announced: Vec<IpAddr> = own_endpoint.addrs.iter().map(|a| a.ip()).collect();
        assert_eq!(announced, own_addresses(false));
    }

    #[test]
    fn no_address_is_listened_on_twice() {
        let kept = |texts: &[&str]| without_covered(&ips(texts));
        assert_eq!(kept(&["10.0.0.1", "::1"]), ips(&["10.0.0.1", "::1"]));
        assert_eq!(kept(&["::1", "0.0.0.0", "10.0.0.1"]), ips(&["::1", "0.0.0.0"]));
        assert_eq!(kept(&["0.0.0.0", "::", "fd00::1"]), ips(&["::"]));
        let config = EngineConfig { bind: ips(&["127.0.0.1", "127.0.0.1"]), ..Default::default() };
        assert_eq!(listen(&config).unwrap().0.len(), 1);
    }

    #[test]
    fn a_configured_loopback_address_is_sent_to_peers() {
        let config = EngineConfig { bind: ips(&["127.0.0.2"]), ..Default::default() };
        let (_, own_endpoint) = listen(&config).unwrap();
        assert_eq!(own_endpoint.loopback_port, None);
        assert_eq!(own_endpoint.candidates(&host_identity()), own_endpoint.addrs);
        assert_eq!(own_endpoint.addrs[0].ip(), ips(&["127.0.0.2"])[0]);
    }

    #[test]
    fn loopback_connections_are_not_paced_at_either_end() {
        let (sockets, own_endpoint) = listen(&EngineConfig::default()).unwrap();
        let near = connect(&own_endpoint.candidates(&host_identity())[0]).unwrap();
        let far = (0..1000).find_map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            net::accept(&sockets[0]).ok()
        });
        for end in [near, far.expect("the connection is accepted")] {
            assert_eq!(sockopt::tcp_congestion(&end).unwrap(), UNPACED);
        }
    }

    #[test]
    fn an_address_of_another_machine_is_refused_by_name() {
        let config = EngineConfig { bind: ips(&["192.0.2.1"]), ..Default::default() };
        let e = listen(&config).unwrap_err().to_string();
        assert!(e.contains("192.0.2.1"), "{e}");
    }
}
