"""pplx-kernels' interface over :class:`fabric_ray.moe.AllToAll`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fabric_ray.engine import TransferEngine
from fabric_ray.errors import InvalidArgument
from fabric_ray.kernels import Launcher
from fabric_ray.moe.comm import Comm, comm_of
from fabric_ray.moe.exchanges import Exchanges
from fabric_ray.moe.rows import check_rows
from fabric_ray.moe.shared_tokens import SharedTokens, bound, experts_within
from fabric_ray.moe.tokens import RowPart

# Tokens are bytes to the exchange; the caller of dispatch gives their dtype.
_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


class AllToAll:
    """One rank of an exchange in pplx-kernels' names: the caller owns the outputs, and each half
    of a call may be made by itself (``do_send``, ``do_recv``). Once a rank is lost each call
    raises ``PeerLost`` (RS-1). Made by :meth:`intranode` or
    :meth:`internode`, which are the same here: the engine chooses links.

    On a device (``device="cuda"``) kernels do a rank's part on torch's current stream and nothing
    waits for them: counts come on the device, ``bound_m`` is read there, and calls can be
    captured. What goes wrong there is raised by a later call, or by :meth:`check`.
    """

    def __init__(
        self,
        max_num_tokens: int,
        num_experts: int,
        experts_per_token: int,
        rank: int,
        world_size: int,
        dp_size: int,
        hidden_dim: int,
        hidden_dim_bytes: int,
        hidden_dim_scale_bytes: int,
        *,
        comm: Comm,
        engine: TransferEngine | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        timeout: float = 30.0,
        device: torch.device | str | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        if (comm.rank(), comm.size()) != (rank, world_size):
            raise InvalidArgument(
                f"rank {rank} of {world_size} is rank {comm.rank()} of {comm.size()} in its group"
            )
        size, rest = divmod(hidden_dim_bytes, max(hidden_dim, 1))
        if rest or size not in _BY_SIZE or hidden_dim_scale_bytes < 0:
            raise InvalidArgument(
                f"{hidden_dim_bytes} bytes for {hidden_dim} elements, and {hidden_dim_scale_bytes} "
                "of scales; elements have 1, 2, 4 or 8 bytes"
            )
        parts = []
        if hidden_dim_scale_bytes:
            parts.append(RowPart("scale", hidden_dim_scale_bytes, torch.uint8))
        self._bits = _BY_SIZE[size]
        self._hidden = hidden_dim
        self._scale_bytes = hidden_dim_scale_bytes
        self._experts = num_experts // world_size
        self._dtype = out_dtype
        self._rows = 0
        self._indices: Tensor | None = None
        if device is not None:
            # An engine knows a GPU by the context that it finds.
            torch.zeros(1, dtype=torch.uint8, device=device)
        self._exchanges = Exchanges(comm, engine, timeout)
        where: dict[str, Any] = {"device": device, "launcher": launcher}
        self._shared = SharedTokens(
            self._exchanges, dp_size, max_tokens=max_num_tokens, hidden=hidden_dim, **where
        )
        self._exchange = self._exchanges.make(
            experts=num_experts,
            topk=experts_per_token,
            hidden=hidden_dim,
            max_tokens=self._shared.most,
            dtype=self._bits,
            parts=parts,
            answer_dtype=out_dtype,
            expert_rows=self._shared.of_all,
            **where,
        )

    @classmethod
    def intranode(
        cls,
        max_num_tokens: int,
        num_experts: int,
        experts_per_token: int,
        rank: int,
        world_size: int,
        dp_size: int,
        hidden_dim: int,
        hidden_dim_bytes: int,
        hidden_dim_scale_bytes: int,
        group_name: str | None = None,
        *,
        comm: Any = None,
        **options: Any,
    ) -> AllToAll:
        """A connected exchange; all ranks call it together.

        Args:
            max_num_tokens: of a rank, at most.
            num_experts: of all ranks.
            experts_per_token: those that a token goes to.
            dp_size: neighbouring ranks that share tokens: they are given the same ones, each sends
                some of them, and all get all sums, in an exchange of their own.
            hidden_dim: elements of a token.
            hidden_dim_bytes: its bytes.
            hidden_dim_scale_bytes: bytes of its scales; 0 for none.
            group_name: of a ``torch.distributed`` group, as for DeepEP's ``Buffer``; the
                default group if ``None``.
            comm: instead of a group: anything with ``rank()``, ``size()``, ``all_gather(bytes)``.
            options: ``engine``, one of its own if ``None``; ``out_dtype``, of experts' answers:
                bfloat16, float16 or float32; ``timeout``, seconds; ``device`` and ``launcher``, as
                for :class:`fabric_ray.moe.AllToAll`.

        Raises:
            InvalidArgument: sizes that don't go together.
            HandshakeError: ranks disagree; the text lists in what.
        """
        return cls(
            max_num_tokens,
            num_experts,
            experts_per_token,
            rank,
            world_size,
            dp_size,
            hidden_dim,
            hidden_dim_bytes,
            hidden_dim_scale_bytes,
            comm=_comm(group_name, comm),
            **options,
        )

    internode = intranode

    def dispatch(
        self,
        out_expert_num_tokens: Tensor,
        out_expert_x: Tensor,
        out_expert_x_scale: Tensor | None,
        dp_x: Tensor,
        dp_x_scale: Tensor | None,
        indices: Tensor,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
    ) -> None:
        """Sends tokens to their experts.

        Args:
            out_expert_num_tokens: int32 ``[local experts]``: rows of each.
            out_expert_x: ``[local experts, rows, hidden]``; each expert's from its beginning. On a
                device there are as many rows as can come, ``max_num_tokens * world_size``, or
                ``dp_size`` times less.
            out_expert_x_scale: ``[local experts, rows, scales]`` if there are scales; rows that
                nothing comes for keep what they have.
            dp_x: ``[tokens, hidden]``, of the bytes the exchange was made for.
            dp_x_scale: ``[tokens, scales]``, likewise.
            indices: integers ``[tokens, experts_per_token]``; unsigned ones too.
            bound_m: one element: how many of the tokens there are; all if ``None``. On a device
                it isn't read by the host: tokens beyond it go nowhere, and their sums are zeros.
            do_send: whether to do the first half.
            do_recv: whether to do the second one; it is called with the same arguments.

        Raises:
            InvalidArgument: a tensor doesn't match, or another half is next.
            PeerLost: a rank was lost, then or before; on a device, the next call says so.
        """
        self._check_outputs(out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x)
        self._exchanges.check_whole()
        if do_send:
            if dp_x.element_size() != self._bits.itemsize:
                raise InvalidArgument(
                    f"tokens are {dp_x.dtype}, and elements have {self._bits.itemsize} bytes"
                )
            parts = self._scales(dp_x_scale, len(dp_x))
            asynchronous = self._exchange.asynchronous
            tokens = bound(bound_m, len(dp_x), asynchronous)
            self._shared.check(tokens)
            experts = experts_within(bound_m, indices[: len(dp_x)], asynchronous)
            mine = self._shared.mine
            self._exchange.dispatch_send(
                mine(dp_x[:tokens].view(self._bits)),
                mine(experts),
                **{k: mine(p[:tokens]) for k, p in parts.items()},
            )
            self._indices = experts
        if do_recv:
            self._rows = out_expert_x.shape[1]
            room = out_expert_x.view(self._bits).flatten(0, 1)
            got = self._exchange.dispatch_recv(stride=self._rows, x=room)
            out_expert_num_tokens.copy_(got.counts)
            if out_expert_x_scale is not None and self._scale_bytes:
                got.copy_part("scale", out_expert_x_scale)
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
    ) -> None:
        """Adds up the experts' answers with weights, in float32 and in the order of ``indices``.

        Args:
            out_tokens: ``[tokens or more, hidden]``; bfloat16, float16 or float32.
            indices: those of the dispatch; on a device they aren't compared.
            weights: float32 ``[tokens, experts_per_token]``.
            expert_y: ``[local experts, rows, hidden]`` of ``out_dtype``; rows as at dispatch.
            bound_m: as at dispatch.
            do_send: as at dispatch.
            do_recv: as at dispatch.

        Raises:
            InvalidArgument: a tensor doesn't match, or another half is next.
            PeerLost: a rank was lost, then or before; on a device, the next call says so.
        """
        if self._indices is None:
            raise InvalidArgument("nothing was dispatched; dispatch before combine")
        tokens = bound(bound_m, len(indices), self._exchange.asynchronous)
        same = indices[:tokens].shape == self._indices.shape
        # Comparing tensors of a device would wait for it.
        if same and not self._exchange.asynchronous:
            same = torch.equal(indices[:tokens].to(torch.int64), self._indices)
        if not same:
            raise InvalidArgument("indices aren't those of the dispatch; give the same")
        wanted = (self._experts, self._rows, self._hidden)
        if expert_y.shape != wanted or expert_y.dtype != self._dtype:
            raise InvalidArgument(
                f"answers are {expert_y.dtype} {tuple(expert_y.shape)}; give {self._dtype} {wanted}"
            )
        if out_tokens.dtype not in _SUMMED:
            raise InvalidArgument(f"out_tokens are {out_tokens.dtype}; give one of {[*_SUMMED]}")
        width = self._indices.shape[1]
        where = self._exchange.device
        check_rows("weights", weights, width=width, dtype=torch.float32, rows=tokens, device=where)
        check_rows(
            "out_tokens",
            out_tokens,
            width=self._hidden,
            dtype=out_tokens.dtype,
            rows=tokens,
            device=where,
        )
        self._exchanges.check_whole()
        if do_send:
            self._exchange.combine_send(expert_y.flatten(0, 1))
        if do_recv:
            if self._shared.alone:
                self._exchange.combine_recv(weights[:tokens], out=out_tokens)
            else:
                weights = self._shared.mine(weights[:tokens])
                sums = self._exchange.combine_recv(weights, dtype=torch.float32)
                out_tokens[:tokens] = self._shared.share(sums, tokens).to(out_tokens.dtype)
            self._indices = None
            self._exchanges.check_whole()

    def check(self) -> None:
        """Waits for what was launched on the device, and raises what went wrong there; without a
        device that is known already.

        Raises:
            PeerLost: a rank was lost: its part is missing.
            FabricError: as :meth:`fabric_ray.moe.AllToAll.check`.
        """
        self._exchange.check()
        self._exchanges.check_whole()

    def destroy(self) -> None:
        """Frees the buffers when all ranks are here and their devices are done; a second call does
        nothing.

        Raises:
            FabricError: as :meth:`check`, when all is freed.
        """
        self._exchanges.close()

    def _check_outputs(
        self, counts: Tensor, out: Tensor, out_scale: Tensor | None, x: Tensor
    ) -> None:
        where = self._exchange.device
        for name, tensor in (("out_expert_num_tokens", counts), ("out_expert_x", out)):
            if tensor.device != where:
                raise InvalidArgument(f"{name} is on {tensor.device}; give it on {where}")
        if counts.shape != (self._experts,) or counts.dtype != torch.int32:
            raise InvalidArgument(
                f"out_expert_num_tokens is {counts.dtype} {tuple(counts.shape)}; give int32 "
                f"[{self._experts}]"
            )
        fits = out.ndim == 3 and (out.shape[0], out.shape[2]) == (self._experts, self._hidden)
        if not fits or out.dtype != x.dtype or not out.is_contiguous():
            raise InvalidArgument(
                f"out_expert_x is {out.dtype} {tuple(out.shape)}; give contiguous {x.dtype} "
                f"[{self._experts}, rows, {self._hidden}]"
            )
        given = 0 if out_scale is None else out_scale.shape[-1] * out_scale.element_size()
        if given != self._scale_bytes or (
            out_scale is not None and out_scale.shape[:2] != out.shape[:2]
        ):
            raise InvalidArgument(
                f"out_expert_x_scale has {given} bytes for a row; give {self._scale_bytes} for "
                f"each of {tuple(out.shape[:2])}"
            )

    def _scales(self, scale: Tensor | None, tokens: int) -> dict[str, Tensor]:
        given = 0 if scale is None else scale.shape[-1] * scale.element_size()
        if given != self._scale_bytes or (scale is not None and len(scale) != tokens):
            raise InvalidArgument(
                f"scales have {given} bytes for a token; give {self._scale_bytes} for each of "
                f"{tokens}"
            )
        return {} if scale is None else {"scale": scale.contiguous().view(torch.uint8)}


def _comm(group_name: str | None, comm: Any) -> Comm:
    if comm is not None:
        return comm_of(None, comm)
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument("no torch.distributed group is there; initialise one, or give comm")
    if group_name is None:
        return comm_of(dist.group.WORLD)
    # What torch itself finds groups by, in collectives that name them.
    resolve: Any = vars(dist.distributed_c10d)["_resolve_process_group"]
    try:
        group = resolve(group_name)
    except (RuntimeError, TypeError):
        raise InvalidArgument(
            f"group_name: got {group_name!r}, expected the name of a torch.distributed group of "
            "this process; give group.group_name, or leave it out for the default group"
        ) from None
    return comm_of(group)
