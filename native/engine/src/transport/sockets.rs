//! ListeningSockets sockets: their addresses and their common port.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::OwnedFd,
};

use rustix::{
    io::Errno,
    net::{self, sockopt, AddressFamily, SocketFlags, SocketType},
};

use crate::{api::Ports, domain::DomainError};

/// Attempts to find a port that is free at all addresses.
const ATTEMPTS: u16 = 16;
const BACKLOG: i32 = 4096;

/// ListeningSockets sockets at one port, so that one firewall rule covers the engine.
#[derive(Debug)]
pub(crate) struct ListeningSockets {
    pub sockets: Vec<(IpAddr, OwnedFd)>,
    pub port: u16,
}

/// Treatment of an address that this machine does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressPolicy {
    /// An error: the user named all of the addresses.
    All,
    /// Skip it: the user named the addresses for other purposes too.
    Any,
    /// Listen on it all the same: discovery found the address, and the kernel may still be
    /// checking that no other host has it (duplicate address detection).
    Found,
}

/// Listens at all of these addresses, at the first port that is free at each of them.
///
/// # Errors
/// [`DomainError::Ports`] if none of the configured ports is free.
pub(crate) fn listen(
    ips: &[IpAddr],
    policy: AddressPolicy,
    ports: Option<Ports>,
) -> Result<ListeningSockets, DomainError> {
    let attempts = ports.map_or(ATTEMPTS, Ports::count);
    for i in 0..attempts {
        let port = ports.map_or(0, |p| p.first() + i);
        match at_port(ips, port, policy) {
            Err(DomainError::Io { errno: Errno::ADDRINUSE, .. }) => {}
            settled => return settled,
        }
    }
    let at = ips.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" and ");
    Err(match ports {
        Some(ports) => DomainError::Ports(format!("{ports} at {at}: taken already")),
        None => DomainError::Io { call: "bind", errno: Errno::ADDRINUSE },
    })
}

/// With port 0, the kernel chooses a port for the first address.
fn at_port(
    ips: &[IpAddr],
    port: u16,
    policy: AddressPolicy,
) -> Result<ListeningSockets, DomainError> {
    let mut listening = ListeningSockets { sockets: Vec::new(), port };
    let mut missing = None;
    for ip in ips {
        if listening.sockets.iter().any(|(had, _)| had == ip) {
            continue;
        }
        match listen_on(SocketAddr::new(*ip, listening.port), policy == AddressPolicy::Found) {
            Ok((socket, bound)) => {
                listening.port = bound;
                listening.sockets.push((*ip, socket));
            }
            Err(e @ DomainError::Unavailable(_)) if policy != AddressPolicy::All => {
                tracing::warn!(%ip, why = %e, "skipping an address that can't be listened on");
                missing = Some(e);
            }
            Err(e) => return Err(e),
        }
    }
    match missing {
        Some(e) if listening.sockets.is_empty() => Err(e),
        _ => Ok(listening),
    }
}

fn listen_on(addr: SocketAddr, found: bool) -> Result<(OwnedFd, u16), DomainError> {
    let fail = |call: &'static str| DomainError::io(call);
    let ip = addr.ip();
    let refused = |errno| match errno {
        Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT => DomainError::Unavailable(format!(
            "no interface of this machine has the address {ip}; see `ip addr`"
        )),
        Errno::ACCESS if addr.port() != 0 => DomainError::Ports(format!(
            "port {} at {ip}: this process may not listen there",
            addr.port()
        )),
        errno => DomainError::Io { call: "bind", errno },
    };
    let socket = new_socket(&addr).map_err(refused)?;
    if ip == IpAddr::from(Ipv6Addr::UNSPECIFIED) {
        sockopt::set_ipv6_v6only(&socket, false).map_err(fail("setsockopt(IPV6_V6ONLY)"))?;
    }
    if addr.port() != 0 {
        // Connections of an earlier engine linger for a minute. A socket that still listens
        // conflicts all the same.
        sockopt::set_socket_reuseaddr(&socket, true).map_err(fail("setsockopt(SO_REUSEADDR)"))?;
    }
    if found {
        // Where freebind is not supported, `bind` reports the error.
        let _ = match ip {
            IpAddr::V4(_) => sockopt::set_ip_freebind(&socket, true),
            IpAddr::V6(_) => sockopt::set_ipv6_freebind(&socket, true),
        };
    }
    net::bind(&socket, &addr).map_err(refused)?;
    net::listen(&socket, BACKLOG).map_err(fail("listen"))?;
    let bound = net::getsockname(&socket).map_err(fail("getsockname"))?;
    let bound = SocketAddr::try_from(bound).map_err(fail("getsockname"))?;
    Ok((socket, bound.port()))
}

/// A non-blocking TCP socket for the address's family.
pub(crate) fn new_socket(addr: &SocketAddr) -> Result<OwnedFd, Errno> {
    let family = match addr {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(family, SocketType::STREAM, flags, None)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const LOOPBACKS: [IpAddr; 2] =
        [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2))];

    /// Two consecutive ports, the first of which was free a moment ago.
    fn two_ports() -> Ports {
        let first = listen(&LOOPBACKS, AddressPolicy::All, None).unwrap().port.min(65534);
        Ports::new(first, first + 1).unwrap()
    }

    #[test]
    fn all_addresses_have_one_port() {
        for ports in [None, Some(two_ports())] {
            let listening = listen(&LOOPBACKS, AddressPolicy::All, ports).unwrap();
            assert_ne!(listening.port, 0);
            for (ip, socket) in &listening.sockets {
                let bound = SocketAddr::try_from(net::getsockname(socket).unwrap()).unwrap();
                assert_eq!(bound, SocketAddr::new(*ip, listening.port));
            }
            assert_eq!(listening.sockets.len(), LOOPBACKS.len());
        }
    }

    #[test]
    fn the_next_port_is_taken_until_there_is_none() {
        // Another process may take a port in between; then other ports show the same.
        let shown = (0..20).any(|_| {
            let ports = two_ports();
            let Ok(first) = listen(&LOOPBACKS, AddressPolicy::All, Some(ports)) else {
                return false;
            };
            // The port is taken at one of the addresses only.
            let Ok(second) = listen(&LOOPBACKS[1..], AddressPolicy::All, Some(ports)) else {
                return false;
            };
            let third = listen(&LOOPBACKS, AddressPolicy::All, Some(ports)).unwrap_err();
            let words = third.to_string();
            assert!(matches!(third, DomainError::Ports(_)), "{words}");
            assert!(words.contains("127.0.0.1 and 127.0.0.2: taken already"), "{words}");
            [first.port, second.port] == [ports.first(), ports.first() + 1]
        });
        assert!(shown, "no two neighbouring ports were free");
    }

    #[test]
    fn an_unusable_address_is_an_error_or_skipped_or_listened_on() {
        let ips = ["192.0.2.1".parse().unwrap(), LOOPBACKS[0]];
        let listening = listen(&ips, AddressPolicy::Any, None).unwrap();
        assert_eq!(listening.sockets.len(), 1);
        // The same as during duplicate address detection.
        let found = listen(&ips, AddressPolicy::Found, None).unwrap();
        assert_eq!(found.sockets.iter().map(|(ip, _)| *ip).collect::<Vec<_>>(), ips);
        let named = listen(&ips, AddressPolicy::All, None).unwrap_err();
        let nothing = listen(&ips[..1], AddressPolicy::Any, None).unwrap_err();
        for e in [named, nothing] {
            assert!(e
                .to_string()
                .contains("no interface of this machine has the address 192.0.2.1"));
        }
    }
}
