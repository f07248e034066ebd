"""pplx-garden's ``P2PAllToAll`` over :class:`fabric_ray.moe.AllToAll`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import Launcher
from fabric_ray.moe.comm import comm_of
from fabric_ray.moe.exchanges import Exchanges
from fabric_ray.moe.rows import check_rows
from fabric_ray.moe.shared_tokens import SharedTokens, bound, experts_within
from fabric_ray.moe.tokens import RowPart

_PRIVATE_ROWS = 32


class ParallelComm:
    """A ``ParallelGroup`` of pplx-garden: ``rank`` and ``size`` are properties there."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        return int(self._group.rank)

    def size(self) -> int:
        return int(self._group.size)

    def all_gather(self, value: bytes) -> list[bytes]:
        return [bytes(one) for one in self._group.all_gather_object(value)]


def _size_of(group: Any) -> int:
    if group is None:
        return 1
    return int(group.size() if callable(group.size) else group.size)


class P2PAllToAll:
    """One rank of an exchange in pplx-garden's names: experts' rows lie behind one another, and
    each half of a call may be made by itself. Once a rank is lost each call raises ``PeerLost``
    (RS-1).

    Args:
        max_num_tokens: of a data-parallel group, at most.
        num_experts: of all ranks; each has the same number, rounded up.
        expert_padding: what each expert's rows are filled up to.
        hidden_dim: elements of a token.
        hidden_dim_scale: its scales, of ``scale_dtype``; ``None`` for none.
        in_dtype: of tokens.
        out_dtype: of answers and sums: float32, bfloat16 or float16.
        num_experts_per_token: those that a token goes to.
        nets_per_gpu: taken; the engine chooses NICs.
        max_private_tokens: rows that each rank sends to each other before it is told where further
            ones go.
        device: what tokens lie on, the host too.
        dp_group: neighbouring ranks that are given the same tokens; ``None`` if each has its own.
        node_group: taken; the engine finds which ranks share memory.
        global_group: all ranks: a ``ParallelGroup``, a ``torch.distributed`` group, or anything
            with ``rank()``, ``size()`` and ``all_gather(bytes)``.
        engine: this rank's; one of its own if ``None``.
        timeout: seconds after which a silent rank is given up.
        launcher: launches the kernels, in place of a GPU.

    Raises:
        InvalidArgument: sizes that don't go together.
        HandshakeError: ranks disagree; the text lists in what.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        num_experts: int,
        expert_padding: int,
        hidden_dim: int,
        hidden_dim_scale: int | None,
        in_dtype: torch.dtype,
        out_dtype: torch.dtype,
        scale_dtype: torch.dtype | None,
        num_experts_per_token: int,
        nets_per_gpu: int = 1,
        max_private_tokens: int | None = None,
        device: torch.device | str = "cpu",
        dp_group: Any = None,
        node_group: Any = None,
        global_group: Any,
        engine: TransferEngine | None = None,
        timeout: float = 30.0,
        launcher: Launcher | None = None,
    ) -> None:
        if (hidden_dim_scale is None) != (scale_dtype is None):
            raise InvalidArgument(
                f"hidden_dim_scale is {hidden_dim_scale} and scale_dtype {scale_dtype}; give both "
                "or none"
            )
        garden = hasattr(global_group, "all_gather_object") and not callable(global_group.rank)
        comm = comm_of(ParallelComm(global_group) if garden else global_group)
        self._padding = expert_padding
        self._hidden, self._in, self._out = hidden_dim, in_dtype, out_dtype
        self._topk = num_experts_per_token
        self._scales = (hidden_dim_scale, scale_dtype)
        self._local = -(-num_experts // comm.size())
        self._sent = 0
        """Tokens of the last dispatch, those of the group."""
        parts = []
        if hidden_dim_scale is not None and scale_dtype is not None:
            parts.append(RowPart("scale", hidden_dim_scale, scale_dtype))
        on_host = torch.device(device).type == "cpu"
        where: dict[str, Any] = {"device": None if on_host else device, "launcher": launcher}
        if not on_host:
            # An engine knows a GPU by the context that it finds.
            torch.zeros(1, dtype=torch.uint8, device=device)
        self._exchanges = Exchanges(comm, engine, timeout)
        self._shared = SharedTokens(
            self._exchanges, _size_of(dp_group), max_tokens=max_num_tokens, hidden=hidden_dim,
            **where,
        )  # fmt: skip
        private = _PRIVATE_ROWS if max_private_tokens is None else max_private_tokens
        self._exchange = self._exchanges.make(
            experts=self._local * comm.size(),
            topk=num_experts_per_token,
            hidden=hidden_dim,
            max_tokens=self._shared.most,
            dtype=in_dtype,
            parts=parts,
            answer_dtype=out_dtype,
            private_rows=private,
            expert_rows=self._shared.of_all,
            **where,
        )

    def dispatch(
        self,
        out_expert_num_tokens: Tensor,
        out_expert_x: Tensor,
        out_expert_x_scale: Tensor | None,
        dp_x: Tensor,
        dp_x_scale: Tensor | None,
        indices: Tensor,
        weights: Tensor | None = None,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        """Sends tokens to their experts.

        Args:
            out_expert_num_tokens: int32 ``[local experts]``: rows of each.
            out_expert_x: ``[rows, hidden]``: each expert's rows begin at a multiple of
                ``expert_padding``. On a device there is room for all rows that can come.
            out_expert_x_scale: ``[rows, scales]`` if there are scales; any strides. Rows that
                nothing comes for keep what they have.
            dp_x: ``[tokens, hidden]``.
            dp_x_scale: ``[tokens, scales]``, likewise.
            indices: integers ``[tokens, experts]``; unsigned ones too.
            weights: taken; combine has them.
            bound_m: one element: how many of the tokens there are; all if ``None``.
            do_send: whether to do the first half.
            do_recv: whether to do the second one; it is called with the same arguments.

        Raises:
            InvalidArgument: a tensor doesn't match, or another half is next.
            PeerLost: a rank was lost, then or before; on a device, the next call says so.
        """
        self._check_dispatch(out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x_scale)
        self._exchanges.check_whole()
        if do_send:
            experts = experts_within(bound_m, indices, self._exchange.asynchronous)
            tokens = len(experts)
            self._shared.check(tokens)
            mine = self._shared.mine
            parts = {} if dp_x_scale is None else {"scale": mine(dp_x_scale[:tokens].contiguous())}
            self._exchange.dispatch_send(mine(dp_x[:tokens]), mine(experts), **parts)
            self._sent = tokens
        if do_recv:
            got = self._exchange.dispatch_recv(multiple=self._padding, x=out_expert_x)
            out_expert_num_tokens.copy_(got.counts)
            if out_expert_x_scale is not None:
                got.copy_part("scale", out_expert_x_scale[: len(got.parts["scale"])])
            self._exchanges.check_whole()

    def combine(
        self,
        out_tokens: Tensor,
        indices: Tensor,
        weights: Tensor,
        expert_y: Tensor,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
        accumulate: bool = False,
    ) -> None:
        """Adds up the experts' answers with weights, in float32 and in the order of ``indices``.

        Args:
            out_tokens: ``[tokens, hidden]`` of ``out_dtype``.
            indices: those of the dispatch.
            weights: float32 ``[tokens, experts]``.
            expert_y: ``[rows, hidden]`` of ``out_dtype``; rows as at dispatch.
            bound_m: as at dispatch.
            do_send: as at dispatch.
            do_recv: as at dispatch.
            accumulate: adds the sums to what is in ``out_tokens``; without a ``dp_group``.

        Raises:
            InvalidArgument: a tensor doesn't match, or another half is next.
            PeerLost: a rank was lost, then or before; on a device, the next call says so.
        """
        if accumulate and not self._shared.alone:
            raise InvalidArgument("accumulate is for ranks with tokens of their own; add the sums")
        where = self._exchange.device
        tokens = bound(bound_m, len(indices), self._exchange.asynchronous)
        if tokens != self._sent and not self._exchange.asynchronous:
            raise InvalidArgument(
                f"{tokens} tokens are combined, and {self._sent} were dispatched; give the same "
                "bound_m"
            )
        for what, tensor, width, dtype, rows in (
            ("weights", weights, self._topk, torch.float32, tokens),
            ("out_tokens", out_tokens, self._hidden, self._out, tokens),
            ("expert_y", expert_y, self._hidden, self._out, None),
        ):
            check_rows(what, tensor, width=width, dtype=dtype, rows=rows, device=where)
        self._exchanges.check_whole()
        if do_send:
            self._exchange.combine_send(expert_y)
        if do_recv:
            mine = self._shared.mine(weights[:tokens])
            if self._shared.alone and not accumulate:
                self._exchange.combine_recv(mine, out=out_tokens)
            else:
                sums = self._exchange.combine_recv(mine, dtype=torch.float32)
                if accumulate:
                    sums = sums[:tokens] + out_tokens[:tokens].float()
                else:
                    sums = self._shared.share(sums, tokens)
                out_tokens[:tokens] = sums.to(self._out)
            self._exchanges.check_whole()

    def check(self) -> None:
        """As :meth:`fabric_ray.moe.pplx.AllToAll.check`."""
        self._exchange.check()
        self._exchanges.check_whole()

    def destroy(self) -> None:
        """As :meth:`fabric_ray.moe.pplx.AllToAll.destroy`."""
        self._exchanges.close()

    def _check_dispatch(
        self, counts: Tensor, out: Tensor, out_scale: Tensor | None, scale: Tensor | None
    ) -> None:
        if counts.shape != (self._local,) or counts.dtype != torch.int32:
            raise InvalidArgument(
                f"out_expert_num_tokens is {counts.dtype} {tuple(counts.shape)}; give int32 "
                f"[{self._local}]"
            )
        check_rows(
            "out_expert_x", out, width=self._hidden, dtype=self._in, device=self._exchange.device
        )
        width, dtype = self._scales
        for what, tensor in (("out_expert_x_scale", out_scale), ("dp_x_scale", scale)):
            given = None if tensor is None else (tensor.shape[-1], tensor.dtype)
            if given != (None if width is None else (width, dtype)):
                raise InvalidArgument(f"{what} has {given}; give [rows, {width}] of {dtype}")
