"""The calls of DeepEP's ``ElasticBuffer`` beside dispatch and combine."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fabric_ray.errors import InvalidArgument
from fabric_ray.moe.deepep.elastic_memory import ALIGNED, Engram, Ring, Sessions, check_host
from fabric_ray.moe.deepep.layout import by_columns
from fabric_ray.moe.deepep.shared_calls import SharedCalls
from fabric_ray.moe.deepep.sizes import up
from fabric_ray.moe.peer_memory import PeerMemory

ALIGNMENT = 2 << 20
_SHAPE = struct.Struct("<QQQ")
_PACK_NBYTES = 4


class ElasticCalls(SharedCalls):
    """Engram, pipeline calls and all-gathers, on host tensors. All ranks make the same calls, but
    ``engram_fetch``, ``pp_send`` and ``pp_recv``. A rank that is lost or silent for the timeout is
    :class:`~fabric_ray.errors.PeerLost`; make a new buffer then."""

    num_ranks: int
    _engram: Engram | None = None
    _ring: Ring | None = None
    _sessions: Sessions | None = None

    def __init__(self) -> None:
        self._memories: dict[type, PeerMemory] = {}
        """By what uses it."""

    def gather(self, value: bytes) -> list[bytes]:
        """Each rank's value of up to 506 bytes, by rank.

        Raises:
            PeerLost: a rank was lost.
        """
        return [one or b"" for one in self._normal.gather(value)]

    # Sizes

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[int, int]:
        """Bytes of what is fetched and of the entries, multiples of 2 MiB, as DeepEP counts them:
        ``num_bytes`` is both together, and ``num_cpu_bytes`` the second."""
        entry = up(hidden * dtype.itemsize, ALIGNED)
        return up(entry * num_max_tokens_per_rank, ALIGNMENT), up(entry * num_entries, ALIGNMENT)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes of the slots of both directions, a multiple of 2 MiB."""
        return up(4 * up(num_max_tensor_bytes, ALIGNED) * num_max_inflight_tensors, ALIGNMENT)

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Any, dtype: torch.dtype) -> int:
        """Bytes of a session with all-gathers of these shapes, one or several."""
        each = dtype.itemsize * int(group.size())
        return sum(up(each * math.prod(shape), ALIGNED) for shape in _shapes(shapes))

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """The same as a multiple of 2 MiB."""
        return up(num_max_session_bytes, ALIGNMENT)

    # Engram

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """Puts this rank's entries where all ranks fetch them; all ranks call it together.

        Args:
            storage: bfloat16 or float8_e4m3fn ``[entries, hidden]``, the same shape on all ranks.
            sf: with fp8, the scales of all ranks' entries, ``[ranks * entries, packs]`` of 4 bytes;
                kept, not copied.

        Raises:
            InvalidArgument: what doesn't fit, or ranks differ in it.
        """
        check_host("storage", storage)
        fp8 = storage.dtype == torch.float8_e4m3fn
        if storage.ndim != 2 or not (fp8 or storage.dtype == torch.bfloat16):
            raise InvalidArgument(
                f"storage is {storage.dtype} {tuple(storage.shape)}; give bfloat16 or "
                "float8_e4m3fn [entries, hidden]"
            )
        entries = len(storage) * self.num_ranks
        if (sf is not None) != fp8:
            raise InvalidArgument("sf goes with fp8 storage; give both or none")
        if sf is not None:
            check_host("sf", sf)
            if sf.ndim != 2 or len(sf) != entries or sf.element_size() != _PACK_NBYTES:
                raise InvalidArgument(
                    f"sf is {sf.dtype} {tuple(sf.shape)}; give 4 bytes [{entries}, packs]"
                )
        self._finish_memory(Engram)
        # No rank fetches any more when all are here.
        said = self.gather(_SHAPE.pack(*storage.shape, storage.element_size()))
        if len({*said}) > 1:
            shapes = [_SHAPE.unpack(one) for one in said]
            raise InvalidArgument(
                f"ranks have entries, hidden and bytes of an element {shapes}; give the same"
            )
        self._engram = Engram(self._memory(Engram, storage.nbytes, 0), storage, sf)
        self.gather(b"")

    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Begins to read entries of any ranks.

        Args:
            indices: int32 ``[tokens, n]``; rank ``r`` has those from ``r * entries`` on.
            num_qps: taken; the engine chooses links.
            use_tma_aligned_col_major_sf: scales lie by columns.

        Returns:
            what waits for them, and returns the tokens' entries behind one another,
            ``[tokens, n * hidden]``, and with fp8 their scales ``[tokens, n * packs]``, otherwise
            ``None``.

        Raises:
            InvalidArgument: there is no such entry; or nothing was written.
        """
        if self._engram is None:
            raise InvalidArgument("there are no entries; call engram_write first")
        check_host("indices", indices)
        if indices.ndim != 2 or indices.dtype != torch.int32:
            raise InvalidArgument(
                f"indices are {indices.dtype} {tuple(indices.shape)}; give int32 [tokens, n]"
            )
        laid_out = by_columns if use_tma_aligned_col_major_sf else torch.Tensor.contiguous
        return self._engram.fetch(indices, laid_out)

    # Pipeline

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Makes the slots of :meth:`pp_send`; all ranks call it together.

        Args:
            num_max_tensor_bytes: of a tensor, at most.
            num_max_inflight_tensors: that were sent to a rank and not received.

        Raises:
            InvalidArgument: less than 1, or ranks differ.
        """
        if min(num_max_tensor_bytes, num_max_inflight_tensors) < 1:
            raise InvalidArgument(
                f"{num_max_inflight_tensors} tensors of {num_max_tensor_bytes} bytes; give at "
                "least 1"
            )
        self._finish_memory(Ring)
        self.gather(b"")
        slot = up(num_max_tensor_bytes, ALIGNED)
        memory = self._memory(Ring, *Ring.sizes(slot, num_max_inflight_tensors))
        self._ring = Ring(memory, slot, num_max_inflight_tensors)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Sends a tensor to the rank before or behind this one; it may be used again at once.

        Raises:
            InvalidArgument: another rank, or too many bytes.
            PeerLost: the rank has received none of the tensors in flight within the timeout.
        """
        self._beside().send(t, dst_rank_idx)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receives the next tensor of the rank before or behind this one into ``t``.

        Raises:
            InvalidArgument: as :meth:`pp_send`.
            PeerLost: none came within the timeout.
        """
        self._beside().receive(t, src_rank_idx)

    # All-gathers

    def agrs_set_config(
        self, num_max_session_bytes: int, num_max_all_gathers_per_session: int
    ) -> None:
        """Makes the memory of sessions; all ranks call it together.

        Args:
            num_max_session_bytes: see :meth:`get_agrs_num_max_session_bytes`.
            num_max_all_gathers_per_session: calls of :meth:`all_gather`.

        Raises:
            InvalidArgument: less than 1, or ranks differ.
        """
        if min(num_max_session_bytes, num_max_all_gathers_per_session) < 1:
            raise InvalidArgument(
                f"{num_max_all_gathers_per_session} all-gathers of {num_max_session_bytes} bytes "
                "a session; give at least 1"
            )
        self._finish_memory(Sessions)
        self.gather(b"")
        nbytes, most = up(num_max_session_bytes, ALIGNED), num_max_all_gathers_per_session
        memory = self._memory(Sessions, nbytes, Sessions.counters(self.num_ranks, most))
        self._sessions = Sessions(memory, nbytes, most)

    def create_agrs_session(self) -> None:
        """Begins a session: memory of the one before is used again."""
        self._session().begin()

    def destroy_agrs_session(self) -> None:
        """Waits until all ranks have ended the session; its tensors may change from then on."""
        self._session().end()

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A session as a context; none if it is not enabled."""
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        finally:
            self.destroy_agrs_session()

    def agrs_get_inplace_tensor(self, shapes: Any, dtype: torch.dtype) -> Any:
        """Where this rank's tensors of the next :meth:`all_gather` may lie: one for a shape, a
        tuple for several shapes. No copy is made of them then."""
        found = self._session().room(_shapes(shapes), dtype)
        return found if isinstance(shapes[0], tuple) else found[0]

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Sends tensors to all ranks, within a session.

        Returns:
            ``[ranks, ...]`` for each tensor, valid until the session ends, and what waits for them.
        """
        found, wait = self._session().gather([t] if isinstance(t, Tensor) else t)
        return *found, wait

    def _memory(self, user: type, nbytes: int, counters: int) -> PeerMemory:
        made = PeerMemory(
            self._exchanges.engine,
            self._exchanges.comm.all_gather,
            nbytes=nbytes,
            counters=counters,
            timeout=self._exchanges.timeout,
        )
        self._memories[user] = made
        return made

    def _beside(self) -> Ring:
        if self._ring is None:
            raise InvalidArgument("there are no slots for tensors; call pp_set_config first")
        return self._ring

    def _session(self) -> Sessions:
        if self._sessions is None:
            raise InvalidArgument("there is no memory for sessions; call agrs_set_config first")
        return self._sessions

    def _finish_memory(self, *users: type) -> None:
        """Waits until other ranks have what this rank has sent, and this one what it fetches."""
        if Engram in users and self._engram is not None:
            self._engram.finish()
        for user in users:
            if (memory := self._memories.pop(user, None)) is not None:
                memory.finish()


def _shapes(shapes: Any) -> list[tuple[int, ...]]:
    """One or several."""
    return [*shapes] if isinstance(shapes[0], tuple) else [tuple(shapes)]
