"""Hosts and rails of the guest, as lines for `ip`, `rdma` and the shell.

A rail is a dummy interface `railR`, on which each host H has a macvlan interface `hHrR` in bridge
mode: they reach each other as through a switch. All are in one network namespace, as rdma_rxe works
in the first one only. That a packet from one local address to another goes by the rail, and not
through the loopback interface, is because rxe looks up its route from a given interface. TCP
connections do take the loopback interface, unless bound to an interface (SO_BINDTODEVICE).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """Shell lines that make it, input for `rdma -b`, and the devices that are then there."""

    script: str
    rdma: str
    devices: tuple[str, ...]


def network(*, hosts: int, rails: int, mtu: int, netns: bool) -> Network:
    ip: list[str] = []
    rdma: list[str] = []
    devices: list[str] = []
    for rail in range(rails):
        ip += [f"link add rail{rail} mtu {mtu} type dummy", f"link set rail{rail} up"]
    for rail in range(rails):
        for host in range(hosts):
            device = f"h{host}r{rail}"
            mac = f"02:77:00:00:{rail:02x}:{host + 1:02x}"
            ip += [
                f"link add link rail{rail} name {device} address {mac} mtu {mtu} "
                "type macvlan mode bridge",
                f"addr add 10.77.{rail}.{host + 1}/24 dev {device}",
                f"link set {device} up",
            ]
            rdma.append(f"link add rxe_{device} type rxe netdev {device}")
            devices.append(f"rxe_{device}")
    after: list[str] = []
    if netns:
        ip += _namespaces(hosts)
        after = _in_namespaces(hosts)
    return Network(_script(ip, rdma, after), "\n".join(rdma) + "\n", tuple(devices))


def _namespaces(hosts: int) -> list[str]:
    """A network namespace for each host, with an interface to the others, and to here."""
    ip = [
        "link add mgmt type dummy",
        "link set mgmt up",
        "link add link mgmt name mgmt0 type macvlan mode bridge",
        "addr add 10.78.0.254/24 dev mgmt0",
        "link set mgmt0 up",
    ]
    for host in range(hosts):
        ip += [
            f"netns add host{host}",
            f"link add link mgmt name eth{host} type macvlan mode bridge",
            f"link set eth{host} netns host{host} name eth0",
        ]
    return ip


def _in_namespaces(hosts: int) -> list[str]:
    lines = []
    for host in range(hosts):
        lines += [
            f"$ip -n host{host} -batch - <<'_'",
            "link set lo up",
            f"addr add 10.78.0.{host + 1}/24 dev eth0",
            "link set eth0 up",
            "_",
            f"echo 10.78.0.{host + 1} host{host} >>/etc/hosts",
        ]
    return lines


def _script(ip: list[str], rdma: list[str], after: list[str]) -> str:
    lines = [
        # By path: busybox's shell would take its own ip.
        "for d in /sbin /usr/sbin /bin /usr/bin /usr/local/sbin; do",
        "  [ ! -x $d/ip ] || ip=$d/ip; [ ! -x $d/rdma ] || rdma=$d/rdma; done",
        '[ "$ip" ] && [ "$rdma" ] || fail "iproute2 is missing"',
        # accept_local: take packets that come from an own address, by wire.
        # rp_filter off and arp_*: hosts are told apart by interface.
        "for f in all default; do c=/proc/sys/net/ipv4/conf/$f",
        "  echo 1 >$c/accept_local; echo 0 >$c/rp_filter",
        "  echo 1 >$c/arp_ignore; echo 2 >$c/arp_announce",
        "  echo 0 >/proc/sys/net/ipv6/conf/$f/accept_dad; done",
        "$ip link set lo up",
    ]
    if ip:
        lines += ["$ip -batch - <<'_' || fail 'network set-up failed'", *ip, "_", *after]
    if rdma:
        lines += ["$rdma -b $rg/ctl/rdma-batch || fail 'rdma set-up failed'"]
    return "\n".join(lines)
