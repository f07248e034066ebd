"""How ranks tell each other of themselves before an exchange."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fabric_ray.errors import FabricError, HandshakeError, InvalidArgument, PeerLost

_GOOD, _BAD = b"+", b"-"


@runtime_checkable
class Comm(Protocol):
    """What takes the place of a ``torch.distributed`` group: threads, Ray actors, MPI."""

    def rank(self) -> int:
        """This rank."""

    def size(self) -> int:
        """How many there are."""

    def all_gather(self, value: bytes, /) -> Sequence[bytes]:
        """Each rank's ``value``, by rank; all ranks call it in the same order."""


class GroupComm:
    """A ``torch.distributed`` group.

    Bytes go as tensors of bytes: nothing that a peer sent is unpickled. They lie on the host if the
    group has a backend for that, such as gloo, or else on the device that it is for (NCCL).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.device = device_of(group)

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def all_gather(self, value: bytes) -> list[bytes]:
        try:
            return self._all_gather(value)
        except RuntimeError as error:
            raise PeerLost(
                f"a rank left the torch.distributed group, or its timeout passed: {error}; look "
                "for a rank that ended, and set the timeout with timeout= of init_process_group",
                peer="",
            ) from error

    def _all_gather(self, value: bytes) -> list[bytes]:
        length = torch.tensor([len(value)], dtype=torch.int64, device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size())]
        dist.all_gather(lengths, length, group=self._group)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if value:
            padded[: len(value)] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        padded = padded.to(self.device)
        all_padded = [torch.zeros_like(padded) for _ in lengths]
        if longest:
            dist.all_gather(all_padded, padded, group=self._group)
        pairs = zip(all_padded, lengths, strict=True)
        return [p.cpu()[: int(n)].numpy().tobytes() for p, n in pairs]


class MpiComm:
    """A communicator of mpi4py."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def rank(self) -> int:
        return int(self._comm.Get_rank())

    def size(self) -> int:
        return int(self._comm.Get_size())

    def all_gather(self, value: bytes) -> list[bytes]:
        return [bytes(one) for one in self._comm.allgather(value)]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors lie that a group gathers: on the host if it can, or else on the current GPU, or
    whatever its first backend is for."""
    kinds = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds[0])


def comm_of(group: Any, comm: Any = None) -> Comm:
    """The one of the two that is given, as a :class:`Comm`.

    Raises:
        InvalidArgument: none or both of them, or something else.
    """
    given = [one for one in (group, comm) if one is not None]
    if len(given) != 1:
        raise InvalidArgument(f"{len(given)} of group and comm were given; give one of them")
    if dist.is_available() and isinstance(given[0], dist.ProcessGroup):
        return GroupComm(given[0])
    if isinstance(given[0], Comm):
        return given[0]
    if all(callable(getattr(given[0], name, None)) for name in ("Get_rank", "Get_size")):
        return MpiComm(given[0])
    raise InvalidArgument(
        f"a {type(given[0]).__name__} connects no ranks; give a torch.distributed group, or an "
        "object with rank(), size() and all_gather(bytes)"
    )


def agree(
    all_gather: Callable[[bytes], Sequence[bytes | None]], value: bytes | FabricError
) -> list[bytes | None]:
    """Each rank's value; ``None`` for a rank that takes no part. A rank with an error raises it,
    and all other ranks report it, so that none waits for a rank that gave up.

    Raises:
        HandshakeError: another rank had an error; the text is its.
    """
    if isinstance(value, FabricError):
        all_gather(_BAD + str(value).encode())
        raise value
    gathered = all_gather(_GOOD + value)
    for rank, one in enumerate(gathered):
        if one is not None and one[:1] != _GOOD:
            cause = one[1:].decode(errors="replace") or "it made another call; make the same ones"
            raise HandshakeError(f"rank {rank} could not take part: {cause}", peer=f"rank {rank}")
    return [one and one[1:] for one in gathered]


def ranks_per_node(comm: Comm) -> int:
    """How many neighbouring ranks each host has, by the hosts' names; all of them if hosts have
    different numbers, or ranks aren't in the order of hosts. All ranks call it together.

    Which ranks are a node decides how often bytes cross between nodes, and never what arrives.
    """
    hosts = comm.all_gather(socket.gethostname().encode())
    size = next((i for i, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    nodes = [hosts[i : i + size] for i in range(0, len(hosts), size)]
    alike = all(len({*node}) == 1 and len(node) == size for node in nodes)
    apart = len({node[0] for node in nodes}) == len(nodes)
    return size if alike and apart else len(hosts)
