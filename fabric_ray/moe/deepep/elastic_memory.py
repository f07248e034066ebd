"""DeepEP's Engram, pipeline calls and all-gather, on memory that all ranks write to and read from.

They take host tensors, and their memory is made when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fabric_ray._native import Transfer
from fabric_ray.errors import InvalidArgument, Unsupported
from fabric_ray.moe.deepep.sizes import up
from fabric_ray.moe.peer_memory import PeerMemory

ALIGNED = 32


def check_host(what: str, tensor: Tensor) -> None:
    """
    Raises:
        Unsupported: it lies on a GPU.
        InvalidArgument: it isn't contiguous.
    """
    if tensor.device.type != "cpu":
        raise Unsupported(
            f"{what} lies on {tensor.device}, and this call takes host tensors; use "
            "torch.distributed, or TransferEngine for GPU memory"
        )
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{what} is not contiguous; give {what}.contiguous()")


class Engram:
    """Entries of all ranks, as many of each, that any rank fetches.

    Args:
        memory: holds this rank's entries.
        storage: those, ``[entries, hidden]``.
        sf: the scales of all ranks' entries, ``[ranks * entries, packs]``, or ``None``.
    """

    def __init__(self, memory: PeerMemory, storage: Tensor, sf: Tensor | None) -> None:
        self._memory, self._scales = memory, sf
        self._entries, self._hidden = storage.shape
        self._dtype = storage.dtype
        self._fetches: list[Transfer] = []
        memory.tensor(0, storage.dtype, storage.shape).copy_(storage)

    def fetch(
        self, indices: Tensor, by_columns: Callable[[Tensor], Tensor]
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Begins to read entries ``[tokens, entries of each]``; what it returns waits for them."""
        flat = indices.flatten().to(torch.int64)
        total = self._entries * (len(self._memory.others) + 1)
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < total:
            raise InvalidArgument(
                f"indices from {int(flat.min())} to {int(flat.max())}; all ranks have {total} "
                "entries"
            )
        nbytes = self._hidden * self._dtype.itemsize
        found, transfer = self._memory.read_rows(flat, nbytes, self._entries)
        self._fetches = [one for one in self._fetches if not one.done()] + [transfer]
        data = found.view(self._dtype).view(len(indices), -1)
        scales = None
        if self._scales is not None:
            scales = by_columns(self._scales[flat].view(len(indices), -1))

        def wait() -> tuple[Tensor, Tensor | None]:
            transfer.wait()
            return data, scales

        return wait

    def finish(self) -> None:
        """Waits for all fetches; what failed is raised where it is waited for."""
        for transfer in self._fetches:
            transfer.wait_quiesced()


class Ring:
    """Tensors to and from the ranks before and behind this one.

    A rank has ``slots`` of ``slot_nbytes`` for what comes from either, and as many for what it
    sends. A slot is used again when the receiver has said that it is free.
    """

    def __init__(self, memory: PeerMemory, slot_nbytes: int, slots: int) -> None:
        self._memory, self._nbytes, self._slots = memory, slot_nbytes, slots
        behind, before = (memory.others or [memory.rank])[0], (memory.others or [memory.rank])[-1]
        # By direction: away from a rank's predecessor, and from its successor.
        self._to, self._from = (behind, before), (before, behind)
        self._sent, self._received = [0, 0], [0, 0]

    @staticmethod
    def sizes(slot_nbytes: int, slots: int) -> tuple[int, int]:
        """Bytes and counters of the memory."""
        return 4 * slots * slot_nbytes, 2 * slots + 2

    def send(self, tensor: Tensor, rank: int) -> None:
        """Copies and sends; waits while the receiver has no free slot."""
        way = self._way(self._to, rank, tensor)
        slot = self._sent[way] % self._slots
        if self._sent[way] >= self._slots:
            self._memory.wait(2 * self._slots + way, [rank])
        self._sent[way] += 1
        out, into = (self._offset(way + 2, slot), self._offset(way, slot))
        self._memory.tensor(out, tensor.dtype, tensor.shape).copy_(tensor)
        self._memory.write(rank, out, into, tensor.nbytes, way * self._slots + slot)

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Waits for the next one, and frees its slot."""
        way = self._way(self._from, rank, tensor)
        slot = self._received[way] % self._slots
        self._memory.wait(way * self._slots + slot, [rank])
        self._received[way] += 1
        tensor.copy_(self._memory.tensor(self._offset(way, slot), tensor.dtype, tensor.shape))
        self._memory.write(rank, 0, 0, 0, 2 * self._slots + way)

    def _way(self, ranks: tuple[int, int], rank: int, tensor: Tensor) -> int:
        check_host("t", tensor)
        if tensor.nbytes > self._nbytes:
            raise InvalidArgument(
                f"t has {tensor.nbytes} bytes, and num_max_tensor_bytes is {self._nbytes}"
            )
        if rank not in ranks or rank == self._memory.rank:
            raise InvalidArgument(
                f"rank {rank} is not beside rank {self._memory.rank}; give one of {sorted(ranks)}"
            )
        return ranks.index(rank)

    def _offset(self, way: int, slot: int) -> int:
        return (way * self._slots + slot) * self._nbytes


class Sessions:
    """All-gathers into memory that is used again from session to session."""

    def __init__(self, memory: PeerMemory, nbytes: int, most: int) -> None:
        self._memory, self._nbytes, self._most = memory, nbytes, most
        self._ranks = len(memory.others) + 1
        self._number, self._open = 0, False
        self._offset = self._gathers = 0
        self._pending: list[Callable[[], None]] = []

    @staticmethod
    def counters(ranks: int, most: int) -> int:
        """One for each gather of a session, and one by which each rank says that it has ended."""
        return most + ranks

    def begin(self) -> None:
        if self._open:
            raise InvalidArgument("a session is open; destroy it first")
        self._number, self._open = self._number + 1, True
        self._offset = self._gathers = 0

    def end(self) -> None:
        """Waits for all gathers, and until all ranks have ended the session."""
        self._check_open()
        for wait in list(self._pending):
            wait()
        self._open, self._pending = False, []
        me = self._memory.rank
        for rank in self._memory.others:
            self._memory.write(rank, 0, 0, 0, self._most + me)
        for rank in self._memory.others:
            self._memory.wait(self._most + rank, [rank])

    def room(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Where the next gather takes this rank's tensors from without a copy."""
        self._check_open()
        found, offset = [], self._offset
        for shape in shapes:
            whole = self._whole(offset, dtype, shape)
            found.append(whole[self._memory.rank])
            offset += up(whole.nbytes, ALIGNED)
        return tuple(found)

    def gather(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Sends tensors to all ranks.

        Returns:
            ``[ranks, ...]`` of each; and what waits for them.
        """
        self._check_open()
        if self._gathers == self._most or not tensors:
            raise InvalidArgument(
                f"{self._gathers} of {self._most} gathers were made in this session; end it, or "
                "give num_max_all_gathers_per_session more"
            )
        me, slot, number, found = self._memory.rank, self._gathers, self._number, []
        offset = self._offset
        for tensor in tensors:
            check_host("t", tensor)
            found.append(self._whole(offset, tensor.dtype, tensor.shape))
            offset += up(found[-1].nbytes, ALIGNED)
        for tensor, whole in zip(tensors, found, strict=True):
            if tensor.data_ptr() != whole[me].data_ptr():
                whole[me].copy_(tensor)
            at = self._offset + me * tensor.nbytes
            for rank in self._memory.others:
                self._memory.write(rank, at, at, tensor.nbytes, slot)
            self._offset += up(whole.nbytes, ALIGNED)
        self._gathers += 1

        def arrived() -> None:
            if not self._open or number != self._number:
                raise InvalidArgument("the session of this gather has ended; wait for it before")
            if arrived in self._pending:
                others = self._memory.others
                self._memory.wait(slot, others, len(others) * len(tensors))
                self._pending.remove(arrived)

        self._pending.append(arrived)
        return found, arrived

    def _whole(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        nbytes = self._ranks * dtype.itemsize
        for size in shape:
            nbytes *= size
        if offset + nbytes > self._nbytes:
            raise InvalidArgument(
                f"{offset + nbytes} bytes are gathered in this session, and num_max_session_bytes "
                f"is {self._nbytes}; end it, or raise that"
            )
        return self._memory.tensor(offset, dtype, (self._ranks, *shape))

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidArgument("no session is open; create one")
