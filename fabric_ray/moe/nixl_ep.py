"""NIXL-EP's ``Buffer`` over :class:`fabric_ray.moe.deepep.Buffer`: DeepEP's calls, on ranks that a
store connects and that may become more or fewer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument, Unsupported
from fabric_ray.kernels import Launcher
from fabric_ray.moe import deepep
from fabric_ray.moe.comm import agree, comm_of
from fabric_ray.moe.deepep.event import EventOverlap, keep
from fabric_ray.moe.deepep.low_latency import Received
from fabric_ray.moe.deepep.parcels import AnyTokens, Tokens
from fabric_ray.moe.deepep.shared_calls import wait_for_losses
from fabric_ray.moe.exchanges import used_by_graphs
from fabric_ray.moe.store_comm import AloneComm, StoreComm

Handle: TypeAlias = tuple[Tensor, Tensor, int, int]
"""As DeepEP's, without the number of experts."""
Hook: TypeAlias = Callable[[], None]

DEFAULT_TIMEOUT_MS = 30_000


class Buffer:
    """One rank's calls in NIXL-EP's names.

    All connected ranks make the same calls in the same order. They are ``0`` to some number: ranks
    join at the end (:meth:`connect_ranks`) and leave there (:meth:`disconnect_ranks`), and the
    connected ones make buffers anew then. Ranks that leave in between are masked, until
    :meth:`connect_ranks` has others in their places. In low-latency calls a rank that is silent for
    ``timeout_ms`` is masked.

    Args:
        disable_ll_nvlink: taken; the engine chooses links.
        explicitly_destroy: taken; :meth:`destroy` may always be called.
        rank: the number of this rank.
        low_latency_mode: whether low-latency calls will be made, or high-throughput ones.
        group: a ``torch.distributed`` group, where there is no store.
        comm: instead of a group, as for :class:`fabric_ray.moe.deepep.Buffer`.
        tcp_store_group: a ``torch.distributed`` store.
        engine: this rank's; one of its own if ``None``.
        launcher: launches kernels, in place of a GPU.
    """

    num_sms = 20

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: Any = None,
        comm: Any = None,
        tcp_store_group: Any = None,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        *,
        engine: TransferEngine | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        if group is not None and comm is not None:
            raise InvalidArgument("group and comm exclude each other; give one of them, or a store")
        self.rank, self.low_latency_mode = rank, low_latency_mode
        self.timeout_ms, self.explicitly_destroy = timeout_ms, explicitly_destroy
        self.group, self.comm, self.tcp_store_group = group, comm, tcp_store_group
        self.group_size = self.num_rdma_bytes = self.num_nvl_bytes = 0
        self._options: dict[str, Any] = {"engine": engine, "launcher": launcher}
        self._each = 0
        self._buffer: deepep.Buffer | None = None
        self._staged: deepep.Buffer | None = None
        # By what tells a handle from others, where results have room for more ranks.
        self._narrow: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()
        self._inactive: set[int] = set()
        """Ranks of the staged buffer that are masked still."""
        self._is_new = True
        """Whether this rank has sent nothing in ``_buffer``: no other rank waits for it there."""
        self._left: set[int] = set()
        """Disconnected ranks of ``_buffer``, before others that remain."""
        self._by_hand: set[int] = set()
        """Ranks that the caller has masked for a rank that is new."""
        self._alone: deepep.Buffer | None = None
        """Calls of a rank that is new, while all others are in ``_by_hand``."""
        self._destroyed = False

    is_sm90_compiled = staticmethod(deepep.Buffer.is_sm90_compiled)
    set_num_sms = staticmethod(deepep.Buffer.set_num_sms)
    capture = staticmethod(deepep.Buffer.capture)
    get_dispatch_config = staticmethod(deepep.Buffer.get_dispatch_config)
    get_combine_config = staticmethod(deepep.Buffer.get_combine_config)
    get_rdma_size_hint = staticmethod(deepep.Buffer.get_low_latency_rdma_size_hint)
    get_low_latency_buffer_size_hint = get_rdma_size_hint

    # Ranks

    def update_memory_buffers(
        self,
        num_ranks: int,
        num_experts_per_rank: int,
        num_rdma_bytes: int,
        num_nvl_bytes: int = 0,
    ) -> None:
        """Says how many ranks there may be, and experts of each."""
        self.group_size, self._each = num_ranks, num_experts_per_rank
        self.num_rdma_bytes, self.num_nvl_bytes = num_rdma_bytes, num_nvl_bytes

    def set_tcp_store_group(self, tcp_store_group: Any) -> None:
        """The store of later connections."""
        self.tcp_store_group = tcp_store_group

    def connect_ranks(self, remote_ranks: Iterable[int], activate: bool = True) -> None:
        """Connects ranks. All ranks that are connected then make this call together.

        Args:
            activate: if false, the ranks take part when :meth:`update_mask_buffer` has unmasked
                all of them; until then the ranks before go on among themselves.

        Raises:
            InvalidArgument: they don't follow the connected ones; or there is no room for them.
            Unsupported: CUDA graphs have calls of this buffer; other ranks raise
                ``HandshakeError``.
            PeerLost: a rank does not connect.
        """
        before = self._remaining
        ranks = before | set(remote_ranks) | {self.rank}
        if ranks != set(range(len(ranks))) or not self._each or len(ranks) > self.group_size:
            raise InvalidArgument(
                f"ranks {sorted(ranks)} would be connected; connect 0 to some number of "
                f"{self.group_size}, behind update_memory_buffers"
            )
        fresh = self._made(len(ranks))
        if activate or not before:
            self._use(fresh)
            return
        self._staged, self._inactive = fresh, ranks - before

    def disconnect_ranks(self, remote_ranks: Iterable[int]) -> None:
        """Goes on without ranks. All ranks that remain make this call together.

        Raises:
            InvalidArgument: this one would be left out; or in high-throughput mode a rank that is
                not among the last ones.
            Unsupported: as :meth:`connect_ranks`.
        """
        gone, remain = set(remote_ranks), self._remaining - set(remote_ranks)
        last = remain == set(range(len(remain)))
        if self.rank not in remain or not (last or self.low_latency_mode):
            raise InvalidArgument(f"ranks {sorted(remain)} would remain; disconnect the last ones")
        if last:
            self._use(self._made(len(remain)))
            return
        for rank in sorted(gone & self._remaining):
            self._connected.low_latency_update_mask_buffer(rank, mask=True)
        self._left |= gone

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank, or takes it back.

        A rank that masks all others before its first call runs alone: the others needn't know, and
        it takes them back by itself. Taking back a rank that takes part does nothing, and waits for
        no other rank. Taking back a rank that this one has lost or left out, or that has left this
        one out, is :meth:`clean_mask_buffer`: all that were lost come back, and all other ranks
        make one of the two calls meanwhile. Ranks that miss no other make that one.

        Raises:
            InvalidArgument: there is no such rank; or it is this one, to be masked; or ranks were
                disconnected before the last one, which :meth:`connect_ranks` takes in first.
            Unsupported: CUDA graphs have calls of the buffer that another would take the place of,
                or of exchanges that a rank has left in the middle of a call.
        """
        if rank_to_mask in self._inactive:
            if not mask:
                if self._captured:
                    raise used_by_graphs([self.rank])
                self._inactive.discard(rank_to_mask)
                if not self._inactive and self._staged is not None:
                    self._use(self._staged)
            return
        connected = self._connected
        if mask:
            if rank_to_mask == self.rank or not 0 <= rank_to_mask < connected.group_size:
                raise InvalidArgument(
                    f"rank {rank_to_mask} is no other rank of {connected.group_size}"
                )
            if not self._is_new or rank_to_mask in connected.lost:
                connected.low_latency_update_mask_buffer(rank_to_mask, mask=True)
            else:
                self._by_hand.add(rank_to_mask)
        elif rank_to_mask in self._by_hand:
            if self._alone is not None and self._alone.captured:
                raise used_by_graphs([self.rank])
            self._drop_alone()
            self._by_hand.discard(rank_to_mask)
        elif not 0 <= rank_to_mask < connected.group_size:
            raise InvalidArgument(
                f"rank {rank_to_mask} is out of range [0, {connected.group_size})"
            )
        elif rank_to_mask in connected.lost:
            # Ranks miss different ones: with one at a time, some would wait for more calls.
            self._take_back()

    def query_mask_buffer(self, mask_status: Tensor) -> None:
        """Puts 0 for ranks that take part into int32 ``[ranks]``, and 1 for others.

        Of a GPU, it waits for the calls before it on the current stream.

        Raises:
            Unsupported: a CUDA graph is captured.
        """
        connected = self._connected
        wait_for_losses(mask_status.device)
        masked = self._by_hand | set(connected.lost)
        active = [r for r in range(min(connected.group_size, len(mask_status))) if r not in masked]
        status = torch.ones(len(mask_status), dtype=torch.int32, device="cpu")
        status[active] = 0
        mask_status.copy_(status)

    def clean_mask_buffer(self) -> None:
        """Takes all connected ranks back, on all of them together; ranks that others left out, and
        whose dispatches raise ``PeerLost`` since, come back by it."""
        for rank in sorted(self._by_hand):
            self.update_mask_buffer(rank, mask=False)
        self._take_back()

    def _take_back(self) -> None:
        if self._left:
            raise InvalidArgument(
                f"ranks {sorted(self._left)} were disconnected, and others behind them were not; "
                "take ranks in their places in by connect_ranks first"
            )
        self._connected.low_latency_clean_mask_buffer()

    def clean_buffer(self, *_: Any) -> None:
        """Nothing: calls leave nothing behind that others would read."""

    def barrier(self) -> None:
        """Waits for all ranks that take part."""
        self._of_calls.barrier()

    def destroy(self) -> None:
        """Frees the buffers when other ranks have what this one has for them; those that are gone
        are not waited for."""
        for buffer in (self._alone, self._staged, self._buffer):
            if buffer is not None:
                buffer.leave()
        self._alone = self._staged = self._buffer = None
        self._destroyed = True

    @property
    def runtime(self) -> Buffer | None:
        """``None`` once destroyed; callers compare it with that, and call nothing of it."""
        return None if self._destroyed else self

    # Low-latency calls

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        *args: Any,
        **options: Any,
    ) -> tuple[Tokens, Tensor, Handle, EventOverlap, Hook | None]:
        """As DeepEP's.

        Args:
            num_experts: what results have room for; those of connected ranks if ``None``.
        """
        if options.get("use_nvfp4"):
            raise Unsupported("NIXL-EP's tokens go as bfloat16 or fp8; leave use_nvfp4 out")
        there, most = self._begun(), num_max_dispatch_tokens_per_rank
        experts = there.group_size * self._each
        room = num_experts or experts
        if room < experts or room % self._each:
            raise InvalidArgument(
                f"num_experts is {room}; give a multiple of {self._each} from {experts} on"
            )
        if room == experts:
            got, counts, handle, event, hook = there.low_latency_dispatch(
                x, topk_idx, most, experts, *args, **options
            )
            return got, counts, handle[:4], event, hook
        ranks, wide = room // self._each, list[Tensor]()

        def copies(received: Received) -> Hook:
            narrow = [received.x, *received.handle[:2]]
            if received.scales is not None:
                narrow.append(received.scales)
            rows = (most * ranks, most * ranks, ranks, most * ranks)
            wide.extend(_wide(*one) for one in zip(narrow, rows, strict=False))

            def copy() -> None:
                for one, into in zip(narrow, wide, strict=True):
                    into[:, : one.shape[1]] = one
                keep(*wide)

            return copy

        _, counts, handle, event, hook = there.low_latency_dispatch(
            x, topk_idx, most, experts, *args, copies=copies, **options
        )
        keep(*wide)
        tokens, source, layout, *scales = wide
        self._narrow[source] = handle
        received: Tokens = (tokens, scales[0]) if scales else tokens
        return received, counts, (source, layout, most, handle[3]), event, hook

    dispatch = low_latency_dispatch

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Handle,
        *args: Any,
        **options: Any,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """As DeepEP's."""
        found = self._handle_of(handle)
        if len(found[0][0]) < x.shape[1]:
            x = x[:, : len(found[0][0])].contiguous()
        return self._of_calls.low_latency_combine(
            x, topk_idx, topk_weights, found, *args, **options
        )

    combine = low_latency_combine

    def get_next_combine_buffer(self, handle: Handle) -> Tensor:
        """As DeepEP's; with room for the connected ranks."""
        return self._of_calls.get_next_low_latency_combine_buffer(self._handle_of(handle))

    def _handle_of(self, handle: Handle) -> Any:
        """DeepEP's handle."""
        return self._narrow.get(handle[0]) or (*handle, self._of_calls.group_size * self._each)

    # High-throughput calls

    def get_dispatch_layout(self, *args: Any, **options: Any) -> Any:
        """As DeepEP's."""
        return self._of_calls.get_dispatch_layout(*args, **options)

    def ht_dispatch(
        self,
        x: AnyTokens,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        config: deepep.Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """As DeepEP's ``dispatch``, without its ``num_worst_tokens``."""
        return self._begun().dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
            num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, 0, config,
            previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip

    def ht_combine(self, *args: Any, **options: Any) -> Any:
        """As DeepEP's ``combine``."""
        return self._of_calls.combine(*args, **options)

    # Memory and events

    def get_comm_stream(self) -> torch.cuda.Stream:
        """As DeepEP's."""
        return self._of_calls.get_comm_stream()

    def get_local_buffer_tensor(self, *args: Any, **options: Any) -> Tensor:
        """As DeepEP's: memory of the caller alone."""
        return self._connected.get_local_buffer_tensor(*args, **options)

    @property
    def _connected(self) -> deepep.Buffer:
        """The buffer of all connected ranks. Rank 0 needs no other one."""
        if self._buffer is None and self.rank == 0 and self._each and not self._destroyed:
            self._use(self._made(1))
        if self._buffer is None:
            raise InvalidArgument("no rank is connected; call connect_ranks")
        return self._buffer

    @property
    def _remaining(self) -> set[int]:
        """The connected ranks."""
        return set(range(self._size(self._buffer))) - self._left

    @property
    def _of_calls(self) -> deepep.Buffer:
        """The buffer that calls go to: that of the connected ranks, or this rank's alone."""
        connected = self._connected
        others = set(range(connected.group_size)) - {self.rank}
        if self._by_hand and self._by_hand | set(connected.lost) == others:
            if self._alone is None:
                self._alone = self._made(connected.group_size, alone=True)
                for rank in others:
                    self._alone.low_latency_update_mask_buffer(rank, mask=True)
            return self._alone
        while self._by_hand:
            connected.low_latency_update_mask_buffer(self._by_hand.pop(), mask=True)
        return connected

    def _begun(self) -> deepep.Buffer:
        """The buffer that a dispatch goes to."""
        found = self._of_calls
        self._is_new &= found is not self._buffer
        return found

    @property
    def _captured(self) -> bool:
        """Whether CUDA graphs have calls of buffers that another would take the place of."""
        return any(one is not None and one.captured for one in (self._buffer, self._alone))

    def _drop_alone(self) -> None:
        alone, self._alone = self._alone, None
        if alone is not None:
            alone.leave()

    @staticmethod
    def _size(buffer: deepep.Buffer | None) -> int:
        return 0 if buffer is None else buffer.group_size

    def _made(self, size: int, *, alone: bool = False) -> deepep.Buffer:
        comm: Any = self.comm
        if alone:
            comm = AloneComm(self.rank, size)
        elif self.tcp_store_group is not None:
            comm = StoreComm(self.tcp_store_group, self.rank, size)
        comm = comm_of(self.group if comm is None else None, comm)
        if not alone:
            # No rank goes on to another buffer if one can't.
            agree(comm.all_gather, used_by_graphs([self.rank]) if self._captured else b"")
        return deepep.Buffer(
            None,
            self.num_nvl_bytes,
            self.num_rdma_bytes,
            self.low_latency_mode,
            comm=comm,
            enable_shrink=self.low_latency_mode,
            timeout=self.timeout_ms / 1000,
            ranks_per_node=size if alone else None,
            **self._options,
        )

    def _use(self, buffer: deepep.Buffer) -> None:
        """Goes on with another buffer."""
        before, self._buffer = self._buffer, buffer
        self._staged, self._inactive, self._is_new = None, set(), True
        self._left = set()
        self._drop_alone()
        self._by_hand.clear()
        if before is not None:
            before.leave()


def _wide(tensor: Tensor, rows: int) -> Tensor:
    """Room for more rows ``[experts, rows, ...]``, in the same order of memory; the rest is 0."""
    if tensor.ndim == 3 and tensor.stride(1) == 1:
        return tensor.new_zeros(len(tensor), tensor.shape[2], rows).transpose(1, 2)
    shape = (len(tensor), rows, *tensor.shape[2:])
    return tensor.new_zeros(shape)
